"""Attention in parts: loops over sequences, heads and chunks of queries are named; whole attentions are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from joma.watch import HeadsUnknown, attention
from joma.watch.repeats import Computation, may_be_parts
from tiny_models import random_normal, textbook_entropy

HEADS, LENGTH, WIDTH = 2, 6, 8
Attend = Callable[[Tensor, Tensor], Tensor]


def by_softmax(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ key


def by_sdpa(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key)


def entropy(query: Tensor, key: Tensor) -> Tensor:
    return textbook_entropy((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1))


def split(x: Tensor) -> Tensor:
    """Return [*batch, head, position, dim]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


Parts = Iterator[tuple[Tensor, Tensor]]


def sequences_of_heads(x: Tensor) -> Parts:
    """Return the queries and the keys of each sequence: [head, position, dim]."""
    return ((heads, heads) for heads in split(x))


def sequences_in_a_batch(x: Tensor) -> Parts:
    return ((heads[None], heads[None]) for heads in split(x))


def sequences_of_one_head(x: Tensor) -> Parts:
    return ((states[None], states[None]) for states in x)


def heads_of_sequences(x: Tensor) -> Parts:
    return ((head, head) for head in split(x).unbind(1))


def heads_in_a_batch(x: Tensor) -> Parts:
    return ((head[:, None], head[:, None]) for head in split(x).unbind(1))


def heads_of_each_sequence(x: Tensor) -> Parts:
    return ((head[None], head[None]) for heads in split(x) for head in heads)


def chunks(x: Tensor) -> Parts:
    return ((chunk, split(x)) for chunk in split(x).split(2, dim=2))


def chunks_of_one_head(x: Tensor) -> Parts:
    return ((chunk, x) for chunk in x.split(4, dim=1))


LOOPS = [
    *(sequences_of_heads, sequences_in_a_batch, sequences_of_one_head, heads_of_sequences, heads_in_a_batch),
    *(heads_of_each_sequence, chunks, chunks_of_one_head),
]


class Loop(nn.Module):
    """Attention in parts, in one call of one module; only the states are given, and a table of positions."""

    def __init__(self, parts: Callable[[Tensor], Parts], attend: Attend, heads: int | None) -> None:
        super().__init__()
        self.parts, self.attend = parts, attend
        if heads is not None:
            self.num_heads = heads

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        del positions
        for query, key in self.parts(x):
            self.attend(query, key)
        return x


class Layers(nn.Module):
    """A model of two modules, each called once with a table of positions for all sequences."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, torch.zeros(1, LENGTH, WIDTH))
        return x


@pytest.mark.parametrize("attend", [by_softmax, by_sdpa])
@pytest.mark.parametrize("parts", LOOPS, ids=lambda parts: parts.__name__)
@pytest.mark.parametrize("heads", [None, HEADS])
@pytest.mark.parametrize("batch", [2, 3])
def test_a_loop_over_parts_is_named_once_and_each_entry_is_its_part(
    parts: Callable[[Tensor], Parts], attend: Attend, heads: int | None, batch: int
) -> None:
    model, x = Layers(*(Loop(parts, attend, heads) for _ in range(2))), random_normal(batch, LENGTH, WIDTH)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attention(model, reduce="none", rows="all") as seen:
            for _ in range(2):
                model(x)
    expected = [entropy(query, key) for query, key in parts(x)]
    reason = f"it computes attention {len(expected)} times in one call"
    assert seen.repeats_unknown == {"layers.0": reason, "layers.1": reason}
    (warning,) = caught
    assert warning.category is HeadsUnknown
    for text in (f"in layers.0 and layers.1 ({reason})", "`layers.0[1]` … are separate", "read each entry as the part"):
        assert text in str(warning.message)
    recorded = [values for layer, values in seen.passes[0].items() if layer.startswith("layers.0")]
    for values, part in zip(recorded, expected, strict=True):
        torch.testing.assert_close(values.flatten(), part.flatten(), atol=2e-6, rtol=0)


class Whole(nn.Module):
    """Attention of all heads and sequences, in one call."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return merge(self.attend(split(x), split(x)))


