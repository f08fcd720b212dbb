"""Heads and sequences in one axis: what the modules were called with says which, and what it does not say is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from joma.watch import HeadsUnknown, attention
from joma.watch.merged_heads import merged_heads
from tiny_models import random_normal, textbook_entropy

LENGTH, WIDTH = 5, 8


def by_softmax(query: Tensor, key: Tensor) -> Tensor:
    return torch.bmm((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1), key)


def by_sdpa(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key)


def by_sdpa_with_a_mask(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key, attn_mask=torch.zeros(len(query), 1, LENGTH))


class Attend(nn.Module):
    """Attention of `heads` heads, all in the first axis; its input has another name than usual."""

    def __init__(self, compute: Any, heads: int, *, axis: int = 0) -> None:
        super().__init__()
        self.compute, self.heads, self.axis = compute, heads, axis

    def split(self, states: Tensor) -> Tensor:
        """Return [sequence · head, position, dim]."""
        states = states.movedim(self.axis, 0) if states.ndim == 3 else states[None]
        return states.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, states: Any) -> Tensor:
        tensor = states.tensor if isinstance(states, SimpleNamespace) else states
        heads = self.split(tensor)
        return self.compute(heads, 2 * heads)


class Model(nn.Module):
    """A model whose configuration says 2 heads, with an attention that has `heads`."""

    def __init__(self, inner: nn.Module, *, heads: int | None = 2) -> None:
        super().__init__()
        self.inner = inner
        if heads is not None:
            self.config = SimpleNamespace(num_attention_heads=heads)

    def forward(self, states: Any) -> Tensor:
        return self.inner(states=states)


def expected(attend: Attend, states: Tensor, heads: int) -> Tensor:
    query = attend.split(states)
    weights = (query @ (2 * query).mT / query.shape[-1] ** 0.5).softmax(-1)
    return textbook_entropy(weights).unflatten(0, (-1, heads))


def recorded(model: nn.Module, states: Any) -> Tensor:
    with torch.no_grad(), attention(model, reduce="none", rows="all") as recording:
        model(states)
    assert recording.heads_unknown == {}
    return recording.passes[0]["inner"]


COMPUTATIONS = [by_softmax, by_sdpa, by_sdpa_with_a_mask]


@pytest.mark.parametrize("compute", COMPUTATIONS, ids=lambda compute: compute.__name__)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([0, 1]))
def test_heads_are_told_from_sequences_by_the_inputs(compute: Any, heads: int, batch: int, axis: int) -> None:
    attend = Attend(compute, heads, axis=axis)
    states = random_normal(batch, LENGTH, WIDTH).movedim(0, axis)
    rows = recorded(Model(attend), states)
    torch.testing.assert_close(rows, expected(attend, states, heads), atol=2e-6, rtol=0)


@pytest.mark.parametrize("compute", [by_softmax, by_sdpa])
def test_one_head_inside_a_model_of_several_has_sequences_first(compute: Any) -> None:
    """The attention itself does not say how many heads it has, and is called by keyword."""
    attend = Attend(compute, 1)
    del attend.heads
    attend.split = lambda states: states  # type: ignore[method-assign]
    states = random_normal(4, LENGTH, WIDTH)
    torch.testing.assert_close(recorded(Model(attend), states), expected(attend, states, 1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("compute", [by_softmax, by_sdpa])
def test_a_sequence_without_a_batch_has_heads_first(compute: Any) -> None:
    attend, states = Attend(compute, 2), random_normal(LENGTH, WIDTH)
    torch.testing.assert_close(recorded(Model(attend), states), expected(attend, states, 2), atol=2e-6, rtol=0)


@pytest.mark.parametrize("compute", [by_softmax, by_sdpa])
def test_heads_that_are_merged_outside_are_known_from_there(compute: Any) -> None:
    class Product(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return compute(query, key)

    attend = Attend(Product(), 2)
    states = random_normal(3, LENGTH, WIDTH)
    with attention(Model(attend), reduce="none", rows="all") as recording:
        Model(attend)(states)
        attend(states)
    (rows,) = recording.passes[-1].values()
    torch.testing.assert_close(rows, expected(attend, states, 2), atol=2e-6, rtol=0)


@pytest.mark.parametrize("compute", [by_softmax, by_sdpa])
def test_what_no_argument_says_is_named_and_never_called_heads(compute: Any) -> None:
    attend, states = Attend(compute, 2), random_normal(3, LENGTH, WIDTH)
    model = Model(attend)
    context = attention(model, reduce="none", rows="all")
    recording = context.__enter__()
    with torch.no_grad():
        model(SimpleNamespace(tensor=states))
    with pytest.warns(HeadsUnknown, match="heads and sequences are not told apart in inner .*: recorded as one head"):
        context.__exit__(None, None, None)
    assert list(recording.heads_unknown) == ["inner"]
    torch.testing.assert_close(recording.passes[0]["inner"], expected(attend, states, 1), atol=2e-6, rtol=0)


def test_a_module_without_a_number_of_heads_has_sequences_first_if_its_inputs_have_as_many() -> None:
    states = torch.ones(6, LENGTH, WIDTH)
    assert merged_heads([nn.Identity()], [states], (6, LENGTH, LENGTH)) == 1
    assert merged_heads([nn.Identity()], [states[:3]], (6, LENGTH, LENGTH)) is None
    assert merged_heads([nn.Identity()], [{"states": [states]}], (6, LENGTH, LENGTH)) == 1
