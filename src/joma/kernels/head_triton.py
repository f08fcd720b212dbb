"""The kernel of `joma.kernels.head` in Triton: one program turns a row of logits into its excess.

A row of up to `_MAX_ROW` logits is read once, and stays in the program's registers. Longer rows are read twice, in
chunks.
"""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.gpu import jit

_MAX_ROW = 1 << 15
_CHUNK, _CHUNK_WARPS = 4096, 8
_LOGITS_BY_WARP = 2048  # of a row in registers, at most: 64 for each thread
_LOWEST = tl.constexpr(-3e38)  # below every logit, and finite: −∞ less −∞ would be NaN


def excess(logits: Tensor, target: Tensor, *, write: bool) -> Tensor:
    """Return −ln softmax(l)[target]; with `write` overwrite the logits l by softmax(l) − 1[target].

    Args:
        logits: [seed, sample, column].
        target: [seed, sample].
        write: whether to overwrite the logits.
    """
    seeds, samples, columns = logits.shape
    nats = torch.empty(seeds, samples, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(columns)
    with torch.cuda.device(logits.device):
        if block <= _MAX_ROW:
            warps = max(1, block // _LOGITS_BY_WARP)
            options = {"WRITE": write, "BLOCK": block, "num_warps": warps}
            _excess_of_row[(seeds * samples,)](logits, target.contiguous(), nats, columns, **options)
        else:
            options = {"WRITE": write, "CHUNK": _CHUNK, "num_warps": _CHUNK_WARPS}
            _excess_by_chunks[(seeds * samples,)](logits, target.contiguous(), nats, columns, **options)
    return nats


@jit
def _excess_of_row(logits_ptr, target_ptr, nats_ptr, columns, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    logits_ptr += row.to(tl.int64) * columns
    inside, target = tokens < columns, tl.load(target_ptr + row)
    logits = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits_ptr + target).to(tl.float32)
    largest = tl.max(logits, 0)
    exponentials = tl.exp(logits - largest)
    total = tl.sum(exponentials, 0)
    tl.store(nats_ptr + row, tl.log(total) + (largest - chosen))
    if WRITE:
        tl.debug_barrier()  # the target's logit has been read by all threads
        difference = exponentials * (1.0 / total) - tl.where(tokens == target, 1.0, 0.0)
        tl.store(logits_ptr + tokens, difference.to(logits_ptr.dtype.element_ty), mask=inside)


@jit
def _excess_by_chunks(logits_ptr, target_ptr, nats_ptr, columns, WRITE: tl.constexpr, CHUNK: tl.constexpr):
    row, lanes = tl.program_id(0), tl.arange(0, CHUNK)
    logits_ptr += row.to(tl.int64) * columns
    target = tl.load(target_ptr + row)
    chosen = tl.load(logits_ptr + target).to(tl.float32)
    largest, total = tl.full((CHUNK,), _LOWEST, dtype=tl.float32), tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, columns, CHUNK):  # each lane by itself: a sum over lanes would make all of them wait
        inside = start + lanes < columns
        logits = tl.load(logits_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        smaller = tl.exp(-tl.abs(logits - largest))  # the larger of the two has the exponential 1
        total = tl.where(logits > largest, total * smaller + 1.0, total + smaller)
        largest = tl.maximum(largest, logits)
    row_largest = tl.max(largest, 0)
    log_total = row_largest + tl.log(tl.sum(total * tl.exp(largest - row_largest), 0))
    tl.store(nats_ptr + row, log_total - chosen)
    if WRITE:
        tl.debug_barrier()
        for start in range(0, columns, CHUNK):
            tokens = start + lanes
            inside = tokens < columns
            logits = tl.load(logits_ptr + tokens, mask=inside, other=0.0).to(tl.float32)
            difference = tl.exp(logits - log_total) - tl.where(tokens == target, 1.0, 0.0)
            tl.store(logits_ptr + tokens, difference.to(logits_ptr.dtype.element_ty), mask=inside)
