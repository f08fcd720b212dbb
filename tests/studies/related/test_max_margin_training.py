"""Trained attention: its logits, its losses against plain formulas, and steps of one length."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.studies.related.max_margin_training import (
    LEAST_LOSS,
    AttentionFactors,
    AttentionMatrix,
    AttentionVector,
    descend,
    descend_normalised,
    log_excess,
    logistic_loss,
)
from joma.study import Arms, Context
from joma.theory.token_selection import attention_weights, vector_flow

seeds = st.integers(0, 2**32 - 1)


def draw(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def best_first(*shape):
    g = torch.zeros(*shape, dtype=torch.float64)
    g[..., 0] = 1.0
    return g


@given(seed=seeds)
def test_vectors_of_all_arms_attend_to_the_tokens_of_their_seed(seed):
    x, p = draw(seed, 3, 2, 4, 5), draw(seed, 6, 5)  # two arms of three seeds
    attention = AttentionVector(p)(x).exp().detach()
    for model in range(6):
        np.testing.assert_allclose(attention[model], attention_weights(x[model % 3], p[model]), atol=1e-14)


@given(seed=seeds)
def test_factors_attend_as_their_product_does(seed):
    x, z, k, q = draw(seed, 3, 2, 4, 5), draw(seed, 3, 2, 6), draw(seed, 3, 5, 2), draw(seed + 1, 3, 6, 2)
    factored = AttentionFactors(k, q)
    torch.testing.assert_close(factored.product.detach(), k @ q.mT)
    logits = torch.einsum("sitd,sde,sie->sit", x, k @ q.mT, z)
    for model in (factored, AttentionMatrix(k @ q.mT)):
        torch.testing.assert_close(model(x, z).detach(), torch.log_softmax(logits, dim=-1))


@given(seed=seeds)
def test_the_excess_is_the_loss_above_its_infimum_and_has_the_same_direction(seed):
    logits, g = draw(seed, 1, 3, 4).requires_grad_(), best_first(1, 3, 4)
    loss = logistic_loss(torch.log_softmax(logits, dim=-1), g)
    excess = log_excess(torch.log_softmax(logits, dim=-1), g)
    torch.testing.assert_close(excess.exp() + LEAST_LOSS, loss)
    gradients = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (loss, excess)]
    torch.testing.assert_close(gradients[0], gradients[1] * excess.exp())


def test_the_excess_keeps_its_gradient_where_the_loss_has_lost_it():
    logits, g = torch.tensor([[[60.0, 0.0, 1.0]]], dtype=torch.float64, requires_grad=True), best_first(1, 1, 3)
    (lost,) = torch.autograd.grad(logistic_loss(torch.log_softmax(logits, dim=-1), g).sum(), logits)
    (gradient,) = torch.autograd.grad(log_excess(torch.log_softmax(logits, dim=-1), g).sum(), logits)
    weight = 1 / (1 + np.e)  # of the token with logit 0, among those with logits 0 and 1
    assert float(lost[0, 0, 0]) == 0.0
    np.testing.assert_allclose(gradient[0, 0], [-1.0, weight, 1 - weight], atol=1e-12)


def test_normalised_steps_have_one_length():
    x, g, p0 = draw(0, 2, 3, 4, 12), best_first(2, 3, 4), draw(1, 2, 12)
    options = {"length": 1.0, "steps": 20, "at": range(21), "label": "test"}
    run = descend_normalised(Context((0, 1)), AttentionVector(p0), (x, None, g), **options)
    np.testing.assert_allclose(np.linalg.norm(np.diff(run.vector, axis=1), axis=-1), 0.05, rtol=1e-4)


def test_plain_descent_approaches_the_flow_as_its_rate_falls():
    x, g, p0 = draw(0, 1, 3, 4, 12), draw(2, 2, 3, 4), draw(1, 2, 12)
    arms, distances = Arms("arm", ["first", "second"]), []
    flow = np.stack([vector_flow(x[0], g[arm], p0[arm], [0.0, 20.0])[-1] for arm in range(2)])
    for steps in (100, 200):
        run = descend(Context((0,)), arms, (x, g, p0), rate=20 / steps, steps=steps, at=[0, steps])
        distances.append(np.linalg.norm(run.trained.isel(step=-1, seed=0) - flow, axis=-1))
    np.testing.assert_allclose(distances[0] / distances[1], 2, rtol=0.1)


def test_matrices_record_the_common_axes():
    x, z, g = draw(0, 2, 3, 4, 5), draw(1, 2, 3, 5), best_first(2, 3, 4)
    model = AttentionFactors(*(1e-2 * draw(seed, 2, 5, 5) for seed in (2, 3)))
    run = descend_normalised(Context((0, 1)), model, (x, z, g), length=8.0, steps=400, at=[0, 400], label="k")
    assert run.matrix.dims == ("seed", "step", "row", "column")
    assert float(run.axes_entropy.isel(step=0).min()) > 0.99
    assert float(run.axes_entropy.isel(step=-1).max()) < 0.9
