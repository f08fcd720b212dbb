"""Averages over noise against mpmath's quadrature of their definitions, for every activation and both noises."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.activations import ACTIVATIONS, LEAK, Activation
from joma.theory.moments import averages

NAMES = ("linear", "relu", "leaky_relu", "gelu", "silu", "tanh")
VALUES = {
    "linear": lambda y: y,
    "relu": lambda y: max(y, mp.mpf(0)),
    "leaky_relu": lambda y: max(y, mp.mpf(0)) + LEAK * min(y, mp.mpf(0)),
    "gelu": lambda y: y * mp.ncdf(y),
    "silu": lambda y: y / (1 + mp.exp(-y)),
    "tanh": mp.tanh,
}
SLOPES = {
    "linear": lambda _: mp.mpf(1),
    "relu": lambda y: mp.mpf(1 if y > 0 else 0),
    "leaky_relu": lambda y: mp.mpf(1 if y > 0 else LEAK),
    "gelu": lambda y: mp.ncdf(y) + y * mp.npdf(y),
    "silu": lambda y: (1 + mp.exp(-y) + y * mp.exp(-y)) / (1 + mp.exp(-y)) ** 2,
    "tanh": lambda y: mp.sech(y) ** 2,
}
CURVATURES = {
    "gelu": lambda y: (2 - y * y) * mp.npdf(y),
    "silu": lambda y: mp.diff(SLOPES["silu"], y),
    "tanh": lambda y: -2 * mp.sech(y) ** 2 * mp.tanh(y),
}


def density(noise, dimension):
    if noise == "gaussian":
        return mp.npdf, mp.mpf(11)
    radius = mp.sqrt(dimension + 2)
    constant = 1 / (mp.beta(0.5, mp.mpf(dimension + 1) / 2) * radius)
    return lambda u: constant * (1 - (u / radius) ** 2) ** (mp.mpf(dimension - 1) / 2), radius


def expectation(function, r, spread, noise="gaussian", dimension=None):
    """E[function(y, u)] at y = r + spread·u, in pieces short enough for mpmath wherever φ or the density bends."""
    with mp.workdps(20):
        p, edge = density(noise, dimension)
        r, spread = mp.mpf(r), mp.mpf(spread)
        bends = [(y - r) / spread for y in (-45, -20, -8, -3, 0, 3, 8, 20, 45)]
        ends = sorted({-edge, edge, *(u for u in (*bends, -4, -1.5, 1.5, 4) if -edge < u < edge)})
        return float(mp.quad(lambda u: function(r + spread * u, u) * p(u), ends))


preactivations = st.floats(-30, 30)
spreads = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(r=preactivations, spread=spreads, dimension=st.none() | st.integers(1, 40))
def test_mean_slope_and_tilt_are_the_integrals(name, r, spread, dimension):
    noise = "gaussian" if dimension is None else "ball"
    rule = averages(name, noise, dimension)
    at = np.array([r]), np.array([spread])
    law = (r, spread, noise, dimension)
    slope, tilt = rule.slopes(*at)
    assert slope[0] == pytest.approx(expectation(lambda y, _: SLOPES[name](y), *law), abs=1e-14)
    assert tilt[0] == pytest.approx(expectation(lambda y, u: u * SLOPES[name](y), *law), abs=1e-14)
    mean = expectation(lambda y, _: VALUES[name](y), *law)
    assert rule.mean(*at)[0] == pytest.approx(mean, abs=1e-14 * (1 + abs(r) + spread))


@pytest.mark.parametrize("name", CURVATURES)
@settings(max_examples=8)
@given(r=st.floats(-10, 10), spread=st.floats(-1, 1).map(lambda exponent: 10.0**exponent))
def test_averaged_curvatures_are_the_integrals(name, r, spread):
    curvatures = averages(name).curved(np.array([r]), np.array([spread]))[2:]
    for power, curvature in enumerate(curvatures):
        exact = expectation(lambda y, u, k=power: u**k * CURVATURES[name](y), r, spread)
        # a central difference of step 1e-5 (times the spread, for closed forms)
        assert curvature[0] == pytest.approx(exact, abs=1e-9 * (1 + 1 / spread))


@settings(max_examples=20)
@given(r=st.floats(-5, 5), spread=st.floats(0.1, 10))
def test_averaged_curvature_of_relu_is_the_density_at_its_kink(r, spread):
    curvatures = averages("relu").curved(np.array([r]), np.array([spread]))[2:]
    at_kink = float(mp.npdf(r / spread)) / spread
    for power, curvature in enumerate(curvatures):
        expected = (-r / spread) ** power * at_kink
        assert curvature[0] == pytest.approx(expected, abs=1e-9 * (1 + 1 / spread))


@pytest.mark.parametrize("noise", ["gaussian", "ball"])
def test_an_activation_of_ones_own_is_integrated_across_its_kinks(noise):
    leaky = ACTIVATIONS["leaky_relu"]
    unnamed = Activation("own", leaky.value, leaky.slope, leaky.kinks)
    r, spread = np.linspace(-3, 3, 13), np.geomspace(0.05, 20, 13)
    closed, integrated = averages("leaky_relu", noise, 3), averages(unnamed, noise, 3)
    np.testing.assert_allclose(integrated.mean(r, spread), closed.mean(r, spread), atol=1e-13)
    np.testing.assert_allclose(integrated.curved(r, spread), closed.curved(r, spread), atol=1e-8)


def test_ball_noise_tends_to_gaussian_noise():
    r, spread = np.linspace(-3, 3, 7), np.full(7, 1.5)
    errors = [
        np.abs(np.subtract(averages("silu", "ball", d).slopes(r, spread), averages("silu").slopes(r, spread))).max()
        for d in (10, 100, 1000)
    ]
    assert errors[0] > 8 * errors[1] > 64 * errors[2] > 0  # like 1/dimension


def test_bad_input_is_named():
    with pytest.raises(InputError, match="`noise` must be one of gaussian, ball"):
        averages("relu", "cauchy")
    with pytest.raises(InputError, match="`dimension` must be given for ball noise"):
        averages("relu", "ball")
    with pytest.raises(InputError, match="`dimension` must be a whole number"):
        averages("relu", "ball", 0)
