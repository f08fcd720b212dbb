"""Theorem 5: the closed form against exact enumeration, and sampled frequencies against the closed form."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from joma.data.trees import HBLT
from joma.theory.hierarchy import cooccurrence_matrix, enumerate_cooccurrence

TREES, SAMPLED, COUNT, SEED = 50, 5, 200_000, 0


def rows() -> Iterator[tuple[str, str, str, bool]]:
    """Yield (what, asked, reached, met)."""
    generator = torch.Generator().manual_seed(SEED)
    trees = [HBLT.random(generator=generator) for _ in range(TREES)]
    worst = max(np.abs(_closed(tree) - _enumerated(tree)).max() for tree in trees)
    sizes = f"up to {max(tree.parents.size for tree in trees)} nodes"
    what = f"Theorem 5 against exact enumeration, {TREES} random trees, {sizes}"
    yield what, "≤ 1e-12", f"{worst:.1e}", bool(worst <= 1e-12)
    scores = np.concatenate([_standard_errors(tree, generator) for tree in trees[:SAMPLED]])
    what = f"Theorem 5, sampled frequencies, largest of {scores.size} pairs, {COUNT:,} samples"
    yield what, "≤ 4 std. errors", f"{scores.max():.2f} std. errors", bool(scores.max() <= 4)


def _closed(tree: HBLT) -> np.ndarray:
    return cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho)


def _enumerated(tree: HBLT) -> np.ndarray:
    return enumerate_cooccurrence(tree.parents, tree.p0, tree.p_child, tree.rho)


def _standard_errors(tree: HBLT, generator: torch.Generator) -> np.ndarray:
    """Distance of every pair's sampled frequency from the closed form, in its binomial standard errors."""
    token = tree.sample(COUNT, generator=generator).token.numpy().astype(np.float64)
    pairs = np.nonzero(~np.eye(tree.tokens, dtype=bool))
    once, chance = token.sum(axis=0)[pairs[1]], _closed(tree)[pairs]
    return np.abs((token.T @ token)[pairs] / once - chance) / np.sqrt(chance * (1 - chance) / once)
