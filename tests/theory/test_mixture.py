"""Theorem 3 against its defining integrals, against sampled data, and against the objective that the flow climbs."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.activations import ACTIVATIONS, named
from joma.theory.mixture import FLOWS, Unit, fixed_centre, objective, offset_velocity, theta, velocity

NAMES = ("linear", "relu", "leaky_relu", "gelu", "silu", "tanh")
positives = st.floats(-1.5, 1.5).map(lambda exponent: 10.0**exponent)


def defining_integrals(name, r, norm, sigma):
    """θ1 and θ2 as the theorem writes them, over y, with p the density of N(0, σ²)."""
    with mp.workdps(20):
        r, norm, sigma = mp.mpf(r), mp.mpf(norm), mp.mpf(sigma)
        wide = 11 * norm * sigma
        marks = (-40, -12, -4, -1, 0, 1, 4, 12, 40, r, r - wide / 3, r + wide / 3)
        ends = sorted({r - wide, r + wide, *(y for y in marks if r - wide < y < r + wide)})

        def density(y):
            return mp.npdf((y - r) / norm, 0, sigma)

        slope = SLOPES[name]
        first = mp.quad(lambda y: slope(y) * density(y), ends)
        return float(first), float(mp.quad(lambda y: slope(y) * (y - r) * density(y), ends))


SLOPES = {
    "linear": lambda _: mp.mpf(1),
    "relu": lambda y: mp.mpf(1 if y > 0 else 0),
    "leaky_relu": lambda y: mp.mpf(1 if y > 0 else 0.01),
    "gelu": lambda y: mp.ncdf(y) + y * mp.npdf(y),
    "silu": lambda y: (1 + mp.exp(-y) + y * mp.exp(-y)) / (1 + mp.exp(-y)) ** 2,
    "tanh": lambda y: mp.sech(y) ** 2,
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(r=st.floats(-20, 20), norm=positives, sigma=positives)
def test_theta_is_the_defining_integral(name, r, norm, sigma):
    theta1, theta2 = theta(name, r, norm, sigma)
    exact1, exact2 = defining_integrals(name, r, norm, sigma)
    assert float(theta1) == pytest.approx(exact1, abs=1e-14 * norm)
    assert float(theta2) == pytest.approx(exact2, abs=1e-14 * norm**2 * sigma)


@given(r=st.floats(-20, 20), norm=positives, sigma=positives)
def test_closed_forms_as_stated(r, norm, sigma):
    phi, cap = lambda x: float(mp.npdf(x)), lambda x: float(mp.ncdf(x))
    x, q = r / (sigma * norm), 1 + (sigma * norm) ** 2
    e = phi(r / q**0.5) / q**0.5
    stated = {
        "identity": (norm, 0.0),
        "relu": (norm * cap(x), norm**2 * sigma * phi(x)),
        "gelu": (
            norm * (cap(r / q**0.5) + r * e / q),
            norm**3 * sigma**2 * e * (2 - (sigma * norm) ** 2 / q - r**2 / q**2),
        ),
    }
    for name, (theta1, theta2) in stated.items():
        got = theta(name, r, norm, sigma)
        assert float(got[0]) == pytest.approx(theta1, abs=2e-15 * norm * (1 + x * x))
        assert float(got[1]) == pytest.approx(theta2, abs=4e-15 * norm**2 * sigma * (1 + x * x))


def test_theta_broadcasts_and_keeps_scalars():
    theta1, theta2 = theta("silu", np.zeros((3, 1)), [1.0, 2.0], 0.5)
    assert theta1.shape == theta2.shape == (3, 2)
    alone = theta("silu", 0.0, 2.0, 0.5)
    assert alone[0].shape == ()
    assert alone[0] == theta1[0, 1]
    assert alone[1] == theta2[0, 1]
    assert theta("relu", 0.0, 1.0, [[1.0], [2.0]])[0].shape == (2, 1)


def sampled(noise, generator, shape):
    """Isotropic noise of unit variance in each direction."""
    normal = generator.normal(size=shape)
    if noise == "gaussian":
        return normal
    tokens = shape[-1]
    direction = normal / np.linalg.norm(normal, axis=-1, keepdims=True)
    return direction * np.sqrt(tokens + 2) * generator.random((*shape[:-1], 1)) ** (1 / tokens)


@pytest.mark.parametrize("noise", ["gaussian", "ball"])
@pytest.mark.parametrize("name", NAMES)
def test_theorem_3_is_the_sampled_expectation(name, noise):
    """E[g φ'(v·x + ξ) x] over 400,000 samples, within five standard errors."""
    generator = np.random.default_rng(3)
    centres, a, v, xi, sigma = generator.normal(size=(3, 4)), [0.6, -0.3, 0.2], generator.normal(size=4), 0.3, 0.7
    unit = Unit.of(name, centres, a, xi=xi, sigma=sigma, noise=noise)
    x = centres[:, None] + sigma * sampled(noise, generator, (3, 400_000, 4))
    slope = named(name).slope(x @ v + xi)
    terms = slope[..., None] * x
    error = np.sqrt((np.square(a)[:, None] * terms.var(axis=1)).sum(0) / terms.shape[1])
    np.testing.assert_array_less(np.abs(a @ terms.mean(1) - velocity(unit, v)), 5 * error + 1e-12)
    offset_error = np.sqrt(np.square(a) @ slope.var(axis=1) / terms.shape[1])
    assert abs(a @ slope.mean(1) - offset_velocity(unit, v)) <= 5 * offset_error + 1e-12


def a_unit(name, generator, *, tokens=4, components=3, noise="gaussian"):
    centres, weights = generator.normal(size=(components, tokens)), generator.normal(size=components)
    return Unit.of(name, centres, weights, xi=generator.normal(), sigma=generator.uniform(0.2, 2), noise=noise)


def difference_quotient(function, v, step=1e-4):
    """Central differences of the fourth order along each axis of `v`."""
    moved = step * np.eye(len(v))
    return (
        np.array(
            [(8 * (function(v + h) - function(v - h)) - function(v + 2 * h) + function(v - 2 * h)) / 12 for h in moved]
        )
        / step
    )


@pytest.mark.parametrize("noise", ["gaussian", "ball"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_plain_and_decayed_flows_climb_the_objective(name, noise, seed):
    generator = np.random.default_rng(seed)
    unit, v, decay = a_unit(name, generator, noise=noise), generator.normal(size=4), generator.uniform(0, 1)
    gradient = difference_quotient(lambda v: objective(unit, v), v)
    scale = 1 + np.abs(unit.weights).sum() * (np.abs(unit.centres).max() + unit.sigma)
    # a ball's density has a corner at its edge, which costs the quotient accuracy
    tolerance = (1e-9 if noise == "gaussian" else 1e-6) * scale
    np.testing.assert_allclose(velocity(unit, v), gradient, atol=tolerance)
    decayed = difference_quotient(lambda v: objective(unit, v, decay=decay), v)
    np.testing.assert_allclose(velocity(unit, v, flow="decayed", decay=decay), decayed, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6))
def test_the_sphere_flow_is_the_part_across_v(name, seed):
    generator = np.random.default_rng(seed)
    unit, v = a_unit(name, generator), generator.normal(size=(5, 4))
    across, plain = velocity(unit, v, flow="sphere"), velocity(unit, v)
    np.testing.assert_allclose((across * v).sum(-1), 0, atol=1e-13 * (1 + np.abs(plain).max()) * np.abs(v).max())
    rest = plain - across
    np.testing.assert_allclose(rest * (v * v).sum(-1, keepdims=True), (rest * v).sum(-1, keepdims=True) * v, atol=1e-11)


@given(seed=st.integers(0, 10**6))
def test_relu_is_homogeneous_so_the_norm_grows_by_the_objective(seed):
    """d‖v‖²/dt = 2 Σ a E φ where ξ = 0: a rising objective decides between growing and dying, and nothing stays."""
    generator = np.random.default_rng(seed)
    unit = Unit.of("relu", generator.normal(size=(3, 4)), generator.normal(size=3), sigma=0.5)
    v = generator.normal(size=4)
    assert float(v @ velocity(unit, v)) == pytest.approx(float(objective(unit, v)), abs=1e-12)
    np.testing.assert_allclose(velocity(unit, 7 * v), velocity(unit, v), atol=1e-12)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), decay=st.floats(1e-3, 2))
