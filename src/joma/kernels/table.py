"""Rows of a table, whose gradient is added up in a fixed order without a sort.

To add up the gradient of an embedding in a fixed order PyTorch sorts the row numbers, a dozen launches on CUDA. Where
each seed has few rows, a product with a matrix of ones and zeros is faster and just as deterministic; where it has many
rows and reads few of them, one kernel, in which the first position that reads a row adds up those of all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from joma.kernels.gpu import TRITON

MAX_ROWS = 512  # rows of one seed up to which the product is faster
MAX_POSITIONS, MAX_WIDTH = 4096, 2048  # of one seed, up to which the kernel is faster than PyTorch


def fits(rows: Int[Tensor, "seed sample position"], table: Float[Tensor, "row width"]) -> bool:
    """Return whether `lookup` has a faster gradient than PyTorch for this table and these rows."""
    few_rows = table.shape[0] // len(rows) <= MAX_ROWS
    few_positions = math.prod(rows.shape[1:]) <= MAX_POSITIONS and table.shape[-1] <= MAX_WIDTH
    use_kernel = TRITON and table.dtype != torch.float64 and few_positions  # the kernel adds in float32
    return table.is_cuda and (few_rows or use_kernel)


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
        if seed_rows > MAX_ROWS:
            from joma.kernels import table_triton  # triton comes with PyTorch for CUDA only

            return None, table_triton.gradient(rows.flatten(1), g.flatten(1, 2), ctx.shape[0])
        tokens = rows.flatten(1) - torch.arange(0, ctx.shape[0], seed_rows, device=rows.device)[:, None]
        one_hot = tokens[..., None] == torch.arange(seed_rows, device=rows.device)
        return None, (one_hot.to(g.dtype).mT @ g.reshape(seeds, -1, g.shape[-1])).flatten(0, 1)
