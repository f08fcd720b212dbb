"""Critical points against closed forms, a dense scan of the circle, the Euler characteristic and integrated flows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.optimize import brentq, minimize

from joma.arguments import InputError
from joma.theory.critical import RESIDUALS, critical_points, jacobian
from joma.theory.mixture import FLOWS, Unit, fixed_centre, objective, velocity

NAMES = ("linear", "relu", "leaky_relu", "gelu", "silu", "tanh")
seeds = st.integers(0, 10**6)


def one_against_two(name, seed, *, tokens=5, sigma=0.5):
    """A positive centre and two negative ones of unit length, with weights that sum to no special number."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(3, tokens))
    centres /= np.linalg.norm(centres, axis=-1, keepdims=True)
    weights = generator.uniform(0.5, 1.5, 3) * [1, -0.5, -0.5]
    return Unit.of(name, centres, weights, sigma=sigma), generator


def difference_quotient(function, v, step=1e-4):
    moved = step * np.eye(len(v))
    return np.array([(function(v + h) - function(v - h)) / (2 * step) for h in moved])


@pytest.mark.parametrize("noise", ["gaussian", "ball"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(seed=seeds)
def test_jacobian_is_the_derivative_of_the_velocity(name, noise, seed):
    generator = np.random.default_rng(seed)
    centres, weights, v = generator.normal(size=(3, 4)), generator.normal(size=3), generator.normal(size=4)
    unit = Unit.of(name, centres, weights, xi=generator.normal(), sigma=generator.uniform(0.3, 2), noise=noise)
    exact = jacobian(unit, v)
    np.testing.assert_allclose(exact, exact.T, atol=1e-12 * (1 + np.abs(exact).max()))
    quotient = difference_quotient(lambda v: velocity(unit, v), v)
    norm = np.linalg.norm(v)
    np.testing.assert_allclose(exact, quotient, atol=1e-5 * (1 + np.abs(exact).max()) * (1 + norm**-2))


def principal_axes(away, rise):
    """Both ways along the axes of the quadratic that fits best: a narrow cone in which it falls escapes chance."""
    products = np.einsum("ni,nj->nij", away, away).reshape(len(away), -1)
    form = np.linalg.lstsq(products, rise)[0].reshape(away.shape[1], -1)
    axes = np.linalg.eigh(form + form.T)[1].T
    axes = axes[np.linalg.norm(away @ axes.T, axis=0) > 1e-6]  # none across the sphere
    return np.concatenate([axes, -axes])


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3)
@given(seed=seeds)
def test_what_is_found_is_critical_and_told_apart_by_its_neighbourhood(name, flow, seed):
    """At a stable point the objective falls in every allowed direction; at the others it rises in some."""
    unit, generator = one_against_two(name, seed)
    points = critical_points(unit, flow=flow, generator=generator, decay=0.2, starts=24)
    decay = 0.2 if flow == "decayed" else 0.0
    for point, kind, cosine in zip(points.points, points.kind, points.cosine, strict=True):
        rest = velocity(unit, point, flow=flow, decay=decay)
        assert np.abs(rest).max() < 1e-8
        np.testing.assert_allclose(cosine, unit.centres @ point / np.linalg.norm(point), atol=1e-12)
        away = generator.normal(size=(400, len(point)))
        if flow == "sphere":
            np.testing.assert_allclose(np.linalg.norm(point), 1, rtol=1e-9)
            away -= away @ np.outer(point, point)

        def rises(away, point=point):
            around = point + 1e-3 * np.linalg.norm(point) * away
            if flow == "sphere":
                around /= np.linalg.norm(around, axis=-1, keepdims=True)
            return objective(unit, around, decay=decay) - objective(unit, point, decay=decay)

        rise = rises(away)
        rise = np.append(rise, rises(principal_axes(away, rise)))
        if kind != "degenerate":
            assert {"stable": (rise < 0).all(), "unstable": (rise > 0).all(), "saddle": rise.min() < 0 < rise.max()}[
                kind
            ]


def tangential(unit, angle):
    """Speed along the circle at one angle or at many."""
    across = velocity(unit, np.stack([np.cos(angle), np.sin(angle)], axis=-1), flow="sphere")
    return (across * np.stack([-np.sin(angle), np.cos(angle)], axis=-1)).sum(-1)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds)
