"""A curve that never rises is seldom called a bounce, whatever the noise; a curve that returns is found."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.bounce import _noise, _rise, _wandering, measure_bounce

X = np.linspace(0, 1, 30)
FALLING = {"flat": 0 * X, "linear": -X, "fast": np.exp(-8 * X), "step": -1.0 * (X > 0.3)}


def test_the_most_rises_in_noise_keep_the_nominal_rate():
    """No curve that falls has a higher rate than the nominal one; a flat one's is not much lower."""
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
    high = scipy.stats.binom.ppf(1 - 1e-4, 800, 0.5) / 800
    assert 0.25 <= (p <= 0.5).mean() <= high  # some noise looks as if it wandered, which makes a rise less clear


@given(st.floats(0, 0.95), st.integers(3, 12))
def test_wandering_noise_has_the_covariance_that_is_said(rho, points):
    """Every point is a sum of the independent ones; their weights give the covariance without any drawing."""
    weights = _wandering(np.eye(points), rho)  # a row for each independent point
    covariance = rho ** np.abs(np.subtract.outer(np.arange(points), np.arange(points)))
    np.testing.assert_allclose(weights.T @ weights, covariance, atol=1e-12)
    bend = np.diff(np.eye(points), n=2, axis=0)
    mean_square = np.trace(bend @ covariance @ bend.T) / (points - 2)
    curve = np.zeros(points)
    curve[1] = np.sqrt(mean_square * (points - 2) / (np.diff(np.eye(points)[1], n=2) ** 2).sum())
    assert _noise(curve[None], rho)[0] == pytest.approx(1.0)


@pytest.mark.parametrize(("rho", "most"), [(0.3, 0.12), (0.6, 0.25), (0.9, 0.45)])
def test_noise_that_wanders_is_seldom_called_a_bounce(rho, most):
    """Were it taken for independent, half to nearly all of these curves would be."""
    rng = np.random.default_rng(3)
    noisy = _wandering(rng.standard_normal((200, 60)), rho)
    found = measure_bounce(np.arange(60), noisy, draws=99, generator=rng)
    assert (found.p_value <= 0.05).mean() <= scipy.stats.binom.ppf(1 - 1e-3, 200, most) / 200
    assert abs(np.median(found.wander) - rho) < 0.2
    assert abs(np.median(found.noise) - 1) < 0.3


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(0.2, 0.8))
def test_a_return_is_found_in_noise_that_wanders(seed, turn):
    rng = np.random.default_rng(seed)
    clean = np.abs(np.linspace(0, 1, 60) - turn)
    noisy = clean + 0.01 * _wandering(rng.standard_normal((1, 60)), 0.5)[0]
    assert measure_bounce(np.arange(60), noisy, draws=99, generator=rng).p_value == 0.01


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.floats(0.2, 0.8), st.floats(0, 0.1), st.floats(0.1, 100))
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
