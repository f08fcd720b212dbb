"""Gradient flow of attention that is trained alone, far enough to see it select a token in each sequence.

    q_i = softmax_t(logits_it),    f_i = Σ_t q_it g_it,    loss = (1/n) Σ_i ln(1 + exp(−f_i))

The scores g_it (label times fixed value head) are given; what is trained are the parameters of the logits,

    vector:    logits_it = x_it · p              matrix:    logits_it = x_itᵀ W z_i, a vector flow with tokens x_it z_iᵀ
    factors:   logits_it = x_itᵀ K Qᵀ z_i

No parameter converges. On a path that selects a token in each sequence and has margins that grow,
−∂loss/∂p = Σ c e^{−margin} (x_i,selected − x_it) with c > 0: as in logistic regression p(t) = p̂ ln t + O(1), hence

    dp/d ln t → p̂,    the hard-margin solution of `margins.max_margin` for the selected tokens.

A flow to ln t = 100 has no use for t itself. So paths are solved over their length s, where all speeds are 1:

    dp/ds = −∇loss/‖∇loss‖,    d ln(1 + t)/ds = 1/((1 + t) ‖∇loss‖)

Parameters move in the span of token differences alone, and only their coordinates there are integrated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import expit, softmax

from joma.arguments import InputError, in_range, increasing, real
from joma.theory.integration import Solver, integrate

# Across its direction the path relaxes at a rate that does not fall with s: over long paths the flow is stiff.
LONG_PATH = Solver("LSODA", rtol=1e-8, atol=1e-10)
FLOW = Solver("DOP853", rtol=1e-9, atol=1e-11)

_LEAST_LOG = -1e300

Tokens = Float[np.ndarray, "sequence token dim"]
Scores = Float[np.ndarray, "sequence token"]
# Coordinates -> the direction of −∇loss, and the logarithm of what it must be multiplied by.
_Push = Callable[[np.ndarray], tuple[np.ndarray, float]]


class VectorPath(NamedTuple):
    """A path of the attention vector: p [point, dim], and ln(1 + t) [point]."""

    p: Float[np.ndarray, "point dim"]
    log_time: Float[np.ndarray, " point"]


class FactorPath(NamedTuple):
    """A path of the factors: K and Q [point, dim, rank], and ln(1 + t) [point]."""

    k: Float[np.ndarray, "point dim rank"]
    q: Float[np.ndarray, "point query rank"]
    log_time: Float[np.ndarray, " point"]


def attention_push(logits: ArrayLike, g: ArrayLike) -> tuple[Float[np.ndarray, "sequence token"], float]:
    """Return −∂loss/∂logits as an array and the logarithm of its factor, exact also where attention is saturated.

        −∂loss/∂logits_it = σ(−f_i)/n · q_it Σ_s q_is (g_it − g_is)

    The plain form q_it (g_it − f_i) is lost to rounding once a token has all of the attention but 1e-16.

    Args:
        logits: [sequence, token].
        g: scores, [sequence, token].

    Returns:
        An array [sequence, token], and the number whose exponential multiplies it: it may be below the range of floats.

    >>> push, log_factor = attention_push([[5000.0, 0.0]], [[1.0, 0.0]])
    >>> push, log_factor
    (array([[ 0.26894142, -0.26894142]]), -5000.0)
    """
    values, scores = real("logits", logits, ndim=2), real("g", g, ndim=2)
    if values.shape != scores.shape:
        raise InputError("g", f"of the shape of `logits`, {values.shape}", scores.shape, "give one for each token")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        push, log_factor = _Scores(scores).push(values)
    in_range("logits`, `g", push)
    return push, log_factor


def vector_path(
    x: ArrayLike, g: ArrayLike, p0: ArrayLike, lengths: ArrayLike, *, solver: Solver = LONG_PATH
) -> VectorPath:
    """Return the path of gradient flow on the attention vector, at the given lengths of the path.

        dp/ds = −∇loss/‖∇loss‖,    logits_it = x_it · p

    Args:
        x: tokens, [sequence, token, dim]. For logits xᵀ W z give `outer_tokens(x, z)`.
        g: scores, [sequence, token], not all equal in every sequence.
        p0: p at the start, [dim].
        lengths: of the path from the start, increasing.
        solver: method and tolerances.

    Returns:
        A `VectorPath` with one point for each length.

    >>> path = vector_path([[[1.0, 0.0], [0.0, 1.0]]], [[1.0, 0.0]], [0.0, 0.0], [0.0, 100.0])
    >>> (path.p / 100).round(4), path.log_time.round(2)  # ln t is close to the margin, 100 √2
    (array([[ 0.    ,  0.    ],
           [ 0.7071, -0.7071]]), array([  0.  , 142.04]))
    """
    problem = _VectorProblem(x, g, p0)
    states = _travel(problem.push, problem.start, lengths, solver)
    return VectorPath(problem.vectors(states[:, :-1]), states[:, -1])


def vector_flow(
    x: ArrayLike, g: ArrayLike, p0: ArrayLike, times: ArrayLike, *, solver: Solver = FLOW
) -> Float[np.ndarray, "time dim"]:
    """Return the attention vector at the given times of gradient flow, for moderate times.

        dp/dt = −∇loss,    integrated over ln(1 + t)

    Args:
        x, g, p0: as for `vector_path`.
        times: increasing.
        solver: method and tolerances.

    >>> vector_flow([[[1.0, 0.0], [0.0, 1.0]]], [[1.0, 0.0]], [0.0, 0.0], [0.0, 100.0]).round(3)
    array([[ 0.   ,  0.   ],
           [ 1.949, -1.949]])
    """
    problem = _VectorProblem(x, g, p0)
    return problem.vectors(_flow(problem.push, problem.start, times, solver))


def factor_path(
    x: ArrayLike,
    z: ArrayLike,
    g: ArrayLike,
    k0: ArrayLike,
    q0: ArrayLike,
    *,
    lengths: ArrayLike,
    solver: Solver = LONG_PATH,
) -> FactorPath:
    """Return the path of gradient flow on keys and queries, at the given lengths of the path.

        d(K, Q)/ds = −∇loss/‖∇loss‖,    logits_it = x_itᵀ K Qᵀ z_i

    Args:
        x: tokens, [sequence, token, dim].
        z: queries, [sequence, query dim].
        g: scores, [sequence, token], not all equal in every sequence.
        k0: K at the start, [dim, rank].
        q0: Q at the start, [query dim, rank]; if both are zero they stay there, which is refused.
        lengths: of the path of both together, increasing.
        solver: method and tolerances.

    Returns:
        A `FactorPath` with one point for each length.

    >>> path = factor_path([[[1.0], [-1.0]]], [[1.0]], [[1.0, 0.0]], [[0.1]], [[0.1]], lengths=[0.0, 4.0])
    >>> (path.k * path.q)[:, 0, 0].round(3)  # K = Q = 0.1 + s/√2
    array([0.01 , 8.576])
    """
    problem = _FactorProblem(x, z, g, k0, q0)
    states = _travel(problem.push, problem.start, lengths, solver)
    return FactorPath(*problem.factors(states[:, :-1]), states[:, -1])


def outer_tokens(x: ArrayLike, z: ArrayLike) -> Float[np.ndarray, "sequence token entry"]:
    """Return the tokens of the vector flow that is the flow of a matrix W: x_it z_iᵀ, flattened.

        x_itᵀ W z_i = (x_it z_iᵀ) · W,    so that p is W, row by row

    Args:
        x: tokens, [sequence, token, dim].
        z: queries, [sequence, query dim].

    >>> outer_tokens([[[1.0, 2.0]]], [[3.0, 4.0]])
    array([[[3., 4., 6., 8.]]])
    """
    tokens, queries = real("x", x, ndim=3), _queries(z, x)
    with np.errstate(over="ignore"):
        products = np.einsum("itd,ie->itde", tokens, queries)
    in_range("x`, `z", products)
    return products.reshape(*tokens.shape[:2], -1)


class _Scores:
    """Scores, and their differences between the tokens of a sequence."""

    def __init__(self, g: Scores) -> None:
        self.g = g
        self.gaps = g[:, :, None] - g[:, None, :]
        self.log_mask = np.where(self.gaps != 0.0, 0.0, -np.inf)

    def push(self, logits: Scores) -> tuple[Scores, float]:
        """Return −∂loss/∂logits as an array and the logarithm of its factor, so that nothing underflows."""
        log_q = logits - logits.max(axis=-1, keepdims=True)
        log_q = log_q - np.log(np.exp(log_q).sum(axis=-1, keepdims=True))
        pairs = log_q[:, :, None] + log_q[:, None, :] + self.log_mask
        scale = max(float(pairs.max()), _LEAST_LOG)  # no pair has different scores if it is −inf
        f = (np.exp(log_q) * self.g).sum(axis=-1)
        slope = expit(-f) / len(f)
        return (np.exp(pairs - scale) * self.gaps).sum(axis=-1) * slope[:, None], scale


def _travel(push: _Push, start: np.ndarray, lengths: ArrayLike, solver: Solver) -> Float[np.ndarray, "point state"]:
    """Return the coordinates and, last, ln(1 + t) at the given lengths of the path."""

    def rhs(_: float, state: np.ndarray) -> np.ndarray:
        slope, log_scale = push(state[:-1])
        size = np.sqrt(slope @ slope)
        return np.append(slope / size, np.exp(-state[-1] - log_scale - np.log(size)))

    return integrate(rhs, np.append(start, 0.0), increasing("lengths", lengths), solver).states


def _flow(push: _Push, start: np.ndarray, times: ArrayLike, solver: Solver) -> Float[np.ndarray, "point state"]:
    """Return the coordinates at the given times."""

    def rhs(log_time: float, state: np.ndarray) -> np.ndarray:
        slope, log_scale = push(state)
        return slope * np.exp(log_time + log_scale)

    return integrate(rhs, start, np.log1p(real("times", times, low=0.0)), solver).states


class _VectorProblem:
    """The attention vector in an orthonormal basis of what can change: p = p0 + basis @ coordinates."""

    def __init__(self, x: ArrayLike, g: ArrayLike, p0: ArrayLike) -> None:
        tokens, self.scores = _sequences(x, g)
        self.p0 = real("p0", p0, ndim=1)
        if len(self.p0) != tokens.shape[-1]:
            raise InputError("p0", f"of dimension {tokens.shape[-1]}", len(self.p0), "match the tokens of `x`")
        relative = tokens - tokens[:, :1]
        self.basis = _basis(relative)
        with np.errstate(all="ignore"):
            self.x, self.offset = relative @ self.basis, relative @ self.p0
        in_range("x`, `p0", self.offset)
        self.rows = self.x.reshape(-1, self.x.shape[-1])
        self.start = np.zeros(self.basis.shape[1])

    def push(self, coordinates: np.ndarray) -> tuple[np.ndarray, float]:
        push, log_scale = self.scores.push(self.offset + self.x @ coordinates)
        return push.ravel() @ self.rows, log_scale

    def vectors(self, coordinates: Float[np.ndarray, "point rank"]) -> Float[np.ndarray, "point dim"]:
        return self.p0 + coordinates @ self.basis.T


class _FactorProblem:
    """Keys and queries in orthonormal bases of what can change and acts on the logits, as one flat vector."""

    def __init__(self, x: ArrayLike, z: ArrayLike, g: ArrayLike, k0: ArrayLike, q0: ArrayLike) -> None:
        tokens, self.scores = _sequences(x, g)
        queries, relative = _queries(z, tokens), tokens - tokens[:, :1]
        self.k0, self.q0 = _factor("k0", k0, tokens, "x"), _factor("q0", q0, queries, "z")
        if self.k0.shape[1] != self.q0.shape[1]:
            got = f"{self.q0.shape[1]} beside {self.k0.shape[1]}"
            raise InputError("q0", "of as many columns as `k0`", got, "give both factors the same rank")
        self.left, self.right = _basis(relative), _basis(queries)
        self.x, self.z = relative @ self.left, queries @ self.right
        self.rank = self.k0.shape[1]
        k, q = self.left.T @ self.k0, self.right.T @ self.q0
        self.start = np.concatenate([k.ravel(), q.ravel()])
        with np.errstate(over="ignore", invalid="ignore"):
            in_range("k0`, `q0", ((self.x @ k) @ (self.z @ q)[:, :, None]))
        if not self.push(self.start)[0].any():
            raise InputError("k0`, `q0", "such that a gradient is not zero", "a stationary point", "start elsewhere")

    def push(self, coordinates: np.ndarray) -> tuple[np.ndarray, float]:
        k, q = self._split(coordinates)
        push, log_scale = self.scores.push(((self.x @ k) @ (self.z @ q)[:, :, None])[..., 0])
        slope = (push[:, None] @ self.x)[:, 0].T @ self.z
        return np.concatenate([(slope @ q).ravel(), (slope.T @ k).ravel()]), log_scale

    def _split(self, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self.left.shape[1] * self.rank
        lead = coordinates.shape[:-1]
        return coordinates[..., :size].reshape(*lead, -1, self.rank), coordinates[..., size:].reshape(
            *lead, -1, self.rank
        )

    def factors(self, coordinates: Float[np.ndarray, "point state"]) -> tuple[np.ndarray, np.ndarray]:
        (k, q), (first_k, first_q) = self._split(coordinates), self._split(self.start)
        return self.k0 + self.left @ (k - first_k), self.q0 + self.right @ (q - first_q)


def _sequences(x: ArrayLike, g: ArrayLike) -> tuple[Tokens, _Scores]:
    """Check tokens and scores."""
    tokens, scores = real("x", x, ndim=3), real("g", g, ndim=2)
    if scores.shape != tokens.shape[:2]:
        raise InputError("g", f"of shape {tokens.shape[:2]}", scores.shape, "give one for each token of `x`")
    if not (scores != scores[:, :1]).any():
        raise InputError("g", "different for two tokens of a sequence", "equal scores", "nothing is to be selected")
    with np.errstate(over="ignore"):
        in_range("x`, `g", np.square(tokens).sum(), np.ptp(scores))
    if not (tokens != tokens[:, :1]).any():
        raise InputError("x", "different tokens in a sequence", "equal tokens", "nothing can be selected")
    return tokens, _Scores(scores)


def _queries(z: ArrayLike, x: ArrayLike) -> Float[np.ndarray, "sequence dim"]:
    queries, shape = real("z", z, ndim=2), np.shape(x)
    if len(queries) != shape[0]:
        raise InputError("z", f"one query for each of {shape[0]} sequences", len(queries), "match `x`")
    return queries


def _factor(name: str, value: ArrayLike, vectors: np.ndarray, vectors_name: str) -> Float[np.ndarray, "dim rank"]:
    factor = real(name, value, ndim=2)
    if len(factor) != vectors.shape[-1]:
        expected = f"of shape [{vectors.shape[-1]}, rank]"
        raise InputError(name, expected, factor.shape, f"give a row for each dimension of `{vectors_name}`")
    return factor


def _basis(vectors: Float[np.ndarray, "*lead dim"]) -> Float[np.ndarray, "dim rank"]:
    """Return an orthonormal basis of the span of the vectors."""
    rows = vectors.reshape(-1, vectors.shape[-1])
    _, sizes, basis = np.linalg.svd(rows, full_matrices=False)
    return basis[sizes > max(rows.shape) * np.finfo(np.float64).eps * sizes[0]].T


def attention_weights(x: ArrayLike, p: ArrayLike) -> Float[np.ndarray, "*lead sequence token"]:
    """Return the attention of vectors p over the tokens of each sequence.

        q_it = exp(x_it · p) / Σ_s exp(x_is · p)

    Args:
        x: tokens, [sequence, token, dim].
        p: [..., dim].

    >>> attention_weights([[[1.0], [0.0]]], [np.log(3.0)])
    array([[0.75, 0.25]])
    """
    tokens, vectors = real("x", x, ndim=3), real("p", p)
    if vectors.shape[-1:] != tokens.shape[-1:]:
        raise InputError("p", f"of dimension {tokens.shape[-1]}", f"shape {vectors.shape}", "match the tokens of `x`")
    with np.errstate(over="ignore", invalid="ignore"):
        logits = np.einsum("itd,...d->...it", tokens, vectors)
    in_range("x`, `p", logits)
    with np.errstate(over="ignore"):
        return softmax(logits, axis=-1)
