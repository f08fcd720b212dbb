"""The inverted quadrature and the clock of softmax attention, against mpmath, an integrated flow and each other."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from joma.arguments import InputError
from joma.theory import inversion

MU, V0 = np.array([1.0, -0.7, 2.5, 0.0, 1.3]), np.array([0.05, 0.4, 3.0, 0.6, 1.3])  # the last component is at rest


def time_taken(mu, v0, v):
    """Return ∫ exp(−s²/2)/(μ − s) ds from v0 to v, to 30 digits."""
    with mp.workdps(30):
        centre = mp.mpf(mu)
        return float(mp.quad(lambda s: mp.exp(-(s**2) / 2) / (centre - s), [mp.mpf(v0), mp.mpf(v)]))


@given(mu=st.floats(-3, 3), v0=st.floats(-3, 3), share=st.floats(0.02, 0.98))
@settings(max_examples=30)
def test_evaluate_inverts_the_quadrature(mu, v0, share):
    """Go a share of the way from v0 to μ; at the time that the integral takes, `evaluate` must be there."""
    if abs(mu - v0) < 1e-3:
        return
    v = v0 + share * (mu - v0)
    t = time_taken(mu, v0, v)
    value, drop = inversion.evaluate(inversion.tabulate(np.array([mu]), np.array([v0])), np.array([t]))
    speed = abs(mu - v) * np.exp(v**2 / 2)
    assert abs(value[0, 0] - v) <= 1e-12 * (1 + speed * t)
    assert drop[0, 0] == pytest.approx(np.log(abs(mu - v0) / abs(mu - v)), abs=1e-11 * (1 + np.exp(v**2 / 2) * t))


def test_a_component_at_its_centre_stays_there():
    v, _ = inversion.evaluate(inversion.tabulate(MU, V0), np.array([0.0, 1.0, 1e6]))
    np.testing.assert_array_equal(v[:, -1], MU[-1])


def test_late_gaps_decay_at_the_known_rate_far_below_rounding():
    """ln w falls at the rate exp(μ²/2), also where μ − v is zero in double precision."""
    table = inversion.tabulate(MU[:3], V0[:3])
    _, drop = inversion.evaluate(table, np.array([50.0, 60.0]))
    np.testing.assert_allclose((drop[1] - drop[0]) / 10.0, np.exp(MU[:3] ** 2 / 2), rtol=1e-12)
    assert drop.min() > 40  # the gaps are below 1e-17


def test_a_time_in_two_parts_is_their_sum():
    table, times = inversion.tabulate(MU, V0), np.linspace(0.1, 4.0, 9)
    whole = inversion.evaluate(table, times)
    parts = inversion.evaluate(table, times - 0.05, np.full(9, 0.05))
    for first, second in zip(whole, parts, strict=True):
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [1, 8, 64])
def test_pieces_and_chunks_cover_everything_once(monkeypatch, block):
    monkeypatch.setattr(inversion, "_BLOCK", block)
    times = np.linspace(0.0, 3.0, 7)
    v, visits = np.zeros((7, len(MU))), np.zeros((7, len(MU)))
    for components, table in inversion.pieces(MU, V0, times.size):
        for part, weights, _ in inversion.chunks(table, times):
            v[part, components] = weights
            visits[part, components] += 1
    np.testing.assert_array_equal(visits, 1)
    np.testing.assert_allclose(v, inversion.evaluate(inversion.tabulate(MU, V0), times)[0], rtol=0, atol=1e-13)


def test_partition_integrates_z_along_the_flow():
    def rhs(_, state):
        powers = np.exp(state[:-1] ** 2 / 2)
        return np.append((MU - state[:-1]) * powers, powers.sum())

    times = np.array([0.2, 1.0, 2.0])
    solution = solve_ivp(rhs, (0, 2.0), np.append(V0, 0.0), "DOP853", t_eval=times, rtol=1e-12, atol=1e-13)
    elapsed, z = inversion.partition([inversion.tabulate(MU[:-1], V0[:-1])], np.stack([times, np.zeros(3)]))
    at_rest = np.exp(MU[-1] ** 2 / 2)
    np.testing.assert_allclose(elapsed + at_rest * times, solution.y[-1], rtol=1e-9)
    np.testing.assert_allclose(z + at_rest, np.exp(solution.y[:-1] ** 2 / 2).sum(axis=0), rtol=1e-9)


@given(times=st.lists(st.floats(0, 200), min_size=1, max_size=6))
@settings(max_examples=30)
def test_clock_is_the_inverse_of_partition(times):
    tables = [inversion.tabulate(MU[:2], V0[:2]), inversion.tabulate(MU[2:4], V0[2:4])]
    tau = inversion.clock(tables, np.array(times))
    np.testing.assert_allclose(inversion.partition(tables, tau)[0], times, rtol=1e-11, atol=1e-9)


def test_grid_starts_at_zero_increases_and_is_thinned():
    times = inversion.grid([inversion.tabulate(*np.random.default_rng(0).uniform(-3, 3, (2, 200)))])
    np.testing.assert_array_equal(times[:, 0], 0.0)
    assert (np.diff(times.sum(axis=0)) >= 0).all()
    assert times.shape[1] <= 513


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: inversion.components(38.0, 0.0), r"`mu` must be in \[-37, 37\]"),
        (lambda: inversion.components(1.0, [0.0, 11.0], largest=10.0), r"`v0` must be in \[-10, 10\]"),
        (lambda: inversion.components([1.0, 2.0], [1.0, 2.0, 3.0]), "`mu`, `v0` must be of shapes"),
        (lambda: inversion.stretch(0.0), "`temperature` must be above 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