def test_on_the_circle_none_is_missed(name, seed):
    """With two tokens a scan of the angle finds every critical point and, by the sign before it, its stability."""
    unit, generator = one_against_two(name, seed, tokens=2)
    angles = np.linspace(-np.pi, np.pi, 721)
    speed = tangential(unit, angles)
    at = np.flatnonzero(speed[:-1] * speed[1:] < 0)
    roots = [brentq(lambda angle: tangential(unit, angle), angles[k], angles[k + 1], xtol=1e-14) for k in at]
    points = critical_points(unit, flow="sphere", generator=generator)
    order = np.argsort(np.arctan2(points.points[:, 1], points.points[:, 0]))
    np.testing.assert_allclose(np.arctan2(points.points[order, 1], points.points[order, 0]), roots, atol=1e-8)
    expected = ["stable" if speed[k] > 0 else "unstable" for k in at]
    assert [points.kind[k] for k in order] == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds, tokens=st.integers(2, 7))
def test_the_sphere_has_its_euler_characteristic(name, seed, tokens):
    """Poincaré and Hopf: Σ (−1)^(unstable directions) over all critical points is 2 on even spheres, 0 on odd ones."""
    unit, generator = one_against_two(name, seed, tokens=tokens)
    points = critical_points(unit, flow="sphere", generator=generator, starts=96)
    if "degenerate" not in points.kind:
        assert sum((-1) ** (points.eigenvalues > 0).sum(-1)) == 1 + (-1) ** (tokens - 1)


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh"])
@settings(max_examples=3)
@given(seed=seeds)
def test_the_decayed_flow_ends_at_a_stable_point_that_was_found(name, seed):
    unit, generator = one_against_two(name, seed, tokens=3)
    points = critical_points(unit, flow="decayed", decay=0.3, generator=generator)
    stable = points.points[points.of_kind("stable")]

    def rhs(_, v):
        return velocity(unit, v.reshape(4, 3), flow="decayed", decay=0.3).ravel()

    def sunk(_, v):
        return np.linalg.norm(v.reshape(4, 3), axis=-1).min() - (1e-5 if name == "relu" else 0.0)

    sunk.terminal = True  # at v = 0 ReLU's flow has no derivative, and the solver would take ever smaller steps
    options = {"method": "LSODA", "rtol": 1e-9, "atol": 1e-11, "events": sunk}
    ends = solve_ivp(rhs, (0, 200), generator.normal(size=12), **options).y[:, -1]
    for end, speed in zip(ends.reshape(4, 3), rhs(0, ends).reshape(4, 3), strict=True):
        at_rest = np.abs(speed).max() < 1e-7
        assert at_rest or name == "relu"  # which may sink into v = 0, where its flow has no derivative
        assert not at_rest or np.linalg.norm(stable - end, axis=-1).min() < 1e-4


@settings(max_examples=15)
@given(seed=seeds)
def test_linear_activation_has_the_closed_form(seed):
    unit, generator = one_against_two("linear", seed)
    mean = unit.weights @ unit.centres
    assert critical_points(unit, flow="plain", generator=generator).points.shape == (0, 5)
    decayed = critical_points(unit, flow="decayed", decay=0.4, generator=generator)
    assert decayed.kind == ("stable",)
    np.testing.assert_allclose(decayed.points, [mean / 0.4], rtol=1e-9)
    np.testing.assert_allclose(decayed.eigenvalues, -0.4)
    sphere = critical_points(unit, flow="sphere", radius=2.0, generator=generator)
    assert sphere.kind == ("stable", "unstable")
    direction = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(sphere.points, [2 * direction, -2 * direction], atol=1e-8)
    slope = np.linalg.norm(mean) / 2
    np.testing.assert_allclose(sphere.eigenvalues, np.outer([-slope, slope], np.ones(4)), rtol=1e-8)


@settings(max_examples=8)
@given(seed=seeds)
def test_relu_decayed_points_are_the_spheres_scaled_by_what_drives_them(seed):
    """The drive has degree 0, so v = drive(v)/λ: the sphere's points where it points outwards, no others."""
    unit, generator = one_against_two("relu", seed)
    sphere = critical_points(unit, flow="sphere", generator=generator).points
    outward = [point for point in sphere if point @ velocity(unit, point) > 0]
    expected = sorted(np.linalg.norm(velocity(unit, point)) / 0.3 for point in outward)
    decayed = critical_points(unit, flow="decayed", decay=0.3, generator=generator).points
    np.testing.assert_allclose(sorted(np.linalg.norm(decayed, axis=-1)), expected, rtol=1e-7)


