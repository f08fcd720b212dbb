"""Row entropies of small scores on the CPU, block by block, and what all blocked passes share.

The matrix of all weights is never in memory. Subtracting one vector from all keys of a head changes no entropy, and
their mean is subtracted first wherever keys are in full precision: an offset common to all scores then costs no digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from joma.kernels.entropy_scores import Rows, Scores, hidden
from joma.kernels.products import exact_products

COPIED_BYTES = 2**26  # of keys, queries or outputs copied at a time


class BlockSize(NamedTuple):
    """The number of scores in memory at once: in total, and of one head as queries × keys."""

    scores: int
    queries: int
    keys: int


# 1 MiB twice stays in the cache of one or two cores; a GPU needs more at once to be busy.
_TILES = {"cpu": BlockSize(2**18, 128, 1024), "cuda": BlockSize(2**24, 512, 4096)}
# For each thread: strips of 512 keys, squares of 64 on the diagonal, and squares of 64, 128 and 256 between the two.
_STRIPS = BlockSize(2**20, 64, 512)
_MAX_THREADS = 8  # each works on one head, so that its data stay in its cache
_MAX_SCORE = 30.0  # sums of exp(±30), without a shift, are far from the limits of float32


def visible_keys(scores: Scores) -> Int[Tensor, "batch head query"]:
    """Return how many keys each query sees.

    >>> visible_keys(Scores(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 2, 4), None, True, 1.0))
    tensor([[[1, 2, 2]]])
    """
    (batch, heads, queries, _), keys = scores.query.shape, scores.key.shape[2]
    row = torch.arange(queries, device=scores.query.device)
    if scores.mask is None:
        count = (row + 1).clamp(max=keys) if scores.causal else torch.full_like(row, keys)
        return count.expand(batch, heads, queries)
    # An axis of stride 0 repeats one mask, which is counted once.
    mask = scores.mask[: 1 if scores.mask.stride(0) == 0 else None, : 1 if scores.mask.stride(1) == 0 else None]
    step = max(1, block_size(scores).scores // (mask.shape[0] * mask.shape[1] * keys))
    count = torch.cat([_count_visible(scores, mask, row[i : i + step]) for i in range(0, queries, step)], dim=-1)
    return count.expand(batch, heads, queries)


def block_size(scores: Scores) -> BlockSize:
    """Return how many scores are in memory at once on this device.

    >>> block_size(Scores(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 2, 4), None, True, 1.0)).keys
    1024
    """
    return _TILES.get(scores.query.device.type, _TILES["cuda"])


def _count_visible(scores: Scores, mask: Tensor, row: Int[Tensor, " row"]) -> Int[Tensor, "mask_batch mask_head row"]:
    visible = ~hidden(mask[:, :, int(row[0]) : int(row[-1]) + 1])
    if scores.causal:
        visible &= torch.arange(visible.shape[-1], device=row.device) <= row[:, None]
    return visible.sum(dim=-1)


# Scores within ±30: sums without a shift


def bounded(scores: Scores) -> Rows:
    """Return the entropies of scores within ±30 on the CPU, without a mask.

        H = ln z − a/z,    z = Σ exp(s),    a = Σ s exp(s),        nothing shifted

    It takes half the time of `blocked`: 2^s is far faster than exp, no largest score is searched for, and no time is
    spent on the causally hidden half.
    """
    (batch, heads, queries, _), keys = scores.query.shape, scores.key.shape[2]
    options = {"dtype": torch.float32, "device": scores.query.device}  # not the user's default dtype and device
    sums = torch.empty(2, batch, heads, queries, **options)
    threads = min(torch.get_num_threads(), _MAX_THREADS)
    heads_at_once, pieces = head_pieces(scores, threads * max(2, _STRIPS.scores // (queries * min(keys, _STRIPS.keys))))
    max_scores = max(_STRIPS.keys, threads * _STRIPS.scores // heads_at_once)
    cover = _cover(queries, keys, scores.causal, max_scores)
    workspace, factor = torch.empty(2, heads_at_once * max_scores, **options), scores.scale / math.log(2)
    with exact_products(scores.query.device):
        for part, shared in pieces:
            query, key = scores.query[part].float(), scores.key[shared].float()
            key = torch.add(-factor * key.mean(dim=-2, keepdim=True), key, alpha=factor).flatten(0, 1)
            piece = _power_sums(query.flatten(0, 1), key, cover, workspace)
            sums[(slice(None), *part)] = piece.unflatten(1, query.shape[:2])
    a, z = sums.double()
    return Rows((z.log() - math.log(2) * a / z).float().clamp_(min=0), None)  # only rounding makes it negative


def fits_bounded(scores: Scores) -> bool:
    """Return whether `bounded` supports these scores: Cauchy-Schwarz, with centred keys, bounds them by 30."""
    if scores.query.device.type != "cpu" or scores.mask is not None or scores.query.dtype == torch.float64:
        return False
    if not scores.plain:
        return False
    query, key = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (scores.query, scores.key))
    mean = torch.linalg.vector_norm(scores.key.mean(dim=-2, dtype=torch.float32), dim=-1).amax()
    return bool(abs(scores.scale) * query * (key + mean) <= _MAX_SCORE)


class Patch(NamedTuple):
    """Equal rectangles of scores: the first begins at (row, column), each next one `apart` further along both axes."""

    row: int
    rows: int
    column: int
    columns: int
    times: int = 1
    apart: int = 1
    diagonal: bool = False


@lru_cache(maxsize=16)
def _cover(queries: int, keys: int, causal: bool, max_scores: int) -> tuple[Patch, ...]:
    """Return what covers every visible score once, `max_scores` at a time at most; all layers of a model share it."""
    return tuple(_patches(queries, keys, causal, max_scores))


def _patches(queries: int, keys: int, causal: bool, max_scores: int) -> Iterator[Patch]:
    """Yield strips and, along the diagonal, squares."""
    keys = min(keys, queries) if causal else keys
    for column in range(0, keys, _STRIPS.keys):
        width = min(_STRIPS.keys, keys - column)
        height = max(1, max_scores // width)
        for row in range(column + width if causal else 0, queries, height):
            yield Patch(row, min(height, queries - row), column, width)
    if causal:
        size = _STRIPS.queries
        yield from _squares(0, size, size, keys, max_scores)
        while size < _STRIPS.keys:
            yield from _squares(size, size, 2 * size, keys, max_scores)
            size *= 2


def _squares(row: int, size: int, apart: int, end: int, max_scores: int) -> Iterator[Patch]:
    """Yield squares from (row, 0) to the last row `end`, which may cut the last one short."""
    count, at_once = max(0, (end - row - size) // apart + 1), max(1, max_scores // size**2)
    for i in range(0, count, at_once):
        yield Patch(row + i * apart, size, i * apart, size, min(at_once, count - i), apart, row == 0)
    last = count * apart
    if row + last < end:
        yield Patch(row + last, end - row - last, last, min(size, end - last), diagonal=row == 0)


def _power_sums(
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "head key dim"],
    cover: Sequence[Patch],
    workspace: Float[Tensor, "two size"],
) -> Float[Tensor, "two head query"]:
    """Return Σ s 2^s and Σ 2^s of each row."""
    heads = query.shape[0]
    sums = query.new_zeros(2, *query.shape[:2])
    for row, rows, column, columns, times, apart, diagonal in cover:
        left, right, total = query[:, row : row + rows], key.mT[..., column : column + columns], sums[..., row:]
        if times > 1:
            left = query[:, row:].unfold(1, rows, apart)[:, :times].mT.flatten(0, 1)
            right = key[:, column:].unfold(1, columns, apart)[:, :times].flatten(0, 1)
        s, e = two_buffers(workspace, heads * times, rows, columns)
        torch.bmm(left, right, out=s)
        torch.exp2(s, out=e)
        if diagonal:
            e.tril_()
        patch = s.new_empty(2, heads * times, rows)
        for terms, out in ((e, patch[1]), (s.mul_(e), patch[0])):  # in turn: each thread sums what it has just written
            torch.sum(terms, dim=-1, out=out)
        total.unfold(2, rows, apart)[:, :, :times] += patch.unflatten(1, (heads, times))
    return sums


# Heads in pieces


def two_buffers(workspace: Float[Tensor, "two size"], *shape: int) -> tuple[Tensor, ...]:
    """Return two tensors of this shape, each from the middle of one row of the workspace.

    Two threads split a tensor at its middle. As all shapes have the same middle, each thread stays in its own half:
    data from another core's cache cost more time than the work on them.
    """
    size = math.prod(shape)
    return workspace.narrow(1, (workspace.shape[1] - size) // 2, size).view(2, *shape).unbind()


def centred(key: Float[Tensor, "*batch key dim"], dtype: torch.dtype) -> Float[Tensor, "*batch key dim"]:
    """Return a copy of the keys in `dtype` with their mean over keys subtracted.

    >>> centred(torch.tensor([[1.0], [3.0]]), torch.float64)
    tensor([[-1.],
            [ 1.]], dtype=torch.float64)
    """
    key = key.to(dtype, copy=True)
    key -= key.mean(dim=-2, keepdim=True)
    return key


Piece = tuple[tuple[slice, slice], tuple[slice, slice]]


def head_pieces(scores: Scores, max_heads: int) -> tuple[int, Iterator[Piece]]:
    """Return how many heads come at a time, at most, and pairs of slices: of query heads and of their key heads.

    Each slice is over batch and head. At most `max_heads` heads come at a time, and fewer where copies of their
    queries or keys would take too much memory.
    """
    (batch, heads, queries, dim), (_, shared, keys, _) = scores.query.shape, scores.key.shape
    bound = max(1, min(max_heads, COPIED_BYTES // (max(queries, keys) * dim * scores.dtype.itemsize)))
    key_heads = min(shared, bound)
    batches = min(batch, max(1, bound // shared))

    def pieces() -> Iterator[Piece]:
        for b in range(0, batch, batches):
            for h in range(0, shared, key_heads):
                for g in range(scores.group):
                    samples = slice(b, min(b + batches, batch))
                    end = min(heads, (h + key_heads) * scores.group)
                    query_heads = slice(h * scores.group + g, end, scores.group)
                    yield (samples, query_heads), (samples, slice(h, min(h + key_heads, shared)))

    return key_heads * batches, pieces()
