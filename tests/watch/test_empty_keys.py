"""Distances with a static cache, which has more keys than there are tokens, and with other caches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from joma.probes.attention_call import AttentionCall
from joma.watch import attention
from joma.watch.empty_keys import without_empty_keys
from joma.watch.flex import flex_call
from tiny_models import random_normal
from watch.generation import generate, window_model
from watch.test_rows_models import mask, pad, sequences


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_distances_while_generating_are_those_without_a_cache(cache: str, implementation: str) -> None:
    parts = sequences([3, 6])
    model = window_model(None)
    generation = generate(model, pad(parts, "left"), mask(parts, "left"), cache=cache, implementation=implementation)
    torch.testing.assert_close(*generation.rows("distance"), atol=1e-5, rtol=0)
    torch.testing.assert_close(*generation.rows("sink_mass"), atol=1e-5, rtol=0)


class Cached(nn.Module):
    """Attention of queries to the keys of a cache, of which the last are empty."""

    def forward(self, query: Tensor, cache: Tensor, visible: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, cache, cache, attn_mask=visible)


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["bool", "inf", "1e4"]), st.booleans())
def test_queries_stand_at_the_end_of_the_keys_that_are_filled(
    queries: int, past: int, empty: int, kind: str, later: bool
) -> None:
    """The position of a query is its number after the `past` keys; several may see keys after them (`later`)."""
    keys = past + queries + empty
    query, key = random_normal(2, 1, queries, 4), 3 * random_normal(2, 1, keys, 4, seed=1)
    position = torch.arange(past, past + queries)
    visible = torch.arange(keys) < past + queries if later else torch.arange(keys) <= position[:, None]
    visible = visible.expand(queries, keys)
    bias = visible if kind == "bool" else torch.where(visible, 0.0, -torch.inf if kind == "inf" else -1e4)
    model = Cached()
    with attention(model, measures="distance", reduce="none", rows="all") as recording:
        model(query, key, bias)
    weights = (query @ key.mT / 2).masked_fill(~visible, -torch.inf).softmax(-1)
    expected = (weights * (position[:, None] - torch.arange(keys)).abs()).sum(-1)
    torch.testing.assert_close(recording.passes[0]["Cached"], expected, atol=2e-5, rtol=0)


def two_later(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query + 2


def test_keys_that_a_function_hides_are_left_out() -> None:
    query, key = random_normal(2, 1, 3, 4), random_normal(2, 1, 8, 4, seed=1)
    block = create_block_mask(two_later, 2, 1, 3, 8, device="cpu")
    cut, excess = without_empty_keys(flex_call(query, key, None, block), 8)
    assert isinstance(cut.key, Tensor)
    assert (cut.key.shape[2], excess) == (5, None)
    block = create_block_mask(two_later, 2, 1, 1, 8, device="cpu")
    assert without_empty_keys(flex_call(query[:, :, :1], key, None, block), 8).excess == 5


def test_a_call_without_a_mask_is_left_alone() -> None:
    call = AttentionCall(random_normal(1, 1, 2, 4), random_normal(1, 1, 5, 4))
    assert without_empty_keys(call, 5) == (call, None)
