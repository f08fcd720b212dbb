"""LayerNorm and its backward pass against PyTorch, and packed states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from joma.arguments import InputError
from joma.theory.block_parts import embedding_columns, layer_norm, layer_norm_backward, pack, query_indices, unpack


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
