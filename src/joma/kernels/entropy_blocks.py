"""Row entropies of attention, block by block or from a fused kernel: no matrix of queries by keys is ever held.

With scores s_ij = scale · q_i·k_j + bias_ij, m their largest value so far and d = s − m, two sums over keys are enough,

    z = Σ_j exp(d_ij),    a = Σ_j d_ij exp(d_ij),        H_i = ln z − a/z,    largest weight 1/z,

and both follow m when it grows: a ← exp(δ) (a + δ z), z ← exp(δ) z, δ = m_old − m_new. All terms of a have one sign, so
nothing cancels; in H_i = lse_i − scale · q_i·o_i with o = attention(q, k, value := k), which fused kernels give, two
numbers of the size of the scores do. Subtracting one vector from all keys of a head changes no entropy, and their mean
is subtracted first wherever keys are held in full precision: an offset common to all scores then costs no digits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from joma.kernels.gpu import HALF, TRITON

HIDDEN = -1e30  # a score that is hidden: exp gives 0, and 0 times it is still 0, which −inf would make NaN
_COPIES = 2**26  # bytes of keys, queries or outputs copied at a time


class Shape(NamedTuple):
    """How many scores are held at once: in all, and of one head in queries by keys."""

    scores: int
    queries: int
    keys: int


# 1 MiB twice stays in the cache of one or two cores; a GPU needs more at once to be busy.
_TILES = {"cpu": Shape(2**18, 128, 1024), "cuda": Shape(2**24, 512, 4096)}
# Of each thread: strips of keys, on the diagonal squares of 64 queries, between the two squares of 64, 128 and 256.
_STRIPS = Shape(2**20, 64, 512)
_THREADS = 8  # counted at most: with a head each, what a thread works on stays in its cache
_BOUND = 30.0  # sums of exp(±30) without a shift are far from what float32 cannot hold


@dataclass(frozen=True)
class Scores:
    """What scaled dot-product attention takes the softmax of; several query heads may share a key head."""

    query: Float[Tensor, "batch head query dim"]
    key: Float[Tensor, "batch shared key dim"]
    mask: Shaped[Tensor, "batch head query key"] | None
    causal: bool
    scale: float

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of sums: float64 for float64, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


class Rows(NamedTuple):
    """One number for each query; NaN where all keys are hidden."""

    entropy: Float[Tensor, "batch head query"]
    largest: Float[Tensor, "batch head query"] | None


def hidden(mask: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Return where a mask hides: False, −inf, or as low as its type goes (less than half its least number)."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def visible(scores: Scores) -> Int[Tensor, "batch head query"]:
    """Return how many keys each query sees."""
    (batch, head, queries, _), keys = scores.query.shape, scores.key.shape[2]
    row = torch.arange(queries, device=scores.query.device)
    if scores.mask is None:
        count = (row + 1).clamp(max=keys) if scores.causal else torch.full_like(row, keys)
        return count.expand(batch, head, queries)
    own = scores.mask[: 1 if scores.mask.stride(0) == 0 else None, : 1 if scores.mask.stride(1) == 0 else None]
    step = max(1, _tile(scores).scores // (own.shape[0] * own.shape[1] * keys))
    count = torch.cat([_seen(scores, own, row[i : i + step]) for i in range(0, queries, step)], dim=-1)
    return count.expand(batch, head, queries)


def _tile(scores: Scores) -> Shape:
    return _TILES.get(scores.query.device.type, _TILES["cuda"])


def _seen(scores: Scores, mask: Tensor, row: Int[Tensor, " row"]) -> Int[Tensor, "one two row"]:
    seen = ~hidden(mask[:, :, int(row[0]) : int(row[-1]) + 1])
    if scores.causal:
        seen &= torch.arange(seen.shape[-1], device=row.device) <= row[:, None]
    return seen.sum(dim=-1)


def bounded(scores: Scores) -> Rows:
    """Scores within ±30 on the CPU, without a mask: H = ln z − a/z from z = Σ exp(s), a = Σ s exp(s), nothing shifted.

    Half the time of `blocked`: 2^s is far faster than exp, no largest score is looked for, and no causal half is lost.
    """
    (batch, head, queries, _), keys = scores.query.shape, scores.key.shape[2]
    own = {"dtype": torch.float32, "device": scores.query.device}  # never what the user has set as the default
    sums = torch.empty(2, batch, head, queries, **own)
    threads = min(torch.get_num_threads(), _THREADS)
    heads, pieces = _pieces(scores, threads * max(2, _STRIPS.scores // (queries * min(keys, _STRIPS.keys))))
    most = max(_STRIPS.keys, threads * _STRIPS.scores // heads)
    cover = list(_cover(queries, keys, scores.causal, most))
    space, factor = torch.empty(2, heads * most, **own), scores.scale / math.log(2)
    with exact_products(scores.query.device):
        for part, shared in pieces:
            query, key = scores.query[part].float(), scores.key[shared].float()
            key = torch.add(-factor * key.mean(dim=-2, keepdim=True), key, alpha=factor).flatten(0, 1)
            found = _power_sums(query.flatten(0, 1), key, cover, space)
            sums[(slice(None), *part)] = found.unflatten(1, query.shape[:2])
    a, z = sums.double()
    return Rows((z.log() - math.log(2) * a / z).float().clamp_(min=0), None)  # rounding alone goes below 0


def blocked(scores: Scores) -> Rows:
    """Any mask, bias, shape and device, in float32 or float64."""
    (batch, head, queries, _), keys, tile = scores.query.shape, scores.key.shape[2], _tile(scores)
    rows, columns = min(queries, tile.queries), min(keys, tile.keys)
    results = torch.empty(2, batch, head, queries, dtype=scores.dtype, device=scores.query.device)
    count, pieces = _pieces(scores, max(1, tile.scores // (rows * columns)))
    space = torch.empty(2, count * rows * columns, dtype=scores.dtype, device=scores.query.device)
    with exact_products(scores.query.device):
        for part, shared in pieces:
            key = _centred(scores.key[shared], scores.dtype).flatten(0, 1)
            for first in range(0, queries, rows):
                at = (*part, slice(first, min(first + rows, queries)))
                query = scores.query[at].to(scores.dtype) * scores.scale
                mask = None if scores.mask is None else scores.mask[at]
                begun = first if scores.causal else None
                found = _row_sums(query.flatten(0, 1), key, mask, begun, space=space, columns=columns)
                results[(slice(None), *at)] = found.unflatten(1, query.shape[:2])
    return Rows(*results)


def _row_sums(
    query: Float[Tensor, "head row dim"],
    key: Float[Tensor, "head key dim"],
    mask: Shaped[Tensor, "batch own row key"] | None,
    first: int | None,
    *,
    space: Float[Tensor, "two size"],
    columns: int,
) -> Float[Tensor, "two head row"]:
    """Return entropy and largest weight of some rows; `first` is the number of the first one if they are causal."""
    heads, rows = query.shape[:2]
    end = key.shape[1] if first is None else min(key.shape[1], first + rows)
    most = query.new_full((heads, rows, 1), HIDDEN)
    z, a = torch.zeros_like(most), torch.zeros_like(most)
    for start in range(0, end, columns):
        stop = min(start + columns, end)
        d, e = _room(space, heads, rows, stop - start)
        torch.bmm(query, key[:, start:stop].mT, out=d)
        if mask is not None:
            _apply(d.unflatten(0, mask.shape[:2]), mask[..., start:stop])
        if first is not None:
            _hide_later(d, first - start)
        new = torch.maximum(most, d.amax(dim=-1, keepdim=True))
        shift = most - new
        torch.exp(d.sub_(new), out=e)
        a = shift.exp() * (a + shift * z)
        z = shift.exp() * z + e.sum(dim=-1, keepdim=True)
        a += e.mul_(d).sum(dim=-1, keepdim=True)
        most = new
    found = torch.stack([z.log() - a / z, 1 / z])[..., 0]
    return found.masked_fill(most[..., 0] <= HIDDEN / 2, torch.nan)


class Patch(NamedTuple):
    """Some rectangles of scores of one size, the first at a row and a column, each `apart` from the last in both."""

    row: int
    rows: int
    column: int
    columns: int
    times: int = 1
    apart: int = 1
    diagonal: bool = False


def _cover(queries: int, keys: int, causal: bool, most: int) -> Iterator[Patch]:
    """Cover every score that is seen, once: strips and, along the diagonal, squares; at most `most` at a time."""
    keys = min(keys, queries) if causal else keys
    for column in range(0, keys, _STRIPS.keys):
        width = min(_STRIPS.keys, keys - column)
        tall = max(1, most // width)
        for row in range(column + width if causal else 0, queries, tall):
            yield Patch(row, min(tall, queries - row), column, width)
    if causal:
        size = _STRIPS.queries
        yield from _squares(0, size, size, keys, most)
        while size < _STRIPS.keys:
            yield from _squares(size, size, 2 * size, keys, most)
            size *= 2


def _squares(row: int, size: int, apart: int, end: int, most: int) -> Iterator[Patch]:
    """Squares from (row, 0) to the last row `end`, which may cut the last one short."""
    count, together = max(0, (end - row - size) // apart + 1), max(1, most // size**2)
    for i in range(0, count, together):
        yield Patch(row + i * apart, size, i * apart, size, min(together, count - i), apart, row == 0)
    last = count * apart
    if row + last < end:
        yield Patch(row + last, end - row - last, last, min(size, end - last), diagonal=row == 0)


def _power_sums(
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "head key dim"],
    cover: Sequence[Patch],
    space: Float[Tensor, "two size"],
) -> Float[Tensor, "two head query"]:
    """Return Σ s 2^s and Σ 2^s of each row."""
    heads = query.shape[0]
    sums = query.new_zeros(2, *query.shape[:2])
    for row, rows, column, columns, times, apart, diagonal in cover:
        left, right, total = query[:, row : row + rows], key.mT[..., column : column + columns], sums[..., row:]
        if times > 1:
            left = query[:, row:].unfold(1, rows, apart)[:, :times].mT.flatten(0, 1)
            right = key[:, column:].unfold(1, columns, apart)[:, :times].flatten(0, 1)
        s, e = _room(space, heads * times, rows, columns)
        torch.bmm(left, right, out=s)
        torch.exp2(s, out=e)
        if diagonal:
            e.tril_()
        own = s.new_empty(2, heads * times, rows)
        for terms, to in ((e, own[1]), (s.mul_(e), own[0])):  # one by one: each thread then sums what it has written
            torch.sum(terms, dim=-1, out=to)
        total.unfold(2, rows, apart)[:, :, :times] += own.unflatten(1, (heads, times))
    return sums


def _room(space: Float[Tensor, "two size"], *shape: int) -> tuple[Tensor, ...]:
    """Return two tensors of this shape from the middle of the space, which is where two halves of any size meet.

    Two threads then keep to their own halves: what a core has to take from another's cache costs more than what is
    done to it.
    """
    size = math.prod(shape)
    return space.narrow(1, (space.shape[1] - size) // 2, size).view(2, *shape).unbind()


def _hide_later(d: Float[Tensor, "head row column"], first: int) -> None:
    """Hide what comes after each row; the first row is column `first`."""
    begun = max(0, first)
    if begun < d.shape[-1]:
        row, column = torch.arange(d.shape[-2], device=d.device), torch.arange(begun, d.shape[-1], device=d.device)
        d[..., begun:].masked_fill_(column > row[:, None] + first, HIDDEN)


def _fits_bounded(scores: Scores) -> bool:
    """By Cauchy and Schwarz, keys being centred."""
    if scores.query.device.type != "cpu" or scores.mask is not None or scores.query.dtype == torch.float64:
        return False
    query, key = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (scores.query, scores.key))
    middle = torch.linalg.vector_norm(scores.key.mean(dim=-2, dtype=torch.float32), dim=-1).amax()
    return bool(abs(scores.scale) * query * (key + middle) <= _BOUND)


def _apply(d: Float[Tensor, "batch head row column"], mask: Shaped[Tensor, "batch head row column"]) -> None:
    if mask.dtype != torch.bool:
        d += mask
    d.masked_fill_(hidden(mask), HIDDEN)


def efficient(scores: Scores) -> Rows:
    """The identity from PyTorch's memory-efficient attention on CUDA, in float32; no mask."""
    return _identity(scores, _efficient_kernel, torch.float32, multiple=4)