@settings(max_examples=8)
@given(seed=seeds)
def test_the_plain_relu_flow_has_no_critical_point(seed):
    """A critical ray would need the objective and its gradient across v to vanish together."""
    unit, generator = one_against_two("relu", seed)
    sphere = critical_points(unit, flow="sphere", generator=generator).points
    assert np.abs(objective(unit, sphere)).min() > 1e-6
    assert critical_points(unit, flow="plain", generator=generator).points.shape == (0, 5)


@pytest.mark.parametrize("flow", ["sphere", "decayed"])
@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh"])
def test_a_stable_point_is_its_own_fixed_centre(name, flow):
    unit, generator = one_against_two(name, 4)
    points = critical_points(unit, flow=flow, decay=0.5, generator=generator)
    stable = points.points[points.of_kind("stable")]
    rate, centre = fixed_centre(unit, stable, flow=flow, decay=0.5)
    assert len(stable)
    assert (rate > 0).all()
    np.testing.assert_allclose(centre, stable, atol=1e-8)


def test_starts_that_sink_into_zero_are_left_there():
    """Where a ball of noise never reaches the unit, decay alone is left, and a Newton step leads to v = 0 at once."""
    unit = Unit.of("relu", [[1.0, 1.0], [1.0, 0.5]], [0.5, -0.5], sigma=0.05, noise="ball")
    points = critical_points(unit, flow="decayed", decay=0.1, generator=np.random.default_rng(0))
    assert (np.linalg.norm(points.points, axis=-1) > 0.1).all()
    assert "stable" in points.kind


def test_a_family_turned_about_the_span_is_one_degenerate_point():
    """With one centre GELU's slope vanishes on a parallel of the sphere: all of it is critical."""
    unit = Unit.of("gelu", [[3.0, 0.0, 0.0, 0.0]], [1.0], sigma=0.5)
    points = critical_points(unit, flow="sphere", generator=np.random.default_rng(0))
    off = np.abs(points.points[:, 0]) < 0.99
    assert off.sum() == 1
    assert [kind for kind, is_off in zip(points.kind, off, strict=True) if is_off] == ["degenerate"]
    height = points.points[off][0, 0]
    turned = np.array([height, 0.6 * np.sqrt(1 - height**2), 0, 0.8 * np.sqrt(1 - height**2)])
    assert np.abs(velocity(unit, turned, flow="sphere")).max() < 1e-9


def test_a_dead_unit_is_no_critical_point():
    """Far below every centre's reach the drive is tiny in all its terms, which is not a balance."""
    unit = Unit.of("relu", [[6.0, 0.0]], [1.0], sigma=0.2)
    assert np.abs(velocity(unit, [-1.0, 0.01])).max() < 1e-100
    points = critical_points(unit, flow="plain", generator=np.random.default_rng(0))
    assert points.points.shape == (0, 2)
    assert points.kind == ()


def test_the_same_generator_gives_the_same_points():
    unit, _ = one_against_two("gelu", 1)
    first, second = (critical_points(unit, flow="sphere", generator=np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(first.points, second.points)


@pytest.mark.parametrize("flow", ["sphere", "decayed"])
@pytest.mark.parametrize("name", ["relu", "gelu", "tanh"])
@settings(max_examples=4)
@given(seed=seeds)
def test_the_highest_point_is_found_where_centres_overlap(name, flow, seed):
    """There ‖field‖ has minima that are no roots and catch most random starts; BFGS on the objective is the oracle."""
    generator = np.random.default_rng(seed)
    unit = Unit.of(name, generator.uniform(0.5, 1.5, size=(2, 4)), [0.5, -0.5], sigma=0.15)

    def cost(v):
        if flow == "sphere":
            return -float(objective(unit, v / np.linalg.norm(v)))
        return -float(objective(unit, v, decay=0.1))

    starts = generator.normal(size=(5, 4))
    best = max(-minimize(cost, start, method="BFGS").fun for start in starts)
    points = critical_points(unit, flow=flow, decay=0.1, generator=generator, starts=24)
    assert points.kind[0] == "stable"
    assert points.value[0] >= best - 1e-7


def test_bad_input_is_named():
    unit, generator = one_against_two("relu", 0)
    for change, message in (
        ({"flow": "spherical"}, "`flow` must be one of plain, sphere, decayed"),
        ({"decay": 0.0}, "`decay` must be above 0"),
        ({"radius": -1.0}, "`radius` must be above 0"),
        ({"starts": 0}, "`starts` must be a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            critical_points(unit, generator=generator, **change)
    assert list(RESIDUALS) == list(FLOWS)
