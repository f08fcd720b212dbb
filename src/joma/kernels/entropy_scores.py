"""The scores of attention whose row entropies the kernels return, and a plain version: the whole matrix in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """The arguments of scaled dot-product attention, whose softmax is measured; query heads may share a key head."""

    query: Float[Tensor, "batch head query dim"]
    key: Float[Tensor, "batch shared key dim"]
    mask: Shaped[Tensor, "batch head query key"] | None
    causal: bool
    scale: float

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which sums are taken: float64 for float64, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


class Rows(NamedTuple):
    """Entropy and largest weight of each query's attention; NaN where all keys are hidden."""

    entropy: Float[Tensor, "batch head query"]
    largest: Float[Tensor, "batch head query"] | None


def hidden(mask: Shaped[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return where a mask hides a key: False, −inf, or a bias below half the least number of its dtype.

    >>> hidden(torch.tensor([0.0, -torch.inf, torch.finfo(torch.float32).min]))
    tensor([False,  True,  True])
    """
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def from_matrix(scores: Scores) -> Rows:
    """Return the rows from the whole matrix of attention in float64, which the tests compare every kernel with.

        H_i = −Σ_j p_ij ln p_ij,    p_i = softmax_j(scale · q_i·k_j + bias_ij)

    >>> from_matrix(Scores(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4), None, True, 1.0)).entropy
    tensor([[[0.0000, 0.6931]]], dtype=torch.float64)
    """
    key = scores.key.double().repeat_interleave(scores.group, dim=1)
    logits = scores.scale * scores.query.double() @ key.mT
    visible = torch.ones_like(logits, dtype=torch.bool)
    if scores.causal:
        visible = visible.tril()
    if scores.mask is not None:
        visible = visible & ~hidden(scores.mask)
        logits = logits if scores.mask.dtype == torch.bool else logits + scores.mask.double()
    p = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)  # NaN in a row without a key
    return Rows(torch.special.entr(p).sum(dim=-1), p.amax(dim=-1))
