"""How low the entropy of attention can be: of one row with logits of a given norm, and of a matrix of logits.

Only the centred logits of a row count, since softmax does not see their mean. `row_floor` is the least entropy of a row
(Zhai et al., arXiv 2303.06296): one logit up, all others equally down. `peak_entropy` is that of k logits up.
`mean_floor` is a bound of ours on the mean entropy of the rows of a square matrix of logits, below which no matrix of
this spectral norm comes; `identity_entropy` is the mean entropy of a multiple of the identity, which attains the bound
from `identity_threshold` on. `joma.theory.entropy_search` looks for lower rows and lower matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import logsumexp

from joma.arguments import InputError, broadcast, check_last_axis, in_range, real, whole, whole_numbers
from joma.theory.entropy import entropy_of_drops


def row_floor(logit_norm: ArrayLike, keys: ArrayLike) -> np.ndarray:
    """Return the least entropy of softmax over T logits whose centred norm is at most σ, in nats.

        B(σ, T) = ln(1 + (T−1) β) + σ √(T(T−1)) β / (1 + (T−1) β),    β = exp(−σ √(T/(T−1)))

    Args:
        logit_norm: σ, norm of the logits less their mean, at least 0; inf gives 0.
        keys: T, number of logits, at least 1. A row of one key has entropy 0.

    Returns:
        The entropy, of the arguments' common shape, to full relative accuracy.

    >>> row_floor([0.0, 1.0, 4.0, 100.0], 10)
    array([2.30258509e+00, 2.21913872e+00, 6.18854578e-01, 1.59427772e-43])
    """
    norm, count = _norm_and_keys(logit_norm, keys)
    return _entropy_of_peaks(norm, count, np.ones_like(count))


def peak_entropy(logit_norm: ArrayLike, keys: ArrayLike, peaks: ArrayLike) -> np.ndarray:
    """Return the entropy of softmax over T logits of centred norm σ, of which k are equally high and the rest equal.

        H = ln k + ln(1 + x) + g x/(1 + x),    g = σ √(T/(k (T−k))),    x = (T−k)/k e^{−g}

    With k = 1 this is `row_floor`. All k = T logits equal have norm 0 and entropy ln T.

    Args:
        logit_norm: σ, at least 0.
        keys: T, number of logits.
        peaks: k, number of high logits, from 1 to T.

    Returns:
        The entropy, of the arguments' common shape.

    >>> peak_entropy(4.0, 10, [1, 2, 5])
    array([0.61885458, 1.30746414, 1.8727815 ])
    """
    norm, count = _norm_and_keys(logit_norm, keys)
    high = whole_numbers("peaks", peaks, low=1.0)
    broadcast(logit_norm=norm, keys=count, peaks=high)
    if (high > count).any():
        raise InputError("peaks", "at most `keys`", f"{high.max():g}", "raise fewer logits")
    return _entropy_of_peaks(norm, count, high)


def softmax_entropy(logits: ArrayLike) -> np.ndarray:
    """Return the entropy of softmax over the last axis, to full relative accuracy even where it is nearly 0, in nats.

        H = ln Σ_j e^{d_j} − Σ_j p_j d_j,    d = z − max z

    Args:
        logits: z, [..., key].

    >>> softmax_entropy([[0.0, 0.0], [40.0, 0.0]])
    array([6.93147181e-01, 1.74182524e-16])
    """
    rows = _rows("logits", logits)
    with np.errstate(over="ignore"):
        drop = rows.max(axis=-1, keepdims=True) - rows
    in_range("logits", drop)
    return entropy_of_drops(drop)


def softmax_entropy_gradient(logits: ArrayLike) -> np.ndarray:
    """Return the gradient of `softmax_entropy` with respect to the logits.

        ∂H/∂z_j = −p_j (ln p_j + H)

    Args:
        logits: z, [..., key].

    >>> softmax_entropy_gradient([0.0, 0.0])
    array([-0., -0.])
    """
    rows = _rows("logits", logits)
    entropy = softmax_entropy(rows)[..., None]
    log_p = rows - logsumexp(rows, axis=-1, keepdims=True)
    with np.errstate(under="ignore"):
        return -np.exp(log_p) * (log_p + entropy)


def identity_entropy(spectral_norm: ArrayLike, keys: ArrayLike) -> np.ndarray:
    """Return the mean entropy of the rows of the logits σI: one logit is σ, the others are 0.

        B(σ √((T−1)/T), T)

    Args:
        spectral_norm: σ, at least 0.
        keys: T, number of rows and of keys.

    Returns:
        The entropy, of the arguments' common shape.

    >>> identity_entropy(4.0, [3, 10, 50]).round(4)
    array([0.1773, 0.7186, 2.5324])
    """
    norm, count = _norm_and_keys(spectral_norm, keys, "spectral_norm")
    return _entropy_of_gap(norm, count, np.ones_like(count))


def mean_floor(spectral_norm: ArrayLike, keys: int) -> np.ndarray:
    """Return a lower bound on the mean entropy of the rows of T×T logits of spectral norm σ (ours), in nats.

        (1/T) Σ_i H_i ≥ b̌(σ² (T−1)/T),    b(s) = B(√s, T),    b̌ its convex envelope on [0, σ²]

    The squared norms of the centred rows are at most σ² each, and sum to at most σ² (T−1). b is concave where the
    largest weight is below ½ and convex beyond, so that its envelope is a chord from s = 0, and b itself from the point
    where the chord touches it.

    Args:
        spectral_norm: σ, at least 0.
        keys: T, number of rows and of keys.

    Returns:
        The bound, of the shape of `spectral_norm`.

    >>> mean_floor([4.0, 2.0], 10).round(4), identity_entropy([4.0, 2.0], 10).round(4)
    (array([0.7186, 1.8859]), array([0.7186, 1.8949]))
    """
    norm, count = real("spectral_norm", spectral_norm, low=0.0), whole("keys", keys)
    if count == 1:
        return np.zeros_like(norm)
    threshold, share = identity_threshold(count), (count - 1) / count
    touch = np.minimum(threshold * np.sqrt(share), norm)  # where the chord ends, as a norm
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        weight = np.where(norm > 0, share * (norm / np.where(touch > 0, touch, 1.0)) ** 2, 0.0)
        chord = np.log(count) + weight * (row_floor(touch, count) - np.log(count))
    return np.where(norm >= threshold, identity_entropy(norm, count), chord)


def identity_threshold(keys: int) -> float:
    """Return the spectral norm σ from which on no T×T logits have a lower mean entropy than σI (ours).

    It is the difference g of logits at which the chord of `mean_floor` from 0 touches b,

        ln(1 + x) + g (1 − p) + ½ g² p (1 − p) = ln T,    x = (T−1) e^{−g},    p = 1/(1 + x)

    with p ≥ ½. Below it `mean_floor` is lower than `identity_entropy`, and what the least mean entropy is stays open.

    Args:
        keys: T, at least 2.

    >>> [round(identity_threshold(keys), 4) for keys in (2, 3, 10, 50)]
    [0.0, 0.9221, 2.8726, 4.9541]
    """
    count = whole("keys", keys, low=2)
    if count == 2:
        return 0.0

    def above_uniform(gap: float) -> float:
        x = (count - 1) * np.exp(-gap)
        p = 1 / (1 + x)
        return float(np.log1p(x) + gap * x * p + gap**2 * p * (x * p) / 2 - np.log(count))

    low = float(np.log(count - 1))  # p = ½: b is convex from here on
    root: Any = brentq(above_uniform, low, 4 * low + 40, xtol=1e-13)
    return float(root)


def _entropy_of_peaks(norm: np.ndarray | np.float64, count: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the entropy of k high logits of T, for checked arguments; for k = T all are equal."""
    rest = count - high
    with np.errstate(under="ignore", over="ignore", invalid="ignore", divide="ignore"):
        gap = np.where(rest > 0, norm * np.sqrt(count / high / rest), 0.0)
    return _entropy_of_gap(gap, count, high)


def _entropy_of_gap(gap: np.ndarray | np.float64, count: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the entropy of k high logits of T that are higher than the others by `gap`, for checked arguments."""
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        root = np.exp(-gap / 2)  # whose square may underflow before it is multiplied by the number of keys
        tail = (count - high) / high * root
        x, linear = tail * root, np.where(tail > 0, gap * tail * root, 0.0)
        return np.asarray(np.log(high) + np.log1p(x) + linear / (1 + x))


def _norm_and_keys(norm: ArrayLike, keys: ArrayLike, name: str = "logit_norm") -> tuple[np.ndarray, np.ndarray]:
    size, count = real(name, norm, low=0.0, finite=False), whole_numbers("keys", keys, low=1.0)
    broadcast(**{name: size, "keys": count})
    return size, count


def _rows(name: str, value: ArrayLike) -> Float[np.ndarray, "*batch key"]:
    rows = real(name, value)
    check_last_axis(name, rows, "put the keys on the last axis")
    return rows
