"""The integrator: blow-ups of known time, the switch to an implicit method, and errors that say what to do."""

from __future__ import annotations

import numpy as np
import pytest

from joma.arguments import InputError
from joma.theory import flows, growth, integration
from joma.theory.integration import METHODS, IntegrationError, Solver, integrate


@pytest.mark.parametrize(
    ("method", "power"), [("DOP853", 1.5), ("DOP853", 2.0), ("DOP853", 3.0), ("LSODA", 2.0), ("Radau", 3.0)]
)
def test_blow_up_of_a_power(method, power):
    """ẏ = y^p from 1 blows up at 1/(p − 1)."""
    pole = 1 / (power - 1)
    solution = integrate(lambda _, y: y**power, [1.0], [0.0, 0.5 * pole, 0.9 * pole, 3 * pole], Solver(method=method))
    assert solution.blow_up == pytest.approx(pole, rel=1e-8)
    np.testing.assert_allclose(solution.times, [0.0, 0.5 * pole, 0.9 * pole])
    exact = (1 - solution.times / pole) ** (-pole)
    np.testing.assert_allclose(solution.states[:, 0], exact, rtol=1e-8)


def test_a_stiff_blow_up_switches_to_an_implicit_method():
    """y = 1/(1 − t) blows up, and u follows cos t with a stiffness of y², which stops an explicit method."""

    def rhs(t, state):
        y, u = state
        return np.array([y**2, y**2 * (np.cos(t) - u) - np.sin(t)])

    times, options = [0.5, 0.9, 2.0], {"rtol": 1e-7, "atol": 1e-9, "max_evaluations": 20_000}
    solution = integrate(rhs, [1.0, 1.0], times, Solver(switch_after=1000, **options))
    assert solution.blow_up == pytest.approx(1.0, rel=1e-6)
    np.testing.assert_allclose(solution.states, [[2.0, np.cos(0.5)], [10.0, np.cos(0.9)]], rtol=1e-6)
    with pytest.raises(IntegrationError, match="stalled") as stall:
        integrate(rhs, [1.0, 1.0], times, Solver(switch_after=20_000, **options))
    assert 0.9 < stall.value.time < 1.0


def test_the_two_methods_meet_at_the_switch():
    """ẏ = −y, with the switch between two of the times: every state once, none lost, all on exp(−t)."""
    times = np.linspace(0, 5, 41)
    solution = integrate(lambda _, y: -y, 1.0, times, Solver(switch_after=200))
    assert solution.evaluations > 1000  # Radau's steps are many more than DOP853's
    np.testing.assert_array_equal(solution.times, times)
    np.testing.assert_allclose(solution.states, np.exp(-times), rtol=1e-9)


def test_one_component_blows_up_beside_a_large_still_one():
    solution = integrate(lambda _, y: np.array([0.0, y[1] ** 2]), [1e9, 1.0], [0.5, 2.0])
    assert solution.blow_up == pytest.approx(1.0, rel=1e-8)
    np.testing.assert_allclose(solution.states, [[1e9, 2.0]], rtol=1e-9)


def test_bound_is_a_blow_up_and_exponential_growth_is_none():
    grown = integrate(lambda _, y: y, 1.0, [1.0, 100.0])
    assert grown.blow_up == np.inf
    np.testing.assert_allclose(grown.states, np.exp([1.0, 100.0]), rtol=1e-8)
    stopped = integrate(lambda _, y: y, 1.0, [1.0, 100.0], Solver(bound=1e3))
    assert stopped.blow_up == pytest.approx(np.log(1e3), rel=1e-10)
    assert stopped.states.shape == (1,)


def test_shape_is_kept_and_time_zero_is_the_start():
    start = np.arange(6.0).reshape(2, 3)
    solution = integrate(lambda t, y: -y + 0 * t, start, [0.0, 1.0])
    np.testing.assert_array_equal(solution.states[0], start)
    np.testing.assert_allclose(solution.states[1], start / np.e, rtol=1e-10)
    np.testing.assert_array_equal(integrate(lambda _, y: -y, start, 0.0).states, start[None])


def jump(_, v):
    """Return the velocity of a block that slides along ReLU's kink, not rounded."""
    return 0.5 * (0.3 * (2 * v > 1) - (v > 1))


