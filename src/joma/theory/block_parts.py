"""What the flows of the theory's blocks share: checked samples, queries and embeddings, LayerNorm, packed states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from joma.arguments import InputError, check_size, choice, described, probabilities, real
from joma.theory.invariants import ATTENTIONS, AttentionLaw, reference
from joma.theory.losses import Gradient

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


class WeightedSamples(NamedTuple):
    """What a block is trained on, checked: the attention, the loss, and the samples with their weights."""

    attention: AttentionLaw
    gradient: Gradient
    x: Float[np.ndarray, "sample token"]
    query: Int[np.ndarray, " sample"]
    weight: Float[np.ndarray, " sample"]
    context: Float[np.ndarray, "dim token"]
    query_embedding: Float[np.ndarray, "dim query"]
    b_ref: Float[np.ndarray, " token"]


def weighted_samples(
    attention: str,
    gradient: Gradient,
    x: ArrayLike,
    *,
    query: ArrayLike,
    weight: ArrayLike | None,
    embedding: ArrayLike | None,
) -> WeightedSamples:
    """Return the checked samples of a flow; the arguments are those of `block_flow.block`."""
    if not callable(gradient):
        expected, remedy = "a function of the outputs", "pass one of `joma.theory.losses`"
        raise InputError("gradient", expected, described(gradient), remedy)
    law, frequency = choice("attention", attention, ATTENTIONS), real("x", x, ndim=2, low=0.0)
    if law.normalised and not (frequency.sum(axis=1) > 0).all():
        raise InputError("x", "positive somewhere in every sample", "a row of zeros", "drop empty contexts")
    samples = len(frequency)
    queries = query_indices(query, samples)
    context, query_embedding = embedding_columns(embedding, frequency.shape[1], queries)
    b_ref = reference(frequency, weight)
    weights = np.full(samples, 1 / samples) if weight is None else probabilities("weight", weight)
    return WeightedSamples(law, gradient, frequency, queries, weights, context, query_embedding, b_ref)


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
