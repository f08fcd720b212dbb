"""The reduced flows of Theorems 2 and 4 against their closed forms, quadratures and known numbers."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf

from joma.arguments import InputError
from joma.theory.flows import linear, nonlinear, softmax_nonlinear


@given(delta=st.lists(st.floats(-2, 2), min_size=1, max_size=5), v0=st.floats(-2, 2))
@settings(max_examples=30)
def test_theorem_2(delta, v0):
    delta = np.array(delta)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        poles = np.where(delta == 0, np.inf, np.sqrt(np.pi / 2) * (np.sign(delta) - erf(v0 / np.sqrt(2))) / delta)
    end = min(poles.min(), 50.0)
    solution = linear(delta, np.array([0.0, 0.5, 0.99]) * end, v0)
    passed = np.sqrt(np.pi / 2) * (erf(solution.states / np.sqrt(2)) - erf(v0 / np.sqrt(2)))
    np.testing.assert_allclose(passed, solution.times[:, None] * delta, rtol=0, atol=1e-9)
    assert solution.blow_up == np.inf


def test_theorem_2_on_known_numbers():
    delta, pole = np.array([0.9, 0.7, 0.5, -0.3, 0.1]), np.sqrt(np.pi / 2) / 0.9
    near = linear(delta, 0.99 * pole).states[0]
    np.testing.assert_allclose(near, [2.57583, 1.20036, 0.75542, -0.42615, 0.13830], atol=5e-6)
    late = linear(delta, [0.5 * pole, (1 - 2e-9) * pole, 2 * pole])
    assert late.blow_up == pytest.approx(pole, rel=1e-9)
    np.testing.assert_allclose(late.states[1, 1:], [1.22064, 0.76471, -0.43073, 0.13971], atol=5e-6)
    assert len(late.times) == 2


@given(mu=st.floats(-3, 3), v0=st.floats(-3, 3), t=st.floats(0.01, 3))
@settings(max_examples=25)
def test_theorem_4_takes_the_time_of_its_quadrature(mu, v0, t):
    v = float(nonlinear(mu, t, v0).states[0, 0])
    if abs(mu - v) < 1e-6:  # arrived: the time is no longer to be read from v
        assert abs(mu - v) <= abs(mu - v0) + 1e-12
        return
    with mp.workdps(30):
        centre = mp.mpf(mu)
        taken = mp.quad(lambda s: mp.exp(-s * s / 2) / (centre - s), [mp.mpf(v0), mp.mpf(v)])
        speed = abs(centre - v) * mp.exp(mp.mpf(v) ** 2 / 2)
    assert abs(float(taken) - t) * float(speed) <= 1e-8


def test_theorem_4_convergence_ratio():
    """ln(1/δ) of μ = 1.5 over that of μ = 1 at t = 0.5, 1, 2, 4."""
    states = nonlinear([1.5, 1.0], [0.5, 1.0, 2.0, 4.0]).states
    log = -np.log(1 - states / np.array([1.5, 1.0]))
    np.testing.assert_allclose(log[:, 0] / log[:, 1], [1.013, 1.151, 1.487, 1.714], atol=5e-4)


def test_figure_4():
    mu = [1.265432, 1.396091, 1.922268, 2.366884, 2.470280, 2.488770, 2.896919, 2.902236, 3.304665, 3.689334]
    solution = softmax_nonlinear(mu, np.linspace(0, 100, 1001), temperature=3.0)
    weight = np.exp(solution.states**2 / 3)
    weight /= weight.sum(axis=1, keepdims=True)
    entropy = -(weight * np.log(weight)).sum(axis=1)
    assert entropy[0] == pytest.approx(np.log(10), abs=1e-12)
    assert entropy.min() == pytest.approx(0.9407, abs=5e-5)
    assert solution.times[entropy.argmin()] == pytest.approx(13.4, abs=0.051)
    assert entropy[-1] == pytest.approx(1.5491, abs=5e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear([1.0, 2.0], 1.0, [0.0, 0.0, 0.0]), "`delta`, `v0` must be of shapes"),
        (lambda: linear(1.0, 1.0, 40.0), "`rhs` must be finite at the start"),
        (lambda: nonlinear(1.0, [1.0, 0.5]), "`times` must be one increasing row"),
        (lambda: softmax_nonlinear([1.0], 1.0, temperature=-1.0), "`temperature` must be above 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
