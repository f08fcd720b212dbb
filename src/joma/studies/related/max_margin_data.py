"""The data of the study `max-margin`: sequences of random tokens, their scores, and starts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from joma.arguments import InputError, whole
from joma.study import Context

SCORES = ("equal", "free")
STARTS = ("zero", "random")
ARMS = tuple((scores, start) for scores in SCORES for start in STARTS)


class Sequences(NamedTuple):
    """Sequences of tokens for each seed.

    Attributes:
        x: tokens of length 1, [seed, sequence, token, dim].
        g: scores [scores, seed, sequence, token]. Equal: 1 for one token of each sequence, 0 for the others. Free:
            uniform in [0, 1].
        z: queries of length 1, [seed, sequence, dim].
    """

    x: Float[np.ndarray, "seed sequence token dim"]
    g: Float[np.ndarray, "scores seed sequence token"]
    z: Float[np.ndarray, "seed sequence dim"]


def sequences(context: Context, purpose: str, sizes: tuple[int, int, int]) -> Sequences:
    """Draw sequences for each seed; the sizes are the numbers of sequences, of tokens in each, and of dimensions."""
    count, tokens, dim = sizes
    draws = []
    for rng in context.numpy_generators(purpose):
        x, z = rng.normal(size=(count, tokens, dim)), rng.normal(size=(count, dim))
        best = rng.integers(tokens, size=count)[:, None] == np.arange(tokens)
        draws.append((_unit(x), np.stack([best.astype(float), rng.uniform(size=(count, tokens))]), _unit(z)))
    x, g, z = (np.stack(arrays) for arrays in zip(*draws, strict=True))
    return Sequences(x, np.moveaxis(g, 1, 0), z)


def starts(context: Context, dim: int) -> Float[np.ndarray, "start seed dim"]:
    """Return p at the start: zero, and standard normal."""
    random = np.stack([rng.normal(size=dim) for rng in context.numpy_generators("starts")])
    return np.stack([np.zeros_like(random), random])


def factor_starts(context: Context, dim: int, scale: float) -> Float[np.ndarray, "factor seed dim dim"]:
    """Return K and Q at the start: normal, of the given scale."""
    draws = [scale * rng.normal(size=(2, dim, dim)) for rng in context.numpy_generators("factors")]
    return np.moveaxis(np.stack(draws), 1, 0)


def check_dim(name: str, dim: int, needed: int) -> None:
    """Raise `InputError` if vectors are of so low a dimension that some selections of tokens have no margin."""
    if whole(name, dim) < needed:
        expected = f"at least {needed}, so that every selection of tokens has a margin"
        raise InputError(name, expected, dim, "raise it, or give fewer sequences or tokens")


def _unit(vectors: Float[np.ndarray, "*lead dim"]) -> Float[np.ndarray, "*lead dim"]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
