"""The first token of each row's own sequence, and distances inside it, against each sequence measured alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from joma.probes.attention_call import AttentionCall
from joma.probes.summary import summary_rows
from joma.watch import attention, sequence_starts
from joma.watch.flash import flash_call, packed_places
from joma.watch.flex import flex_call
from tiny_models import random_normal


class Attend(nn.Module):
    """Attention whose mask has a name that says nothing; the other arguments say something to the watcher alone."""

    def __init__(self, compute: Callable[[Tensor, Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        shown: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        del attention_mask, position_ids
        return self.compute(query, key, shown)


def by_sdpa(query: Tensor, key: Tensor, shown: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key, attn_mask=shown)


def by_bias(query: Tensor, key: Tensor, shown: Tensor) -> Tensor:
    return by_sdpa(query, key, torch.where(shown, 0.0, torch.finfo(torch.float32).min))


def by_softmax(query: Tensor, key: Tensor, shown: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~shown, -1e9).softmax(-1) @ key


def sequence(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def packed(lengths: list[int], window: int, *, causal: bool) -> Tensor:
    """Return what sequences in a row show: keys of the own sequence, not after the query if causal, in a window."""
    number, position = sequence(lengths), torch.arange(sum(lengths))
    ahead = position - position[:, None]
    return (number == number[:, None]) & (ahead.abs() < window) & ((ahead <= 0) | (not causal))


def expected(query: Tensor, key: Tensor, shown: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Return the weight on the first token and the distance, of each sequence alone."""
    parts: dict[str, list[Tensor]] = {"sink_mass": [], "distance": []}
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for start, stop in zip([0, *ends], ends, strict=False):
        rows = slice(start, stop)
        logits = query[..., rows, :] @ key[..., rows, :].mT / query.shape[-1] ** 0.5
        p = logits.masked_fill(~shown[rows, rows], -torch.inf).softmax(-1)
        position = torch.arange(stop - start)
        parts["sink_mass"].append(p[..., 0])
        parts["distance"].append((p * (position - position[:, None]).abs()).sum(-1))
    return {name: torch.cat(values, -1) for name, values in parts.items()}


def recorded(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, Tensor]:
    with torch.no_grad(), attention(model, measures=("sink_mass", "distance"), reduce="none", rows="all") as recording:
        model(*inputs, **options)
    data = recording.dataset()
    return {str(name): torch.as_tensor(values.values[0, 0]).float() for name, values in data.data_vars.items()}


@pytest.mark.parametrize("compute", [by_sdpa, by_bias, by_softmax], ids=lambda compute: compute.__name__)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([2, 99]), st.booleans(), st.booleans())
def test_packed_sequences_by_what_attention_shows(
    compute: Callable, lengths: list[int], window: int, causal: bool, broadcast: bool
) -> None:
    shown = packed(lengths, window, causal=causal)
    query, key = (2 * random_normal(2, 3, sum(lengths), 4, seed=seed) for seed in (0, 1))
    mask = shown if broadcast else shown.expand(2, 1, -1, -1)
    torch.testing.assert_close(
        recorded(Attend(compute), query, key, mask), expected(query, key, shown, lengths), atol=2e-6, rtol=1e-5
    )


def test_position_ids_count_beside_a_mask_that_shows_every_token() -> None:
    lengths = [3, 1, 4]
    shown, query = packed(lengths, 99, causal=True), random_normal(1, 2, 8, 4)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    values = recorded(Attend(by_sdpa), query, query, shown, torch.ones(1, 8), positions)
    torch.testing.assert_close(values, expected(query, query, shown, lengths), atol=2e-6, rtol=1e-5)


