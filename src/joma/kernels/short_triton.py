"""The kernels of `joma.kernels.short` in Triton: one program computes one head of one sample."""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.gpu import jit

_MIN_BLOCK = 16  # the smallest side of a product on tensor cores


def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, biases: Tensor | None, heads: int) -> Tensor:
    """Return the heads' outputs, shaped like the queries."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    output = torch.empty_like(query)
    _launch(_forward, (query, key, value, mask.contiguous()), biases, (output,), heads)
    return output


def backward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, biases: Tensor | None, grad_output: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    query, key, value, grad_output = query.contiguous(), key.contiguous(), value.contiguous(), grad_output.contiguous()
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    _launch(_backward, (query, key, value, mask.contiguous()), biases, (grad_output, *gradients), heads)
    return gradients


def _launch(
    kernel: Any, inputs: tuple[Tensor, ...], biases: Tensor | None, others: tuple[Tensor, ...], heads: int
) -> None:
    (seeds, samples, queries, width), keys = inputs[0].shape, inputs[1].shape[2]
    part = width // heads
    rows, columns = (max(_MIN_BLOCK, triton.next_power_of_2(length)) for length in (queries, keys))
    with torch.cuda.device(inputs[0].device):
        kernel[(seeds * samples * heads,)](
            *inputs,
            inputs[0] if biases is None else biases.contiguous(),
            *others,
            seeds,
            samples,
            heads,
            queries,
            keys,
            part**-0.5,
            BIASED=biases is not None,
            PART=part,
            QUERIES=rows,
            KEYS=columns,
            num_warps=max(rows, columns) // _MIN_BLOCK,
        )


@jit
def _offsets(length, heads, PART: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets of [ROWS, PART] of this program's sample and head, and which rows are below `length`."""
    sample = (tl.program_id(0) // heads).to(tl.int64)
    rows = tl.arange(0, ROWS)
    first = ((sample * length + rows) * heads + tl.program_id(0) % heads) * PART
    return first[:, None] + tl.arange(0, PART)[None, :], (rows < length)[:, None]


@jit
def _load(pointer, length, heads, PART: tl.constexpr, ROWS: tl.constexpr):
    offsets, inside = _offsets(length, heads, PART, ROWS)
    return tl.load(pointer + offsets, mask=inside, other=0.0)


@jit
def _load_biased(
    pointer,
    bias_ptr,
    which,
    length,
    seeds,
    samples,
    heads,
    BIASED: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load queries (`which` = 0), keys (1) or values (2) and add their bias; rows beyond `length` stay zero."""
    offsets, inside = _offsets(length, heads, PART, ROWS)
    values = tl.load(pointer + offsets, mask=inside, other=0.0)
    if BIASED:
        seed = tl.program_id(0) // (heads * samples)
        bias_offsets = ((which * seeds + seed) * heads + tl.program_id(0) % heads) * PART + tl.arange(0, PART)
        bias = tl.load(bias_ptr + bias_offsets).to(tl.float32)
        values = tl.where(inside, values.to(tl.float32) + bias[None, :], 0.0).to(values.dtype)
    return values


@jit
def _store(pointer, values, length, heads, PART: tl.constexpr, ROWS: tl.constexpr):
    offsets, inside = _offsets(length, heads, PART, ROWS)
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=inside)


@jit
def _weights(query, key, mask_ptr, queries, keys, scale, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    rows, columns = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    inside = (rows < queries) & (columns < keys)
    mask = tl.load(mask_ptr + rows * keys + columns, mask=inside, other=0.0).to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale + mask
    scores = tl.where(columns < keys, scores, float("-inf"))
    e = tl.exp(scores - tl.max(scores, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@jit
def _forward(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    bias_ptr,
    output_ptr,
    seeds,
    samples,
    heads,
    queries,
    keys,
    scale,
    BIASED: tl.constexpr,
    PART: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = _load_biased(query_ptr, bias_ptr, 0, queries, seeds, samples, heads, BIASED, PART, QUERIES)
    key = _load_biased(key_ptr, bias_ptr, 1, keys, seeds, samples, heads, BIASED, PART, KEYS)
    value = _load_biased(value_ptr, bias_ptr, 2, keys, seeds, samples, heads, BIASED, PART, KEYS)
    p = _weights(query, key, mask_ptr, queries, keys, scale, QUERIES, KEYS)
    _store(output_ptr, tl.dot(p.to(value.dtype), value, input_precision="ieee"), queries, heads, PART, QUERIES)


@jit
def _backward(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    bias_ptr,
    grad_output_ptr,
    grad_query_ptr,
    grad_key_ptr,
    grad_value_ptr,
    seeds,
    samples,
    heads,
    queries,
    keys,
    scale,
    BIASED: tl.constexpr,
    PART: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = _load_biased(query_ptr, bias_ptr, 0, queries, seeds, samples, heads, BIASED, PART, QUERIES)
    key = _load_biased(key_ptr, bias_ptr, 1, keys, seeds, samples, heads, BIASED, PART, KEYS)
    value = _load_biased(value_ptr, bias_ptr, 2, keys, seeds, samples, heads, BIASED, PART, KEYS)
    grad = _load(grad_output_ptr, queries, heads, PART, QUERIES)
    p = _weights(query, key, mask_ptr, queries, keys, scale, QUERIES, KEYS)
    _store(grad_value_ptr, tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision="ieee"), keys, heads, PART, KEYS)
    grad_weight = tl.dot(grad, tl.trans(value), input_precision="ieee")
    grad_score = p * (grad_weight - tl.sum(p * grad_weight, 1)[:, None]) * scale
    grad_score = grad_score.to(query.dtype)
    _store(grad_query_ptr, tl.dot(grad_score, key, input_precision="ieee"), queries, heads, PART, QUERIES)
    _store(grad_key_ptr, tl.dot(tl.trans(grad_score), query, input_precision="ieee"), keys, heads, PART, KEYS)
