"""Values and slopes against mpmath, at 40 digits; the smoothed kinks against the convolution they stand for."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.activations import ACTIVATIONS, LEAK, Activation, named, smoothed

FORMULAS = {
    "linear": lambda y: y,
    "relu": lambda y: mp.mpf(max(y, 0)),
    "leaky_relu": lambda y: max(y, 0) + mp.mpf(LEAK) * min(y, 0),
    "gelu": lambda y: y * mp.ncdf(y),
    "silu": lambda y: y / (1 + mp.exp(-y)),
    "tanh": mp.tanh,
}
# A slope that crosses zero is a difference of terms no larger than this, so its error is measured against it.
TERMS = {
    "gelu": lambda y: mp.ncdf(y) + abs(y) * mp.npdf(y),
    "silu": lambda y: (1 + abs(y)) / (1 + mp.exp(-y)),
}
preactivations = st.floats(-30, 30)


def oracle_slope(name: str, y: float) -> mp.mpf:
    with mp.workdps(40):
        return mp.diff(FORMULAS[name], mp.mpf(y), direction=0, h=mp.mpf("1e-15"))


@pytest.mark.parametrize("name", FORMULAS)
@given(y=preactivations)
def test_value_is_the_formula(name, y):
    with mp.workdps(40):
        expected = FORMULAS[name](mp.mpf(y))
        error = abs(mp.mpf(float(ACTIVATIONS[name].value(y))) - expected)
        assert error <= 2e-15 * abs(expected) * (1 + y * y) + mp.mpf(2) ** -1074  # one subnormal step


@pytest.mark.parametrize("name", FORMULAS)
@given(y=preactivations)
def test_slope_is_the_derivative_even_in_the_tails(name, y):
    if any(abs(y - kink) < 1e-9 for kink in ACTIVATIONS[name].kinks):
        y += 1.0
    expected = oracle_slope(name, y)
    with mp.workdps(40):
        scale = TERMS[name](mp.mpf(y)) if name in TERMS else abs(expected)
        # exp(−y²/2) and exp(−y) turn half an ulp of the exponent into that many ulps of the result; the difference
        # quotient of the oracle itself is good to 1e-24
        assert abs(mp.mpf(float(ACTIVATIONS[name].slope(y))) - expected) <= 1e-15 * scale * (1 + y * y) + mp.mpf(
            "1e-23"
        )


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
@given(y=st.floats(-5, 5), width=st.floats(1e-3, 2.0))
def test_smoothed_is_the_convolution_with_a_normal_law(name, y, width):
    activation = smoothed(name, width)
    nodes = sorted({-14.0, 14.0, 0.0, float(np.clip(-y / width, -14, 14))})  # the kink lies at s = −y/w
    with mp.workdps(25):
        value = mp.quad(lambda s: FORMULAS[name](y + width * s) * mp.npdf(s), nodes)
        slope = mp.quad(lambda s: (1 if y + width * s > 0 else ACTIVATIONS[name].slope(-1.0)) * mp.npdf(s), nodes)
    assert float(activation.value(y)) == pytest.approx(float(value), rel=1e-13, abs=1e-14)
    assert float(activation.slope(y)) == pytest.approx(float(slope), rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
@given(y=st.floats(-3, 3), width=st.floats(0.01, 1.0))
def test_smoothed_slope_is_the_derivative_of_the_smoothed_value(name, y, width):
    activation, step = smoothed(name, width), 1e-5 * width
    quotient = (float(activation.value(y + step)) - float(activation.value(y - step))) / (2 * step)
    assert float(activation.slope(y)) == pytest.approx(quotient, abs=1e-9 * (1 + abs(y) / width))


@given(width=st.floats(1e-3, 1.0))
def test_smoothing_costs_most_at_the_kink(width):
    y = np.linspace(-3, 3, 601)
    excess = smoothed("relu", width).value(y) - ACTIVATIONS["relu"].value(y)
    assert excess.max() == pytest.approx(width / np.sqrt(2 * np.pi), rel=1e-12)
    assert (excess >= 0).all()


def test_smoothing_handles_every_kink_and_leaves_smooth_ones_alone():
    hat = Activation("hat", lambda y: np.maximum(1 - np.abs(y), 0), lambda y: -np.sign(y) * (np.abs(y) < 1), (-1, 0, 1))
    assert [hat.jump(kink) for kink in hat.kinks] == [1, -2, 1]
    rounded = smoothed(hat, 0.1)
    assert rounded.smooth
    expected = mp.quad(lambda s: max(1 - abs(0.05 + 0.1 * s), 0) * mp.npdf(s), [-12, -10.5, -0.5, 9.5, 12])
    assert float(rounded.value(0.05)) == pytest.approx(float(expected), rel=1e-13)
    assert smoothed("gelu", 0.1) is ACTIVATIONS["gelu"]


@pytest.mark.parametrize("name", FORMULAS)
def test_far_out_it_is_its_asymptote_and_shapes_are_kept(name):
    far = np.array([[-1e200, -1e4], [1e4, 1e200]])
    slope = named(name).slope(far)
    left, right = {"linear": (1, 1), "leaky_relu": (LEAK, 1), "tanh": (0, 0)}.get(name, (0, 1))
    np.testing.assert_array_equal(slope, [[left, left], [right, right]])
    value = named(name).value(far)
    limit = np.sign(far) if name == "tanh" else slope * far
    np.testing.assert_array_equal(value, limit)
    assert named(name).value(0.3).shape == named(name).slope(0.3).shape == ()
    assert named(name).value(np.float64(0.3)).dtype == named(name).slope([1]).dtype == np.float64


def test_kinked_activations_are_not_smooth_and_take_the_left_slope():
    assert {name for name, activation in ACTIVATIONS.items() if not activation.smooth} == {"relu", "leaky_relu"}
    assert float(named("relu").slope(0.0)) == 0.0
    assert float(named("leaky_relu").slope(0.0)) == LEAK


def test_identity_is_linear():
    assert named("identity") is named("linear") is named(ACTIVATIONS["linear"])


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"`activation` must be one of linear, .*did you mean 'relu'"):
        named("rleu")
    for width in (0.0, -1.0, np.nan, [0.1, 0.2]):
        with pytest.raises(InputError, match="`width` must be"):
            smoothed("relu", width)
