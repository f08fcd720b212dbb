"""The kernel of `joma.kernels.table` in Triton: one program adds up the gradient of one row of a large table."""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.gpu import jit


def gradient(rows: Tensor, g: Tensor, table_rows: int) -> Tensor:
    """Return the gradient of a table of `table_rows` rows: g added up by row, each sum in a fixed order.

    Args:
        rows: [seed, position], the row that each position reads; no row is read by two seeds.
        g: [seed, position, width].
        table_rows: number of rows of the table.
    """
    (seeds, positions), width = rows.shape, g.shape[-1]
    table = torch.zeros(table_rows, width, dtype=g.dtype, device=g.device)
    with torch.cuda.device(g.device):
        _gradient[(seeds, positions)](
            rows.contiguous(),
            g.contiguous(),
            table,
            positions,
            width,
            POSITIONS=triton.next_power_of_2(positions),
            WIDTH=triton.next_power_of_2(width),
            num_warps=1 if positions <= 1024 else 4,  # a program does little, and warps wait for each other
        )
    return table


@jit
def _gradient(rows_ptr, g_ptr, table_ptr, positions, width, POSITIONS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the row that this program's position is the first to read; programs of later positions do nothing."""
    rows_ptr += tl.program_id(0) * positions
    g_ptr += tl.program_id(0).to(tl.int64) * positions * width
    row, all_positions = tl.load(rows_ptr + tl.program_id(1)), tl.arange(0, POSITIONS)
    same = tl.load(rows_ptr + all_positions, mask=all_positions < positions, other=-1) == row
    readers = tl.where(same, all_positions, POSITIONS)
    position = tl.min(readers, 0)
    if position == tl.program_id(1):
        columns, total = tl.arange(0, WIDTH), tl.zeros((WIDTH,), dtype=tl.float32)
        while position < POSITIONS:
            total += tl.load(g_ptr + position * width + columns, mask=columns < width, other=0.0).to(tl.float32)
            position = tl.min(tl.where(readers > position, readers, POSITIONS), 0)
        tl.store(table_ptr + row * width + columns, total.to(table_ptr.dtype.element_ty), mask=columns < width)
