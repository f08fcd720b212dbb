"""All measures of attention's rows on a GPU, in one pass, and the heaviest weights in another: no matrix in memory.

The first pass adds Σ exp(d) |distance| to the sums of `entropy_blocks`. The second, without exponentials, keeps the
four largest scores of each lane; lane n holds one key of every block of keys. The `top` largest of them are the
largest of all unless more than four of these are in one lane, which shows: then the fourth of a lane is above the last
that was taken. Rows where this happens are computed again with other lanes (the keys of each block rotated), and if it
happens again, by a search for one score after the other. So the result is exact whatever the scores.
"""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false
# ruff: noqa: PLR0917

import math
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from joma.kernels.entropy_scores import Rows, Scores
from joma.kernels.entropy_triton import (
    Operand,
    Sizes,
    Tile,
    capped,
    largest_score,
    mask_operand,
    query_block,
    tile_scores,
)
from joma.kernels.gpu import jit

_LOG2E = 1 / math.log(2)
_ROTATION = 17  # of the keys of a block, times its number, when rows are computed again
_FEW = 8  # up to so many weights one block in fifty has an unsure row: to search at once takes less time


def default_tile(dtype: torch.dtype, dim: int) -> Tile:
    """Return the tile that is fastest on an H200 for heads of this width."""
    if dtype == torch.float32:
        return Tile(64, 64, 4, 2) if dim <= 64 else Tile(64, 32, 4, 2)
    return Tile(64, 64, 4, 2) if dim <= 128 else Tile(64, 32, 4, 2)


def summary_sums(
    scores: Scores,
    products: str,
    top: int = 0,
    *,
    distance: bool = False,
    sink: int | None = None,
    tile: Tile | None = None,
) -> Rows:
    """Return the measures of each row; float32 products are "tf32", "tf32x3" or "ieee", `top` is 0 or 1 to 16."""
    query, key = scores.query, scores.key
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    tile = tile or default_tile(query.dtype, dim)
    results = torch.empty(7, batch, heads, queries, dtype=torch.float32, device=query.device)
    softcap = scores.softcap or 0.0
    unsure = torch.empty(batch * heads * queries if top > 1 else 1, dtype=torch.int8, device=query.device)
    if scores.scale < 0:  # the kernel takes the largest score before it scales
        query = -query
    centred = query.dtype == torch.float32 and not softcap  # a bfloat16 key minus its mean would be rounded
    mask = mask_operand(scores.mask, query)
    operands = (
        Operand(query, query.stride()),
        Operand(key, key.stride()),
        mask.operand,
        key.mean(dim=2) if centred else key,
        results.unbind(),
        Sizes(heads, scores.group, queries, keys),
        (abs(scores.scale) * _LOG2E, mask.least, softcap * _LOG2E, scores.offset, sink or 0),
    )
    constants = {
        **{"DIM": dim, "WIDTH": max(16, triton.next_power_of_2(dim)), "QUERIES": tile.queries, "KEYS": tile.keys},
        **{"CAUSAL": scores.causal, "CENTRED": centred, "MASKED": mask.kind, "CAPPED": bool(softcap)},
        **{"PRODUCTS": products, "num_warps": tile.warps, "num_stages": tile.stages},
    }
    grid = (triton.cdiv(queries, tile.queries) * batch * heads,)
    with nullcontext() if query.device.index == torch.cuda.current_device() else torch.cuda.device(query.device):
        _sums_kernel[grid](*operands, DISTANCE=distance, SINK=sink is not None, **constants)
        if top > 1:
            _top_kernel[grid](*operands, unsure, TOP=top, ROTATION=0, **constants)
            if top > _FEW:
                _top_kernel[grid](*operands, unsure, TOP=top, ROTATION=_ROTATION, **constants)
            _search_kernel[grid](*operands, unsure, TOP=top, **constants)
    entropy, largest, log_sum, largest_logit, far, mass, first = results
    mass = None if top == 0 else largest if top == 1 else mass
    rows = Rows(entropy, largest, log_sum, largest_logit, mass, far if distance else None)
    return rows if sink is None else rows._replace(sink_mass=first)


