"""A binary Markov chain, and why a predictor with tied weights may stop at its stationary distribution.

The chain has P(0→1) = p and P(1→0) = q and starts in its stationary distribution π. A predictor of the next symbol that
ignores the present one has at least the loss H(π); one that knows the transitions has the entropy rate, which is lower
unless p + q = 1. The reduced model has the residual path of a one-layer transformer alone: its logit is affine in the
present symbol s,

    logit = a e s + b,    tied: a = e.

At e = 0 (and a = 0) with b = logit π_1 it predicts π, and the gradient vanishes. `unigram_rates` says whether that
point attracts, and `reduced_flow` where gradient flow goes. `unigram_hessian` is the same question for a whole
transformer with tied weights.

p and q may be arrays, which broadcast together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import entr, expit, logit, xlog1py

from joma.arguments import InputError, broadcast, flag, in_range, real, scalar, whole
from joma.theory.integration import DEFAULT_SOLVER, Solver, integrate

LARGEST_START = 1e12  # of the reduced model's parameters, far from the range of a double

Chain = Float[np.ndarray, "*chain"]


def stationary(p: ArrayLike, q: ArrayLike) -> np.ndarray:
    """Return the stationary probability of the symbol 1.

        π_1 = p / (p + q)

    Args:
        p: probability of 1 after 0, above 0 and below 1.
        q: probability of 0 after 1, above 0 and below 1.

    Returns:
        π_1, of the common shape of p and q.

    >>> stationary(0.5, 0.8).round(4)
    np.float64(0.3846)
    """
    p, q = _chain(p, q)
    return np.asarray(p / (p + q))


def unigram_entropy(p: ArrayLike, q: ArrayLike) -> np.ndarray:
    """Return the entropy of the stationary distribution, the least loss of a prediction that ignores the context.

        H(π) = −π_0 ln π_0 − π_1 ln π_1

    Args:
        p, q: the transition probabilities, as in `stationary`.

    Returns:
        H(π) in nats, of the common shape of p and q.

    >>> unigram_entropy([0.5, 0.9], [0.8, 0.9]).round(4)
    array([0.6663, 0.6931])
    """
    p, q = _chain(p, q)
    return _binary_entropy(np.asarray(np.minimum(p, q) / (p + q)))


def entropy_rate(p: ArrayLike, q: ArrayLike) -> np.ndarray:
    """Return the entropy rate of the chain, the least loss of any prediction from the past.

        R = π_0 h(p) + π_1 h(q),    h(x) = −x ln x − (1 − x) ln(1 − x)

    Args:
        p, q: the transition probabilities, as in `stationary`.

    Returns:
        R in nats, of the common shape of p and q; H(π) exactly if p + q = 1.

    >>> entropy_rate([0.5, 0.9], [0.8, 0.9]).round(4)
    array([0.619 , 0.3251])
    """
    p, q = _chain(p, q)
    return np.asarray(q / (p + q) * _binary_entropy(p) + p / (p + q) * _binary_entropy(q))


def covariance(p: ArrayLike, q: ArrayLike, lag: int = 1) -> np.ndarray:
    """Return the covariance of two symbols of the stationary chain that are `lag` steps apart.

        Cov(s_n, s_{n+lag}) = π_0 π_1 (1 − p − q)^lag

    Args:
        p, q: the transition probabilities, as in `stationary`.
        lag: number of steps, at least 0.

    Returns:
        The covariance, of the common shape of p and q.

    >>> covariance(0.5, 0.8).round(4), covariance(0.5, 0.8, lag=2).round(4)
    (np.float64(-0.071), np.float64(0.0213))
    """
    p, q = _chain(p, q)
    return np.asarray(p / (p + q) * (q / (p + q)) * _persistence(p, q) ** whole("lag", lag, low=0))


def kernel_logits(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return slope and bias of the logit that is affine in the present symbol and predicts as the chain moves.

        logit P(s_{n+1} = 1 | s_n) = slope s_n + bias,    bias = logit p,    slope = ln((1 − p)(1 − q) / (p q))

    The slope has the sign of 1 − p − q, so that a square cannot be the slope if p + q > 1.

    Args:
        p, q: the transition probabilities, as in `stationary`.

    Returns:
        The slope and the bias, each of the common shape of p and q.

    >>> slope, bias = kernel_logits(0.5, 0.8)
    >>> slope.round(4), bias.round(4)
    (np.float64(-1.3863), np.float64(0.0))
    """
    p, q = _chain(p, q)
    slope = np.asarray(-logit(p) - logit(q))
    with np.errstate(over="ignore", divide="ignore"):
        near_0 = np.log1p(np.maximum(_persistence(p, q) / p / q, -1.0))  # where the two logits nearly cancel
    return np.where(np.abs(slope) < 1.0, near_0, slope), np.asarray(logit(p))


