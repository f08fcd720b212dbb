"""What the flows of the theory's blocks share: checked queries and embeddings, LayerNorm, packed states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from joma.arguments import InputError, check_size, described, real

LAYER_NORM_EPSILON = 1e-5  # PyTorch's default

Embedded = Float[np.ndarray, "sample dim"]
Deviation = Float[np.ndarray, "sample 1"]


def query_indices(query: ArrayLike, samples: int) -> Int[np.ndarray, " sample"]:
    """Return the query token of each sample, counted from 0; one number stands for all samples.

    >>> query_indices(0, samples=2)
    array([0, 0])
    """
    index = real("query", query, low=0.0)
    if index.shape not in ((), (samples,)) or (index != np.round(index)).any() or (index >= 2**53).any():
        expected = f"one whole number, or one for each of {samples} samples"
        raise InputError("query", expected, described(query), "match `x`")
    return np.broadcast_to(index, (samples,)).astype(np.int64)


def embedding_columns(embedding: ArrayLike | None, tokens: int, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns of the embedding that belong to contextual tokens, and those that belong to queries."""
    columns = tokens + 1 + int(query.max())
    check_size("query", (columns, columns))
    u = np.eye(columns) if embedding is None else real("embedding", embedding, ndim=2)
    if u.shape[1] < columns:
        remedy = "give a column for each token, then one for each query"
        raise InputError("embedding", f"of at least {columns} columns", f"shape {u.shape}", remedy)
    return u[:, :tokens], u[:, tokens:]


def layer_norm(f: Embedded) -> tuple[Embedded, Deviation]:
    """Return LayerNorm(f), without its learned scale and shift, and the deviation that it divided by."""
    deviation = np.sqrt(f.var(axis=1, keepdims=True) + LAYER_NORM_EPSILON)
    return (f - f.mean(axis=1, keepdims=True)) / deviation, deviation


def layer_norm_backward(gradient: Embedded, normalised: Embedded, deviation: Deviation) -> Embedded:
    """Return the gradient with respect to f, from the one with respect to LayerNorm(f)."""
    along = (gradient * normalised).mean(axis=1, keepdims=True)
    return (gradient - gradient.mean(axis=1, keepdims=True) - normalised * along) / deviation


def pack(*parts: np.ndarray) -> np.ndarray:
    """Return arrays of any shapes as one flat state."""
    return np.concatenate([part.ravel() for part in parts])


def unpack(states: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the parts of flat states [..., state], each [..., *shape].

    >>> [part.tolist() for part in unpack(np.arange(5.0), [(2,), (1, 3)])]
    [[0.0, 1.0], [[2.0, 3.0, 4.0]]]
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = np.split(states, ends, axis=-1)
    return [part.reshape(*states.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