@jit
def _sums_kernel(
    query,  # Operand
    key,  # Operand
    mask,  # Operand
    mean_ptr,
    results,  # pointers to entropy, largest weight, log sum, largest logit, distance, top mass and the sink's weight
    sizes,  # Sizes
    numbers,  # scale, the bias that hides a key, the cap, the number of keys before the first query, and the sink
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CAPPED: tl.constexpr,
    DISTANCE: tl.constexpr,
    SINK: tl.constexpr,
):
    """Compute everything but the top mass, for one block of queries of one head."""
    tile, pointers, strides, ends, row_offsets = query_block(
        query, key, mask, mean_ptr, sizes, DIM, WIDTH, QUERIES, KEYS, CAUSAL, CENTRED, MASKED
    )
    queries, mean, rows, _ = tile
    clear, end = ends
    zeros = tl.zeros([QUERIES], dtype=tl.float32)
    sums = (zeros - 1e30, zeros, zeros, zeros)
    for start in range(0, clear, KEYS):
        sums = _step(
            sums, tile, pointers, strides, start, sizes, numbers,
            DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, CAPPED, DISTANCE, False,
        )  # fmt: skip
    for start in range(clear, end, KEYS):
        sums = _step(
            sums, tile, pointers, strides, start, sizes, numbers,
            DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, CAPPED, DISTANCE, True,
        )  # fmt: skip
    peak, z, a, far = sums
    if SINK:
        score = _key_score(tile, pointers, strides, sizes, numbers, DIM, CAUSAL, CENTRED, MASKED, CAPPED)
        weight = tl.exp2(tl.minimum(score - peak, 0.0)) / z
        weight = tl.where(peak > -5e29, tl.where(weight > 1, 1.0, weight), float("nan"))
        tl.store(results[6] + row_offsets, weight, mask=rows < sizes.queries)
    if CENTRED:  # the mean key was subtracted from all keys
        offset = tl.sum(queries * mean[None, :], 1) * numbers[0]
        peak = tl.where(peak > -5e29, peak + offset, peak)
    _store(results, row_offsets, rows < sizes.queries, peak, z, a, far, DISTANCE)


@jit
def _top_kernel(
    query,  # Operand
    key,  # Operand
    mask,  # Operand
    mean_ptr,
    results,  # pointers to entropy, largest weight, log sum, largest logit, distance, top mass and the sink's weight
    sizes,  # Sizes
    numbers,  # scale, the bias that hides a key, the cap, the number of keys before the first query, and the sink
    unsure_ptr,  # whether a row is to be computed again
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CAPPED: tl.constexpr,
    TOP: tl.constexpr,
    ROTATION: tl.constexpr,
):
    """Compute the top mass, for one block of queries of one head; with a rotation, only where a row is unsure."""
    tile, pointers, strides, ends, row_offsets = query_block(
        query, key, mask, mean_ptr, sizes, DIM, WIDTH, QUERIES, KEYS, CAUSAL, CENTRED, MASKED
    )
    within = tile[2] < sizes.queries
    if ROTATION != 0:  # noqa: SIM102 (known when compiled, unlike the next)
        if tl.max(tl.load(unsure_ptr + row_offsets, mask=within, other=0), 0) == 0:
            return
    clear, end = ends
    hidden = tl.full([QUERIES, KEYS], -1e30, dtype=tl.float32)
    lanes = (hidden, hidden, hidden, hidden)
    for start in range(0, clear, KEYS):
        lanes = _insert(
            lanes, tile, pointers, strides, start, sizes, numbers,
            DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, CAPPED, ROTATION, False,
        )  # fmt: skip
    for start in range(clear, end, KEYS):
        lanes = _insert(
            lanes, tile, pointers, strides, start, sizes, numbers,
            DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, CAPPED, ROTATION, True,
        )  # fmt: skip
    top_1, top_2, top_3, top_4 = lanes
    fourth = tl.max(top_4, 1)
    first = tl.max(top_1, 1)
    last = first
    heavy = tl.zeros([QUERIES], dtype=tl.float32)
    missing = tl.full([QUERIES], TOP, dtype=tl.int32)
    for _ in range(TOP):
        largest = tl.max(top_1, 1)
        taking = top_1 == largest[:, None]
        taken = tl.minimum(tl.sum(taking.to(tl.int32), 1), missing)
        taken = tl.where(largest > -5e29, taken, 0)
        heavy += taken.to(tl.float32) * _relative(largest - first, numbers[0], MASKED, CAPPED)
        last = tl.where(missing > 0, largest, last)
        missing -= taken
        top_1 = tl.where(taking, top_2, top_1)
        top_2 = tl.where(taking, top_3, top_2)
        top_3 = tl.where(taking, top_4, top_3)
        top_4 = tl.where(taking, -1e30, top_4)
    tl.store(unsure_ptr + row_offsets, (fourth > last).to(tl.int8), mask=within)
    _store_mass(results, row_offsets, within, heavy)