def affine_loss(p: ArrayLike, q: ArrayLike, slope: ArrayLike, bias: ArrayLike) -> np.ndarray:
    """Return the cross entropy of the prediction whose logit is slope · s + bias, s being the present symbol.

        L = Σ_s π_s [ln(1 + exp(x_s)) − P(1 | s) x_s],    x_s = slope s + bias

    It is convex in (slope, bias). Its least value is the entropy rate, at `kernel_logits`, and H(π) among those with
    slope 0.

    Args:
        p, q: the transition probabilities, as in `stationary`.
        slope, bias: of the logit.

    Returns:
        The loss in nats, of the arguments' common shape.

    >>> affine_loss(0.5, 0.8, *kernel_logits(0.5, 0.8)).round(4)
    np.float64(0.619)
    """
    p, q = _chain(p, q)
    slope, bias = real("slope", slope), real("bias", bias)
    broadcast(p=p, slope=slope, bias=bias)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        after_1 = slope + bias
        # P(1 | s) times the loss at a 1 and P(0 | s) times that at a 0: no difference of large numbers
        losses = [
            to_1 * np.logaddexp(0.0, -x) + to_0 * np.logaddexp(0.0, x)
            for to_1, to_0, x in ((p, 1 - p, bias), (1 - q, q, after_1))
        ]
        loss = q / (p + q) * losses[0] + p / (p + q) * losses[1]
    in_range("slope`, `bias", loss)
    return np.asarray(loss)


def unigram_rates(p: ArrayLike, q: ArrayLike, *, tied: bool = True) -> np.ndarray:
    """Return the largest growth rate of e, or of (e, a), at the point where the reduced model predicts π.

        tied:    ė = 2 C e              the rate is 2 C: negative if p + q > 1, and e decays
        untied:  ė = C a,  ȧ = C e      the rate is |C|, along a = sign(C) e

    C is `covariance(p, q)`. The bias relaxes at the rate −π_0 π_1 in both.

    Args:
        p, q: the transition probabilities, as in `stationary`.
        tied: whether a = e.

    Returns:
        The rate, of the common shape of p and q.

    >>> unigram_rates([0.5, 0.2], [0.8, 0.3]).round(4), unigram_rates([0.5, 0.2], [0.8, 0.3], tied=False).round(4)
    (array([-0.142,  0.24 ]), array([0.071, 0.12 ]))
    """
    size = covariance(p, q)
    return np.asarray(2 * size if flag("tied", tied) else np.abs(size))


@dataclass(frozen=True)
class ReducedPath:
    """The reduced model along gradient flow: `e`, `a` (equal to `e` if tied) and `b` at `times`, and the `loss`."""

    times: Float[np.ndarray, " time"]
    e: Float[np.ndarray, " time"]
    a: Float[np.ndarray, " time"]
    b: Float[np.ndarray, " time"]
    loss: Float[np.ndarray, " time"]


def reduced_flow(
    p: float,
    q: float,
    times: ArrayLike,
    *,
    e0: float,
    a0: float | None = None,
    b0: float | None = None,
    solver: Solver = DEFAULT_SOLVER,
) -> ReducedPath:
    """Integrate gradient flow of the reduced model, logit = a e s + b, on the exact loss.

        ė = a r_1,  ȧ = e r_1,  ḃ = r_0 + r_1,    r_s = π_s (P(1 | s) − σ(a e s + b))

    Tied weights have a = e and ė = 2 e r_1. If p + q > 1, H(π) is then the least loss of all: the best slope is
    negative, e² is not, and the loss is convex. In all other cases the flow ends at the entropy rate, unless it starts
    at a = −sign(C) e, which it keeps, or at e = a = 0: then at H(π).

    Args:
        p, q: the transition probabilities, one of each.
        times: increasing, at least 0.
        e0: e at time 0.
        a0: a at time 0; None for tied weights.
        b0: b at time 0; None for logit π_1.
        solver: method and tolerances.

    Returns:
        A `ReducedPath`.

    >>> path = reduced_flow(0.5, 0.8, [0.0, 1000.0], e0=0.5)
    >>> path.loss.round(4), unigram_entropy(0.5, 0.8).round(4)
    (array([0.6869, 0.6663]), np.float64(0.6663))
    """
    p, q = scalar("p", p), scalar("q", q)
    share, rest = float(stationary(p, q)), float(stationary(q, p))
    bias = float(np.log(p) - np.log(q)) if b0 is None else _start("b0", b0)
    tied = a0 is None
    start = [_start("e0", e0), _start("e0", e0) if a0 is None else _start("a0", a0), bias]

    def rhs(_t: float, state: np.ndarray) -> np.ndarray:
        e, a, b = state
        after_0, after_1 = rest * (p - expit(b)), share * (1 - q - expit(a * e + b))
        factor = 2.0 if tied else 1.0  # e is both embedding and head
        return np.array([factor * a * after_1, factor * e * after_1, after_0 + after_1])

    solution = integrate(rhs, start, times, solver)
    e, a, b = solution.states.T
    return ReducedPath(solution.times, e, a, b, affine_loss(p, q, a * e, b))


