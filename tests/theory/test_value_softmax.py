"""The value-softmax flow: its orbit against the package's block flow, its laws against integration and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import cumulative_simpson, quad
from scipy.special import entr, expit, softmax

from joma.arguments import InputError
from joma.theory.block_flow import Architecture, block
from joma.theory.integration import Solver, integrate
from joma.theory.invariants import predict
from joma.theory.losses import constant
from joma.theory.value_softmax import (
    fixed_gap,
    fixed_values,
    late_error,
    orbit,
    orbit_at_margins,
    trained_gap,
    two_token_invariant,
)

seeds = st.integers(0, 2**32 - 1)
SOLVER = Solver("DOP853", rtol=1e-10, atol=1e-10)
NORM = 1.3


def start(seed, tokens, dim=4, scale=0.3):
    """Draw values [token, dim], logits and a direction of length NORM."""
    generator = np.random.default_rng(seed)
    values, logits = scale * generator.normal(size=(tokens, dim)), scale * generator.normal(size=tokens)
    c = generator.normal(size=dim)
    return values, logits, NORM * c / np.linalg.norm(c)


def block_path(gradient, values, logits, times):
    """Solve the package's block on one sample that contains each token once."""
    tokens, dim = values.shape
    flow = block(
        "softmax",
        "linear",
        gradient,
        np.full((1, tokens), 1 / tokens),
        architecture=Architecture(residual=False),
    )
    return flow.solve(times, np.vstack([values, np.zeros((1, dim))]), logits[None], solver=SOLVER)


@given(seed=seeds, tokens=st.integers(2, 6))
@settings(max_examples=15)
def test_the_orbit_is_the_flow_of_the_block_with_a_constant_gradient(seed, tokens):
    values, logits, c = start(seed, tokens)
    times = np.array([0.0, 0.5, 3.0, 20.0])
    path, reduced = block_path(constant(c), values, logits, times), orbit(values @ c, logits, times, norm=NORM)
    np.testing.assert_allclose(reduced.logits, path.z[:, 0], rtol=0, atol=1e-7)
    np.testing.assert_allclose(reduced.scores, path.v @ c, rtol=1e-8, atol=1e-7)
    rebuilt = values + (reduced.scores - values @ c)[..., None] * c / NORM**2
    np.testing.assert_allclose(rebuilt, path.v, rtol=1e-8, atol=1e-7)
    np.testing.assert_allclose(reduced.clock, times, atol=1e-12)


@given(seed=seeds, tokens=st.integers(2, 6))
@settings(max_examples=15)
def test_velocities_are_the_descent_direction_of_autograd(seed, tokens):
    """The right-hand side, by a short step of the orbit, against autograd of −c · Vσ(a)."""
    values, logits, c = start(seed, tokens)
    v, a = (torch.tensor(array, requires_grad=True) for array in (values, logits))
    v_slope, a_slope = torch.autograd.grad(torch.softmax(a, 0) @ v @ torch.tensor(c), [v, a])
    step = 1e-5
    path = orbit(values @ c, logits, [0.0, step], norm=NORM)
    np.testing.assert_allclose(np.diff(path.scores, axis=0)[0] / step, (v_slope @ torch.tensor(c)).numpy(), atol=1e-4)
    np.testing.assert_allclose(np.diff(path.logits, axis=0)[0] / step, a_slope.numpy(), atol=1e-4)


@given(seed=seeds, tokens=st.integers(2, 6))
@settings(max_examples=15)
def test_losses_of_the_margin_have_the_same_attention_at_the_same_margin(seed, tokens):
    values, logits, c = start(seed, tokens)
    for slope in (lambda m: expit(-m), lambda m: 6.0 - m):
        path = block_path(lambda y, slope=slope: slope(y @ c)[:, None] * c, values, logits, np.array([0.5, 2.0, 6.0]))
        attention = softmax(path.z[:, 0], axis=-1)
        margin = (attention * (path.v @ c)).sum(axis=-1)
        if (np.diff(margin) > 0).all():  # the square loss may be at rest
            reduced = orbit_at_margins(values @ c, logits, margin, norm=NORM)
            np.testing.assert_allclose(reduced.attention, attention, rtol=0, atol=1e-6)
            np.testing.assert_allclose(reduced.margin, margin, rtol=1e-7, atol=1e-9)


