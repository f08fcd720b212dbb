"""The sums of `entropy_blocks` in one pass on a GPU: products of queries and keys stay in registers.

The value vectors of attention are not needed. Scores are in units of ln 2, because the hardware computes exp2.
"""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917
#
# Values that are known at run time come in named tuples, which triton passes field by field. Those known when a kernel
# is compiled, in capitals, stay single parameters: `tl.constexpr` annotates a parameter. Both kernels therefore have
# more than eight parameters.

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.entropy_scores import Scores
from joma.kernels.gpu import jit

_LOG2E = 1 / math.log(2)


class Tile(NamedTuple):
    """The queries and keys of one step, and triton's number of warps and of pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Operand(NamedTuple):
    """A tensor of four axes as a kernel reads it: its address, and the stride of each axis."""

    pointer: Tensor
    strides: tuple[int, ...]


class Mask(NamedTuple):
    """A mask as the kernel reads it."""

    operand: Operand
    kind: int  # 0: none, 1: boolean, 2: a bias
    least: float  # a bias that is not greater hides its key


class Sizes(NamedTuple):
    """The numbers of query heads, query heads that share a key head, queries and keys."""

    heads: int
    group: int
    queries: int
    keys: int


def default_tile(dtype: torch.dtype, dim: int) -> Tile:
    """Return the tile that is fastest on an H200 and fits into registers and shared memory for heads of this width."""
    if dtype == torch.float32:
        return Tile(128, 64, 8, 2) if dim <= 64 else Tile(64, 32, 4, 2)
    if dim <= 64:
        return Tile(64, 128, 4, 2)
    return Tile(64, 64, 4, 2) if dim <= 128 else Tile(64, 32, 4, 2)


def row_sums(scores: Scores, products: str, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Return entropy and largest weight of each row; float32 products are "tf32", "tf32x3" or "ieee"."""
    query, key = scores.query, scores.key
    batch, heads, queries, dim = query.shape
    tile = tile or default_tile(query.dtype, dim)
    entropy, largest = torch.empty(2, batch, heads, queries, dtype=torch.float32, device=query.device)
    if scores.scale < 0:  # the kernel takes the largest score before it scales
        query = -query
    centred = query.dtype == torch.float32  # a bfloat16 key minus its mean would be rounded
    mask = mask_operand(scores.mask, query)
    with nullcontext() if query.device.index == torch.cuda.current_device() else torch.cuda.device(query.device):
        _kernel[(triton.cdiv(queries, tile.queries) * batch * heads,)](
            Operand(query, query.stride()),
            Operand(key, key.stride()),
            mask.operand,
            key.mean(dim=2) if centred else key,
            (entropy, largest),
            Sizes(heads, scores.group, queries, key.shape[2]),
            (abs(scores.scale) * _LOG2E, mask.least),
            DIM=dim,
            WIDTH=max(16, triton.next_power_of_2(dim)),
            QUERIES=tile.queries,
            KEYS=tile.keys,
            CAUSAL=scores.causal,
            CENTRED=centred,
            MASKED=mask.kind,
            PRODUCTS=products,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return entropy, largest


def mask_operand(mask: Tensor | None, query: Tensor) -> Mask:
    """Return the mask for the kernel; without one the queries stand in for its pointer, which is never read."""
    if mask is None:
        return Mask(Operand(query, (0, 0, 0, 0)), 0, 0.0)
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
        return Mask(Operand(mask, mask.stride()), 1, 0.0)
    least = max(torch.finfo(mask.dtype).min / 2, torch.finfo(torch.float32).min)
    return Mask(Operand(mask, mask.stride()), 2, least)


@jit
def _kernel(
    query,  # Operand
    key,  # Operand
    mask,  # Operand
    mean_ptr,
    results,  # pointers to entropy and largest weight
    sizes,  # Sizes
    numbers,  # scale, and the bias that hides a key
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Compute one block of queries of one head."""
    tile, pointers, strides, ends, row_offsets = query_block(
        query, key, mask, mean_ptr, sizes, DIM, WIDTH, QUERIES, KEYS, CAUSAL, CENTRED, MASKED
    )
    clear, end = ends
    peak = tl.full([QUERIES], -1e30, dtype=tl.float32)
    z = tl.zeros([QUERIES], dtype=tl.float32)
    a = tl.zeros([QUERIES], dtype=tl.float32)
    for start in range(0, clear, KEYS):
        peak, z, a = _step(
            (peak, z, a), tile, pointers, strides, start, sizes, numbers,
            DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, False,
        )  # fmt: skip
    for start in range(clear, end, KEYS):
        peak, z, a = _step(
            (peak, z, a), tile, pointers, strides, start, sizes, numbers,
            DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, True,
        )  # fmt: skip
    _store(results, row_offsets, tile[2] < sizes.queries, peak, z, a)


@jit
def query_block(
    query,
    key,
    mask,
    mean_ptr,
    sizes,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return this program's queries, where its keys and mask are, the ends of its loops, and where its results go."""
    blocks = tl.cdiv(sizes.queries, QUERIES)
    batch_head = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks  # if causal, those with the most keys first
    batch = (batch_head // sizes.heads).to(tl.int64)
    head = (batch_head % sizes.heads).to(tl.int64)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, WIDTH)
    inside = (rows < sizes.queries)[:, None] & (dims < DIM)[None, :]
    offsets = rows.to(tl.int64)[:, None] * query.strides[2] + dims[None, :] * query.strides[3]
    query_ptr = query.pointer + batch * query.strides[0] + head * query.strides[1]
    queries = tl.load(query_ptr + offsets, mask=inside, other=0.0)
    shared = head // sizes.group
    key_ptr = key.pointer + (batch * key.strides[0] + shared * key.strides[1])
    mask_ptr = mask.pointer + (batch * mask.strides[0] + head * mask.strides[1])
    mean = tl.zeros([WIDTH], dtype=tl.float32)
    if CENTRED:
        first = (batch * (sizes.heads // sizes.group) + shared) * DIM
        mean = tl.load(mean_ptr + first + dims, mask=dims < DIM, other=0.0)
    end = sizes.keys
    clear = sizes.keys
    if CAUSAL:
        end = tl.minimum(sizes.keys, (block + 1) * QUERIES)
        clear = tl.minimum(sizes.keys, block * QUERIES)
    clear = (clear // KEYS) * KEYS  # up to here every row sees every key
    if MASKED != 0:
        clear = clear * 0
    row_offsets = (batch * sizes.heads + head) * sizes.queries + rows
    return (queries, mean, rows, dims), (key_ptr, mask_ptr), (key.strides, mask.strides), (clear, end), row_offsets


@jit
def _store(results, offsets, inside, peak, z, a):
    """Write entropy and largest weight; NaN for a row without a visible key."""
    entropy = 0.6931471805599453 * (tl.log2(z) - a / z)
    entropy = tl.where(entropy < 0, 0.0, entropy)  # only rounding makes it negative; NaN stays
    seen = peak > -5e29
    tl.store(results[0] + offsets, tl.where(seen, entropy, float("nan")), mask=inside)
    largest = tl.where(z < 1, 1.0, 1.0 / z)  # as above
    tl.store(results[1] + offsets, tl.where(seen, largest, float("nan")), mask=inside)


@jit
def tile_scores(
    tile,  # the queries, the mean key, the numbers of the rows and of the dimensions
    pointers,  # to the keys and to the mask
    strides,  # of both
    start,
    sizes,  # Sizes
    numbers,  # scale, the bias that hides a key and, if capped, the cap
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CAPPED: tl.constexpr,
    EDGE: tl.constexpr,
    ROTATION: tl.constexpr = 0,
):
    """Return the products of the queries with one block of keys, and their scores; `EDGE` if some may be hidden.

    A hidden score is −1e30 in both. With a mask or a cap both are the scores, else the second is scale times the first.
    With a rotation the columns begin with another key in every block.
    """
    query, mean, rows, dims = tile
    columns = start + (tl.arange(0, KEYS) + ROTATION * (start // KEYS)) % KEYS
    offsets = columns.to(tl.int64)[None, :] * strides[0][2] + dims[:, None] * strides[0][3]
    inside = (dims < DIM)[:, None]
    if EDGE:
        inside = inside & (columns < sizes.keys)[None, :]
    key = tl.load(pointers[0] + offsets, mask=inside, other=0.0)
    if CENTRED:
        key = key - mean[:, None]
    products = tl.dot(query, key, input_precision=PRODUCTS)
    scores = products * numbers[0]
    if CAPPED:
        scores = capped(scores, numbers[2])
        products = scores
    if EDGE:
        seen = (columns < sizes.keys)[None, :] & (rows < sizes.queries)[:, None]
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        if MASKED != 0:
            row_ptr = pointers[1] + rows.to(tl.int64)[:, None] * strides[1][2]
            entry_ptr = row_ptr + columns.to(tl.int64)[None, :] * strides[1][3]
            if MASKED == 1:
                seen = seen & (tl.load(entry_ptr, mask=seen, other=0) != 0)
            else:
                bias = tl.load(entry_ptr, mask=seen, other=0.0).to(tl.float32)
                seen = seen & (bias > numbers[1])
                scores += bias * 1.4426950408889634
            products = scores
        scores = tl.where(seen, scores, -1e30)
        products = tl.where(seen, products, -1e30)
    return products, scores


@jit
def capped(scores, cap):
    """Return cap · tanh(scores / cap)."""
    ratio = scores / cap
    shrink = tl.exp2(-2.8853900817779268 * tl.abs(ratio))  # exp(−2 |ratio|), of which tanh is a fraction
    return tl.where(ratio < 0, -cap, cap) * (1 - shrink) / (1 + shrink)


@jit
def largest_score(products, scores, scale, MASKED: tl.constexpr, CAPPED: tl.constexpr, EDGE: tl.constexpr):
    """Return the largest score of each row; where nothing is hidden it is scaled after the search."""
    return tl.max(scores, 1) if EDGE or MASKED != 0 or CAPPED else tl.max(products, 1) * scale


@jit
def _step(
    sums,  # the largest score so far, z and a
    tile,
    pointers,
    strides,
    start,
    sizes,
    numbers,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Add one block of keys to the sums."""
    peak, z, a = sums
    products, scores = tile_scores(
        tile, pointers, strides, start, sizes, numbers, DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, False, EDGE
    )
    new = tl.maximum(peak, largest_score(products, scores, numbers[0], MASKED, False, EDGE))
    d = scores - new[:, None]  # scaled and shifted in one instruction
    shift = peak - new
    decay = tl.exp2(shift)
    e = tl.exp2(d)
    a = decay * (a + shift * z) + tl.sum(e * d, 1)
    z = decay * z + tl.sum(e, 1)
    return new, z, a
