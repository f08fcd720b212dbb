"""The gradients that the layer above sends back, against torch's autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from joma.arguments import InputError
from joma.theory.losses import constant, cross_entropy, soft_cross_entropy, squared_error


def as_probabilities(target):
    return torch.softmax(torch.as_tensor(target), dim=1)


LOSSES = {
    "constant": (constant, lambda h, target: -(h * target).sum()),
    "cross entropy": (
        lambda target: cross_entropy(target.argmax(1)),
        lambda h, target: functional.cross_entropy(h, target.argmax(1), reduction="sum"),
    ),
    "soft cross entropy": (
        lambda target: soft_cross_entropy(as_probabilities(target)),
        lambda h, target: functional.cross_entropy(h, as_probabilities(target), reduction="sum"),
    ),
    "squared error": (squared_error, lambda h, target: 0.5 * ((h - target) ** 2).sum()),
}


@pytest.mark.parametrize("name", list(LOSSES))
@given(seed=st.integers(0, 2**32 - 1), samples=st.integers(1, 6), hidden=st.integers(1, 5))
def test_the_gradient_is_that_of_autograd(name, seed, samples, hidden):
    ours, loss = LOSSES[name]
    h, target = np.random.default_rng(seed).normal(size=(2, samples, hidden))
    leaf = torch.tensor(h, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(leaf, torch.tensor(target)), leaf)
    np.testing.assert_allclose(ours(target)(h), -gradient.numpy(), rtol=0, atol=1e-13)


def test_constants_and_targets_broadcast():
    np.testing.assert_array_equal(constant([1.0, 2.0])(np.zeros((3, 2))), [[1.0, 2.0]] * 3)
    np.testing.assert_array_equal(squared_error(1.0)(np.full((2, 2), 0.25)), np.full((2, 2), 0.75))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: squared_error(np.ones((2, 3)))(np.zeros((2, 2))), "`target` must be broadcastable"),
        (lambda: constant(np.ones(3))(np.zeros((2, 2))), "`g` must be broadcastable"),
        (lambda: cross_entropy([0, 2])(np.zeros((2, 2))), "`label` must be 2 labels below 2"),
        (lambda: soft_cross_entropy([[0.5, 0.5]])(np.zeros((2, 2))), "`posterior` must be"),
        (lambda: soft_cross_entropy([[0.5, 0.6]]), "`posterior` must sum to 1"),
        (lambda: cross_entropy([0, 0.5]), "`label` must be a whole number"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
