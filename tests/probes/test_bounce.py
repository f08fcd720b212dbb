"""A curve that never rises is seldom called a bounce, whatever the noise; a curve that comes back is."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.bounce import _clearest_rise, _runs, measure_bounce
from joma.probes.correlated_noise import CANDIDATES, NoiseEstimate

X = np.linspace(0, 1, 30)
LEVEL = 0.05


def curves(shape, points, rho, count, seed):
    """Return curves [curve, step] of a shape, with noise of deviation 1 whose correlation over k points is ρ^k."""
    fresh = np.random.default_rng(seed).standard_normal((count, points))
    fresh[:, 1:] *= np.sqrt(1 - rho**2)
    return shape(np.linspace(0, 1, points)) + scipy.signal.lfilter([1.0], [1.0, -rho], fresh, axis=-1)


def detected(y, level=LEVEL):
    return (measure_bounce(np.arange(y.shape[-1]), y).p_value <= level).mean()


FALLING = {
    "flat": lambda x: 0 * x,
    "linear": lambda x: -5 * x,
    "exponential": lambda x: 5 * np.exp(-8 * x),
    "step": lambda x: -5.0 * (x > 0.3),
    "early step": lambda x: -3.0 * (x > 0.1),
}


@pytest.mark.parametrize("points", [20, 60])
@pytest.mark.parametrize("name", FALLING)
def test_false_positives_keep_the_nominal_rate_whatever_the_correlation(name, points):
    """Over 400 curves a rate of 7 per cent exceeds this limit with a probability of 1e-4."""
    limit = scipy.stats.binom.ppf(1 - 1e-4, 400, 0.07) / 400
    for number, rho in enumerate((0.0, 0.3, 0.6)):
        assert detected(curves(FALLING[name], points, rho, 400, [points, number])) <= limit, rho


@pytest.mark.parametrize("points", [20, 60])
def test_at_the_largest_correlation_the_p_value_is_uniform(points):
    """So the test is no more careful than it must be; at smaller correlations p is larger."""
    y = curves(FALLING["flat"], points, 0.65, 800, points)
    for level in (0.05, 0.2, 0.5):
        low, high = scipy.stats.binom.ppf([1e-4, 1 - 1e-4], 800, level) / 800
        assert low <= detected(y, level) <= high
        assert detected(curves(FALLING["flat"], points, 0.0, 200, points), level) <= high


BOUNCES = {
    "clear": lambda x: 6 * np.abs(2 * x - 1),
    "second dip": lambda x: np.interp(x, [0, 1 / 3, 2 / 3, 1], [6, 0, 5, 2]),
    "shallow": lambda x: 2 * np.abs(2 * x - 1),
    "early": lambda x: 40 / (1 + np.exp(35 * (x - 0.15))) + 12 * np.maximum(x - 0.3, 0),
}


@pytest.mark.parametrize(
    ("name", "points", "rho", "share"),
    [
        ("clear", 20, 0.0, 0.69),
        ("clear", 20, 0.6, 0.84),
        ("clear", 60, 0.6, 0.96),
        ("second dip", 60, 0.3, 0.97),
        ("early", 60, 0.3, 0.99),
        ("shallow", 120, 0.0, 0.92),
    ],
)
def test_bounces_are_detected(name, points, rho, share):
    """The shares were measured on 400 other curves; with them the limit is missed with a probability of 1e-4."""
    low = scipy.stats.binom.ppf(1e-4, 200, share) / 200
    assert detected(curves(BOUNCES[name], points, rho, 200, [9, points])) >= low


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(1e-6, 1e6), st.floats(-100, 100))
def test_units_and_levels_change_nothing(seed, unit, level):
    y = curves(BOUNCES["shallow"], 30, 0.3, 4, seed)
    plain, ours = measure_bounce(np.arange(30), y), measure_bounce(np.arange(30), unit * (y + level))
    np.testing.assert_array_equal(ours.p_value, plain.p_value)
    np.testing.assert_array_equal(ours.correlation, plain.correlation)
    for field in ("depth", "recovery", "chance", "noise"):
        np.testing.assert_allclose(getattr(ours, field), unit * getattr(plain, field), rtol=1e-6, atol=1e-9 * unit)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.floats(0.2, 0.6), st.floats(0, 0.1), st.floats(0.1, 100))
@example(2516528, 0.6, 0.09375, 1.0)
def test_a_recovery_of_many_standard_deviations_is_detected_whatever_the_unit(seed, turn, sigma, unit):
    rng = np.random.default_rng(seed)
    steps = np.arange(40) * 100
    x = np.linspace(0, 1, 40)
    clean = np.abs(x - turn)
    bounce = measure_bounce(steps, unit * (clean + 0.3 * sigma * rng.standard_normal(40)), draws=99, generator=rng)
    assert bounce.p_value == 0.01
    assert abs(bounce.step / 3900 - turn) < 0.2
    assert bounce.depth / unit == pytest.approx(turn, abs=0.25)
    assert bounce.recovery / unit == pytest.approx(1 - turn, abs=0.25)


@given(st.integers(0, 2**32), st.integers(5, 25), st.sampled_from(range(len(CANDIDATES))))
def test_the_clearest_rise_is_the_best_of_all_contrasts(seed, points, candidate):
    y = np.random.default_rng(seed).standard_normal(points)
    covariance = scipy.linalg.toeplitz(CANDIDATES[candidate].correlations(points))
    best = 0.0
    for i, j in zip(*_runs(points), strict=True):
        contrast = np.zeros(points)
        contrast[j:], contrast[i:j] = 1 / (points - j), -1 / (j - i)
        best = max(best, contrast @ y / (2.5 * np.sqrt(contrast @ covariance @ contrast)))
    noise = NoiseEstimate(np.array([candidate]), np.array([2.5]))
    assert _clearest_rise(y[None], noise)[0] == pytest.approx(best, abs=1e-12)


@given(st.integers(5, 300))
def test_runs_and_what_follows_have_a_tenth_of_the_points(points):
    first, end = _runs(points)
    shortest = max(1, points // 10)
    assert (first >= 0).all()
    assert (end - first).min() == (points - end).min() == shortest
    assert (end - first).max() == points - shortest
    assert set(end) == set(range(shortest, points - shortest + 1))
    lengths = np.unique(end - first)
    assert (lengths[1:] <= 1.5 * lengths[:-1] + 1).all()


@given(st.integers(0, 2**32))
def test_missing_points_are_left_out(seed):
    rng = np.random.default_rng(seed)
    curve = np.abs(X - 0.5) + 0.05 * rng.standard_normal(X.size)
    missing = rng.permutation(X.size)[:10]
    incomplete = curve.copy()
    incomplete[missing] = np.nan
    present = np.delete(np.arange(X.size), missing)
    ours = measure_bounce(np.arange(X.size), incomplete)
    np.testing.assert_array_equal(ours, measure_bounce(present, curve[present]))


@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 4))
def test_a_diverged_seed_is_nan_and_changes_no_other(seed, diverged, finite):
    """Up to four points before the divergence are too few to measure."""
    curves = np.abs(X - 0.5) + 0.05 * np.random.default_rng(seed).standard_normal((3, X.size))
    curves[diverged, finite:] = np.nan
    others = [number for number in range(3) if number != diverged]
    steps = np.arange(X.size)
    for ours, expected in zip(
        measure_bounce(steps, curves, draws=19), measure_bounce(steps, curves[others], draws=19), strict=True
    ):
        assert np.isnan(ours[diverged])
        np.testing.assert_array_equal(ours[others], expected)


def test_curves_without_noise_have_the_least_or_the_largest_p_value():
    steps = np.arange(X.size)
    falls = measure_bounce(steps, [-X, np.exp(-3 * X), np.full(X.size, 0.1), np.full(X.size, 2.0)])
    assert falls.p_value.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert falls.recovery.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert measure_bounce(steps, np.abs(X - 0.5), draws=999).p_value == 0.001


def test_known_noise_replaces_the_estimate():
    rng = np.random.default_rng(1)
    curve = np.abs(X - 0.5) + 0.05 * rng.standard_normal(X.size)
    steps = np.arange(X.size)
    assert measure_bounce(steps, curve, noise=0.05).p_value == 0.001
    drowned = measure_bounce(steps, curve, noise=5.0)
    assert drowned.p_value > 0.2
    assert drowned.noise == 5.0
    assert drowned.chance > 5 > drowned.recovery


def test_batches_keep_their_shape_and_short_curves_are_nan():
    curve = np.full((2, 3, 6), np.nan)
    curve[0, 0] = [3, 2, 1, 1, 2, 3]
    curve[1, 1, :4] = 1
    bounce = measure_bounce(np.arange(6), curve)
    assert bounce.depth.shape == (2, 3)
    assert bounce.depth[0, 0] == 2
    assert np.isnan(bounce.p_value).sum() == 5


def test_a_generator_is_used_as_given_and_the_default_seed_is_fixed():
    curve = np.random.default_rng(2).standard_normal(20)
    steps = np.arange(20)
    again = [measure_bounce(steps, curve, generator=np.random.default_rng(0)) for _ in range(2)]
    np.testing.assert_array_equal(again[0], again[1])
    np.testing.assert_array_equal(again[0], measure_bounce(steps, curve))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"steps": [0, 1, 1, 2, 3]}, "steps"),
        ({"curve": [1.0, 2.0]}, "curve"),
        ({"curve": 1.0}, "curve"),
        ({"curve": [1, 2, np.inf, 3, 4]}, "curve"),
        ({"curve": ["1", "2", "3", "2", "1"]}, "curve"),
        ({"noise": 0.0}, "noise"),
        ({"noise": [1.0, 2.0]}, "noise"),
        ({"draws": 0}, "draws"),
    ],
)
def test_bad_input_is_named(change, name):
    options = {"steps": np.arange(5), "curve": np.ones(5), **change}
    with pytest.raises(InputError, match=f"`{name}` must"):
        measure_bounce(options.pop("steps"), options.pop("curve"), **options)


def test_curves_of_more_than_a_thousand_points_are_measured_but_not_tested():
    steps = np.arange(1001)
    bounce = measure_bounce(steps, np.abs(steps - 300.0))
    assert (bounce.depth, bounce.recovery, bounce.step) == (300.0, 700.0, 300.0)
    assert np.isnan([bounce.chance, bounce.noise, bounce.p_value, bounce.correlation]).all()
