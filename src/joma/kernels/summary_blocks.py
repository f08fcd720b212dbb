"""Measures of attention's rows, block by block, for any scores: the matrix of all weights is never in memory.

With scores s_ij, m their largest value so far and d = s − m, three sums over keys are enough,

    z = Σ_j exp(d_ij),    a = Σ_j d_ij exp(d_ij),    b = Σ_j exp(d_ij) |position of i − j|,

    H_i = ln z − a/z,    largest weight 1/z,    ln Σ_j exp(s_ij) = m + ln z,    mean distance b/z,

and all follow m when it grows: a ← exp(δ) (a + δ z), z ← exp(δ) z, b ← exp(δ) b, δ = m_old − m_new. All terms of a sum
have one sign, so nothing cancels. The largest scores of a row are merged with those of each block. Where the mean key
is subtracted first (`entropy_blocks`), its score is added again to m alone. Scores are in units of ln 2: on the CPU exp
is slower than exp2, and a hundred times slower where it underflows, as for hidden keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from joma.kernels.entropy_blocks import COPIED_BYTES, BlockSize, block_size, head_pieces, two_buffers
from joma.kernels.entropy_scores import Rows, Scores, hidden, modified
from joma.kernels.products import exact_products

LN2, LOG2E = math.log(2), 1 / math.log(2)
_GROUP = 8  # scores
HIDDEN = -1e30  # the score of a hidden key: exp gives 0, and 0 times it is still 0, which −inf would make NaN


def blocked(scores: Scores, top: int = 0, *, distance: bool = False, sink: int | None = None) -> Rows:
    """Return the measures of each row, for any mask, bias, shape and device, in float32 or float64.

    Args:
        scores: whose softmax is measured.
        top: of how many heaviest keys the weight is returned; 0 for none, which costs nothing.
        distance: whether the mean distance is returned.
        sink: a key whose weight may be returned; here it is left to `chosen_scores`.
    """
    del sink
    (batch, heads, queries, _), keys, tile = scores.query.shape, scores.key.shape[2], block_size(scores)
    size = BlockSize(tile.scores, min(queries, tile.queries), min(keys, tile.keys))
    options = {"dtype": scores.dtype, "device": scores.query.device}
    count, pieces = head_pieces(scores, max(1, size.scores // (size.queries * size.keys)))
    workspace = torch.empty(2, count * size.queries * size.keys, **options)
    results = torch.empty(7, batch, heads, queries, **options)
    with exact_products(scores.query.device):
        for part, shared in pieces:
            key = scores.key[shared].to(scores.dtype, copy=scores.plain)
            mean = key.mean(dim=-2, keepdim=True) if scores.plain else key.new_zeros(*key.shape[:2], 1, key.shape[-1])
            key = key.sub_(mean) if scores.plain else key
            for first in range(0, queries, size.queries):
                index = (*part, slice(first, min(first + size.queries, queries)))
                query = scores.query[index].to(scores.dtype) * _unit(scores)
                block = _RowBlock(scores, index, query.flatten(0, 1), key.flatten(0, 1))
                sums = _RowSums(block.query, _Positions.of(scores, index) if distance else None, min(top, keys))
                block.accumulate(sums, workspace, size.keys)
                mean_score = torch.bmm(block.query, mean.flatten(0, 1).mT)
                results[(slice(None), *index)] = sums.measures(mean_score).unflatten(1, query.shape[:2])
    entropy, largest, log_sum, largest_logit, top_mass, mean_distance, visible = results
    return Rows(
        entropy,
        largest,
        log_sum,
        largest_logit,
        top_mass if top else None,
        mean_distance if distance else None,
        visible.long() if scores.score_mod is not None else None,
    )


class _Positions(NamedTuple):
    """The positions of some rows, and the least and the greatest of them."""

    values: Float[Tensor, "some_head row"]
    range: tuple[int, int]

    @classmethod
    def of(cls, scores: Scores, index: tuple[slice, slice, slice]) -> _Positions:
        """Return the positions of the rows of some heads; given ones may lie anywhere."""
        samples, heads, rows = index
        if scores.places is not None:
            places = scores.positions[samples, rows].to(scores.dtype)
            return cls(places.repeat_interleave(heads.stop - heads.start, dim=0), (-1, scores.key.shape[2]))
        numbers = range(scores.query.shape[2])[:: -1 if scores.backwards else 1][rows]
        ends = sorted((scores.offset + numbers[0], scores.offset + numbers[-1]))
        return cls(scores.positions[rows].to(scores.dtype)[None], (ends[0], ends[1]))


class _RowSums:
    """The sums of some rows over the keys so far; `top` is the number of the largest scores to keep."""

    def __init__(self, query: Float[Tensor, "head row dim"], positions: _Positions | None, top: int) -> None:
        self.largest = query.new_full((*query.shape[:2], 1), HIDDEN)
        self.z, self.a, self.b, self.visible = (torch.zeros_like(self.largest) for _ in range(4))
        self.top = query.new_full((*query.shape[:2], top), HIDDEN)
        self.positions = positions

    def add(self, d: Float[Tensor, "head row column"], e: Float[Tensor, "head row column"], start: int) -> None:
        """Add the scores `d` of the keys from number `start` on; both tensors are overwritten."""
        highest = d
        if self.top.shape[-1]:
            highest = _candidates(d, self.top.shape[-1])
            self.top = torch.cat([self.top, highest], dim=-1).topk(self.top.shape[-1], dim=-1, sorted=False).values
        new = torch.maximum(self.largest, highest.amax(dim=-1, keepdim=True))
        shift = self.largest - new
        decay = shift.exp2()
        torch.exp2(d.sub_(new), out=e)
        self.a = decay * (self.a + shift * self.z)
        self.z = decay * self.z + e.sum(dim=-1, keepdim=True)
        self.a += d.mul_(e).sum(dim=-1, keepdim=True)
        self.largest = new
        if self.positions is not None:
            self.b = decay * self.b + self._distances(e, start)

    def _distances(self, e: Float[Tensor, "head row column"], start: int) -> Float[Tensor, "head row 1"]:
        """Return Σ_j e_ij |position of i − j| over one block of keys; all terms are positive.

        Keys on one side of all rows need no matrix of distances: with the last key n before the rows,
        Σ_j e_j (i − j) = (i − n) Σ_j e_j + Σ_j e_j (n − j).
        """
        assert self.positions is not None
        (low, high), position = self.positions.range, self.positions.values[..., None]
        column = torch.arange(start, start + e.shape[-1], device=e.device, dtype=e.dtype)
        first = min(max(low + 1 - start, 0), e.shape[-1])  # keys before it are on the left of all rows
        last = min(max(high - start, first), e.shape[-1])  # keys from it on are on the right of all rows
        total = torch.zeros_like(self.z)
        if first > 0:
            edge = start + first - 1
            total += (position - edge) * e[..., :first].sum(dim=-1, keepdim=True)
            total += (e @ (edge - column).clamp_(min=0))[..., None]  # of all, as a product with a part would copy it
        if last < e.shape[-1]:
            edge = start + last
            total += (edge - position) * e[..., last:].sum(dim=-1, keepdim=True)
            total += (e @ (column - edge).clamp_(min=0))[..., None]
        if first < last:
            total += (e[..., first:last] * (position - column[first:last]).abs()).sum(dim=-1, keepdim=True)
        return total

    def measures(self, mean_score: Float[Tensor, "head row 1"]) -> Float[Tensor, "seven head row"]:
        """Return entropy, largest weight, log-sum, largest score, weight of the top keys, distance and visible keys."""
        log_z = self.z.log()
        top = (self.top - self.largest).exp2().sum(dim=-1, keepdim=True) / self.z
        peak = LN2 * (self.largest + mean_score)
        values = [log_z - LN2 * self.a / self.z, 1 / self.z, peak + log_z, peak, top.clamp(max=1), self.b / self.z]
        results = torch.stack(values)[..., 0].masked_fill(self.largest[..., 0] <= HIDDEN / 2, torch.nan)
        return torch.cat([results, self.visible.squeeze(-1)[None]])


def _candidates(d: Float[Tensor, "head row column"], top: int) -> Float[Tensor, "head row candidate"]:
    """Return scores of each row, the `top` largest among them.

    These are in the groups with the largest maxima, which the CPU selects in half the time for short rows.
    """
    groups = d.shape[-1] // _GROUP
    if groups <= top or not d.is_cpu:
        return d.topk(min(top, d.shape[-1]), dim=-1, sorted=False).values
    grouped, rest = d[..., : groups * _GROUP].unflatten(-1, (_GROUP, groups)), d[..., groups * _GROUP :]
    chosen = grouped.amax(dim=-2).topk(top, dim=-1, sorted=False).indices
    members = grouped.gather(-1, chosen[..., None, :].expand(-1, -1, _GROUP, -1))
    return torch.cat([members.flatten(-2), rest], dim=-1)


@dataclass(frozen=True)
class _RowBlock:
    """Some rows of some heads: slices over batch, head and query, and the queries times the scale."""

    scores: Scores
    index: tuple[slice, slice, slice]
    query: Float[Tensor, "head row dim"]
    key: Float[Tensor, "head key dim"]

    def accumulate(self, sums: _RowSums, workspace: Float[Tensor, "two size"], columns: int) -> None:
        """Add all keys that the rows may see, `columns` at a time."""
        heads, rows = self.query.shape[:2]
        end = min(self.key.shape[1], self.index[2].stop) if self.scores.causal else self.key.shape[1]
        for start in range(0, end, columns):
            d, e = two_buffers(workspace, heads, rows, min(start + columns, end) - start)
            self._fill(d, start)
            if self.scores.score_mod is not None:
                sums.visible += (d > HIDDEN / 2).sum(dim=-1, keepdim=True)
            sums.add(d, e, start)

    def _fill(self, d: Float[Tensor, "head row column"], start: int) -> None:
        """Write the scores of the keys from number `start` on into `d`, `HIDDEN` or less for those that are hidden."""
        scores, stop = self.scores, start + d.shape[-1]
        torch.bmm(self.query, self.key[:, start:stop].mT, out=d)
        if scores.softcap is not None:
            d.tanh_().mul_(scores.softcap)
        samples, heads, rows = self.index
        block = d.unflatten(0, (samples.stop - samples.start, -1))
        if scores.score_mod is not None:
            sizes, parts = (*scores.query.shape[:2], stop), (samples, heads, slice(start, stop))
            batch, head, key = (torch.arange(n, device=d.device)[part] for n, part in zip(sizes, parts, strict=True))
            values = modified(scores.score_mod, block, (batch, head, scores.numbers[rows], key))
            block.copy_(values.clamp_(min=HIDDEN))
        if not scores.plain:
            d *= LOG2E
        if scores.mask is not None:
            block.add_(_bias(scores.mask[self.index][..., start:stop], d.dtype))
        if scores.causal:
            _hide_later(d, rows.start - start)


def _unit(scores: Scores) -> float:
    """Return the factor of the queries: to scores in units of ln 2, or to what is capped or modified first."""
    return scores.scale * (LOG2E if scores.plain else 1 / (scores.softcap or 1.0))


def _bias(
    mask: Shaped[Tensor, "batch head row column"], dtype: torch.dtype
) -> Float[Tensor, "some_batch some_head row column"]:
    """Return what a mask adds to the scores in units of ln 2; once for all heads that share it.

    Filling where a boolean is False takes the CPU longer than the product of queries and keys.
    """
    mask = mask[: 1 if mask.stride(0) == 0 else None, : 1 if mask.stride(1) == 0 else None]
    if mask.dtype == torch.bool:
        return mask.to(dtype).sub_(1).mul_(-HIDDEN)
    return F.threshold(mask.to(dtype), max(HIDDEN, torch.finfo(mask.dtype).min / 2), HIDDEN).mul_(LOG2E)


def _hide_later(d: Float[Tensor, "head row column"], first: int) -> None:
    """Hide the keys after each query; the first row sees the columns up to number `first`."""
    start = max(0, first)
    if start < d.shape[-1]:
        d[..., start:] += d.new_full((d.shape[-2], d.shape[-1] - start), HIDDEN).triu_(1 + first - start)


# The scores of chosen keys


def chosen_scores(scores: Scores, key: int | Int[Tensor, "batch head query"]) -> Float[Tensor, "batch head query"]:
    """Return the score of a chosen key, −inf where it is hidden: the same key for all rows, or one for each row.

    >>> ones = torch.ones(1, 1, 3, 4)
    >>> chosen_scores(Scores(ones, ones, None, True, 1.0), 2)
    tensor([[[-inf, -inf, 4.]]])
    """
    values = scores.scale * _products(scores, key)
    if scores.softcap is not None:
        values = scores.softcap * (values / scores.softcap).tanh()
    if scores.score_mod is not None:
        batch, heads = (torch.arange(size, device=values.device) for size in scores.query.shape[:2])
        number = torch.arange(key, key + 1, device=values.device) if isinstance(key, int) else key[..., None]
        values = modified(scores.score_mod, values[..., None], (batch, heads, scores.numbers, number))[..., 0]
    if scores.mask is not None:
        mask = scores.mask[..., key] if isinstance(key, int) else scores.mask.gather(-1, key[..., None])[..., 0]
        values = values if mask.dtype == torch.bool else values + mask.to(values.dtype)
        values = values.masked_fill(hidden(mask), -torch.inf)
    if scores.causal and not (isinstance(key, int) and key == 0):
        values = values.masked_fill(key > scores.numbers, -torch.inf)
    return values


def _products(scores: Scores, key: int | Int[Tensor, "batch head query"]) -> Float[Tensor, "batch head query"]:
    """Return the product of each query with its chosen key, a few key heads at a time to bound what is copied."""
    (batch, heads, queries, dim), shared = scores.query.shape, scores.key.shape[1]
    size = scores.group * queries * dim * scores.dtype.itemsize
    samples, at_once = max(1, COPIED_BYTES // (size * shared)), max(1, min(shared, COPIED_BYTES // size))
    results = torch.empty(batch, heads, queries, dtype=scores.dtype, device=scores.query.device)
    with exact_products(scores.query.device):
        for b in range(0, batch, samples):
            for h in range(0, shared, at_once):
                part = slice(b, b + samples), slice(h * scores.group, (h + at_once) * scores.group)
                query = scores.query[part].to(scores.dtype).unflatten(1, (-1, scores.group))
                keys = scores.key[b : b + samples, h : h + at_once]
                if isinstance(key, int):
                    product = query @ keys[:, :, None, key, :, None].to(scores.dtype)
                else:
                    product = (query * _gathered(keys, key[part], scores.group)).sum(dim=-1, keepdim=True)
                results[part] = product[..., 0].flatten(1, 2)
    return results


def _gathered(
    key: Float[Tensor, "batch shared key dim"], numbers: Int[Tensor, "batch head query"], group: int
) -> Float[Tensor, "batch shared group some_query dim"]:
    """Return the key of each query; only one for each head if all queries have the same."""
    numbers = numbers[..., :1] if numbers.stride(-1) == 0 else numbers
    index = numbers.unflatten(1, (-1, group)).flatten(2)
    return key.gather(2, index[..., None].expand(-1, -1, -1, key.shape[-1])).unflatten(2, (group, -1))
