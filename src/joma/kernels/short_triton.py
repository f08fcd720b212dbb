"""The kernels of `short`, in triton: a program holds one head of one sample whole."""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.gpu import jit

_LEAST = 16  # the tensor cores' smallest factor


def forward(query: Tensor, key: Tensor, value: Tensor, reach: Tensor, biases: Tensor | None, heads: int) -> Tensor:
    """Return the heads' outputs, shaped like the queries."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    output = torch.empty_like(query)
    _launch(_forward, (query, key, value, reach.contiguous()), biases, (output,), heads)
    return output


def backward(
    query: Tensor, key: Tensor, value: Tensor, reach: Tensor, biases: Tensor | None, slope: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slopes of queries, keys and values."""
    query, key, value, slope = query.contiguous(), key.contiguous(), value.contiguous(), slope.contiguous()
    slopes = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    _launch(_backward, (query, key, value, reach.contiguous()), biases, (slope, *slopes), heads)
    return slopes


def _launch(
    kernel: Any, given: tuple[Tensor, ...], biases: Tensor | None, others: tuple[Tensor, ...], heads: int
) -> None:
    (seeds, samples, asks, width), keys = given[0].shape, given[1].shape[2]
    part = width // heads
    rows, columns = (max(_LEAST, triton.next_power_of_2(length)) for length in (asks, keys))
    with torch.cuda.device(given[0].device):
        kernel[(seeds * samples * heads,)](
            *given,
            given[0] if biases is None else biases.contiguous(),
            *others,
            seeds,
            samples,
            heads,
            asks,
            keys,
            part**-0.5,
            BIASED=biases is not None,
            PART=part,
            ASKS=rows,
            KEYS=columns,
            num_warps=max(rows, columns) // _LEAST,
        )


@jit
def _places(length, heads, PART: tl.constexpr, ROWS: tl.constexpr):
    """Where [ROWS, PART] of this program's sample and head lie, and which of them are among its `length` positions."""
    sample = (tl.program_id(0) // heads).to(tl.int64)
    rows = tl.arange(0, ROWS)
    first = ((sample * length + rows) * heads + tl.program_id(0) % heads) * PART
    return first[:, None] + tl.arange(0, PART)[None, :], (rows < length)[:, None]


@jit
def _load(at, length, heads, PART: tl.constexpr, ROWS: tl.constexpr):
    places, inside = _places(length, heads, PART, ROWS)
    return tl.load(at + places, mask=inside, other=0.0)


@jit
def _biased(
    at, bias_at, which, length, seeds, samples, heads, BIASED: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr
):
    """Load, and add the bias of queries (0), keys (1) or values (2); positions that are not there stay zero."""
    places, inside = _places(length, heads, PART, ROWS)
    found = tl.load(at + places, mask=inside, other=0.0)
    if BIASED:
        seed = tl.program_id(0) // (heads * samples)
        own = ((which * seeds + seed) * heads + tl.program_id(0) % heads) * PART + tl.arange(0, PART)
        bias = tl.load(bias_at + own).to(tl.float32)
        found = tl.where(inside, found.to(tl.float32) + bias[None, :], 0.0).to(found.dtype)
    return found


@jit
def _store(at, values, length, heads, PART: tl.constexpr, ROWS: tl.constexpr):
    places, inside = _places(length, heads, PART, ROWS)
    tl.store(at + places, values.to(at.dtype.element_ty), mask=inside)


@jit
def _weights(query, key, reach_at, asks, keys, scale, ASKS: tl.constexpr, KEYS: tl.constexpr):
    rows, columns = tl.arange(0, ASKS)[:, None], tl.arange(0, KEYS)[None, :]
    inside = (rows < asks) & (columns < keys)
    reach = tl.load(reach_at + rows * keys + columns, mask=inside, other=0.0).to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale + reach
    scores = tl.where(columns < keys, scores, float("-inf"))
    e = tl.exp(scores - tl.max(scores, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@jit
def _forward(
    query_at,
    key_at,
    value_at,
    reach_at,
    bias_at,
    output_at,
    seeds,
    samples,
    heads,
    asks,
    keys,
    scale,
    BIASED: tl.constexpr,
    PART: tl.constexpr,
    ASKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = _biased(query_at, bias_at, 0, asks, seeds, samples, heads, BIASED, PART, ASKS)
    key = _biased(key_at, bias_at, 1, keys, seeds, samples, heads, BIASED, PART, KEYS)
    value = _biased(value_at, bias_at, 2, keys, seeds, samples, heads, BIASED, PART, KEYS)
    p = _weights(query, key, reach_at, asks, keys, scale, ASKS, KEYS)
    _store(output_at, tl.dot(p.to(value.dtype), value, input_precision="ieee"), asks, heads, PART, ASKS)


@jit
def _backward(
    query_at,
    key_at,
    value_at,
    reach_at,
    bias_at,
    slope_at,
    by_query_at,
    by_key_at,
    by_value_at,
    seeds,
    samples,
    heads,
    asks,
    keys,
    scale,
    BIASED: tl.constexpr,
    PART: tl.constexpr,
    ASKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = _biased(query_at, bias_at, 0, asks, seeds, samples, heads, BIASED, PART, ASKS)
    key = _biased(key_at, bias_at, 1, keys, seeds, samples, heads, BIASED, PART, KEYS)
    value = _biased(value_at, bias_at, 2, keys, seeds, samples, heads, BIASED, PART, KEYS)
    slope = _load(slope_at, asks, heads, PART, ASKS)
    p = _weights(query, key, reach_at, asks, keys, scale, ASKS, KEYS)
    _store(by_value_at, tl.dot(tl.trans(p.to(slope.dtype)), slope, input_precision="ieee"), keys, heads, PART, KEYS)
    by_weight = tl.dot(slope, tl.trans(value), input_precision="ieee")
    by_score = p * (by_weight - tl.sum(p * by_weight, 1)[:, None]) * scale
    by_score = by_score.to(query.dtype)
    _store(by_query_at, tl.dot(by_score, key, input_precision="ieee"), asks, heads, PART, ASKS)
    _store(by_key_at, tl.dot(tl.trans(by_score), query, input_precision="ieee"), keys, heads, PART, KEYS)