def flash(scores: Scores) -> Rows:
    """The identity from flash attention on CUDA, in half precision: its rounded output costs up to 0.1 nats."""
    return _identity(scores, _flash_kernel, scores.query.dtype, multiple=8)


def _identity(
    scores: Scores, kernel: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, *, multiple: int
) -> Rows:
    """Return lse − scale · q·o, heads in pieces; the width of a head is filled up with zeros to a `multiple`."""
    batch, head, queries, dim = scores.query.shape
    entropy = torch.empty(batch, head, queries, dtype=torch.float32, device=scores.query.device)
    for part, shared in _pieces(scores, batch * head)[1]:
        query = pad(scores.query[part].to(dtype), (0, -dim % multiple))
        key = scores.key[shared] if dtype in HALF else _centred(scores.key[shared], dtype)
        output, lse = kernel(query, pad(key, (0, -dim % multiple)), scores.causal, scores.scale)
        entropy[part] = lse[..., :queries] - scores.scale * output.float().mul_(query).sum(dim=-1)
    return Rows(entropy.clamp_(min=0), None)  # two large numbers cancel


def _efficient_kernel(query: Tensor, key: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, key, None, True, 0.0, causal, scale=scale)[:2]


def _flash_kernel(query: Tensor, key: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, key, 0.0, causal, False, scale=scale)[:2]