@pytest.mark.parametrize("method", list(METHODS))
def test_an_unrounded_kink_stops_every_method(method):
    with pytest.raises(IntegrationError, match="round jumps"):
        integrate(jump, 2.0, 5.0, Solver(method=method, max_evaluations=20_000))


@pytest.mark.parametrize("method", [None, "Radau"])
@pytest.mark.parametrize("end", [1e30, 1e300])
def test_rest_is_no_blow_up_however_late(method, end):
    """At rest the slope is rounding, which at late times looks like growth within a fraction of t."""
    mu = np.array([1.0, 2.0, -1.5])
    solution = flows.nonlinear(mu, [1.0, end], solver=Solver(method=method, switch_after=2000))
    assert solution.blow_up == np.inf
    np.testing.assert_allclose(solution.states, growth.nonlinear(mu, [1.0, end]), rtol=1e-9)


def test_growth_at_late_times_is_followed():
    solution = flows.linear(1e-300, [1e300, 1e301])
    np.testing.assert_allclose(solution.states, growth.linear([1e-300], [1e300]), rtol=1e-9)
    np.testing.assert_allclose(solution.blow_up, growth.blow_up_time(1e-300), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-280, 1e-120, 1e-60, 1e60, 1e120, 1e300])
def test_the_scale_of_time_changes_nothing(scale):
    """A flow that is slower by a factor reaches the same states later by that factor, to the same accuracy."""
    delta, times = np.array([0.9, 0.7, -0.3]), np.array([0.1, 0.5, 1.2, 3.0])
    solution = flows.linear(delta / scale, times * scale)
    np.testing.assert_allclose(solution.states, growth.linear(delta, times[:3]), rtol=1e-9)
    np.testing.assert_allclose(solution.blow_up / scale, growth.blow_up_time(delta)[0], rtol=1e-9)


def test_times_too_far_apart_are_refused():
    with pytest.raises(InputError, match="`times` must be within 290 orders of magnitude"):
        flows.linear(1e-300, [1e-10, 1e300])


def test_work_is_bounded_for_every_size_and_method(monkeypatch):
    """Without `max_evaluations` the number of evaluations falls with the size of the state and is the same anywhere."""
    monkeypatch.setattr(integration, "MAX_WORK", 4000)
    counts = {}
    for method in METHODS:
        for size in (1, 2000):
            calls = []

            def rhs(t, v, calls=calls):
                calls.append(t)
                return jump(t, v)

            with pytest.raises(IntegrationError, match="round jumps") as stall:
                integrate(rhs, np.full(size, 2.0), 5.0, Solver(method=method, switch_after=1000))
            assert 0 <= stall.value.time < 5.0
            counts[method, size] = len(calls)
    assert counts["DOP853", 1] <= 4002
    assert counts["DOP853", 2000] <= 2001  # an evaluation costs twice as much; Radau does not take over
    assert counts["Radau", 2000] == 501  # the least, which is less than one Jacobian


def test_an_evaluation_of_many_numbers_counts_for_more(monkeypatch):
    monkeypatch.setattr(integration, "MAX_WORK", 4000)
    with pytest.raises(IntegrationError, match="after 1000 evaluations"):
        integrate(jump, 2.0, 5.0, Solver(switch_after=10**6), numbers=6000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Solver(method="Euler"), "`method` must be one of DOP853"),
        (lambda: Solver(rtol=0.0), "`rtol` must be above 0"),
        (lambda: Solver(switch_after=0), "`switch_after` must be a whole number of at least 1"),
        (
            lambda: integrate(lambda _, y: y[:1], [1.0, 2.0], 1.0),
            "`rhs` must be a function that returns arrays of shape .2,.",
        ),
        (lambda: integrate(lambda _, y: y / 0 * 0, np.ones(2), 1.0), "`rhs` must be finite at the start"),
        (lambda: integrate(lambda _, y: y, 1e9, 1.0, Solver(bound=1e3)), "`y0` must be below `bound`"),
        (
            lambda: integrate(lambda _, y: -y, np.ones(10**6), 1.0, Solver(method="Radau")),
            "`y0` must be of a size that fits into memory",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