class Twice(Whole):
    """A module that is called twice by its parent, with the same weights."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.layer = Whole(attend)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Functional(Whole):
    """Two layers that are no modules."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Decoder(Whole):
    """Self-attention, and attention to a memory of another length, in one module."""

    def forward(self, x: Tensor) -> Tensor:
        memory = split(x[:, 1:])
        self.attend(split(x), split(x))
        return merge(self.attend(split(x), memory))


class OneHead(Whole):
    """Two attentions of one head, which the module says."""

    num_heads = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x) + self.attend(2 * x, x)


class Windows(Whole):
    """Attention in windows of three positions, then in the whole sequence."""

    def forward(self, x: Tensor) -> Tensor:
        windows = split(x.unflatten(1, (-1, 3)).flatten(0, 1))
        return merge(self.attend(split(x), split(x))) + merge(self.attend(windows, windows)).reshape(x.shape)


WHOLE = {Whole: 1, Twice: 2, Functional: 2, Decoder: 2, OneHead: 2, Windows: 2}


@pytest.mark.parametrize("attend", [by_softmax, by_sdpa])
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("batch", [1, 3])
def test_whole_attentions_in_one_module_are_not_warned_of(kind: type[Whole], attend: Attend, batch: int) -> None:
    x, expected = random_normal(batch, LENGTH, WIDTH), []

    def note(query: Tensor, key: Tensor) -> Tensor:
        expected.append(entropy(query, key).flatten())
        return attend(query, key)

    kind(note)(x)
    model = nn.Sequential(kind(attend))
    with torch.no_grad(), attention(model, reduce="none", rows="all") as seen:
        model(x)
    assert seen.repeats_unknown == {}
    recorded = [values.flatten() for values in seen.passes[0].values()]
    assert len(recorded) == WHOLE[kind]
    for values, entropies in zip(recorded, expected, strict=True):
        torch.testing.assert_close(values, entropies, atol=2e-6, rtol=0)


def test_a_module_whose_layout_is_known_is_not_warned_of() -> None:
    kind = type("CascadedGroupAttention", (Loop,), {})  # one head at a time
    model = Layers(kind(heads_of_sequences, by_softmax, HEADS))
    with torch.no_grad(), attention(model) as seen:
        model(random_normal(2, LENGTH, WIDTH))
    assert list(seen.passes[0]) == ["layers.0", "layers.0[1]"]


def test_heads_that_are_unknown_and_parts_are_one_warning() -> None:
    model = nn.Sequential(Loop(sequences_of_heads, by_softmax, HEADS))
    warned = pytest.warns(HeadsUnknown, match="recorded as one head; attention may be recorded in parts")
    with torch.no_grad(), warned as caught, attention(model) as seen:
        model(random_normal(3, LENGTH, WIDTH))
    assert len(caught) == 1
    assert seen.heads_unknown.keys() > seen.repeats_unknown.keys()


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 6), st.integers(2, 4), st.booleans())
def test_parts_have_fewer_rows_than_the_states(batch: int, heads: int, chunk: int, times: int, channels_first: bool):
    queries, modules = chunk * times, [nn.Identity()]
    states = torch.zeros(batch, heads, chunk, times) if channels_first else torch.zeros(queries, batch, 2)
    whole = [Computation(f"attn[{index}]", batch, heads, queries) for index in range(times)]
    parts = [computation._replace(queries=chunk) for computation in whole]
    single = [computation._replace(heads=1) for computation in whole]
    assert may_be_parts(whole, modules, [states]) is None
    assert may_be_parts(whole[:1], modules, []) is None
    assert may_be_parts(single, modules, [states]) == f"it computes attention {times} times in one call"
    if not channels_first:
        assert may_be_parts(parts, modules, [states]) is not None
        assert may_be_parts(whole, modules, [torch.zeros(queries, 2 * batch, 2), states]) is not None
