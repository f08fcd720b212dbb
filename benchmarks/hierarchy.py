"""Theorem 5: the closed form against exact enumeration, and frequencies in samples against the closed form."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks import Row
from joma.data.trees import HBLT
from joma.theory.hierarchy import cooccurrence_matrix, enumerate_cooccurrence

SEED = 0
TREES = 50  # random trees that are enumerated
SAMPLED_TREES = 5  # of these trees, how many are also sampled
SAMPLES = 200_000  # of each sampled tree


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    generator = torch.Generator().manual_seed(SEED)
    trees = [HBLT.random(generator=generator) for _ in range(TREES)]
    worst = max(np.abs(_closed(tree) - _enumerated(tree)).max() for tree in trees)
    sizes = f"up to {max(tree.parents.size for tree in trees)} nodes"
    what = f"Theorem 5 against exact enumeration, {TREES} random trees, {sizes}"
    yield what, "≤ 1e-12", f"{worst:.1e}", bool(worst <= 1e-12)
    errors = np.concatenate([_standard_errors(tree, generator) for tree in trees[:SAMPLED_TREES]])
    what = f"Theorem 5, sampled frequencies, largest of {errors.size} pairs, {SAMPLES:,} samples"
    yield what, "≤ 4 std. errors", f"{errors.max():.2f} std. errors", bool(errors.max() <= 4)


def _closed(tree: HBLT) -> np.ndarray:
    return cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho)


def _enumerated(tree: HBLT) -> np.ndarray:
    return enumerate_cooccurrence(tree.parents, tree.p0, tree.p_child, tree.rho)


def _standard_errors(tree: HBLT, generator: torch.Generator) -> np.ndarray:
    """Return how far P[l | m] in samples is from the closed form for each pair of tokens, in standard errors."""
    token = tree.sample(SAMPLES, generator=generator).token.numpy().astype(np.float64)
    pairs = np.nonzero(~np.eye(tree.tokens, dtype=bool))
    occurrences, probability = token.sum(axis=0)[pairs[1]], _closed(tree)[pairs]
    deviation = (token.T @ token)[pairs] / occurrences - probability
    return np.abs(deviation) / np.sqrt(probability * (1 - probability) / occurrences)