def unigram_hessian(p: ArrayLike, q: ArrayLike, states: ArrayLike, jacobian: ArrayLike) -> np.ndarray:
    """Return the Hessian in the embedding e of a transformer with tied weights, at e = 0, where it predicts π.

        ∇²_e L = π_0 π_1 [Cov_n(z_n) − 2 ρ sym(G)],    G = mean_n Σ_{m≤n} ρ^{n−m} ∂z_n/∂x_m,    ρ = 1 − p − q

    The transformer maps inputs x_m = s_m e + position_m to outputs z_n, and its logit is ⟨e, z_n⟩ + b, with any layers
    between them. The bias is eliminated: the Hessian is that of the loss minimised over b. With the residual path alone
    G is the identity, and the Hessian is −2 C times the identity up to the spread of the positions.

    The Hessian decides whether the unigram is a local minimum in e: positive definite, it is; with a negative
    eigenvalue it is a saddle, whatever the sign of 1 − p − q.

    Args:
        p, q: the transition probabilities, as in `stationary`.
        states: the outputs z_n at e = 0, [..., position, dim].
        jacobian: ∂z_n/∂x_m at e = 0, [..., position n, position m, output, input]; zero for m > n.

    Returns:
        The Hessian [..., dim, dim], symmetric, of the chains' shape followed by `dim, dim`.

    >>> residual = np.einsum("nm,ij->nmij", np.eye(3), np.eye(2))
    >>> unigram_hessian(0.5, 0.8, np.zeros((3, 2)), residual).round(4)
    array([[0.142, 0.   ],
           [0.   , 0.142]])
    """
    p, q = _chain(p, q)
    outputs, derivative = real("states", states), real("jacobian", jacobian)
    if outputs.ndim < 2:
        raise InputError("states", "[..., position, dim]", f"shape {outputs.shape}", "give the output of each position")
    length, dim = outputs.shape[-2:]
    if derivative.shape[-4:] != (length, length, dim, dim):
        expected = f"[..., {length}, {length}, {dim}, {dim}], as `states` has {length} positions of {dim} numbers"
        raise InputError("jacobian", expected, f"shape {derivative.shape}", "give ∂z_n/∂x_m for each pair")
    correlation = _persistence(p, q)
    lags = np.arange(length)[:, None] - np.arange(length)
    weights = np.where(lags < 0, 0.0, correlation[..., None, None] ** np.maximum(lags, 0)) / length
    gain = np.einsum("...nm,...nmij->...ij", weights, derivative)
    centred = outputs - outputs.mean(axis=-2, keepdims=True)
    spread = np.swapaxes(centred, -1, -2) @ centred / length
    pull = correlation[..., None, None] * (gain + np.swapaxes(gain, -1, -2))
    return covariance(p, q, lag=0)[..., None, None] * (spread - pull)


def _chain(p: ArrayLike, q: ArrayLike) -> tuple[Chain, Chain]:
    """Check the transition probabilities and broadcast them."""
    checked = [_inside(name, value) for name, value in (("p", p), ("q", q))]
    shape = broadcast(p=checked[0], q=checked[1])
    first, second = (np.broadcast_to(array, shape)[()] for array in checked)
    return np.asarray(first), np.asarray(second)


def _start(name: str, value: float) -> float:
    return scalar(name, value, low=-LARGEST_START, high=LARGEST_START)


def _inside(name: str, value: ArrayLike) -> np.ndarray:
    array = real(name, value, low=0.0, high=1.0)
    if ((array == 0.0) | (array == 1.0)).any():
        raise InputError(name, "above 0 and below 1", "0 or 1", "give a probability of a change that may or may not be")
    return array


def _persistence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return 1 − p − q with all its digits: where it is small, each step but the last is exact."""
    low, high = np.minimum(p, q), np.maximum(p, q)
    return np.asarray(np.where(high < 0.5, (0.5 - high) + (0.5 - low), (1 - high) - low))


def _binary_entropy(x: np.ndarray) -> np.ndarray:
    """Return −x ln x − (1 − x) ln(1 − x), with 0 ln 0 = 0, to full relative accuracy."""
    rarer = np.minimum(x, 1 - x)  # exact: 1 − x does not round where it is the smaller
    return np.asarray(entr(rarer) - xlog1py(1 - rarer, -rarer))
