"""The noise's correlations agree with their definition, and the estimate with a plain second implementation."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.probes.correlated_noise import CANDIDATES, Autoregression, correlated_noise, estimate_noise

PARTIAL = st.floats(-0.9, 0.9)


def covariance(noise, points):
    return scipy.linalg.toeplitz(noise.correlations(points))


@given(PARTIAL, PARTIAL)
def test_the_partial_correlations_are_those_given_and_none_beyond_the_second(first, second):
    """The last weight of the best prediction from k points is the partial correlation over k points."""
    noise = Autoregression(first, second)
    correlations = noise.correlations(6)
    for lag, expected in enumerate([first, second, 0.0, 0.0, 0.0], start=1):
        weights = np.linalg.solve(scipy.linalg.toeplitz(correlations[:lag]), correlations[1 : lag + 1])
        assert weights[-1] == pytest.approx(expected, abs=1e-9)


@given(st.floats(-0.7, 0.7), st.floats(-0.7, 0.7))
def test_the_variance_of_a_long_mean_sums_the_correlations(first, second):
    noise = Autoregression(first, second)
    assert noise.long_run == pytest.approx(2 * noise.correlations(2000).sum() - 1, rel=1e-9)


@given(st.sampled_from(CANDIDATES), st.integers(2, 12))
def test_noise_has_the_correlations_given(noise, points):
    """Each point is a sum of independent ones, whose weights give the covariance without drawing."""
    weights = correlated_noise(np.eye(points), noise)
    np.testing.assert_allclose(weights.T @ weights, covariance(noise, points), atol=1e-12)


def plain_estimate(y):
    """Return candidate and deviation by least squares on every trend, without matrix updates, for n of 20 to 29."""
    points, step = y.size, np.arange(y.size)
    terms = [(step >= at) * 1.0 for at in step[1:]] + [np.maximum(step - at, 0.0) for at in step[1:-1]]
    terms += [1 / (1 + np.exp(step - at)) for at in range(0, 8, 2)]  # falls of width 2 in the first third
    best = (np.inf, -1, np.nan)
    for number, noise in enumerate(CANDIDATES):
        factor = np.linalg.cholesky(covariance(noise, points))
        trend = [np.ones(points), step * 1.0]

        def squares(trend, factor=factor):
            white = scipy.linalg.solve_triangular(factor, np.stack([y, *trend], axis=-1), lower=True)
            return np.sum((white[:, 0] - white[:, 1:] @ np.linalg.lstsq(white[:, 1:], white[:, 0])[0]) ** 2)

        for count in range(6):
            left = squares(trend)
            log_determinant = np.linalg.slogdet(covariance(noise, points))[1]
            criterion = points * np.log(left) + log_determinant + 4 * count * np.log(points)
            best = min(best, (criterion, number, np.sqrt(left / (points - 2 - 2 * count))))
            trend.append(min(terms, key=lambda term, trend=trend: squares([*trend, term])))
    return best[1:]


@settings(max_examples=6)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.6]), st.sampled_from([0.0, 3.0, 10.0]))
def test_the_estimate_is_that_of_plain_least_squares(seed, rho, depth):
    rng = np.random.default_rng(seed)
    bounce = depth * np.abs(np.linspace(-1, 1, 22))
    y = bounce + correlated_noise(rng.standard_normal((1, 22)), Autoregression(rho))[0]
    estimate, expected = estimate_noise(y[None]), plain_estimate(y)
    assert estimate.candidate[0] == expected[0]
    assert estimate.sd[0] == pytest.approx(expected[1], rel=1e-9)


@given(st.integers(0, 2**32), st.integers(5, 40), st.floats(1e-3, 1e3), st.floats(-10, 10), st.floats(-10, 10))
def test_units_and_lines_change_nothing_but_the_deviation(seed, points, unit, level, slope):
    y = np.random.default_rng(seed).standard_normal((3, points))
    ours, plain = estimate_noise(unit * (y + level + slope * np.linspace(0, 1, points))), estimate_noise(y)
    np.testing.assert_array_equal(ours.candidate, plain.candidate)
    np.testing.assert_allclose(ours.sd, unit * plain.sd, rtol=1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_noise_around_a_curve_with_two_dips_is_estimated(rho):
    """A trend that missed a turn would count it as correlation; one that followed the noise would hide it."""
    dips = np.interp(np.arange(120), [0, 30, 60, 90, 119], [8, 0, 6, 1, 6])
    y = dips + correlated_noise(np.random.default_rng(3).standard_normal((60, 120)), Autoregression(rho))
    estimate = estimate_noise(y)
    correlation = np.array([candidate.first for candidate in CANDIDATES])[estimate.candidate]
    assert abs(correlation.mean() - rho) < 0.1
    assert abs(estimate.sd.mean() - 1) < 0.15


def test_many_curves_are_estimated_as_each_alone():
    """More curves than are fitted at once."""
    y = np.random.default_rng(4).standard_normal((600, 8))
    together, alone = estimate_noise(y), [estimate_noise(curve[None]) for curve in y[::50]]
    np.testing.assert_array_equal(together.candidate[::50], [estimate.candidate[0] for estimate in alone])
    np.testing.assert_allclose(together.sd[::50], [estimate.sd[0] for estimate in alone], rtol=1e-9)