@given(seed=seeds, tokens=st.integers(2, 8))
@settings(max_examples=15)
def test_both_parametrisations_give_the_same_orbit_and_the_margin_grows(seed, tokens):
    values, logits, c = start(seed, tokens)
    path = orbit(values @ c, logits, np.linspace(0, 15, 8), norm=NORM)
    assert (np.diff(path.margin) > 0).all()
    again = orbit_at_margins(values @ c, logits, path.margin[1:], norm=NORM)
    for name in ("clock", "scores", "logits", "log_time"):
        np.testing.assert_allclose(getattr(again, name), getattr(path, name)[1:], rtol=1e-7, atol=1e-7)


def test_the_logistic_time_of_the_orbit_is_that_of_the_logistic_flow():
    values, logits, c = start(3, 4)
    times = np.array([1.0, 10.0, 100.0])
    path = block_path(lambda y: expit(-(y @ c))[:, None] * c, values, logits, times)
    margin = (softmax(path.z[:, 0], axis=-1) * (path.v @ c)).sum(axis=-1)
    np.testing.assert_allclose(np.expm1(orbit_at_margins(values @ c, logits, margin, norm=NORM).log_time), times, 1e-6)


@pytest.mark.parametrize("tokens", [2, 5])
def test_the_ledger_of_one_sample_has_no_gap(tokens):
    """Theorem 1 on one sample: the logits are known from the values, with drift alone."""
    values, logits, c = start(1, tokens, scale=0.05)
    path = block_path(constant(c), values, logits, np.array([0.0, 10.0, 300.0]))
    uniform = np.full(tokens, 1 / tokens)
    prediction = predict("softmax", path.v, path.v[0], logits[None], b_ref=uniform) - path.ledger.drift
    np.testing.assert_allclose(prediction, path.z[:, 0], atol=1e-7)
    assert abs(path.ledger.gap).max() < 1e-12 * abs(path.ledger.drift).max()


@pytest.mark.parametrize(("tokens", "tolerance"), [(2, 2e-4), (3, 2e-3), (5, 2e-2)])
def test_the_late_error_tends_to_its_law(tokens, tolerance):
    values, logits, c = start(0, tokens, scale=0.05)
    clock = np.array([1e3, 1e5])
    path = orbit(values @ c, logits, clock, norm=NORM, solver=SOLVER)
    ratio = late_error(clock, tokens, norm=NORM) / path.error
    assert abs(ratio[1] - 1) < tolerance
    assert abs(ratio[1] - 1) < abs(ratio[0] - 1)


def test_the_law_solves_the_late_equation_of_equal_losers():
    """ε̇ = −‖c‖² τ ε² k/(k − 1), by finite differences of the law."""
    clock, step = np.array([3.0, 50.0]), 1e-5
    for tokens in (2, 7):
        slope = (late_error(clock + step, tokens) - late_error(clock - step, tokens)) / (2 * step)
        np.testing.assert_allclose(slope, -clock * late_error(clock, tokens) ** 2 * tokens / (tokens - 1), rtol=1e-8)


@given(seed=seeds)
@settings(max_examples=20)
def test_two_tokens_keep_their_invariant(seed):
    values, logits, c = start(seed, 2)
    path = orbit(values @ c, logits, [0.0, 1.0, 8.0, 60.0], norm=NORM)
    invariant = two_token_invariant(path.scores, path.logits, norm=NORM)
    largest = 1 + np.ptp(path.scores, axis=-1).max() ** 2
    np.testing.assert_allclose(invariant, invariant[0], rtol=0, atol=1e-8 * largest)


def test_the_clock_of_two_tokens_is_a_quadrature():
    """Without the integrator: dτ = 4 cosh² x dx / d(x), with d(x) from the invariant."""
    scores, logits, square = np.array([0.7, 0.1]), np.array([0.2, 0.0]), NORM**2
    path = orbit(scores, logits, [25.0], norm=NORM)
    x0, x1 = (logits[0] - logits[1]) / 2, float(path.logits[0, 0] - path.logits[0, 1]) / 2
    invariant = float(two_token_invariant(scores, logits, norm=NORM))
    clock, _ = quad(lambda x: 4 * np.cosh(x) ** 2 / np.sqrt(invariant + 4 * square * np.sinh(x) ** 2), x0, x1, epsabs=0)
    assert clock == pytest.approx(25.0, rel=1e-9)


def test_the_square_loss_stops_where_the_orbit_has_its_margin():
    values, logits, c = start(5, 4)
    path = block_path(lambda y: (6.0 - y @ c)[:, None] * c, values, logits, np.array([200.0]))
    attention = softmax(path.z[-1, 0])
    assert float(attention @ path.v[-1] @ c) == pytest.approx(6.0, abs=1e-8)
    expected = orbit_at_margins(values @ c, logits, 6.0, norm=NORM).entropy
    np.testing.assert_allclose(entr(attention).sum(), expected, atol=1e-7)


