"""LayerNorm and its backward pass against PyTorch, and packed states."""

from __future__ import annotations

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from joma.arguments import InputError
from joma.theory.block_flow import block
from joma.theory.block_parts import (
    WeightedSamples,
    embedding_columns,
    layer_norm,
    layer_norm_backward,
    pack,
    query_indices,
    unpack,
)
from joma.theory.losses import constant
from joma.theory.value_flow import value_block


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e3))
@settings(max_examples=20)
def test_layer_norm_and_its_gradient_are_those_of_pytorch(seed, scale):
    rng = np.random.default_rng(seed)
    f, gradient = scale * rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
    leaf = torch.tensor(f, requires_grad=True)
    expected = functional.layer_norm(leaf, [5])
    expected.backward(torch.tensor(gradient))
    normalised, deviation = layer_norm(f)
    np.testing.assert_allclose(normalised, expected.detach(), rtol=1e-10, atol=1e-12)
    ours = layer_norm_backward(gradient, normalised, deviation)
    np.testing.assert_allclose(ours, leaf.grad, rtol=1e-9, atol=1e-11 / scale)


def test_states_are_packed_and_unpacked():
    parts = [np.arange(6.0).reshape(2, 3), np.empty((0, 4)), np.array([7.0])]
    state = pack(*parts)
    assert state.shape == (7,)
    for part, again in zip(parts, unpack(np.stack([state, -state]), [part.shape for part in parts]), strict=True):
        np.testing.assert_array_equal(again[0], part)
        np.testing.assert_array_equal(again[1], -part)


def test_embeddings_are_split_into_tokens_and_queries():
    embedding = np.arange(15.0).reshape(3, 5)
    context, queries = embedding_columns(embedding, 3, np.array([0, 1]))
    np.testing.assert_array_equal(np.hstack([context, queries]), embedding)
    assert context.shape == (3, 3)


@pytest.mark.parametrize("query", [0.5, [0, 1, 2], 1e300])
def test_bad_queries_are_named(query):
    with pytest.raises(InputError, match="`query`"):
        query_indices(query, samples=2)


def test_both_flows_are_set_up_on_the_same_samples():
    x, weight = [[0.5, 0.5], [0.2, 0.8]], [0.25, 0.75]
    given = {"x": x, "query": [0, 1], "weight": weight}
    block_flow = block("softmax", "tanh", constant(1.0), **given)
    value_flow = value_block("softmax", "tanh", constant(1.0), **given)
    for name in WeightedSamples._fields[2:]:
        np.testing.assert_array_equal(getattr(block_flow, name), getattr(value_flow, name))
    np.testing.assert_array_equal(block_flow.weight, weight)
    np.testing.assert_array_equal(value_block("softmax", "tanh", constant(1.0), x).weight, [0.5, 0.5])


@pytest.mark.parametrize("set_up", [block, value_block])
def test_both_flows_refuse_the_same_samples(set_up, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside the tests
    with pytest.raises(InputError, match="`gradient` must be a function of the outputs, got 3"):
        set_up("softmax", "tanh", 3, [[1.0]])
    with pytest.raises(InputError, match="`x` must be positive somewhere in every sample"):
        set_up("softmax", "tanh", constant(1.0), [[1.0], [0.0]])
    with pytest.raises(InputError, match="`attention` must be one of"):
        set_up("sofmax", "tanh", constant(1.0), [[1.0]])