def exact(scores: Scores) -> Rows:
    """One pass of our own over the keys on CUDA; products of half precision are exact, float32 ones within 1e-6."""
    from joma.kernels import entropy_triton  # triton comes with PyTorch for CUDA only

    return Rows(*entropy_triton.row_sums(scores, "tf32x3"))


def rounded(scores: Scores) -> Rows:
    """As `exact`, but for float32 products, which are rounded to TF32."""
    from joma.kernels import entropy_triton

    return Rows(*entropy_triton.row_sums(scores, "tf32"))


def _fits_kernel(scores: Scores) -> bool:
    fits = scores.query.is_cuda and scores.query.dtype != torch.float64 and scores.query.shape[-1] <= 256
    return fits and _compiles(scores.query.device, scores.query.dtype, scores.query.shape[-1])


@cache
def _compiles(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Try the kernel once: it needs triton, and triton a compiler and a GPU that it knows."""
    if not TRITON:
        return False
    one = torch.ones(1, 1, 16, dim, device=device, dtype=dtype)
    try:
        rounded(Scores(one, one, None, True, 1.0))
        exact(Scores(one, one, None, True, 1.0))
        torch.cuda.synchronize(device)
    except Exception as cause:  # whatever keeps a kernel from compiling, there is another way
        warnings.warn(f"attention entropy goes on without its own kernel, which failed: {cause}", stacklevel=2)
        return False
    return True


def _fits_efficient(scores: Scores) -> bool:
    return scores.query.is_cuda and scores.mask is None and scores.query.dtype != torch.float64


def _fits_flash(scores: Scores) -> bool:
    square = not scores.causal or scores.query.shape[2] == scores.key.shape[2]
    small = scores.query.dtype in HALF and scores.query.shape[-1] <= 256
    return (
        _fits_efficient(scores) and square and small and torch.cuda.get_device_capability(scores.query.device)[0] >= 8
    )


class Implementation(NamedTuple):
    """A way to the rows, where it may be taken, and whether the largest weights come with it."""

    rows: Callable[[Scores], Rows]
    fits: Callable[[Scores], bool]
    largest: bool


IMPLEMENTATIONS = {
    "exact": Implementation(exact, _fits_kernel, True),
    "rounded": Implementation(rounded, _fits_kernel, True),
    "flash": Implementation(flash, _fits_flash, False),
    "efficient": Implementation(efficient, _fits_efficient, False),
    "bounded": Implementation(bounded, _fits_bounded, False),
    "blocked": Implementation(blocked, lambda _: True, True),
}
# The first that fits is taken. Half precision loses nothing in the kernel, and is as fast at either precision.
PRECISIONS = {
    "highest": ("exact", "efficient", "bounded", "blocked"),
    "high": ("rounded", "flash", "efficient", "bounded", "blocked"),
}


def rows(scores: Scores, order: tuple[str, ...], *, largest: bool = False) -> Rows:
    """Return the rows by the first way of `order` that fits."""
    ways = (IMPLEMENTATIONS[name] for name in order)
    way = next(way for way in ways if way.fits(scores) and (way.largest or not largest))
    return way.rows(scores)


def _centred(key: Float[Tensor, "*batch key dim"], dtype: torch.dtype) -> Float[Tensor, "*batch key dim"]:
    key = key.to(dtype, copy=True)
    key -= key.mean(dim=-2, keepdim=True)
    return key


Piece = tuple[tuple[slice, slice], tuple[slice, slice]]


def _pieces(scores: Scores, most: int) -> tuple[int, Iterator[Piece]]:
    """Return how many heads come at a time, at most, and slices of query heads beside those of their key heads."""
    (batch, head, queries, dim), (_, shared, keys, _) = scores.query.shape, scores.key.shape
    bound = max(1, min(most, _COPIES // (max(queries, keys) * dim * scores.dtype.itemsize)))
    heads = min(shared, bound)
    batches = min(batch, max(1, bound // shared))

    def pieces() -> Iterator[Piece]:
        for b in range(0, batch, batches):
            for h in range(0, shared, heads):
                for g in range(scores.group):
                    some = slice(b, min(b + batches, batch))
                    query_heads = slice(h * scores.group + g, min(head, (h + heads) * scores.group), scores.group)
                    yield (some, query_heads), (some, slice(h, min(h + heads, shared)))

    return heads * batches, pieces()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Keep float32 products in float32, whatever the user allows elsewhere."""
    backend: Any = getattr(torch.backends, "cuda" if device.type == "cuda" else "mkldnn").matmul
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before
