"""The scores of attention whose rows the kernels measure, and a plain version: the whole matrix in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from joma.arguments import InputError, short_reason


@dataclass(frozen=True)
class Scores:
    """The arguments of scaled dot-product attention, whose softmax is measured; query heads may share a key head.

    s_ij = score_mod(cap(scale · q_i·k_j)) + bias_ij,    cap(s) = softcap · tanh(s / softcap)
    """

    query: Float[Tensor, "batch head query dim"]
    key: Float[Tensor, "batch shared key dim"]
    mask: Shaped[Tensor, "batch head query key"] | None
    causal: bool
    scale: float
    softcap: float | None = None
    score_mod: Callable[..., Tensor] | None = None  # of score, batch, head, query and key, as in FlexAttention
    backwards: bool = False  # whether the last query comes first
    places: Int[Tensor, "batch 1 query 1"] | None = None  # of the queries among the keys; as `offset` says if None

    @classmethod
    def of_logits(cls, logits: Float[Tensor, "batch head query key"], causal: bool = False) -> Scores:
        """Return scores that are given themselves: a bias on queries and keys of zero."""
        zero = logits.new_zeros(())
        batch, heads, queries, keys = logits.shape
        return cls(zero.expand(batch, heads, queries, 1), zero.expand(batch, heads, keys, 1), logits, causal, 1.0)

    @property
    def plain(self) -> bool:
        """Whether scores are scaled products plus a bias, which every kernel supports."""
        return self.softcap is None and self.score_mod is None

    @property
    def numbers(self) -> Int[Tensor, " query"]:
        """The number of each row's query, counted from the first query."""
        numbers = torch.arange(self.query.shape[2], device=self.query.device)
        return numbers.flip(0) if self.backwards else numbers

    @property
    def offset(self) -> int:
        """The position of the first query: if there are more keys than queries, as with a cache, queries are last."""
        return 0 if self.causal else max(0, self.key.shape[2] - self.query.shape[2])

    @property
    def positions(self) -> Int[Tensor, "*batch query"]:
        """The position of each row's query among the keys: for all alike, or [batch, query]."""
        return self.offset + self.numbers if self.places is None else self.places[:, 0, :, 0]

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which sums are taken: float64 for float64, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


class Rows(NamedTuple):
    """Measures of each query's attention, NaN where all keys are hidden; None for those that were not asked for."""

    entropy: Float[Tensor, "batch head query"]
    largest: Float[Tensor, "batch head query"] | None  # the largest weight
    log_sum: Float[Tensor, "batch head query"] | None = None  # ln Σ_j exp(s_ij)
    largest_logit: Float[Tensor, "batch head query"] | None = None  # max_j s_ij
    top_mass: Float[Tensor, "batch head query"] | None = None  # the weight on the heaviest keys
    distance: Float[Tensor, "batch head query"] | None = None  # Σ_j p_ij |position of i − j|
    visible: Int[Tensor, "batch head query"] | None = None  # None also where `visible_keys` counts them
    sink_mass: Float[Tensor, "batch head query"] | None = None  # the weight of one key; None also where it is left out


def hidden(mask: Shaped[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return where a mask hides a key: False, −inf, or a bias below half the least number of its dtype.

    >>> hidden(torch.tensor([0.0, -torch.inf, torch.finfo(torch.float32).min]))
    tensor([False,  True,  True])
    """
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def entropy_of(p: Tensor, dim: int = -1) -> Tensor:
    """Return −Σ p ln p of weights along `dim`, with 0 ln 0 = 0, unchecked; see `joma.probes.entropy.shannon_entropy`.

    >>> entropy_of(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return torch.special.entr(p).sum(dim=dim)


def from_matrix(scores: Scores, top: int = 1) -> Rows:
    """Return the rows from the whole matrix of attention in float64, which the tests compare every kernel with.

        H_i = −Σ_j p_ij ln p_ij,    p_i = softmax_j(s_ij)

    >>> from_matrix(Scores(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4), None, True, 1.0)).entropy
    tensor([[[0.0000, 0.6931]]], dtype=torch.float64)
    """
    logits = logit_matrix(scores)
    seen = logits.isfinite().any(dim=-1)
    p = logits.softmax(dim=-1)  # NaN in a row without a key
    distance = (scores.positions[..., None] - torch.arange(p.shape[-1], device=p.device)).abs()
    distance = distance if scores.places is None else distance[:, None]
    return Rows(
        entropy_of(p),
        p.amax(dim=-1),
        logits.logsumexp(dim=-1).where(seen, torch.nan),
        logits.amax(dim=-1).where(seen, torch.nan),
        p.topk(min(top, p.shape[-1]), dim=-1).values.sum(dim=-1),
        (p * distance).sum(dim=-1),
        (logits > -torch.inf).sum(dim=-1),
    )


def logit_matrix(
    scores: Scores, heads: Int[Tensor, " head"] | None = None, rows: Int[Tensor, " row"] | None = None
) -> Float[Tensor, "batch head row key"]:
    """Return the scores in float64, −inf for hidden keys: of all heads and rows, or of those with these numbers."""
    (_, head_count, row_count, _), device = scores.query.shape, scores.query.device
    heads = torch.arange(head_count, device=device) if heads is None else heads.to(device)
    rows = torch.arange(row_count, device=device) if rows is None else rows.to(device)
    query, key = scores.query[:, heads][:, :, rows].double(), scores.key[:, heads // scores.group].double()
    logits, numbers = scores.scale * query @ key.mT, scores.numbers[rows]
    batch, keys = (torch.arange(size, device=device) for size in (logits.shape[0], logits.shape[-1]))
    if scores.softcap is not None:
        logits = scores.softcap * (logits / scores.softcap).tanh()
    if scores.score_mod is not None:
        logits = modified(scores.score_mod, logits, (batch, heads, numbers, keys))
    if scores.mask is not None:
        mask = scores.mask[:, heads][:, :, rows]
        logits = logits if mask.dtype == torch.bool else logits + mask.double()
        logits = logits.masked_fill(hidden(mask), -torch.inf)
    if scores.causal:
        logits = logits.masked_fill(keys > numbers[:, None], -torch.inf)
    return logits


def modified(
    score_mod: Callable[..., Tensor],
    scores: Float[Tensor, "batch head row key"],
    numbers: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Float[Tensor, "batch head row key"]:
    """Return `score_mod` of each score, −inf where it hides a key.

    Args:
        score_mod: a function of single scores, as in FlexAttention.
        scores: its first argument.
        numbers: those of the batches, heads, queries and keys; those of the keys may differ from row to row.

    >>> zero, keys = torch.zeros(1, dtype=torch.int64), torch.arange(3)
    >>> modified(lambda score, batch, head, query, key: score - key, torch.zeros(1, 1, 1, 3), (zero, zero, zero, keys))
    tensor([[[[ 0., -1., -2.]]]])
    """
    mapped, by_row = score_mod, numbers[3].ndim == 4
    for level in (3, 2, 1, 0):
        axes = [0 if axis == level or (axis == 3 and by_row) else None for axis in range(4)]
        mapped = torch.vmap(mapped, in_dims=(0, *axes))
    try:
        values = mapped(scores, *numbers).to(scores.dtype).expand(scores.shape)
    except Exception as cause:  # the user's function may raise anything
        remedy = "pass what you pass to `flex_attention`"
        expected = "a function of a score and the numbers of its batch, head, query and key"
        raise InputError("score_mod", expected, short_reason(cause), remedy) from cause
    return values.masked_fill(hidden(values), -torch.inf)