@jit
def _insert(
    lanes,  # the four largest scores so far of each lane, in order
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
    CAPPED: tl.constexpr,
    ROTATION: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Insert the scores of one block of keys into the lanes."""
    products, _ = tile_scores(
        tile, pointers, strides, start, sizes, numbers,
        DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, CAPPED, EDGE, ROTATION,
    )  # fmt: skip
    top_1, top_2, top_3, top_4 = lanes
    top_4 = tl.maximum(top_4, tl.minimum(top_3, products))
    top_3 = tl.maximum(top_3, tl.minimum(top_2, products))
    top_2 = tl.maximum(top_2, tl.minimum(top_1, products))
    return tl.maximum(top_1, products), top_2, top_3, top_4


@jit
def _relative(gap, scale, MASKED: tl.constexpr, CAPPED: tl.constexpr):
    """Return exp of a difference of products or scores, which is at most 0, whatever they are units of."""
    if MASKED == 0 and not CAPPED:
        gap = gap * scale
    return tl.exp2(tl.minimum(gap, 0.0))


@jit
def _store_mass(results, offsets, inside, heavy):
    """Write the top mass from the sum of the heaviest weights over the largest one, which is NaN without a key."""
    mass = heavy * tl.load(results[1] + offsets, mask=inside, other=0.0)
    tl.store(results[5] + offsets, tl.where(mass > 1, 1.0, mass), mask=inside)  # only rounding makes it more than 1


@jit
def _search_kernel(
    query,  # this and all others as for `_top_kernel`
    key,
    mask,
    mean_ptr,
    results,
    sizes,
    numbers,
    unsure_ptr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CAPPED: tl.constexpr,
    TOP: tl.constexpr,
):
    """Compute the top mass of the rows that are still unsure: one pass for each of the heaviest weights."""
    tile, pointers, strides, ends, row_offsets = query_block(
        query, key, mask, mean_ptr, sizes, DIM, WIDTH, QUERIES, KEYS, CAUSAL, CENTRED, MASKED
    )
    within = tile[2] < sizes.queries
    if tl.max(tl.load(unsure_ptr + row_offsets, mask=within, other=0), 0) == 0:
        return
    last = tl.full([QUERIES], float("inf"), dtype=tl.float32)
    first = last
    heavy = tl.zeros([QUERIES], dtype=tl.float32)
    missing = tl.full([QUERIES], TOP, dtype=tl.int32)
    for n in range(TOP):
        largest = tl.full([QUERIES], -1e30, dtype=tl.float32)
        count = tl.zeros([QUERIES], dtype=tl.int32)
        for start in range(0, ends[1], KEYS):
            products, _ = tile_scores(
                tile, pointers, strides, start, sizes, numbers,
                DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, CAPPED, True,
            )  # fmt: skip
            products = tl.where(products < last[:, None], products, -1e30)
            new = tl.maximum(largest, tl.max(products, 1))
            count = tl.where(new > largest, 0, count) + tl.sum((products == new[:, None]).to(tl.int32), 1)
            largest = new
        first = tl.where(n == 0, largest, first)
        taken = tl.where(largest > -5e29, tl.minimum(count, missing), 0)
        heavy += taken.to(tl.float32) * _relative(largest - first, numbers[0], MASKED, CAPPED)
        missing -= taken
        last = largest
    _store_mass(results, row_offsets, within, heavy)


@jit
def _key_score(
    tile,
    pointers,
    strides,
    sizes,
    numbers,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Return the score of each query with the sink, −1e30 where it is hidden."""
    queries, mean, rows, dims = tile
    sink = numbers[4]
    key = tl.load(pointers[0] + sink * strides[0][2] + dims * strides[0][3], mask=dims < DIM, other=0.0).to(tl.float32)
    if CENTRED:
        key = key - mean
    score = tl.sum(queries.to(tl.float32) * key[None, :], 1) * numbers[0]
    if CAPPED:
        score = capped(score, numbers[2])
    seen = rows >= 0
    if CAUSAL:
        seen = rows >= sink
    if MASKED != 0:
        entry_ptr = pointers[1] + rows.to(tl.int64) * strides[1][2] + sink * strides[1][3]
        inside = seen & (rows < sizes.queries)
        if MASKED == 1:
            seen = inside & (tl.load(entry_ptr, mask=inside, other=0) != 0)
        else:
            bias = tl.load(entry_ptr, mask=inside, other=0.0).to(tl.float32)
            seen = inside & (bias > numbers[1])
            score += bias * 1.4426950408889634
    return tl.where(seen, score, -1e30)


@jit
def _store(results, offsets, inside, peak, z, a, far, DISTANCE: tl.constexpr):
    """Write the measures; NaN for a row without a visible key."""
    seen = peak > -5e29
    nan = float("nan")
    entropy = 0.6931471805599453 * (tl.log2(z) - a / z)
    entropy = tl.where(entropy < 0, 0.0, entropy)  # only rounding makes it negative; NaN stays
    tl.store(results[0] + offsets, tl.where(seen, entropy, nan), mask=inside)
    largest = tl.where(z < 1, 1.0, 1.0 / z)  # as above
    tl.store(results[1] + offsets, tl.where(seen, largest, nan), mask=inside)
    tl.store(results[2] + offsets, tl.where(seen, 0.6931471805599453 * (peak + tl.log2(z)), nan), mask=inside)
    tl.store(results[3] + offsets, tl.where(seen, 0.6931471805599453 * peak, nan), mask=inside)
    if DISTANCE:
        tl.store(results[4] + offsets, tl.where(seen, far / z, nan), mask=inside)


@jit
def _step(
    sums,  # the largest score so far, z, a and the sum of distances
    tile,  # the queries, the mean key, the numbers of the rows and of the dimensions
    pointers,  # to the keys and to the mask
    strides,  # of both
    start,
    sizes,
    numbers,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CAPPED: tl.constexpr,
    DISTANCE: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Add one block of keys to the sums; `EDGE` if some of its scores may be hidden."""
    peak, z, a, far = sums
    products, scores = tile_scores(
        tile, pointers, strides, start, sizes, numbers,
        DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, CAPPED, EDGE,
    )  # fmt: skip
    new = tl.maximum(peak, largest_score(products, scores, numbers[0], MASKED, CAPPED, EDGE))
    d = scores - new[:, None]
    shift = peak - new
    decay = tl.exp2(shift)
    e = tl.exp2(d)
    a = decay * (a + shift * z) + tl.sum(e * d, 1)
    z = decay * z + tl.sum(e, 1)
    if DISTANCE:
        position = (tile[2] + numbers[3]).to(tl.float32)
        columns = (start + tl.arange(0, KEYS)).to(tl.float32)
        far = decay * far + tl.sum(e * tl.abs(position[:, None] - columns[None, :]), 1)
    return new, z, a, far
