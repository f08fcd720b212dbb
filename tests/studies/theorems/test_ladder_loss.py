"""The loss at all positions, its gradient and its Hessian: against autograd through the model of the trained arms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.functional import hessian
from torch.func import functional_call

from joma.models import OneLayer
from joma.models.one_layer_config import OneLayerConfig
from joma.studies.surprisal import expected_surprisal
from joma.studies.theorems.ladder_loss import FreeLogits, NextTokenLoss, ProductLogits


def drawn(seed, *, count=3, samples=6, positions=4, scale=1.0):
    """Return tokens [sample, position] and targets; rows that have seen the same have the same target."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(count, size=(samples, positions))
    seen = (tokens[..., None] == np.arange(count)).cumsum(axis=1)
    scores = np.sin(seen @ generator.normal(size=(count, count)) * scale)
    return tokens, np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("parts", [FreeLogits, ProductLogits])
@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 3.0))
def test_gradient_and_hessian_are_those_of_the_model(parts, seed, scale):
    tokens, target = drawn(seed)
    objective = parts(NextTokenLoss(tokens, target))
    config = OneLayerConfig(tokens=3, outputs=3, positions="all")
    model = OneLayer(config, generators=[torch.Generator().manual_seed(0)])
    state = scale * np.random.default_rng(seed + 1).normal(size=9 * len(objective.names))

    def loss(vector):
        w, *logits = vector.view(-1, 1, 3, 3)
        z = logits[0] if parts is FreeLogits else logits[0] @ logits[1].mT
        outputs = functional_call(model, {"w": w, "z": z}, torch.tensor(tokens)[None])
        return expected_surprisal(outputs, torch.tensor(target)[None]).mean()

    vector = torch.tensor(state, requires_grad=True)
    value = loss(vector)
    (slope,) = torch.autograd.grad(value, vector)
    measured, gradient = objective.gradient(state)
    assert measured == pytest.approx(value.item(), rel=1e-12)
    np.testing.assert_allclose(gradient, slope, atol=1e-12 * (1 + scale))
    np.testing.assert_allclose(objective.hessian(state), hessian(loss, vector), atol=1e-12 * (1 + scale) ** 2)


def test_equal_rows_are_one_row():
    tokens, target = drawn(0)
    once, twice = NextTokenLoss(tokens, target), NextTokenLoss(np.tile(tokens, (2, 1)), np.tile(target, (2, 1, 1)))
    assert sum(len(rows.x) for rows in once.rows) < tokens.size
    assert sum(rows.weight.sum() for rows in once.rows) == pytest.approx(1.0)
    for first, second in zip(once.rows, twice.rows, strict=True):
        np.testing.assert_array_equal(first.x, second.x)
        np.testing.assert_allclose(first.weight, second.weight)


def test_rows_of_equal_frequencies_and_other_counts_differ():
    """A token alone and the same token twice have the same frequencies, and other probabilities of the next token."""
    target = np.array([[[0.5, 0.5], [0.9, 0.1]]])
    loss = NextTokenLoss(np.array([[0, 0]]), target)
    (rows,) = loss.rows
    np.testing.assert_array_equal(rows.x, [[1.0, 0.0], [1.0, 0.0]])
    np.testing.assert_array_equal(rows.target, target[0])


def test_logits_of_any_size_give_finite_derivatives():
    tokens, target = drawn(1)
    objective = FreeLogits(NextTokenLoss(tokens, target))
    state = np.concatenate([np.ones(9), 1e4 * np.random.default_rng(2).normal(size=9)])
    loss, gradient = objective.gradient(state)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert np.isfinite(objective.hessian(state)).all()
