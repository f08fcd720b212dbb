"""A curve that never rises is seldom called a bounce, whatever the noise; a curve that returns is found."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.signal
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.bounce import _rise, measure_bounce

X = np.linspace(0, 1, 30)
FALLING = {"flat": 0 * X, "linear": -X, "fast": np.exp(-8 * X), "step": -1.0 * (X > 0.3)}


def test_the_most_rises_in_noise_keep_the_nominal_rate():
    """For a flat curve the rate is the nominal one, and no curve that falls has a higher one."""
    rng = np.random.default_rng(0)
    for name, curve in FALLING.items():
        for sigma in (0.02, 0.3):
            noisy = curve + sigma * rng.standard_normal((200, X.size))
            p = measure_bounce(np.arange(X.size), noisy, draws=99, generator=rng).p_value
            # Over 200 curves a rate of 7 per cent exceeds 14 with a probability of 1e-4.
            most = scipy.stats.binom.ppf(1 - 1e-4, 200, 0.07) / 200
            assert (p <= 0.05).mean() <= most, (name, sigma)
    flat = rng.standard_normal((800, X.size))
    p = measure_bounce(np.arange(X.size), flat, draws=99, generator=rng).p_value
    low, high = scipy.stats.binom.ppf([1e-4, 1 - 1e-4], 800, 0.5) / 800
    assert low <= (p <= 0.5).mean() <= high


@pytest.mark.parametrize(("rho", "least", "most"), [(0.3, 0.38, 0.55), (0.6, 0.76, 0.94)])
def test_noise_that_wanders_is_called_a_bounce_as_often_as_is_said(rho, least, most):
    """A limit of the test, which its docstring gives in figures; each point here is ρ times the one before and new."""
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
def test_a_return_is_found_whatever_the_unit(seed, turn, sigma, unit):
    rng = np.random.default_rng(seed)
    steps = np.arange(40) * 100
    x = np.linspace(0, 1, 40)
    clean = np.abs(x - turn)
    found = measure_bounce(steps, unit * (clean + 0.3 * sigma * rng.standard_normal(40)), draws=99, generator=rng)
    assert found.p_value == 0.01
    assert abs(found.step / 3900 - turn) < 0.2
    assert found.depth / unit == pytest.approx(turn, abs=0.25)
    assert found.recovery / unit == pytest.approx(1 - turn, abs=0.25)


@given(st.integers(0, 2**32), st.integers(5, 12))
def test_the_clearest_rise_is_the_best_of_all_contrasts(seed, points):
    y = np.random.default_rng(seed).standard_normal(points)
    best = 0.0
    for i in range(points):
        for j in range(i + 1, points):
            gap = y[j:].mean() - y[i:j].mean()
            best = max(best, gap / (2.5 * np.sqrt(1 / (points - j) + 1 / (j - i))))
    assert _rise(y[None], np.array([2.5]))[0] == pytest.approx(best, abs=1e-12)


@given(st.integers(0, 2**32))
def test_missing_points_are_left_out(seed):
    rng = np.random.default_rng(seed)
    curve = np.abs(X - 0.5) + 0.05 * rng.standard_normal(X.size)
    gone = rng.permutation(X.size)[:10]
    holes = curve.copy()
    holes[gone] = np.nan
    kept = np.delete(np.arange(X.size), gone)
    ours = measure_bounce(np.arange(X.size), holes)
    np.testing.assert_array_equal(ours, measure_bounce(kept, curve[kept]))


def test_curves_without_noise_are_judged_without_doubt():
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
    found = measure_bounce(np.arange(6), curve)
    assert found.depth.shape == (2, 3)
    assert found.depth[0, 0] == 2
    assert np.isnan(found.p_value).sum() == 5


def test_a_stream_is_used_as_given_and_the_default_is_fixed():
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
    with pytest.raises(InputError, match=f"`{name}` must be"):
        measure_bounce(options.pop("steps"), options.pop("curve"), **options)
