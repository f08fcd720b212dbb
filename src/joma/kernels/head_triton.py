"""The kernel of `joma.kernels.head` in Triton: one program turns a few rows of logits into their excess.

A program reads its rows twice, in chunks of columns: the second time they are in the card's cache. Several rows share
the bias, whose numbers are twice as wide as the logits.
"""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.gpu import jit

_ROWS, _CHUNK, _WARPS = 2, 2048, 8
_LOWEST = tl.constexpr(-1e30)  # below every logit, and finite: −∞ less −∞ would be NaN


def excess(logits: Tensor, bias: Tensor, target: Tensor, *, write: bool) -> Tensor:
    """Return −ln softmax(l + b)[target]; with `write` overwrite the logits l by softmax(l + b) − 1[target].

    Args:
        logits: [seed, sample, column], at least as many columns as the vocabulary has tokens; what stands in the others
            is not read, and becomes 0.
        bias: [seed, vocabulary].
        target: [seed, sample].
        write: whether to overwrite the logits.
    """
    seeds, samples, columns = logits.shape
    nats = torch.empty(seeds, samples, dtype=bias.dtype, device=logits.device)
    with torch.cuda.device(logits.device):
        _excess[(seeds, triton.cdiv(samples, _ROWS))](
            logits,
            bias.contiguous(),
            target.contiguous(),
            nats,
            samples,
            bias.shape[-1],
            columns,
            WRITE=write,
            ROWS=_ROWS,
            CHUNK=_CHUNK,
            num_warps=_WARPS,
        )
    return nats


@jit
def _load(logits_ptr, bias_ptr, first, exists, start, vocabulary, CHUNK: tl.constexpr):
    """Return a chunk of logits with their bias, [ROWS, CHUNK], the token numbers, and −∞ beyond the vocabulary."""
    tokens = start + tl.arange(0, CHUNK)
    inside = tokens < vocabulary
    bias = tl.load(bias_ptr + tokens, mask=inside, other=float("-inf"))
    logits = tl.load(logits_ptr + first[:, None] + tokens[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
    return logits.to(tl.float32) + bias[None, :], tokens


@jit
def _excess(
    logits_ptr,
    bias_ptr,
    target_ptr,
    nats_ptr,
    samples,
    vocabulary,
    columns,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    bias_ptr += tl.program_id(0) * vocabulary
    sample = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists, row = sample < samples, tl.program_id(0).to(tl.int64) * samples + sample
    first, target = row * columns, tl.load(target_ptr + row, mask=exists, other=0)
    chosen = tl.load(logits_ptr + first + target, mask=exists, other=0.0).to(tl.float32) + tl.load(bias_ptr + target)
    largest, total = tl.full((ROWS, CHUNK), _LOWEST, dtype=tl.float32), tl.zeros((ROWS, CHUNK), dtype=tl.float32)
    for start in range(0, vocabulary, CHUNK):  # each lane by itself: a sum over lanes would make all of them wait
        logits, _ = _load(logits_ptr, bias_ptr, first, exists, start, vocabulary, CHUNK)
        larger = tl.maximum(largest, logits)
        total = total * tl.exp(largest - larger) + tl.exp(logits - larger)
        largest = larger
    row_largest = tl.max(largest, 1)
    log_total = row_largest + tl.log(tl.sum(total * tl.exp(largest - row_largest[:, None]), 1))
    tl.store(nats_ptr + row, log_total - chosen, mask=exists)
    if WRITE:
        for start in range(0, columns, CHUNK):
            logits, tokens = _load(logits_ptr, bias_ptr, first, exists, start, vocabulary, CHUNK)
            is_target = tokens[None, :] == target[:, None]
            difference = tl.exp(logits - log_total[:, None]) - tl.where(is_target, 1.0, 0.0)
            inside = exists[:, None] & (tokens < columns)[None, :]
            tl.store(
                logits_ptr + first[:, None] + tokens[None, :], difference.to(logits_ptr.dtype.element_ty), mask=inside
            )
