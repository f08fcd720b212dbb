"""Test whether a measured curve falls and comes back, or whether its rise is noise.

The least value of a noisy curve lies below its end even where nothing bounces. So the rise is tested against a null
hypothesis: a curve that never rises, plus noise that may be correlated from point to point.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from joma.arguments import InputError, as_numbers, check_size, instance, positive, real, whole
from joma.probes.correlated_noise import CANDIDATES, Autoregression, NoiseEstimate, correlated_noise, estimate_noise

_MIN_POINTS = 5  # with fewer points noise and bounce cannot be distinguished
_MAX_POINTS = 1000  # of curves that are tested: time and memory grow with the square of their number
_MAX_CONTRASTS = 2**20  # in memory at once
_ROUNDING = 1e-12  # rises and deviations below this share of the largest value are rounding errors
# Noise that must not explain a rise. The test holds its level up to a correlation of 0.6; 0.65 leaves a margin for the
# error of a threshold that is simulated.
_NULL_NOISE = (Autoregression(0.0), Autoregression(0.65))
_WANDERING = Autoregression(0.9)  # must not explain it either where the estimated `long_run` is above the next number
_MAX_LONG_RUN = 6.0


class MeasuredBounce(NamedTuple):
    """Depth and recovery of each curve; each field is [*batch], NaN for curves of fewer than five points."""

    start: np.ndarray
    least: np.ndarray
    step: np.ndarray  # at which the curve is least
    end: np.ndarray
    depth: np.ndarray  # start − least
    recovery: np.ndarray  # end − least
    chance: np.ndarray  # the mean recovery by noise alone
    noise: np.ndarray  # standard deviation of one point
    p_value: np.ndarray  # the probability that noise alone rises as clearly
    correlation: np.ndarray  # of the noise, from one point to the next


def measure_bounce(
    steps: ArrayLike,
    curve: ArrayLike,
    *,
    noise: ArrayLike | None = None,
    draws: int = 999,
    generator: np.random.Generator | None = None,
) -> MeasuredBounce:
    """Return how far curves fall and come back, and the probability that noise alone would rise as clearly.

        depth = y_0 − min y,    recovery = y_n − min y,    p = max_r (1 + #{T*_r ≥ T}) / (1 + draws)
        T = max_{i<j} (mean y_j..y_n − mean y_i..y_{j−1}) / (σ s_ij)

    T is the clearest rise from a run of points to all that follow it; both have at least a tenth of the points. σ is
    the noise's standard deviation and s_ij the standard error of the rise for σ = 1 and the noise's correlations, which
    are estimated together with a trend whose turns the data choose (`correlated_noise.estimate_noise`). T*_r is the
    same on flat curves with normal noise of correlation r = 0 and 0.65 from point to point, and also 0.9 where the
    estimate is that large. Curves that fall rise less clearly than flat ones, so p is an upper bound for all that never
    rise.

    Size: at the level of 5 %, at most 4 % of flat curves and of exponential, linear and sudden falls were called a
    bounce, for 20 to 200 points and correlations from 0 to 0.6 (`python -m benchmarks bounce`, 2000 curves each). The
    size holds for shorter curves too, but they show only very clear bounces. The p-value is no estimate where noise
    wanders as slowly as a bounce takes, which nothing distinguishes from one: of flat curves with a correlation of 0.8,
    5 to 16 % were called a bounce, and of those whose noise is half independent and half of correlation 0.8, 2 to 20 %.

    Power: a fall and return by 6 σ is detected in 67 to 83 % of curves of 20 points, in 90 to 99 % of 50 and in at
    least 98 % of 100; with a second fall in 6 to 24 %, 64 to 96 % and at least 97 %; one by 2 σ in at most 17 % below
    100 points, in 42 to 81 % of 100 and in 76 to 100 % of 200. A rise that lasts for less than a tenth of the points is
    missed.

    A small p means that this curve rises; only the spread over seeds shows whether others would.

    Args:
        steps: [step], increasing. The noise is correlated from point to point, however far apart their steps are.
        curve: [*batch, step]; points that are NaN are left out.
        noise: the standard deviation σ of a point if it is known, broadcasts to [*batch]; estimated if not given. The
            correlation is estimated in either case.
        draws: number of curves drawn for each correlation.
        generator: draws their noise, once for each number of points; `np.random.default_rng(0)` if not given. The
            results of one curve do not depend on the others. Without a generator, further curves of the same number of
            points are tested with the same draws, in a hundredth of the time.

    Returns:
        Ten arrays [*batch]. A curve with fewer than five numbers, such as that of a seed that diverged early, gets NaN.
        One with more than 1000 is not tested: `chance`, `noise`, `p_value` and `correlation` are NaN. Average
        neighbouring points to have it tested.

    >>> steps = np.arange(30)
    >>> bounce = measure_bounce(steps, np.abs(steps - 10) / 10)
    >>> bounce.depth, bounce.step, bounce.recovery, bounce.p_value
    (array(1.), array(10.), array(1.9), array(0.001))
    """
    step_numbers = real("steps", steps, ndim=1)
    if (step_numbers[1:] <= step_numbers[:-1]).any():
        raise InputError("steps", "increasing", "a step that is not above the previous one", "sort the curve by step")
    y = as_numbers("curve", curve)
    if y.ndim == 0 or y.shape[-1] != step_numbers.size or np.isinf(y).any():
        got = "an infinite value" if np.isinf(y).any() else f"shape {y.shape}"
        raise InputError(
            "curve", f"[*batch, {step_numbers.size}] and not infinite", got, "give one number for each step"
        )
    known_sigma = None if noise is None else _known_noise(noise, y.shape[:-1]).reshape(-1)
    count = whole("draws", draws, low=1)
    check_size("draws", (count, step_numbers.size))
    generator = np.random.default_rng(0) if generator is None else generator
    instance("generator", generator, np.random.Generator, "pass `np.random.default_rng(seed)`")
    seed = int(generator.integers(2**63))
    curves = y.reshape(-1, step_numbers.size)
    defined = ~np.isnan(curves)
    points = defined.sum(axis=-1)
    fields = np.full((len(MeasuredBounce._fields), len(curves)), np.nan)
    for number in np.unique(points[points >= _MIN_POINTS]):
        rows = np.flatnonzero(points == number)
        sigma = None if known_sigma is None else known_sigma[rows]
        fields[:, rows] = _measure(step_numbers, curves[rows], defined[rows], sigma, (count, seed))
    return MeasuredBounce(*(np.asarray(field.reshape(y.shape[:-1])) for field in fields))


def _known_noise(noise: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    sigma = positive("noise", real("noise", noise, high=1e150))  # its square must not overflow
    try:
        return np.broadcast_to(sigma, shape)
    except ValueError:
        expected = f"a shape that broadcasts to {shape}"
        raise InputError("noise", expected, sigma.shape, "give one number for each curve", must="have") from None


def _measure(
    steps: Float[np.ndarray, " step"],
    curves: Float[np.ndarray, "curve step"],
    defined: Bool[np.ndarray, "curve step"],
    known_sigma: Float[np.ndarray, " curve"] | None,
    simulation: tuple[int, int],
) -> tuple[np.ndarray, ...]:
    """Return the fields of curves that have the same number of points; `simulation` is draws and seed."""
    y = curves[defined].reshape(len(curves), -1)
    lowest = y.argmin(axis=-1)[:, None]
    start, least, end = y[:, 0], np.take_along_axis(y, lowest, axis=-1)[:, 0], y[:, -1]
    step = np.broadcast_to(steps, curves.shape)[defined].reshape(y.shape)
    turn = np.take_along_axis(step, lowest, axis=-1)[:, 0]
    fields = (start, least, turn, end, start - least, end - least)
    if y.shape[-1] > _MAX_POINTS:
        return (*fields, *np.full((4, len(y)), np.nan))
    p_value, estimate = _test(y, known_sigma, *simulation)
    chance = [
        _chance(values, CANDIDATES[candidate], sigma, *simulation)
        for values, candidate, sigma in zip(y, *estimate, strict=True)
    ]
    correlation = np.array([candidate.first for candidate in CANDIDATES])[estimate.candidate]
    return (*fields, np.array(chance), estimate.sd, p_value, correlation)


def _test(
    y: Float[np.ndarray, "curve step"], known_sigma: Float[np.ndarray, " curve"] | None, draws: int, seed: int
) -> tuple[Float[np.ndarray, " curve"], NoiseEstimate]:
    """Return the p-value of each curve and its noise."""
    centred = y - y.mean(axis=-1, keepdims=True)
    spread = np.abs(centred).max(axis=-1)
    unit = np.where(spread > _ROUNDING * np.abs(y).max(axis=-1), spread, 1.0)
    estimate = estimate_noise(centred / unit[:, None])
    sigma = unit * estimate.sd if known_sigma is None else known_sigma
    rise = _clearest_rise(y / unit[:, None], estimate._replace(sd=sigma / unit))
    null = _null_rises(y.shape[-1], draws, seed, known_sigma is None)
    clearer = {noise: draws - np.searchsorted(rises, rise) for noise, rises in null.items()}
    wandering = np.array([candidate.long_run > _MAX_LONG_RUN for candidate in CANDIDATES])[estimate.candidate]
    clearer[_WANDERING] = np.where(wandering, clearer[_WANDERING], 0)
    return (1 + np.maximum.reduce([*clearer.values()])) / (1 + draws), estimate._replace(sd=sigma)


def _chance(y: Float[np.ndarray, " step"], noise: Autoregression, sigma: float, draws: int, seed: int) -> float:
    """Return the mean recovery of the best curve that never rises, with noise added."""
    null = _never_rising(y, sigma * np.sqrt(noise.long_run))
    curves = null + sigma * _noise(y.size, draws, seed, noise)
    return float((curves[:, -1] - curves.min(axis=-1)).mean())


@lru_cache(maxsize=32)
def _noise(points: int, draws: int, seed: int, noise: Autoregression) -> Float[np.ndarray, "draw step"]:
    """Return noise of variance 1 that depends on nothing but its arguments, so that no curve changes another's."""
    return correlated_noise(np.random.default_rng([seed, points]).standard_normal((draws, points)), noise)


@lru_cache(maxsize=32)
def _null_rises(
    points: int, draws: int, seed: int, estimated: bool
) -> dict[Autoregression, Float[np.ndarray, " draw"]]:
    """Return T of flat curves for each noise, sorted; its standard deviation is `estimated`, or known to be 1."""
    rises = {}
    for noise in (*_NULL_NOISE, _WANDERING):
        y = _noise(points, draws, seed, noise)
        estimate = estimate_noise(y)
        rises[noise] = np.sort(_clearest_rise(y, estimate if estimated else estimate._replace(sd=np.ones(draws))))
    return rises


def _never_rising(y: Float[np.ndarray, " step"], sigma: float) -> Float[np.ndarray, " step"]:
    """Return the best curve that never rises, with steps of at least two standard errors.

    Isotonic regression follows noise downwards, most of all at both ends, and a null hypothesis that falls by itself
    makes rises look rarer than they are. So levels that noise can explain are merged, the least distinct ones first.
    """
    blocks = isotonic_regression(y, increasing=False).blocks
    while blocks.size > 2:
        size = np.diff(blocks)
        level = np.add.reduceat(y, blocks[:-1]) / size
        drop = -np.diff(level) / np.sqrt(1 / size[1:] + 1 / size[:-1])
        if drop.min() >= 2 * sigma:
            break
        blocks = np.delete(blocks, 1 + drop.argmin())
    size = np.diff(blocks)
    return np.repeat(np.add.reduceat(y, blocks[:-1]) / size, size)


@lru_cache(maxsize=16)
def _runs(points: int) -> tuple[Int[np.ndarray, " run"], Int[np.ndarray, " run"]]:
    """Return the first points i and the ends j of the runs that are compared with all that follows them.

    Runs and what follows have at least a tenth of the points, so that single outliers weigh little. Of the lengths of
    runs about 4 log₂ n are tried.
    """
    shortest = max(1, points // 10)
    lengths = np.geomspace(shortest, points - shortest, 4 * int(np.log2(points))).round().astype(int)
    runs = [(end - length, end) for length in np.unique(lengths) for end in range(length, points - shortest + 1)]
    first, end = np.array(runs).T
    return first, end


@lru_cache(maxsize=64)
def _standard_errors(points: int, noise: Autoregression) -> Float[np.ndarray, " run"]:
    """Return the standard deviation of the rise after each run, for noise of variance 1.

        V(m) = Var(y_1 + … + y_m) = Σ_{|k|<m} (m − |k|) r_k,    2 Cov(run, rest) = V(run + rest) − V(run) − V(rest)

    The covariances of all points would take too much memory for long curves.
    """
    first, end = _runs(points)
    run, rest = end - first, points - end
    correlation, lag = noise.correlations(points), np.arange(points)
    variance = (lag + 1) * (2 * correlation.cumsum() - 1) - 2 * (lag * correlation).cumsum()
    of_run, of_rest, of_both = (variance[length - 1] for length in (run, rest, run + rest))
    covariance = (of_both - of_run - of_rest) / 2
    return np.sqrt(of_run / run**2 + of_rest / rest**2 - 2 * covariance / (run * rest))


def _clearest_rise(y: Float[np.ndarray, "curve step"], noise: NoiseEstimate) -> Float[np.ndarray, " curve"]:
    """Return T, the clearest rise from a run of points to all that follow; 0 where the curve never rises."""
    points = y.shape[-1]
    first, end = _runs(points)
    sums = np.pad(np.cumsum(y, axis=-1), ((0, 0), (1, 0)))
    clearest = np.zeros(len(y))
    for candidate in np.unique(noise.candidate):
        error = _standard_errors(points, CANDIDATES[candidate])
        curves = np.flatnonzero(noise.candidate == candidate)
        for part in np.array_split(curves, 1 + curves.size * end.size // _MAX_CONTRASTS):
            total = sums[part]
            rise = (total[:, -1:] - total[:, end]) / (points - end) - (total[:, end] - total[:, first]) / (end - first)
            clearest[part] = (rise / error).max(axis=-1)
    clearest = np.where(clearest > _ROUNDING * np.abs(y).max(axis=-1), clearest, 0.0)
    return clearest / np.where(noise.sd > 0, noise.sd, np.finfo(float).tiny)
