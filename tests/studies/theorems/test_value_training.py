"""Training for the value law: data, measures against autograd, and laws that notice a wrong rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.studies.theorems.value_training import (
    ABOVE,
    BASE,
    LAWS,
    Config,
    ValueSetting,
    arrays,
    build,
    draw_data,
    law_errors,
    law_residual,
    measure,
    mlp_law,
    rounding,
    train,
    trial,
    value_law,
)
from joma.study import Context
from joma.theory import invariants

SMALL = Config(classes=3, distinct=3, common=2, queries=2, values=3, head_width=2, hidden=4, steps=30)
CONTEXT = Context((0, 1))


def backward(model, data):
    model(data.x, data.query).square().mean(dim=(-2, -1)).sum().backward()


def test_every_class_occurs_with_every_query_and_the_label_needs_both():
    data = draw_data(SMALL, CONTEXT, arms=2)
    assert data.x.shape == (4, 6, 5)
    assert data.query.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.label.tolist() == [0, 1, 2, 1, 2, 0]
    torch.testing.assert_close(data.x[:2], data.x[2:])  # an arm has the seeds' data again
    assert not torch.equal(data.x[0], data.x[1])


@pytest.mark.parametrize("attention", ["exp", "softmax"])
def test_the_push_on_the_logits_is_the_gradient_of_free_ones(attention):
    """Where logits are free, −∂loss/∂z is at hand; a model of products with the same logits has the same one."""
    data = draw_data(SMALL, CONTEXT, 1)
    product = build(SMALL, CONTEXT, ValueSetting(attention, "product"))
    free = build(SMALL, CONTEXT, ValueSetting(attention))
    with torch.no_grad():
        free.z.copy_(product.logits)
    for model in (product, free):
        backward(model, data)
    torch.testing.assert_close(measure(product, data.query)["zeta"], -free.z.grad)


def test_the_weights_of_the_mlp_are_what_multiplies_attention():
    """v is ∂(w · f)/∂b, by autograd, with values and without."""
    for setting in (ABOVE["units"], replace(ABOVE["units"], values=False)):
        model = build(SMALL, CONTEXT, setting)
        table = model.U_C.mT if model.W_V is None else model.value_vectors @ model.W_O

        def preactivation(b, table=table, model=model):
            return (b @ table @ model.w)[0]

        b = torch.rand(2, 1, SMALL.tokens, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(preactivation, b)[0, :, 0, 0]
        backward(model, draw_data(SMALL, CONTEXT, 1))
        v = measure(model, draw_data(SMALL, CONTEXT, 1).query)["v"]
        torch.testing.assert_close(v[0].T, jacobian)


@pytest.mark.parametrize("name", LAWS)
def test_a_law_holds_at_its_rates_and_at_no_others(name):
    setting = LAWS[name]
    path, finite = arrays(train(SMALL, CONTEXT, setting).sel(rates="unequal", drop=True))
    b_ref = np.stack([invariants.reference(x) for x in draw_data(SMALL, CONTEXT, 1).x.numpy()])
    right, wrong = (0.6 * SMALL.rate, 1.7 * SMALL.rate), (SMALL.rate, SMALL.rate)
    laws = [value_law(setting.attention, path, rates=rates, b_ref=b_ref) for rates in (right, wrong)]
    every = list(range(SMALL.steps + 1))
    assert law_residual(laws[0], every, finite).max() <= rounding(SMALL, SMALL.steps, rows=6)
    assert law_residual(laws[1], every[-1:], finite).min() > 1e-5
    assert law_errors(laws[1], every[-1:], finite)[1].min() > 0.05


def test_the_law_of_the_mlp_is_that_of_jomas_block():
    path, finite = arrays(train(SMALL, CONTEXT, replace(ABOVE["head"], values=False)).sel(rates="equal", drop=True))
    law = mlp_law(path, kappa=1.0)
    assert law_residual(law, list(range(SMALL.steps + 1)), finite).max() <= rounding(SMALL, SMALL.steps, rows=6)
    by_hand = path["z"][0].sum(axis=1) + 0.5 * ((path["v"][-1] ** 2).sum(-1) - (path["v"][0] ** 2).sum(-1))
    np.testing.assert_allclose(law.predicted[-1], by_hand, rtol=1e-12)


def test_unequal_rates_train_logits_and_values_at_their_rates():
    """The first step of each arm is the gradient times its own rate."""
    trajectory = train(SMALL, CONTEXT, BASE).transpose("rates", "step", ...)
    step = {name: trajectory[name].isel(step=1) - trajectory[name].isel(step=0) for name in ("z", "p")}
    for name, factor in (("z", 0.6), ("p", 1.7)):
        np.testing.assert_allclose(
            step[name].sel(rates="unequal"), factor * step[name].sel(rates="equal"), rtol=1e-9, atol=1e-12
        )


def test_a_diverged_seed_is_nan_and_leaves_the_others_alone():
    trajectory = train(SMALL, CONTEXT, ABOVE["units"]).sel(rates="equal", drop=True)
    broken = trajectory.copy(deep=True)
    broken["z"].loc[{"seed": 1, "step": 5}] = np.inf
    path, finite = arrays(broken)
    assert finite.tolist() == [True, False]
    errors = law_errors(mlp_law(path, kappa=1.0), [0, 10], finite)
    assert np.isnan(errors[..., 1]).all()
    whole, _ = arrays(trajectory)
    np.testing.assert_array_equal(errors[..., 0], law_errors(mlp_law(whole, kappa=1.0), [0, 10], finite)[..., 0])


def test_a_trial_has_the_laws_that_its_setting_allows():
    compared = trial(SMALL, CONTEXT, replace(ABOVE["norm"], values=False))
    assert set(compared.data_vars) == {"mlp", "mlp_residual", "loss"}
    assert set(trial(SMALL, CONTEXT, LAWS["keys exp"]).data_vars) == {"value", "value_residual", "loss"}


def test_the_bound_of_rounding_counts_steps_and_terms():
    assert rounding(SMALL, 10, rows=6) == pytest.approx(np.finfo(float).eps * 10 * (6 + 8 + 6))
