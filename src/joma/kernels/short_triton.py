"""The kernels of `joma.kernels.short` in Triton: one program computes one head of one sample.

Heads may be wider than what a program holds at once: products along the width of a head are added up in chunks.
"""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.gpu import jit
from joma.noise import FIRST_MULTIPLIER, SECOND_MULTIPLIER

_MIN_BLOCK = 16  # the smallest side of a product on tensor cores
_MAX_CHUNK = 128  # numbers along the width of a head that a program holds at once
_FIRST, _SECOND = tl.constexpr(FIRST_MULTIPLIER), tl.constexpr(SECOND_MULTIPLIER % 2**32)


def forward(inputs: tuple[Tensor, ...], biases: Tensor | None, noise: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Return the heads' outputs, shaped like the queries; `inputs` are queries, keys, values and mask."""
    output = torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)
    _launch(_forward, inputs, biases, noise, (output,), options)
    return output


def backward(
    inputs: tuple[Tensor, ...],
    biases: Tensor | None,
    noise: Tensor | None,
    grad_output: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `inputs` are queries, keys, values and mask."""
    query, key, value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:3])
    others = grad_output.contiguous(), query, key, value, query.stride(2)
    _launch(_backward, inputs, biases, noise, others, options)
    return query, key, value


def backward_joined(
    joined: Tensor, mask: Tensor, noise: Tensor | None, grad_output: Tensor, options: dict[str, Any]
) -> Tensor:
    """Return the gradient of queries, keys and values that stand side by side in one tensor."""
    gradient = torch.empty(joined.shape, dtype=joined.dtype, device=joined.device)
    others = grad_output.contiguous(), *gradient.chunk(3, dim=-1), gradient.stride(2)
    _launch(_backward, (*joined.chunk(3, dim=-1), mask), None, noise, others, options)
    return gradient


def _in_rows(x: Tensor) -> Tensor:
    """Return x with rows at equal distances, as it is where it has them: parts of one product need no copy."""
    equal = x.stride(0) == x.stride(1) * x.shape[1] and x.stride(1) == x.stride(2) * x.shape[2]
    return x if equal and x.stride(3) == 1 else x.contiguous()


def _launch(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    biases: Tensor | None,
    noise: Tensor | None,
    others: tuple[Tensor | int, ...],
    options: dict[str, Any],
) -> None:
    query, key, value, mask = *map(_in_rows, inputs[:3]), inputs[3].contiguous()
    (seeds, samples, queries, width), keys, heads = query.shape, key.shape[2], options["heads"]
    part = width // heads
    chunk = min(_MAX_CHUNK, triton.next_power_of_2(part))
    rows, columns = (max(_MIN_BLOCK, triton.next_power_of_2(length)) for length in (queries, keys))
    with torch.cuda.device(query.device):
        kernel[(seeds * samples * heads,)](
            *(query, key, value, mask),
            query if biases is None else biases.contiguous(),
            query if noise is None else noise.contiguous(),
            *others,
            *(x.stride(2) for x in (query, key, value)),
            seeds,
            samples,
            heads,
            queries,
            keys,
            mask.numel() // (queries * keys),
            part**-0.5,
            round(options["p"] * 2**32),
            1.0 / (1.0 - options["p"]),
            options["site"],
            BIASED=biases is not None,
            DROPS=noise is not None,
            PART=part,
            CHUNK=chunk,
            CHUNKS=triton.cdiv(part, chunk),
            QUERIES=rows,
            KEYS=columns,
            num_warps=max(rows, columns) // _MIN_BLOCK * (2 if part > chunk else 1),
        )


@jit
def _offsets(length, stride, heads, PART: tl.constexpr, CHUNK: tl.constexpr, chunk, ROWS: tl.constexpr):
    """Return the offsets of [ROWS, CHUNK] of this program's sample, head and chunk, and which of them exist.

    Rows are `stride` numbers apart.
    """
    sample = (tl.program_id(0) // heads).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), chunk * CHUNK + tl.arange(0, CHUNK)
    first = (sample * length + rows) * stride + tl.program_id(0) % heads * PART
    return first[:, None] + columns[None, :], (rows < length)[:, None] & (columns < PART)[None, :]


@jit
def _load(pointer, length, heads, PART: tl.constexpr, CHUNK: tl.constexpr, chunk, ROWS: tl.constexpr):
    offsets, inside = _offsets(length, heads * PART, heads, PART, CHUNK, chunk, ROWS)
    return tl.load(pointer + offsets, mask=inside, other=0.0)


@jit
def _load_biased(
    pointer,
    bias_ptr,
    which,
    length,
    stride,
    seeds,
    samples,
    heads,
    BIASED: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    chunk,
    ROWS: tl.constexpr,
):
    """Load queries (`which` = 0), keys (1) or values (2) and add their bias; what does not exist stays zero."""
    offsets, inside = _offsets(length, stride, heads, PART, CHUNK, chunk, ROWS)
    values = tl.load(pointer + offsets, mask=inside, other=0.0)
    if BIASED:
        seed = tl.program_id(0) // (heads * samples)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        bias_offsets = ((which * seeds + seed) * heads + tl.program_id(0) % heads) * PART + columns
        bias = tl.load(bias_ptr + bias_offsets, mask=columns < PART, other=0.0).to(tl.float32)
        values = tl.where(inside, values.to(tl.float32) + bias[None, :], 0.0).to(values.dtype)
    return values


@jit
def _store(pointer, values, length, stride, heads, PART: tl.constexpr, CHUNK: tl.constexpr, chunk, ROWS: tl.constexpr):
    offsets, inside = _offsets(length, stride, heads, PART, CHUNK, chunk, ROWS)
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=inside)


@jit
def _weights(
    query_ptr,
    key_ptr,
    mask_ptr,
    bias_ptr,
    query_stride,
    key_stride,
    seeds,
    samples,
    heads,
    queries,
    keys,
    masks,
    scale,
    BIASED: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the softmax of the scores; there is one mask for all samples, or one for each of `masks` samples."""
    rows, columns = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    scores = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
    for chunk in range(CHUNKS):
        query = _load_biased(
            query_ptr, bias_ptr, 0, queries, query_stride, seeds, samples, heads, BIASED, PART, CHUNK, chunk, QUERIES
        )
        key = _load_biased(
            key_ptr, bias_ptr, 1, keys, key_stride, seeds, samples, heads, BIASED, PART, CHUNK, chunk, KEYS
        )
        scores += tl.dot(query, tl.trans(key), input_precision="ieee")
    mask_offsets = ((tl.program_id(0) // heads) % masks * queries + rows) * keys + columns
    mask = tl.load(mask_ptr + mask_offsets, mask=(rows < queries) & (columns < keys), other=0.0).to(tl.float32)
    scores = tl.where(columns < keys, scores * scale + mask, float("-inf"))
    e = tl.exp(scores - tl.max(scores, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@jit
def _mix(words):
    """Scramble 32-bit words, as `joma.noise` does."""
    words ^= words >> 16
    words *= _FIRST
    words ^= words >> 15
    words *= _SECOND
    words ^= words >> 16
    return words


@jit
def _retained(
    noise_ptr,
    seeds,
    samples,
    heads,
    queries,
    keys,
    threshold,
    factor,
    site,
    DROPS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the factor of each weight: 1, or with dropout 0 or `factor`, the numbers of `joma.noise.dropout`."""
    retained = tl.full((QUERIES, KEYS), 1.0, dtype=tl.float32)
    if DROPS:
        seed, within = tl.program_id(0) // (heads * samples), tl.program_id(0) % (heads * samples)
        first = _mix((tl.load(noise_ptr + seed) + site).to(tl.uint32))
        second = _mix((tl.load(noise_ptr + seeds + seed) + site).to(tl.uint32))
        rows, columns = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
        words = ((within * queries + rows) * keys + columns).to(tl.uint32)
        words = _mix(_mix(words ^ first) ^ second)
        retained = tl.where(words.to(tl.int64) >= threshold, factor, 0.0)
    return retained


@jit
def _forward(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    bias_ptr,
    noise_ptr,
    output_ptr,
    query_stride,
    key_stride,
    value_stride,
    seeds,
    samples,
    heads,
    queries,
    keys,
    masks,
    scale,
    threshold,
    factor,
    site,
    BIASED: tl.constexpr,
    DROPS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    p = _weights(
        query_ptr, key_ptr, mask_ptr, bias_ptr, query_stride, key_stride, seeds, samples, heads, queries, keys, masks,
        scale, BIASED, PART, CHUNK, CHUNKS, QUERIES, KEYS,
    )  # fmt: skip
    p *= _retained(noise_ptr, seeds, samples, heads, queries, keys, threshold, factor, site, DROPS, QUERIES, KEYS)
    for chunk in range(CHUNKS):
        value = _load_biased(
            value_ptr, bias_ptr, 2, keys, value_stride, seeds, samples, heads, BIASED, PART, CHUNK, chunk, KEYS
        )
        output = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        _store(output_ptr, output, queries, heads * PART, heads, PART, CHUNK, chunk, QUERIES)


@jit
def _backward(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    bias_ptr,
    noise_ptr,
    grad_output_ptr,
    grad_query_ptr,
    grad_key_ptr,
    grad_value_ptr,
    grad_stride,
    query_stride,
    key_stride,
    value_stride,
    seeds,
    samples,
    heads,
    queries,
    keys,
    masks,
    scale,
    threshold,
    factor,
    site,
    BIASED: tl.constexpr,
    DROPS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    p = _weights(
        query_ptr, key_ptr, mask_ptr, bias_ptr, query_stride, key_stride, seeds, samples, heads, queries, keys, masks,
        scale, BIASED, PART, CHUNK, CHUNKS, QUERIES, KEYS,
    )  # fmt: skip
    retained = _retained(noise_ptr, seeds, samples, heads, queries, keys, threshold, factor, site, DROPS, QUERIES, KEYS)
    grad_weight = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
    for chunk in range(CHUNKS):
        grad = _load(grad_output_ptr, queries, heads, PART, CHUNK, chunk, QUERIES)
        value = _load_biased(
            value_ptr, bias_ptr, 2, keys, value_stride, seeds, samples, heads, BIASED, PART, CHUNK, chunk, KEYS
        )
        grad_weight += tl.dot(grad, tl.trans(value), input_precision="ieee")
        grad_value = tl.dot(tl.trans((p * retained).to(grad.dtype)), grad, input_precision="ieee")
        _store(grad_value_ptr, grad_value, keys, grad_stride, heads, PART, CHUNK, chunk, KEYS)
    grad_weight *= retained
    grad_score = p * (grad_weight - tl.sum(p * grad_weight, 1)[:, None]) * scale
    for chunk in range(CHUNKS):
        key = _load_biased(
            key_ptr, bias_ptr, 1, keys, key_stride, seeds, samples, heads, BIASED, PART, CHUNK, chunk, KEYS
        )
        half = grad_score.to(key.dtype)
        grad_query = tl.dot(half, key, input_precision="ieee")
        _store(grad_query_ptr, grad_query, queries, grad_stride, heads, PART, CHUNK, chunk, QUERIES)
        query = _load_biased(
            query_ptr, bias_ptr, 0, queries, query_stride, seeds, samples, heads, BIASED, PART, CHUNK, chunk, QUERIES
        )
        grad_key = tl.dot(tl.trans(half), query, input_precision="ieee")
        _store(grad_key_ptr, grad_key, keys, grad_stride, heads, PART, CHUNK, chunk, KEYS)
