"""A curve that never rises is seldom called a bounce, whatever the noise; a curve that comes back is."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.signal
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.bounce import _clearest_rise, measure_bounce

X = np.linspace(0, 1, 30)
FALLING = {"flat": 0 * X, "linear": -X, "fast": np.exp(-8 * X), "step": -1.0 * (X > 0.3)}


def test_false_positives_keep_the_nominal_rate():
    """For a flat curve the rate is the nominal one, and no curve that falls has a higher one."""
    rng = np.random.default_rng(0)
    for name, curve in FALLING.items():
        for sigma in (0.02, 0.3):
            noisy = curve + sigma * rng.standard_normal((200, X.size))
            p = measure_bounce(np.arange(X.size), noisy, draws=99, generator=rng).p_value
            # Over 200 curves a rate of 7 per cent exceeds 14 with a probability of 1e-4.
            limit = scipy.stats.binom.ppf(1 - 1e-4, 200, 0.07) / 200
            assert (p <= 0.05).mean() <= limit, (name, sigma)
    flat = rng.standard_normal((800, X.size))
    p = measure_bounce(np.arange(X.size), flat, draws=99, generator=rng).p_value
    low, high = scipy.stats.binom.ppf([1e-4, 1 - 1e-4], 800, 0.5) / 800
    assert low <= (p <= 0.5).mean() <= high


@pytest.mark.parametrize(("rho", "least", "most"), [(0.3, 0.38, 0.55), (0.6, 0.76, 0.94)])
def test_correlated_noise_is_called_a_bounce_as_often_as_documented(rho, least, most):
    """A limitation, with the numbers of the docstring; each point is ρ times the one before, plus fresh noise."""
    rng = np.random.default_rng(5)
    for points in (30, 60):
        fresh = rng.standard_normal((200, points)) * np.sqrt(1 - rho**2)
        fresh[:, 0] /= np.sqrt(1 - rho**2)
        noisy = scipy.signal.lfilter([1.0], [1.0, -rho], fresh, axis=-1)
        rate = (measure_bounce(np.arange(points), noisy, draws=99, generator=rng).p_value <= 0.05).mean()
        low, high = scipy.stats.binom.ppf([1e-3, 1 - 1e-3], 200, [least, most]) / 200
        assert low <= rate <= high


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.floats(0.2, 0.75), st.floats(0, 0.1), st.floats(0.1, 100))
def test_a_recovery_is_detected_whatever_the_unit(seed, turn, sigma, unit):
    rng = np.random.default_rng(seed)
    steps = np.arange(40) * 100
    x = np.linspace(0, 1, 40)
    clean = np.abs(x - turn)
    bounce = measure_bounce(steps, unit * (clean + 0.3 * sigma * rng.standard_normal(40)), draws=99, generator=rng)
    assert bounce.p_value == 0.01
    assert abs(bounce.step / 3900 - turn) < 0.2
    assert bounce.depth / unit == pytest.approx(turn, abs=0.25)
    assert bounce.recovery / unit == pytest.approx(1 - turn, abs=0.25)


@given(st.integers(0, 2**32), st.integers(5, 12))
def test_the_clearest_rise_is_the_best_of_all_contrasts(seed, points):
    y = np.random.default_rng(seed).standard_normal(points)
    best = 0.0
    for i in range(points):
        for j in range(i + 1, points):
            gap = y[j:].mean() - y[i:j].mean()
            best = max(best, gap / (2.5 * np.sqrt(1 / (points - j) + 1 / (j - i))))
    assert _clearest_rise(y[None], np.array([2.5]))[0] == pytest.approx(best, abs=1e-12)


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
    falls = measure_bounce(steps, [-X, np.exp(-3 * X), np.full(X.size, 0.1)])
    assert falls.p_value.tolist() == [1.0, 1.0, 1.0]
    assert falls.recovery.tolist() == [0.0, 0.0, 0.0]
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
        ({"noise": 0.0}, "noise"),
        ({"noise": [1.0, 2.0]}, "noise"),
        ({"draws": 0}, "draws"),
    ],
)
def test_bad_input_is_named(change, name):
    options = {"steps": np.arange(5), "curve": np.ones(5), **change}
    with pytest.raises(InputError, match=f"`{name}` must"):
        measure_bounce(options.pop("steps"), options.pop("curve"), **options)
