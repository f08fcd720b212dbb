"""The layers of `even-pairs`: trained by the loop, against plain gradient descent and against the flow."""

import numpy as np
import pytest
from scipy.special import expit

from joma.studies.related.even_pairs_training import (
    SOLVER,
    Arm,
    WorldConfig,
    arms,
    attention_errors,
    solve,
    targets,
    train,
)
from joma.study import Context
from joma.theory.even_pairs import all_sequences, pair_attention, pair_flow, pair_margins, pair_start

CONFIG = WorldConfig(lengths=(3,), until=100.0, records=60, trained_length=3, rates=(0.1, 0.5), steps=200)


@pytest.fixture(scope="module")
def trained():
    return train(CONFIG, Context((0, 1)))


def descend(task, rate, steps):
    """Train from zero by plain gradient descent in NumPy; return u, the logits and the loss at the end."""
    world = all_sequences(3)
    label, weight = targets(task, world)
    u, logits = np.zeros(world.tokens), np.zeros((world.tokens, world.tokens))
    for _ in range(steps):
        b = pair_attention(world, logits)
        f = b @ u
        g = weight * label * expit(-label * f)
        slope = np.zeros_like(logits)
        np.add.at(slope, world.last, g[:, None] * b * (u - f[:, None]))
        u, logits = u + rate * (g @ b), logits + rate * slope
    return u, logits, float(weight @ np.logaddexp(0.0, -pair_margins(world, label, u, logits)))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_training_from_zero_is_plain_gradient_descent(trained, rate):
    u, logits, loss = descend("pairs", rate, CONFIG.steps)
    end = trained.sel(arm=Arm("pairs", "zero", rate).label).isel(step=-1)
    np.testing.assert_allclose(end.loss, loss, rtol=1e-10)
    np.testing.assert_allclose(end.u_norm, np.linalg.norm(u), rtol=1e-10)
    np.testing.assert_allclose(end.w_norm, np.linalg.norm(logits), rtol=1e-10)


def test_gradient_descent_follows_the_flow(trained):
    flow = solve(CONFIG, 3)
    end = trained.sel(arm="pairs zero 0.1").isel(step=-1, seed=0)
    u_norm = np.interp(0.1 * CONFIG.steps, flow.time, flow.flow_u_norm)
    assert float(end.u_norm) == pytest.approx(u_norm, rel=0.01)


def test_theorem_1_is_that_of_uniform_attention_at_zero():
    """Written out for one query and column at a time, with the mean of uniform attention over all sequences."""
    flow, world = solve(CONFIG, 3), all_sequences(3)
    path = pair_flow(world, world.even_pair).solve([0.0, CONFIG.until], *pair_start(world), solver=SOLVER)
    u, logits = path.v[-1, :, 0], path.z[-1].sum(axis=0)
    uniform = sum(
        weight * present / length
        for weight, present, length in zip(world.weight, world.present, world.length, strict=True)
    )
    predicted = (u**2 - uniform / world.weight.sum() * (u**2).sum()) / 2
    assert float(flow.theorem_1_correlation) == pytest.approx(np.corrcoef(logits, predicted)[0, 1], abs=1e-6)
    error = np.linalg.norm(predicted - logits) / np.linalg.norm(logits)
    assert float(flow.theorem_1_error) == pytest.approx(error, rel=1e-6)


def test_arms_have_their_tasks_and_starts(trained):
    assert trained.arm.values.tolist() == [arm.label for arm in arms(CONFIG)]
    assert trained.task.values.tolist() == ["pairs"] * 4 + ["parity", "chain", "decisions"]
    first = trained.isel(step=0)
    zero = trained.start == "zero"
    assert (first.u_norm.isel(arm=np.flatnonzero(zero)) == 0).all()
    assert (first.u_norm.isel(arm=np.flatnonzero(~zero)) > 0).all()
    assert float(first.loss.sel(arm="pairs zero 0.5")[0]) == pytest.approx(3 * np.log(2))


def test_targets_have_the_labels_and_weights_of_their_task():
    world = all_sequences(3)
    np.testing.assert_array_equal(targets("parity", world)[0], world.even)
    np.testing.assert_array_equal(targets("pairs", world)[1], world.weight)
    np.testing.assert_array_equal(targets("chain", world)[1], world.chain_weight)
    np.testing.assert_array_equal(targets("decisions", world)[1], world.decision_weight)


def test_errors_of_attention_are_those_of_a_loop():
    world = all_sequences(3)
    logits = np.random.default_rng(0).normal(size=(6, 6))
    attention = pair_attention(world, logits)
    even, odd = [], []
    for index in np.flatnonzero(world.length > 1):
        first = attention[index, world.first[index]]
        (even if world.even_pair[index] > 0 else odd).append(first)
    assert attention_errors(world, attention) == pytest.approx((np.mean([1 - first for first in even]), np.mean(odd)))


def test_a_diverged_layer_has_no_accuracy():
    config = WorldConfig(lengths=(2,), trained_length=2, rates=(0.5, 1.7e308), steps=20, records=20)
    trained = train(config, Context((0,)))
    assert np.isnan(trained.accuracy.sel(arm="pairs zero 1.7e+308")).all()
    assert np.isfinite(trained.accuracy.sel(arm="pairs random 0.5")).all()
