"""How often the test of a bounce is wrong and how often it is right, by shape, correlation and number of points.

Curves of n points have noise of standard deviation 1 and correlation ρ^k over k points. Behind each result stands that
of the test that joma had before, which took noise for independent. The settings of `joma.probes.correlated_noise` were
chosen on draws of other seeds (1, 11, 12, 13, 21 and 31); the draws of this table were made after that.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
from scipy.signal import lfilter

from benchmarks import Row
from joma.probes.bounce import _never_rising, measure_bounce

POINTS = (20, 50, 100, 200)
CORRELATIONS = (0.0, 0.3, 0.6)
LEVEL = 0.05
MAX_SIZE = 0.07
SEED = 2028
CURVES = {"size": 2000, "power": 1000, "before": 200}
Noise = Callable[[np.random.Generator, int, int], np.ndarray]
NEVER_RISING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda x: 0 * x,
    "exponential fall by 5 sd": lambda x: 5 * np.exp(-8 * x),
    "step down by 5 sd": lambda x: -5.0 * (x > 0.3),
    "linear fall by 5 sd": lambda x: -5 * x,
}
BOUNCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "falls by 6 sd, returns by 6": lambda x: 6 * np.abs(2 * x - 1),
    "falls steeply by 6 sd, returns by 3": lambda x: 6 * np.exp(-20 * x) + 3 * x,
    "falls early by 40 sd, returns by 12": lambda x: 40 / (1 + np.exp(35 * (x - 0.15))) + 12 * np.maximum(x - 0.3, 0),
    "falls by 6 sd, rises by 5, falls by 3": lambda x: np.interp(x, [0, 1 / 3, 2 / 3, 1], [6, 0, 5, 2]),
    "falls by 2 sd, returns by 2": lambda x: 2 * np.abs(2 * x - 1),
}


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    yield from costs()
    yield from sizes()
    yield from other_noise()
    yield from powers()


def sizes() -> Iterator[Row]:
    """Yield how often curves that never rise are called a bounce."""
    for number, (name, shape) in enumerate(NEVER_RISING.items()):
        for points in POINTS:
            for rho in CORRELATIONS:
                rng = np.random.default_rng([SEED, number, points, int(10 * rho)])
                y = shape(np.linspace(0, 1, points)) + correlated(rng, CURVES["size"], points, rho)
                rate, before = rejections(y)
                what = f"bounce: false alarms, {name}, n = {points}, ρ = {rho:g}"
                yield what, f"≤ {MAX_SIZE:.0%}", f"{rate:.1%} (was {before:.0%})", rate <= MAX_SIZE


def other_noise() -> Iterator[Row]:
    """Yield the same for flat curves with noise for which the test makes no promise."""
    kinds: dict[str, Noise] = {
        "correlation 0.8": lambda rng, curves, points: correlated(rng, curves, points, 0.8),
        "autoregression 0.4, 0.2": lambda rng, curves, points: np.asarray(
            lfilter([1], [1, -0.4, -0.2], rng.standard_normal((curves, 100 + points)))
        )[:, 100:],
        "half white, half correlation 0.8": lambda rng, curves, points: (
            correlated(rng, curves, points, 0.8) + rng.standard_normal((curves, points))
        ),
        "heavy tails (t, 3 degrees)": lambda rng, curves, points: rng.standard_t(3, (curves, points)),
    }
    for number, (name, noise) in enumerate(kinds.items()):
        for points in POINTS:
            rng = np.random.default_rng([SEED, 10 + number, points])
            rate, before = rejections(noise(rng, CURVES["power"], points))
            yield f"bounce: false alarms, flat, n = {points}, {name}", "-", f"{rate:.1%} (was {before:.0%})", True


def powers() -> Iterator[Row]:
    """Yield how often curves that bounce are called so."""
    for number, (name, shape) in enumerate(BOUNCES.items()):
        for points in POINTS:
            for rho in CORRELATIONS:
                rng = np.random.default_rng([SEED, 20 + number, points, int(10 * rho)])
                y = shape(np.linspace(0, 1, points)) + correlated(rng, CURVES["power"], points, rho)
                rate, before = rejections(y)
                what = f"bounce: detected, {name}, n = {points}, ρ = {rho:g}"
                yield what, "-", f"{rate:.0%} (was {before:.0%})", True


def costs() -> Iterator[Row]:
    """Yield the time of one curve, after the first of its number of points and with it."""
    for points in (60, 200):
        y = np.random.default_rng(SEED).standard_normal((101, points))
        times = [time.process_time()]
        for curves in (y[:1], y[1:]):
            measure_bounce(np.arange(points), curves)
            times.append(time.process_time())
        first, others = 1e3 * (times[1] - times[0]), 10 * (times[2] - times[1])
        yield f"bounce: one of 100 more curves of {points} points", "≤ 50 ms", f"{others:.1f} ms", others <= 50
        yield f"bounce: the first curve of {points} points", "-", f"{first:.0f} ms", True


def correlated(rng: np.random.Generator, curves: int, points: int, rho: float) -> np.ndarray:
    """Return noise [curve, step] of variance 1 whose correlation over k points is ρ^k."""
    fresh = rng.standard_normal((curves, points))
    fresh[:, 1:] *= np.sqrt(1 - rho**2)
    return np.asarray(lfilter([1.0], [1.0, -rho], fresh, axis=-1))


def rejections(y: np.ndarray) -> tuple[float, float]:
    """Return the share of curves [curve, step] that are called a bounce, and the share of the first by the old test."""
    p_values = measure_bounce(np.arange(y.shape[-1]), y).p_value
    rng = np.random.default_rng(SEED)
    before = [independent_p_value(curve, rng) for curve in y[: CURVES["before"]]]
    return float((p_values <= LEVEL).mean()), float((np.array(before) <= LEVEL).mean())


def independent_p_value(y: np.ndarray, rng: np.random.Generator, draws: int = 99) -> float:
    """Return the p-value of the earlier test: independent noise, its size from second differences.

    For speed it draws 99 curves instead of 999, and tries runs of some lengths only.
    """
    sigma = float(noise_by_differences(y))
    noise = sigma * rng.standard_normal((draws, y.size))
    null = independent_rise(_never_rising(y, sigma) + noise, noise_by_differences(noise))
    return float(1 + (null >= independent_rise(y[None], np.array([sigma]))).sum()) / (1 + draws)


def noise_by_differences(y: np.ndarray) -> np.ndarray:
    """Return the standard deviation of a point of each curve, from second differences."""
    return np.sqrt((np.diff(y, n=2, axis=-1) ** 2).mean(axis=-1) / 6)


def independent_rise(y: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return the clearest rise from a run of points to all that follow, over its error for independent noise."""
    points, clearest = y.shape[-1], np.zeros(len(y))
    sums = np.pad(np.cumsum(y, axis=-1), ((0, 0), (1, 0)))
    for length in np.unique(np.geomspace(1, points - 1, 24).round().astype(int)):
        end = np.arange(length, points)
        after = (sums[:, -1:] - sums[:, end]) / (points - end)
        rise = after - (sums[:, end] - sums[:, end - length]) / length
        clearest = np.maximum(clearest, (rise / np.sqrt(1 / (points - end) + 1 / length)).max(axis=-1))
    return clearest / sigma
