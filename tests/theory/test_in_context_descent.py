"""Steps of preconditioned gradient descent: against explicit descent on sampled prompts and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory import in_context
from joma.theory.in_context_descent import (
    _loss_gradient,
    best_descent,
    descent_losses,
    sample_covariances,
)

SPECTRUM = np.array([1.6, 1.0, 0.6, 0.3])


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4))
def test_losses_are_those_of_explicit_descent_on_each_task(seed, size, layers):
    """Descend on the prompt's least squares for each basis vector as the task, and sum the squared errors."""
    generator = np.random.default_rng(seed)
    spectrum, x = generator.uniform(0.3, 2.0, size=size), generator.normal(size=(5, size))
    steps = generator.normal(size=(layers, size, size)) / 3
    expected = 0.0
    for task in np.eye(size):
        w = np.zeros(size)
        for step in steps:
            w = w - step @ (x.T @ (x @ w - x @ task)) / len(x)
        expected += spectrum @ (w - task) ** 2 / 2
    assert descent_losses(steps, [x.T @ x / len(x)], spectrum)[0] == pytest.approx(expected, rel=1e-10)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_the_gradient_is_that_of_central_differences(seed, size, layers):
    generator = np.random.default_rng(seed)
    spectrum = generator.uniform(0.3, 2.0, size=size)
    prompts = sample_covariances(spectrum, 4, 7, generator)
    steps = generator.normal(size=(layers, size, size)) / 3
    loss, gradient = _loss_gradient(steps, prompts, spectrum)
    assert loss == pytest.approx(descent_losses(steps, prompts, spectrum).mean(), rel=1e-12)
    for index in np.ndindex(*steps.shape):
        change = np.zeros_like(steps)
        change[index] = 1e-6
        ends = [descent_losses(steps + sign * change, prompts, spectrum).mean() for sign in (1, -1)]
        assert gradient[index] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-6)


def test_one_step_is_the_optimum_of_the_sampled_moments():
    """For one step the loss is quadratic in A, and its minimum solves a linear equation."""
    prompts = sample_covariances(SPECTRUM, 12, 3000, np.random.default_rng(0))
    best = best_descent(1, prompts, SPECTRUM, np.random.default_rng(1))
    mean, square = prompts.mean(axis=0), (prompts @ prompts).mean(axis=0)
    np.testing.assert_allclose(best.steps[0], mean @ np.linalg.inv(square), atol=1e-5)
    gamma = in_context.preconditioner(SPECTRUM, 12)
    np.testing.assert_allclose(best.steps[0].diagonal(), gamma, rtol=0.05)
    losses = descent_losses([np.diag(gamma)], prompts, SPECTRUM)
    assert abs(losses.mean() - in_context.least_loss(SPECTRUM, 12)) < 4 * losses.std() / np.sqrt(len(losses))


def test_more_steps_are_better_and_searches_differ_by_their_order_alone():
    """The steps do not commute: a search that begins with the small step ends at another, slightly higher minimum."""
    prompts = sample_covariances(SPECTRUM, 12, 1000, np.random.default_rng(0))
    best = [best_descent(layers, prompts, SPECTRUM, np.random.default_rng(1), starts=6) for layers in (1, 2, 3)]
    losses = [descent.loss for descent in best]
    assert losses[0] > 1.5 * losses[1] > 1.5**2 * losses[2] > 0
    for descent in best:
        assert descent.slope < 1e-5
        np.testing.assert_allclose(descent.losses, descent.loss, rtol=0.05)
        diagonal = descent.steps * np.eye(4)
        assert abs(descent.steps - diagonal).max() < 0.2 * abs(diagonal).max()


def test_enough_steps_on_one_prompt_leave_no_error():
    best = best_descent(2, [np.diag([1.0, 2.0])], [1.0, 1.0], np.random.default_rng(0))
    assert best.loss < 1e-12


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sample_covariances([1.0], 0, 5, np.random.default_rng(0)), "length"),
        (lambda: descent_losses(np.ones((1, 2, 2)), np.ones((1, 3, 3)), [1.0, 1.0, 1.0]), "steps"),
        (lambda: descent_losses(np.ones((1, 3, 3)), np.ones((1, 2, 2)), [1.0, 1.0, 1.0]), "covariances"),
        (lambda: best_descent(0, np.ones((1, 1, 1)), [1.0], np.random.default_rng(0)), "layers"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        call()
