"""Theorems 2 and 4: how the weights of one hidden unit grow once attention is folded into the MLP.

With exp attention the logits are a function of the weights (Theorem 1), and the weight of each token evolves
independently of the others. With a `linear` activation the most salient token blows up while the others stop (winner
takes all). With a `nonlinear` one every weight converges to its own centre, the largest first, so that attention is
sparse for a while and then dense again.

Results have the shape `times.shape + broadcast(parameters, v0).shape`. `linear`, `nonlinear` and `softmax_nonlinear`
also accept `t`, the former name of `times`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import erfc, erfcinv, erfcx

from joma.arguments import InputError, broadcast, check_last_axis, positive, real
from joma.renaming import old_names
from joma.theory import inversion
from joma.theory.entropy import entropy_of_drops

_NO_WEIGHT = 1000.0  # a logit that is so far below the largest has weight 0 in a double


@old_names(t="times")
def linear(
    delta: ArrayLike,
    times: ArrayLike,
    v0: ArrayLike = 0.0,
    *,
    z0: ArrayLike | None = None,
    kappa: ArrayLike = 1.0,
    rate_w: ArrayLike = 1.0,
) -> np.ndarray:
    """Return the weights under a linear activation and exp attention at the given times (Theorem 2).

        v̇ = D exp(κv²/2),    √(π/2κ) [erf(√(κ/2) v) − erf(√(κ/2) v0)] = D t,    D = η_w Δ exp(z0 − κ v0²/2)

    Args:
        delta: salience Δ of each token; any sign.
        times: at least 0.
        v0: weights at time 0; |v0| √κ ≤ 37.
        z0: logits at time 0. None stands for κ v0²/2, at which D = η_w Δ.
        kappa: ratio η_z/η_w of the learning rates, positive.
        rate_w: learning rate of the weights, positive.

    Returns:
        The weights, of shape `times.shape + (components)`; ±inf at and after a component's blow-up.

    >>> linear([0.9, 0.7, -0.3], [0.0, 1.0, 2.0]).round(4)
    array([[ 0.    ,  0.    ,  0.    ],
           [ 1.0761,  0.7697, -0.3046],
           [    inf,     inf, -0.6414]])
    """
    times = real("times", times, low=0.0)
    race = _race(delta, v0, z0, kappa, rate_w)
    return _race_weights(race, times.reshape(times.shape + (1,) * race.v0.ndim))


def blow_up_time(
    delta: ArrayLike,
    v0: ArrayLike = 0.0,
    *,
    z0: ArrayLike | None = None,
    kappa: ArrayLike = 1.0,
    rate_w: ArrayLike = 1.0,
) -> np.ndarray:
    """Return the time at which each component becomes infinite (Theorem 2); inf where Δ = 0.

        t* = √(π/2κ) (sign(Δ) − erf(√(κ/2) v0)) / D,    D = η_w Δ exp(z0 − κ v0²/2)

    Args:
        delta: salience Δ of each token.
        v0, z0, kappa, rate_w: as in `linear`.

    Returns:
        t*, of the arguments' common shape.

    >>> blow_up_time([0.9, -0.3, 0.0]).round(4)
    array([1.3926, 4.1777,    inf])
    """
    return _race(delta, v0, z0, kappa, rate_w).blow_up.copy()


def linear_limit(
    delta: ArrayLike,
    v0: ArrayLike = 0.0,
    *,
    z0: ArrayLike | None = None,
    kappa: ArrayLike = 1.0,
    rate_w: ArrayLike = 1.0,
) -> np.ndarray:
    """Return the weights at the first blow-up, that of the winner (Theorem 2).

        v_l = √(2/κ) erf⁻¹( erf(√(κ/2) v0_l) + √(2κ/π) D_l t* ),    t* = min over the last axis of the blow-up times

    Args:
        delta: salience Δ of each token; the tokens are the last axis.
        v0, z0, kappa, rate_w: as in `linear`.

    Returns:
        The limits; ±inf for the winner and for every component that ties with it, and v0 where no component grows.

    >>> linear_limit([0.9, 0.7, 0.5, -0.3, 0.1]).round(5)
    array([    inf,  1.22064,  0.76471, -0.43073,  0.13971])
    """
    race = _race(delta, v0, z0, kappa, rate_w)
    return _race_weights(race, race.blow_up.min(axis=-1, keepdims=True) if race.blow_up.ndim else race.blow_up)


class _Race(NamedTuple):
    """Components that grow to infinity, mirrored so that all of them move to the right in x = √(κ/2) v sign(Δ)."""

    v0: Float[np.ndarray, "*component"]
    sign: Float[np.ndarray, "*component"]
    scale: Float[np.ndarray, "*component"]  # √(κ/2)
    blow_up: Float[np.ndarray, "*component"]


def _race(delta: ArrayLike, v0: ArrayLike, z0: ArrayLike | None, kappa: ArrayLike, rate_w: ArrayLike) -> _Race:
    """Check the arguments of Theorem 2 and compute the blow-up times."""
    salience, start = real("delta", delta), real("v0", v0)
    ratio, rate = positive("kappa", kappa), positive("rate_w", rate_w)
    logits = np.asarray(ratio * start**2 / 2) if z0 is None else real("z0", z0)
    shape = broadcast(delta=salience, v0=start, z0=logits, kappa=ratio, rate_w=rate)
    if (np.sqrt(ratio) * np.abs(start)).max() > inversion.LARGEST:
        got, expected = f"{np.abs(start).max():.6g}", f"at most {inversion.LARGEST:g}/√kappa in size"
        raise InputError("v0", expected, got, "start nearer to 0: exp(κv²/2) leaves the range of a double there")
    sign, scale = np.sign(salience), np.sqrt(ratio / 2)
    x0 = sign * scale * start
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        # erfc(x0) exp(x0² − z0), in factors none of which overflows before the product does.
        low = np.minimum(x0, 0)
        remaining = erfc(x0) if z0 is None else erfcx(np.maximum(x0, 0)) * erfc(low) * np.exp(low**2 - logits)
        blow_up = np.sqrt(np.pi) / 2 / scale * remaining / (rate * np.abs(salience))
    return _Race(*(np.broadcast_to(part, shape) for part in (start, sign, scale, blow_up)))


def _race_weights(race: _Race, t: Float[np.ndarray, ...]) -> np.ndarray:
    """Return the weights at the times `t`, from the solution x of erfc(x) = erfc(x0) (1 − t/t*)."""
    v0, sign, scale, blow_up = race
    x0 = sign * scale * v0
    with np.errstate(all="ignore"):
        ahead = erfc(x0) * ((blow_up - t) / blow_up)
        behind = erfc(-x0) + erfc(x0) * (t / blow_up)
        # The smaller of the two tails is known to full relative accuracy.
        x = np.where(ahead < behind, erfcinv(np.clip(ahead, 0, 1)), -erfcinv(np.clip(behind, 0, 1)))
        v = sign * np.where(t >= blow_up, np.inf, x) / scale
    return np.where((t == 0) | np.isinf(blow_up), v0, v)


def linear_attention(
    delta: ArrayLike,
    times: ArrayLike,
    v0: ArrayLike = 0.0,
    z0: ArrayLike = 1.0,
    *,
    rate_w: ArrayLike = 1.0,
    rate_z: ArrayLike = 1.0,
) -> np.ndarray:
    """Return the weights under a linear activation and *linear* attention b = x ∘ z: exponential growth, no blow-up.

        v̇ = η_w Δ z,  ż = η_z Δ v:    v = v0 cosh(ωΔt) + √(η_w/η_z) z0 sinh(ωΔt),    ω = √(η_w η_z)

    The equations are symmetric: exchange v0 with z0 and η_w with η_z for the logits.

    Args:
        delta: salience Δ of each token.
        times: at least 0.
        v0: weights at time 0.
        z0: logits at time 0.
        rate_w, rate_z: learning rates of weights and logits, positive.

    Returns:
        The weights, of shape `times.shape + (components)`; ±inf where they exceed the largest double.

    >>> linear_attention([0.5, -0.5], [0.0, 2.0]).round(4)
    array([[ 0.    ,  0.    ],
           [ 1.1752, -1.1752]])
    """
    salience, times = real("delta", delta), real("times", times, low=0.0)
    start, logits = real("v0", v0), real("z0", z0)
    rate_w, rate_z = positive("rate_w", rate_w), positive("rate_z", rate_z)
    shape = broadcast(delta=salience, v0=start, z0=logits, rate_w=rate_w, rate_z=rate_z)
    times = times.reshape(times.shape + (1,) * len(shape))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        angle = np.abs(salience) * np.sqrt(rate_w * rate_z) * times
        # cosh = exp(−x) + sinh keeps the decaying solution, v0 = −√(η_w/η_z) z0 sign(Δ), free of cancellation.
        growing = start + np.sign(salience) * np.sqrt(rate_w / rate_z) * logits
        v = start * np.exp(-angle) + np.where(growing == 0, 0.0, growing * np.sinh(angle))
    return np.broadcast_to(v, times.shape[: times.ndim - len(shape)] + shape).copy()


@old_names(t="times")
def nonlinear(mu: ArrayLike, times: ArrayLike, v0: ArrayLike = 0.05, *, temperature: float = 2.0) -> np.ndarray:
    """Return the weights as they converge to their centres μ, with attention folded in (Theorem 4).

        v̇ = (μ − v) exp(v²/T),    t = ∫_{v0}^{v} exp(−s²/T)/(μ − s) ds

    The quadrature is inverted, so that every time costs the same, early or late (`joma.theory.inversion`).

    Args:
        mu: centre μ of each component; any sign, |μ| √(2/T) ≤ 37.
        times: at least 0.
        v0: weights at time 0, on either side of μ; |v0| √(2/T) ≤ 37.
        temperature: T, positive; 2 in the theorem, and 2/κ with unequal learning rates.

    Returns:
        The weights, of shape `times.shape + (components)`.

    >>> nonlinear([1.0, 1.5, 3.0], [0.0, 0.5, 1.0]).round(4)
    array([[0.05  , 0.05  , 0.05  ],
           [0.4352, 0.6593, 1.73  ],
           [0.6871, 1.1061, 3.    ]])
    """
    stretch = inversion.stretch(temperature)
    (centre, start), times = inversion.components(mu, v0, stretch), real("times", times, low=0.0)
    v = np.empty((times.size, centre.size))
    for block, table in inversion.pieces(centre.ravel(), start.ravel(), times.size):
        for part, weights, _ in inversion.chunks(table, times.ravel()):
            v[part, block] = weights
    v /= stretch
    v[times.ravel() == 0] = np.broadcast_to(real("v0", v0), centre.shape).ravel()
    return v.reshape(times.shape + centre.shape)


def nonlinear_log_gap(mu: ArrayLike, times: ArrayLike, v0: ArrayLike = 0.05) -> np.ndarray:
    """Return ln|δ| of the relative gap δ = 1 − v/μ (Theorem 4), accurate even where v rounds to μ.

    For large t, ln|δ| is a constant minus t exp(μ²/2). Its ratio between two components tends to `convergence_ratio`,
    with an error of order 1/t.

    Args:
        mu: centre μ of each component, not 0; |μ| ≤ 37.
        times: at least 0.
        v0: weights at time 0; |v0| ≤ 37.

    Returns:
        ln|δ|, of shape `times.shape + (components)`; −inf for a component that starts at its centre.

    >>> log_gap = nonlinear_log_gap([1.5, 1.0], [1.0, 4.0, 1e6])
    >>> (log_gap[:, 0] / log_gap[:, 1]).round(3)
    array([1.151, 1.714, 1.868])
    """
    (centre, start), times = inversion.components(mu, v0), real("times", times, low=0.0)
    if (centre == 0).any():
        raise InputError("mu", "free of zeros", "0", "take v itself, the gap to 0, from `nonlinear`")
    log_gap = np.empty((times.size, centre.size))
    with np.errstate(divide="ignore"):
        start_log_gap = (np.log(np.abs(centre - start)) - np.log(np.abs(centre))).ravel()
    for block, table in inversion.pieces(centre.ravel(), start.ravel(), times.size):
        for part, _, drop in inversion.chunks(table, times.ravel()):
            log_gap[part, block] = start_log_gap[block] - drop
    return log_gap.reshape(times.shape + centre.shape)


def convergence_ratio(mu_j: ArrayLike, mu_k: ArrayLike) -> np.ndarray:
    """Return how much faster one component converges than another, from any start but the centre itself (Theorem 4).

        ln(1/δ_j) / ln(1/δ_k)  →  exp((μ_j² − μ_k²)/2)    as t → ∞

    Args:
        mu_j, mu_k: centres.

    Returns:
        The ratio, of the arguments' common shape.

    >>> convergence_ratio(1.5, 1.0).round(3)
    np.float64(1.868)
    """
    first, second = real("mu_j", mu_j), real("mu_k", mu_k)
    broadcast(mu_j=first, mu_k=second)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.exp((first - second) * (first + second) / 2))


@old_names(t="times")
def softmax_nonlinear(mu: ArrayLike, times: ArrayLike, v0: ArrayLike = 0.05, temperature: float = 2.0) -> np.ndarray:
    """Return the weights of Theorem 4 with normalised attention, as in the paper's Fig. 4.

        v̇ = (μ − v) ∘ softmax(v²/T)

    The components share one clock. In the scaled weights u = v √(2/T) these are the curves of `nonlinear` at the time
    τ with dt = Z dτ, Z = Σ_l exp(u_l²/2). Since d ln|μ_l − v_l| = −softmax_l dt, and the softmax sums to 1, the clock
    has a closed form:

        t = Σ_l ln |(μ_l − v0_l)/(μ_l − v_l(τ))|

    Args:
        mu: centres; the softmax is over the last axis. |μ| √(2/T) ≤ 10.
        times: at least 0.
        v0: weights at time 0. |v0| √(2/T) ≤ 10.
        temperature: T of the attention, positive.

    Returns:
        The weights, of shape `times.shape + (components)`.

    >>> softmax_nonlinear([1.0, 2.0, 3.0], [0.0, 4.0, 400.0], temperature=3.0).round(4)
    array([[0.05  , 0.05  , 0.05  ],
           [0.5987, 1.3057, 2.6407],
           [1.    , 2.    , 3.    ]])
    """
    stretch = inversion.stretch(temperature)
    centre, start = inversion.components(mu, v0, stretch, largest=inversion.LARGEST_NORMALISED)
    times = real("times", times, low=0.0)
    rows = centre.reshape(-1, centre.shape[-1] if centre.ndim else 1)
    v = np.empty((times.size, *rows.shape))
    for row, (row_centre, row_start) in enumerate(zip(rows, start.reshape(rows.shape), strict=True)):
        tables = list(inversion.pieces(row_centre, row_start, times.size))
        tau = inversion.clock([table for _, table in tables], times.ravel())
        for block, table in tables:
            for part, weights, _ in inversion.chunks(table, *tau):
                v[part, row, block] = weights
    v /= stretch
    v[times.ravel() == 0] = np.broadcast_to(real("v0", v0), centre.shape).reshape(rows.shape)
    return v.reshape(times.shape + centre.shape)


def attention_entropy(v: ArrayLike, temperature: float = 2.0) -> np.ndarray:
    """Return the entropy −Σ p ln p, in nats, of the attention p = softmax(v²/T) over the last axis.

    Weights that have blown up share all attention. At the end of `nonlinear` and `softmax_nonlinear` v = μ, so that
    `attention_entropy(mu, temperature)` is the limit of the entropy along them.

    Args:
        v: weights, possibly infinite; tokens on the last axis.
        temperature: T, positive; 2 for `nonlinear`, 2/κ for `linear` from v0 = z0 = 0.

    Returns:
        The entropy, of shape `v.shape[:-1]`, to full relative accuracy.

    >>> attention_entropy([[0.05] * 5, [1, 1.5, 2, 2.5, 3], [np.inf, 1, 2, -np.inf, 3]]).round(4)
    array([1.6094, 0.862 , 0.6931])
    """
    weights = real("v", v, finite=False)
    check_last_axis("v", weights, "put the tokens on the last axis")
    size = np.abs(weights)
    top = size.max(axis=-1, keepdims=True)
    half_square = inversion.stretch(temperature) ** 2 / 2
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        drop = np.where(size == top, 0.0, (top - size) * (top + size) * half_square)
    return entropy_of_drops(np.minimum(drop, _NO_WEIGHT))
