"""The entropy of attention, in nats: defined here and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from joma.arguments import InputError


def entropy(p: Tensor, dim: int = -1) -> Tensor:
    """Return H = −Σ p ln p along `dim`, with 0 ln 0 = 0.

    Args:
        p: probabilities that sum to one along `dim`.
        dim: the axis of the distribution.

    Returns:
        A tensor without the axis `dim`, between 0 and the logarithm of its length.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    sums = p.sum(dim=dim)
    if not torch.isfinite(sums).all() or (sums - 1).abs().max() > 1e-3 or p.min() < 0:
        got = f"sums in [{float(sums.min()):.3g}, {float(sums.max()):.3g}]"
        raise InputError("p", "distributions that sum to 1", got, "apply `.softmax(-1)` first")
    return torch.special.entr(p).sum(dim=dim)
