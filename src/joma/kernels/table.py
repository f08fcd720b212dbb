"""Rows of a small table, whose gradient is a matrix product instead of a sort.

To add up the gradient of an embedding in a fixed order PyTorch sorts the row numbers, a dozen launches on CUDA. Where
each seed has few rows, a product with a matrix of ones and zeros is faster and just as deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_ROWS = 512  # rows of one seed up to which the product is faster


def lookup(
    rows: Int[Tensor, "seed sample position"], table: Float[Tensor, "row width"]
) -> Float[Tensor, "seed sample position width"]:
    """Return table[rows]; the table has the rows of each seed one after the other, and each seed reads only its own.

    >>> lookup(torch.tensor([[[0]], [[3]]]), torch.arange(4.0)[:, None]).flatten()
    tensor([0., 3.])
    """
    embedded = _Lookup.apply(rows, table)
    assert isinstance(embedded, Tensor)
    return embedded


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return F.embedding(rows, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows,) = ctx.saved_tensors
        seeds, seed_rows = len(rows), ctx.shape[0] // len(rows)
        tokens = rows.flatten(1) - torch.arange(0, ctx.shape[0], seed_rows, device=rows.device)[:, None]
        one_hot = tokens[..., None] == torch.arange(seed_rows, device=rows.device)
        return None, (one_hot.to(g.dtype).mT @ g.reshape(seeds, -1, g.shape[-1])).flatten(0, 1)
