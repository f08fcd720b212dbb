"""The sums of `blocks` in one pass on a GPU: query by key products stay in registers, and no value is multiplied.

Scores are in units of ln 2, for the sake of the hardware's exp2.
"""

# No `from __future__ import annotations`: triton reads `tl.constexpr` from the annotations themselves.
# pyright: basic, reportMissingImports=false

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
    """Queries and keys of one step, and how the GPU goes about it."""

    queries: int
    keys: int
    warps: int
    stages: int


def default_tile(dtype: torch.dtype, dim: int) -> Tile:
    """Return a tile that fits into registers and shared memory at this width of a head; the quickest on an H200."""
    if dtype == torch.float32:
        return Tile(128, 64, 8, 2) if dim <= 64 else Tile(64, 32, 4, 2)
    if dim <= 64:
        return Tile(64, 128, 4, 2)
    return Tile(64, 64, 4, 2) if dim <= 128 else Tile(64, 32, 4, 2)


def row_sums(scores: Scores, products: str, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Return entropy and largest weight of each row; `products` is how float32 is multiplied: tf32, tf32x3 or ieee."""
    query, key, mask = scores.query, scores.key, scores.mask
    batch, head, queries, dim = query.shape
    tile = tile or default_tile(query.dtype, dim)
    entropy, largest = torch.empty(2, batch, head, queries, dtype=torch.float32, device=query.device)
    if scores.scale < 0:  # the kernel takes the largest score before it scales
        query = -query
    centred = query.dtype == torch.float32  # a bfloat16 key less its mean would be rounded
    mean = key.mean(dim=2) if centred else key
    kind, least = 0, 0.0
    if mask is not None:
        kind = 1 if mask.dtype == torch.bool else 2
        mask = mask.view(torch.uint8) if kind == 1 else mask
        least = 0.0 if kind == 1 else max(torch.finfo(mask.dtype).min / 2, torch.finfo(torch.float32).min)
    with nullcontext() if query.device.index == torch.cuda.current_device() else torch.cuda.device(query.device):
        _kernel[(triton.cdiv(queries, tile.queries) * batch * head,)](
            query,
            key,
            mean,
            query if mask is None else mask,
            entropy,
            largest,
            *query.stride(),
            *key.stride(),
            *((0, 0, 0, 0) if mask is None else mask.stride()),
            head,
            scores.group,
            queries,
            key.shape[2],
            abs(scores.scale) * _LOG2E,
            least,
            DIM=dim,
            WIDTH=max(16, triton.next_power_of_2(dim)),
            QUERIES=tile.queries,
            KEYS=tile.keys,
            CAUSAL=scores.causal,
            CENTRED=centred,
            MASKED=kind,
            PRODUCTS=products,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return entropy, largest


@jit
def _kernel(  # noqa: PLR0917
    query_at,
    key_at,
    mean_at,
    mask_at,
    entropy_at,
    largest_at,
    query_batch,
    query_head,
    query_row,
    query_dim,
    key_batch,
    key_head,
    key_row,
    key_dim,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    heads,
    group,
    queries,
    keys,
    scale,
    least,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    blocks = tl.cdiv(queries, QUERIES)
    which = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks  # causal: the longest first
    batch = (which // heads).to(tl.int64)
    head = (which % heads).to(tl.int64)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, WIDTH)
    inside = (rows < queries)[:, None] & (dims < DIM)[None, :]
    places = rows.to(tl.int64)[:, None] * query_row + dims[None, :] * query_dim
    query = tl.load(query_at + batch * query_batch + head * query_head + places, mask=inside, other=0.0)
    shared = head // group
    key_at += batch * key_batch + shared * key_head
    mask_at += batch * mask_batch + head * mask_head
    mean = tl.zeros([WIDTH], dtype=tl.float32)
    if CENTRED:
        own = (batch * (heads // group) + shared) * DIM
        mean = tl.load(mean_at + own + dims, mask=dims < DIM, other=0.0)

    most = tl.full([QUERIES], -1e30, dtype=tl.float32)
    z = tl.zeros([QUERIES], dtype=tl.float32)
    a = tl.zeros([QUERIES], dtype=tl.float32)
    end = keys
    clear = keys
    if CAUSAL:
        end = tl.minimum(keys, (block + 1) * QUERIES)
        clear = tl.minimum(keys, block * QUERIES)
    clear = (clear // KEYS) * KEYS  # up to here every row sees every key
    if MASKED != 0:
        clear = clear * 0
    for start in range(0, clear, KEYS):
        most, z, a = _step(
            most, z, a, query, key_at, mean, mask_at, start, rows, dims, key_row, key_dim, mask_row, mask_column,
            queries, keys, scale, least, DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, False,
        )  # fmt: skip
    for start in range(clear, end, KEYS):
        most, z, a = _step(
            most, z, a, query, key_at, mean, mask_at, start, rows, dims, key_row, key_dim, mask_row, mask_column,
            queries, keys, scale, least, DIM, KEYS, CAUSAL, CENTRED, MASKED, PRODUCTS, True,
        )  # fmt: skip

    entropy = 0.6931471805599453 * (tl.log2(z) - a / z)
    entropy = tl.where(entropy < 0, 0.0, entropy)  # rounding alone goes below 0; NaN stays
    seen = most > -5e29
    at = (batch * heads + head) * queries + rows
    tl.store(entropy_at + at, tl.where(seen, entropy, float("nan")), mask=rows < queries)
    largest = tl.where(z < 1, 1.0, 1.0 / z)  # as above
    tl.store(largest_at + at, tl.where(seen, largest, float("nan")), mask=rows < queries)


@jit
def _step(  # noqa: PLR0917
    most,
    z,
    a,
    query,
    key_at,
    mean,
    mask_at,
    start,
    rows,
    dims,
    key_row,
    key_dim,
    mask_row,
    mask_column,
    queries,
    keys,
    scale,
    least,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Take in one block of keys; `EDGE` where some score of it may be hidden."""
    columns = start + tl.arange(0, KEYS)
    places = columns.to(tl.int64)[None, :] * key_row + dims[:, None] * key_dim
    inside = (dims < DIM)[:, None]
    if EDGE:
        inside = inside & (columns < keys)[None, :]
    key = tl.load(key_at + places, mask=inside, other=0.0)
    if CENTRED:
        key = key - mean[:, None]
    scores = tl.dot(query, key, input_precision=PRODUCTS)
    if EDGE:
        scores *= scale
        seen = (columns < keys)[None, :] & (rows < queries)[:, None]
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        if MASKED != 0:
            at = mask_at + rows.to(tl.int64)[:, None] * mask_row + columns.to(tl.int64)[None, :] * mask_column
            if MASKED == 1:
                seen = seen & (tl.load(at, mask=seen, other=0) != 0)
            else:
                bias = tl.load(at, mask=seen, other=0.0).to(tl.float32)
                seen = seen & (bias > least)
                scores += bias * 1.4426950408889634
        scores = tl.where(seen, scores, -1e30)
        new = tl.maximum(most, tl.max(scores, 1))
        d = scores - new[:, None]
    else:  # scaled and shifted in one instruction
        new = tl.maximum(most, tl.max(scores, 1) * scale)
        d = scores * scale - new[:, None]
    shift = most - new
    decay = tl.exp2(shift)
    e = tl.exp2(d)
    a = decay * (a + shift * z) + tl.sum(e * d, 1)
    z = decay * z + tl.sum(e, 1)
    return new, z, a