def test_fixed_centre_rewrites_the_flow(name, flow, seed, decay):
    generator = np.random.default_rng(seed)
    unit, v = a_unit(name, generator), generator.normal(size=(6, 4))
    rate, centre = fixed_centre(unit, v, flow=flow, decay=decay)
    exists = rate > 0
    np.testing.assert_array_equal(np.isnan(centre).any(-1), ~exists)
    rewritten = rate[exists, None] * (centre[exists] - v[exists])
    expected = velocity(unit, v, flow=flow, decay=decay)[exists]
    np.testing.assert_allclose(rewritten, expected, atol=1e-12 * (1 + np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6))
def test_fixed_centre_is_the_theorems_formula(name, seed):
    """μ = −‖v‖² Σ a θ1 x̄ / Σ a θ2, where Σ a θ2 < 0."""
    generator = np.random.default_rng(seed)
    unit, v = a_unit(name, generator), generator.normal(size=4)
    norm = np.linalg.norm(v)
    theta1, theta2 = theta(name, unit.centres @ v + unit.xi, norm, unit.sigma)
    rate, centre = fixed_centre(unit, v)
    assert float(rate) == pytest.approx(-unit.weights @ theta2 / norm**3, abs=1e-13 / norm)
    if unit.weights @ theta2 < 0:
        expected = -(norm**2) * (unit.weights * theta1) @ unit.centres / (unit.weights @ theta2)
        np.testing.assert_allclose(centre, expected, rtol=1e-11)


