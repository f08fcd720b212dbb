"""The data-free laws of a head: their flow with weight decay, SGD's steps counted by autograd, and each measure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.studies.theorems import value_heads
from joma.studies.theorems.value_heads import (
    ARMS,
    BY_SGD,
    DIMS,
    RUNG,
    HeadArm,
    check_heads,
    flow_factor,
    heads,
    law_measures,
    matrix_from_steps,
    optimiser_of,
    squared_steps,
    terms,
    train_arm,
    trial,
)
from joma.studies.theorems.value_ladder import build_rung, rung_loss
from joma.studies.theorems.value_training import Config, arrays
from joma.study import Context

SMALL = Config(
    classes=3, distinct=3, common=2, queries=2, values=3, head_width=2, hidden=4, samples=6, length=4, batch=2,
    ladder_steps=40, decay=0.1,
)  # fmt: skip
CONTEXT = Context((0, 1))
PAIRS = {"query_key": ("W_Q", "W_K"), "value_output": ("W_V", "W_O")}


def matrix_of(law, weights):
    """Return Δ of stored weights: columns of W_Q, W_K and W_V are dimensions of the head, and so are rows of W_O."""
    first, second = (weights[name] for name in PAIRS[law])
    return first.mT @ first - (second @ second.mT if law == "value_output" else second.mT @ second)


def gradients_of(model, loss, step):
    parameters = dict(model.named_parameters())
    values = torch.autograd.grad(loss(model, torch.tensor(step)).sum(), list(parameters.values()))
    return dict(zip(parameters, values, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_along_the_flow_both_matrices_decay_at_twice_the_weight_decay(decay):
    """The classical Runge-Kutta method on the whole model: LayerNorm, a residual and an MLP stand above the head."""
    model, loss = build_rung(SMALL, CONTEXT, RUNG), rung_loss(SMALL, CONTEXT, RUNG)
    parameters = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def slope(weights):
        for name, weight in weights.items():
            parameters[name].data.copy_(weight)
        return {name: -gradient - decay * weights[name] for name, gradient in gradients_of(model, loss, 0).items()}

    now, h, steps = start, 0.02, 200
    for _ in range(steps):
        first = slope(now)
        second = slope({name: weight + h / 2 * first[name] for name, weight in now.items()})
        third = slope({name: weight + h / 2 * second[name] for name, weight in now.items()})
        fourth = slope({name: weight + h * third[name] for name, weight in now.items()})
        mean = {name: (first[name] + 2 * second[name] + 2 * third[name] + fourth[name]) / 6 for name in now}
        now = {name: weight + h * mean[name] for name, weight in now.items()}
    factor = float(flow_factor(steps, rate=h, decay=decay)[-1])
    assert factor == pytest.approx(np.exp(-2 * decay * h * steps))
    for law, pair in PAIRS.items():
        expected = factor * matrix_of(law, start)
        torch.testing.assert_close(matrix_of(law, now), expected, rtol=0, atol=1e-8)
        assert all((now[name] - factor**0.5 * start[name]).norm() > 1e-3 for name in pair)


@pytest.mark.parametrize("name", ["sgd", "sgd half", "decay"])
def test_the_squares_of_steps_are_those_of_the_gradients(name):
    """Autograd at the recorded weights, on the minibatch of each step."""
    arm, step = ARMS[name], 7
    path, _ = arrays(train_arm(SMALL, CONTEXT, arm))
    model = build_rung(SMALL, CONTEXT, RUNG)
    loss, rate = rung_loss(SMALL, CONTEXT, RUNG, substeps=arm.substeps), arm.rate(SMALL)
    trainings = train_whole(arm, step)
    for parameter, weight in zip(model.parameters(), trainings, strict=True):
        parameter.data.copy_(weight)
    gradients = gradients_of(model, loss, step)
    weights = {weight: path[weight] for weight in DIMS}
    for law in PAIRS:
        added = squared_steps(law, weights, 1 - rate * arm.decay(SMALL))[step]
        torch.testing.assert_close(added, rate**2 * matrix_of(law, gradients), rtol=1e-6, atol=1e-15)


def train_whole(arm, steps):
    """Return all parameters after plain steps of SGD, p − η(g + λp)."""
    model = build_rung(SMALL, CONTEXT, RUNG)
    loss = rung_loss(SMALL, CONTEXT, RUNG, substeps=arm.substeps)
    for step in range(steps):
        gradients = gradients_of(model, loss, step)
        for name, parameter in model.named_parameters():
            parameter.data.sub_(arm.rate(SMALL) * (gradients[name] + arm.decay(SMALL) * parameter.data))
    return [parameter.detach() for parameter in model.parameters()]


def test_each_minibatch_is_the_loss_of_all_its_substeps():
    model = build_rung(SMALL, CONTEXT, RUNG)
    single, double = (rung_loss(SMALL, CONTEXT, RUNG, substeps=substeps) for substeps in (1, 2))
    for step in (6, 7):
        assert torch.equal(double(model, torch.tensor(step)), single(model, torch.tensor(3)))
    assert not torch.equal(single(model, torch.tensor(3)), single(model, torch.tensor(4)))


@pytest.fixture(scope="module")
def small():
    return heads(SMALL, CONTEXT)


def test_squares_of_steps_account_for_sgd_and_not_for_adam(small):
    by_sgd = [name for name, arm in ARMS.items() if arm.optimiser == "sgd"]
    assert set(by_sgd) == {*BY_SGD, "decay"}
    assert float(small.head_residual.sel(head_arm=by_sgd).max()) <= float(small.head_rounding) < 1e-10
    assert float(small.head_residual.isel(ladder_step=-1).sel(head_arm=["adam", "adamw"]).min()) > 1e-3


@pytest.mark.parametrize("decayed", [False, True])
def test_half_the_learning_rate_halves_the_drift(decayed):
    """From a constant matrix, or with weight decay from e^{−2λt} Δ(0)."""
    drifts = [
        trial(SMALL, CONTEXT, HeadArm(decayed=decayed, substeps=substeps)).head_drift_decayed.isel(ladder_step=-1)
        for substeps in (8, 16)
    ]
    np.testing.assert_allclose(drifts[1] / drifts[0], 0.5, atol=0.05)


def test_the_measures_are_those_of_the_definitions(small):
    arm, config = ARMS["decay"], SMALL
    path, finite = arrays(train_arm(config, CONTEXT, arm))
    assert finite.all()
    rate, step = arm.rate(config), config.ladder_steps
    for law, (first, second) in PAIRS.items():
        run = small.sel(head_arm="decay", head_law=law, ladder_step=step)
        for seed in (0, 1):
            left, left_start = (path[first][when, seed].T @ path[first][when, seed] for when in (step, 0))
            columns = [path[second][when, seed] for when in (step, 0)]
            columns = [weight.T for weight in columns] if law == "value_output" else columns
            right, right_start = (weight.T @ weight for weight in columns)
            for name, factor in {"drift": 1.0, "drift_decayed": np.exp(-2 * config.decay * rate * step)}.items():
                moved, other = left - factor * left_start, right - factor * right_start
                expected = np.linalg.norm(moved - other) / (np.linalg.norm(moved) + np.linalg.norm(other))
                assert float(run[f"head_{name}"].sel(seed=seed)) == pytest.approx(expected)
            order = np.roll(np.arange(len(right)), 1)
            moved, other = left - left_start, (right - right_start)[np.ix_(order, order)]
            expected = np.linalg.norm(moved - other) / (np.linalg.norm(moved) + np.linalg.norm(other))
            assert float(run.head_drift_shifted.sel(seed=seed)) == pytest.approx(expected)
            size = np.linalg.norm(left - right) / np.linalg.norm(left_start - right_start)
            assert float(run.head_size.sel(seed=seed)) == pytest.approx(size)
            assert float(run.head_loss.sel(seed=seed)) == pytest.approx(path["loss"][step, seed])


def test_what_is_shown_of_half_the_learning_rate_is_after_as_many_minibatches(small):
    arm = ARMS["sgd half"]
    path, _ = arrays(train_arm(SMALL, CONTEXT, arm))
    assert len(path["W_Q"]) == 2 * SMALL.ladder_steps + 1
    drift = law_measures("query_key", {name: path[name] for name in DIMS}, rate=arm.rate(SMALL), decay=0.0)["drift"]
    shown = small.head_drift.sel(head_arm="sgd half", head_law="query_key", ladder_step=20).values
    np.testing.assert_allclose(shown, drift[40])


def test_a_gradient_that_breaks_the_law_is_left_over():
    """A step of the queries alone is no step of SGD: what the squares do not count shows in the residual."""
    path, _ = arrays(train_arm(SMALL, CONTEXT, ARMS["sgd"]))
    weights = {name: path[name].copy() for name in DIMS}
    weights["W_Q"][10:] *= 1.001
    left = law_measures("query_key", weights, rate=SMALL.rate, decay=0.0)["residual"]
    assert left[9].max() < 1e-13
    assert left[10:].min() > 1e-5
    torch.testing.assert_close(
        matrix_from_steps("query_key", weights, 1.0)[0], terms("query_key", weights).difference[0]
    )


def test_diverged_seeds_are_nan(monkeypatch):
    monkeypatch.setattr(value_heads, "arrays", lambda trajectory: (arrays(trajectory)[0], np.array([True, False])))
    run = trial(SMALL, CONTEXT, ARMS["sgd"])
    for name in ("head_drift", "head_residual", "head_loss"):
        missing = run[name].isel(ladder_step=-1).isnull()
        assert missing.all([dim for dim in missing.dims if dim != "seed"]).values.tolist() == [False, True]


def test_a_seed_is_the_same_alone_and_among_others(small):
    alone = trial(SMALL, Context((1,)), ARMS["sgd"])
    together = small.sel(head_arm="sgd", seed=1)
    np.testing.assert_allclose(alone.head_drift.sel(seed=1), together.head_drift, rtol=1e-9)


@pytest.mark.parametrize("name", ["rate", "adam_rate", "decay"])
def test_bad_configs_are_named(name):
    with pytest.raises(InputError, match=f"`{name}`"):
        check_heads(replace(SMALL, **{name: -1.0}))


def test_arms_have_labels_and_rates_of_their_own():
    assert len({arm.label for arm in ARMS.values()}) == len(ARMS)
    rates = {name: (optimiser_of(SMALL, arm).rate, optimiser_of(SMALL, arm).weight_decay) for name, arm in ARMS.items()}
    rate, adam = SMALL.rate, SMALL.adam_rate
    expected = {"sgd": (rate, 0), "sgd half": (rate / 2, 0), "decay": (rate, 0.1), "adam": (adam, 0)}
    assert rates == {**expected, "adamw": (adam, 0.1)}