@given(seed=seeds, tokens=st.integers(2, 5))
@settings(max_examples=15)
def test_fixed_values_are_the_flow_in_plain_time(seed, tokens):
    values, logits, c = start(seed, tokens, scale=1.0)
    scores = values @ c

    def rhs(_, a):
        sigma = softmax(a)
        margin = sigma @ scores
        return expit(-margin) * sigma * (scores - margin)

    times = np.array([0.0, 1.0, 30.0])
    plain = integrate(rhs, logits, times).states
    np.testing.assert_allclose(fixed_values(scores, logits, np.log1p(times)), plain, atol=1e-8)


def test_gaps_tend_to_their_laws():
    scores, logits = np.array([0.9, 0.2, -0.4, 0.5]), np.zeros(4)
    log_times = np.array([100.0, 1000.0])
    states = fixed_values(scores, logits, log_times)
    gap, law = states[:, :1] - states, fixed_gap(scores, log_times)
    np.testing.assert_allclose(gap[:, 1:], law[:, 1:], rtol=0, atol=1e-6)
    path = orbit(scores, logits, [1e4], norm=NORM, solver=SOLVER)
    lead = path.logits[0, 0] - path.logits[0, 1:]
    np.testing.assert_allclose(lead, trained_gap(path.log_time[0], 4, norm=NORM), atol=0.1)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("scores", lambda: orbit([1.0], [0.0], [1.0])),
        ("scores", lambda: orbit([1.0, 2.0], [0.0], [1.0])),
        ("norm", lambda: orbit([1.0, 2.0], [0.0, 0.0], [1.0], norm=0.0)),
        ("margins", lambda: orbit_at_margins([1.0, 2.0], [0.0, 0.0], [1.0])),
        ("margins", lambda: orbit_at_margins([1.0, 2.0], [0.0, 0.0], [3.0, 2.0])),
        ("clock", lambda: late_error(0.0, 3)),
        ("tokens", lambda: late_error(1.0, 1)),
        ("scores", lambda: two_token_invariant([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])),
        ("log_time", lambda: trained_gap(-1.0, 3)),
        ("scores", lambda: fixed_gap([1.0, 1.0], 3.0)),
        ("scores", lambda: fixed_values([1e308, -1e308], [0.0, 0.0], [1.0])),
        ("scores", lambda: orbit([1e308, 0.0], [0.0, 0.0], [1.0])),
        ("logits", lambda: orbit([1.0, 2.0], [0.0, 1e308], [1.0])),
        ("logits", lambda: orbit_at_margins([1.0, 2.0], [1e300, 0.0], [3.0])),
        ("logits", lambda: fixed_values([1.0, 2.0], [0.0, 1e308], [1.0])),
        ("clock", lambda: orbit([1.0, 2.0], [0.0, 0.0], [-1.0])),
        ("clock", lambda: orbit([1.0, 2.0], [0.0, 0.0], [2.0, 1.0])),
        ("clock", lambda: orbit([1.0, 2.0], [0.0, 0.0], "1")),
        ("log_times", lambda: fixed_values([1.0, 2.0], [0.0, 0.0], [np.nan])),
        ("log_times", lambda: fixed_values([1.0, 2.0], [0.0, 0.0], [2.0, 1.0])),
    ],
)
def test_bad_arguments_are_named(name, call):
    with pytest.raises(InputError, match=f"`{name}"):
        call()


@pytest.mark.parametrize("lift", [0.0, 50.0, 500.0, 1000.0, 1e6])
def test_an_orbit_may_start_at_any_margin_and_its_time_is_a_quadrature(lift):
    """1 + t = 1 + ∫ (1 + e^m) dτ, from a dense orbit in units of e^lift; a lift of all scores changes nothing else."""
    clock = np.linspace(0.0, 6.0, 6001)
    low, high = (orbit([shift + 0.4, shift, shift - 0.3], [0.1, 0.0, 0.2], clock) for shift in (0.0, lift))
    np.testing.assert_allclose(high.attention, low.attention, rtol=1e-7, atol=0)
    rates = np.exp(low.margin) + np.exp(-lift)
    integral = cumulative_simpson(rates, x=clock, initial=0.0) + np.exp(-lift)
    np.testing.assert_allclose(high.log_time[1:], lift + np.log(integral[1:]), rtol=1e-9, atol=1e-8)
    assert high.log_time[0] == 0.0
