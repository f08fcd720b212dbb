"""The flows of `polarise`: against plain integration of the model's own equations, without the block."""

import numpy as np
import pytest
from scipy.special import entr, expit, softmax

from joma.studies.related.polarise_flows import (
    FlowConfig,
    draw,
    grid,
    orbit_entropy,
    solve_constant,
    solve_losses,
    solve_rates,
    solve_targets,
)
from joma.theory.block_parts import pack, unpack
from joma.theory.integration import integrate

CONFIG = FlowConfig(tokens=(3,), records=12, until=30.0, loss_tokens=3, targets=(1.0, 8.0), target_tokens=4)


def plain(start, gradient, times):
    """Integrate V̇_j = σ_j g, ȧ_j = σ_j (V_j − y) · g and return values and logits at the times."""
    shapes = [start.values.shape, start.logits.shape]

    def rhs(_, state):
        v, a = unpack(state, shapes)
        sigma = softmax(a)
        y = sigma @ v
        g = gradient(y)
        return pack(np.outer(sigma, g), sigma * ((v - y) @ g))

    return unpack(integrate(rhs, pack(start.values, start.logits), times).states, shapes)


@pytest.fixture
def start():
    return draw(np.random.default_rng(0), 3, CONFIG.dim, norm=CONFIG.norm, start=CONFIG.start)


def test_a_start_has_the_size_and_the_direction_that_it_says(start):
    assert np.linalg.norm(start.c) == pytest.approx(CONFIG.norm)
    np.testing.assert_allclose(start.scores, [value @ start.c for value in start.values])


def test_the_losses_are_those_of_the_plain_equations(start):
    solved = solve_losses(CONFIG, start)
    slopes = {"constant": np.ones_like, "logistic": lambda m: expit(-m), "square": lambda m: CONFIG.margin - m}
    for loss, slope in slopes.items():
        v, a = plain(start, lambda y, slope=slope: slope(y @ start.c) * start.c, grid(CONFIG))
        attention = softmax(a, axis=-1)
        np.testing.assert_allclose(solved.entropy.sel(loss=loss), entr(attention).sum(axis=-1), atol=1e-6)
        np.testing.assert_allclose(solved.margin.sel(loss=loss), (attention * (v @ start.c)).sum(axis=-1), atol=1e-5)


def test_the_constant_gradient_is_that_of_the_plain_equations():
    solved = solve_constant(CONFIG, np.random.default_rng(3))
    start = draw(np.random.default_rng(3), 3, CONFIG.dim, norm=CONFIG.norm, start=CONFIG.start)
    _, a = plain(start, lambda _: start.c, grid(CONFIG))
    np.testing.assert_allclose(solved.error.sel(tokens=3), 1 - softmax(a, axis=-1).max(axis=-1), atol=1e-7)


def test_targets_are_reached_at_the_entropy_of_the_plain_equations():
    solved = solve_targets(CONFIG, np.random.default_rng(1))
    start = draw(np.random.default_rng(1), 4, CONFIG.dim, norm=1.0, start=CONFIG.target_start)
    start = start._replace(logits=np.zeros(4))
    assert float(solved.final_distance.max()) < 1e-6
    for length in CONFIG.targets:
        _, a = plain(start, lambda y, length=length: length * start.c - y, np.array([300.0]))
        entropy = entr(softmax(a[-1])).sum()
        assert float(solved.final_entropy.sel(target=length)) == pytest.approx(entropy, abs=1e-5)


def test_values_along_the_target_end_exactly_where_the_orbit_says():
    """The premise of the prediction: with values along y* the gradient stays along y*."""
    start = draw(np.random.default_rng(2), 4, 3, norm=5.0, start=0.3)
    along = start._replace(values=np.outer(start.values[:, 0], start.c))
    _, a = plain(along, lambda y: along.c - y, np.array([300.0]))
    expected = orbit_entropy(along, np.array([25.0]))
    np.testing.assert_allclose(entr(softmax(a[-1])).sum(), expected[0], atol=1e-7)


def test_margins_may_come_in_any_order(start):
    margins = np.array([3.0, 1.0, 2.0, 1.0])
    np.testing.assert_array_equal(orbit_entropy(start, margins)[[1, 2, 0]], orbit_entropy(start, np.sort(margins)[1:]))


def test_rates_begin_at_the_same_logits(start):
    solved = solve_rates(CONFIG, start).isel(point=0)
    assert float(solved.log_time) == 0.0
    winners = {name: float(solved[name]) for name in ("trained_gap", "fixed_gap")}
    possible = [start.logits[token] - np.delete(start.logits, token).mean() for token in range(3)]
    for name, gap in winners.items():
        assert min(abs(gap - value) for value in possible) < 1e-9, name
