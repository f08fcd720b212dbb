"""Rows of a small table: the gradient as a product instead of a sort.

To add up the gradient of an embedding in a fixed order PyTorch sorts numbers of rows, a dozen launches on CUDA. Where a
seed has few types, a product with ones and zeros is quicker and as deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

FEW = 512  # types up to which the product is the quicker one


def lookup(
    rows: Int[Tensor, "seed sample position"], table: Float[Tensor, "row width"]
) -> Float[Tensor, "seed sample position width"]:
    """Return table[rows], the table holding the seeds' rows one after the other, each seed asking for its own alone.

    >>> lookup(torch.tensor([[[0]], [[3]]]), torch.arange(4.0)[:, None]).flatten()
    tensor([0., 3.])
    """
    found = _Lookup.apply(rows, table)
    assert isinstance(found, Tensor)
    return found


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
        seeds, types = len(rows), ctx.shape[0] // len(rows)
        own = rows.flatten(1) - torch.arange(0, ctx.shape[0], types, device=rows.device)[:, None]
        chosen = own[..., None] == torch.arange(types, device=rows.device)
        return None, (chosen.to(g.dtype).mT @ g.reshape(seeds, -1, g.shape[-1])).flatten(0, 1)