def test_leading_axes_are_a_batch():
    generator = np.random.default_rng(0)
    unit, v = a_unit("tanh", generator), generator.normal(size=(2, 3, 4))
    for function in (velocity, objective, offset_velocity):
        together = function(unit, v)
        np.testing.assert_allclose(together[1, 2], function(unit, v[1, 2]), rtol=1e-13)
        assert together.shape[:2] == (2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "`activation` must be one of linear, "),
        ({"r": np.nan}, "`r` must be free of NaN"),
        ({"r": []}, "`r` must be non-empty"),
        ({"norm": 0.0}, "`norm` must be above 0"),
        ({"norm": -1.0}, "`norm` must be above 0"),
        ({"sigma": 0.0}, "`sigma` must be above 0"),
        ({"sigma": np.inf}, "`sigma` must be finite"),
        ({"r": [1.0, 2.0], "norm": [1.0, 2.0, 3.0]}, "`r`, `norm`, `sigma` must be of shapes that broadcast"),
        ({"noise": "cauchy"}, "`noise` must be one of gaussian, ball"),
    ],
)
def test_bad_input_to_theta_is_named(change, message):
    with pytest.raises(InputError, match=message):
        theta(**{"activation": "relu", "r": 0.0, "norm": 1.0, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"centres": [1.0, 2.0]}, "`centres` must be 2-dimensional"),
        ({"centres": [[np.nan, 1.0]]}, "`centres` must be free of NaN"),
        ({"weights": [1.0, 2.0]}, "`weights` must be one for each centre"),
        ({"weights": []}, "`weights` must be non-empty"),
        ({"xi": [1.0]}, "`xi` must be 0-dimensional"),
        ({"sigma": -1.0}, "`sigma` must be above 0"),
    ],
)
def test_bad_mixtures_are_named(change, message):
    with pytest.raises(InputError, match=message):
        Unit.of(**{"activation": "relu", "centres": [[1.0, 0.0]], "weights": [1.0], **change})


def test_bad_weights_are_named():
    unit = Unit.of("relu", [[1.0, 0.0]], [1.0])
    for v, message in ((np.ones(3), "of 2 tokens"), (1.0, "of 2 tokens"), (np.zeros(2), "other than the zero vector")):
        with pytest.raises(InputError, match=f"`v` must be {message}"):
            velocity(unit, v)
    with pytest.raises(InputError, match="`flow` must be one of plain, sphere, decayed"):
        velocity(unit, np.ones(2), flow="clipped")
    for function in (velocity, objective, fixed_centre):
        with pytest.raises(InputError, match="`decay` must be at least 0"):
            function(unit, np.ones(2), decay=-0.1)


def test_every_activation_of_the_table_is_tested_here():
    assert {activation.name for activation in ACTIVATIONS.values()} == set(NAMES)