def test_padding_on_the_left_by_what_attention_shows() -> None:
    """Transformers lets padded queries see all keys, so that no row is empty."""
    padding, query = torch.tensor([2, 0]), random_normal(2, 3, 6, 4)
    real = torch.arange(6) >= padding[:, None]
    shown = (real[:, None] & torch.ones(6, 6, dtype=torch.bool).tril()) | ~real[..., None]
    values = recorded(Attend(by_sdpa), query, query, shown[:, None])["sink_mass"]
    p = (query @ query.mT / 2).masked_fill(~shown[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(values[0, :, 2:], p[0, :, 2:, 2])
    torch.testing.assert_close(values[1], p[1, :, :, 0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_documents_of_flex_attention() -> None:
    lengths, query = [3, 1, 4], random_normal(1, 2, 8, 4)
    number = sequence(lengths)

    def document(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (number[row] == number[column]) & (column <= row)

    shown = create_block_mask(document, 1, None, 8, 8, device="cpu")
    model = Attend(lambda query, key, shown: flex_attention(query, key, key, block_mask=shown))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        values = recorded(model, query, query, shown)
    plain = expected(query, query, packed(lengths, 99, causal=True), lengths)
    torch.testing.assert_close(values, plain, atol=2e-6, rtol=1e-5)


def test_documents_are_read_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    number, query = sequence([3, 1, 4]), random_normal(2, 1, 8, 4)
    monkeypatch.setattr(sequence_starts, "AT_ONCE", 40)

    def document(score: Tensor, _batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.where(number[row] == number[column], score, -torch.inf)

    call = flex_call(query, query, document, None)
    starts = sequence_starts.sequence_starts(call)
    assert starts is not None
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4, 4, 4]] * 2


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([(-1, -1), (1, 1)]),
)
def test_queries_of_packed_sequences_stand_at_the_end_of_their_own_keys(
    sizes: list[tuple[int, int]], causal: bool, window: tuple[int, int]
) -> None:
    """FlashAttention's packed sequences have fewer queries than keys while tokens are generated with a cache."""
    queries, keys = [count for count, _ in sizes], [count + past for count, past in sizes]
    starts = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, keys)]
    query, key = random_normal(1, 2, sum(queries), 4), 2 * random_normal(1, 2, sum(keys), 4, seed=1)
    call = flash_call(query, key, causal=causal, window=window, places=packed_places(starts[0], starts[1]))
    rows = summary_rows(call, ["distance"])["distance"]
    first = sequence_starts.sequence_starts(call)
    parts, first_keys = [], []
    for n, (count, past) in enumerate(sizes):
        row, column = slice(*starts[0][n : n + 2].tolist()), slice(*starts[1][n : n + 2].tolist())
        ahead = torch.arange(count + past) - torch.arange(past, past + count)[:, None]
        shown = ((ahead <= 0) | (not causal)) & ((ahead.abs() <= window[0]) | (window[0] < 0))
        p = (query[..., row, :] @ key[..., column, :].mT / 2).masked_fill(~shown, -torch.inf).softmax(-1)
        parts.append((p * ahead.abs()).sum(-1))
        first_keys += [int(starts[1][n])] * count
    torch.testing.assert_close(rows, torch.cat(parts, -1), atol=2e-6, rtol=1e-5)
    assert (first_keys == [0] * len(first_keys)) if first is None else first.tolist() == [first_keys]


@pytest.mark.parametrize("measure", ["sink_mass", "distance"])
def test_a_key_that_its_row_does_not_see_has_no_weight(measure: str) -> None:
    """Keys after the query weigh 0, rows that see nothing are undefined: in every way to give a call."""
    query, shown = random_normal(1, 2, 4, 4), torch.ones(4, 4, dtype=torch.bool).tril()
    shown[2] = False
    logits = (query @ query.mT / 2).masked_fill(~shown, -torch.inf)

    def visible(score: Tensor, _batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.where(shown[row, column], score, -torch.inf)

    calls = (
        AttentionCall(query, query, mask=shown),
        AttentionCall(logits=logits),
        AttentionCall(query, query, score_mod=visible),
    )
    p = logits.softmax(-1)
    ahead = (torch.arange(4) - torch.arange(4)[:, None]).abs()
    plain = {"sink_mass": p[..., 3], "distance": (p * ahead).sum(-1)}[measure]
    for call in calls:
        for sinks in (3, torch.full((4,), 3)):
            rows = summary_rows(call, [measure], sinks=sinks)[measure]
            torch.testing.assert_close(rows, plain, atol=2e-6, rtol=1e-5, equal_nan=True)
