"""Attention maps against the whole matrix in float64, and what is kept for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from joma.arguments import InputError, StateError
from joma.memory import OutOfMemory
from joma.probes.attention_call import AttentionCall
from joma.watch.maps import DEFAULT_LIMIT, KeptCalls, attention_maps, kept_calls
from tiny_models import random_normal

LENGTHS = st.integers(1, 6)


def keep_call(call: AttentionCall, limit: int = DEFAULT_LIMIT) -> KeptCalls:
    calls = KeptCalls(limit)
    calls.start_pass()
    calls.keep("layer", call)
    return calls


def matrix(query: Tensor, key: Tensor, mask: Tensor | None, *, causal: bool, softcap: float | None) -> Tensor:
    """Return all weights [batch, head, query, key], by the textbook."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = torch.einsum("bhid,bhjd->bhij", query.double(), key) / query.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.where(mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    if causal:
        logits = logits.where(torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1)


@given(
    seed=st.integers(0, 2**31),
    queries=LENGTHS,
    keys=LENGTHS,
    causal=st.booleans(),
    kind=st.sampled_from(["none", "boolean", "bias"]),
    softcap=st.sampled_from([None, 1.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_window_has_the_weights_of_the_whole_matrix(
    *, seed: int, queries: int, keys: int, causal: bool, kind: str, softcap: float | None, dtype: torch.dtype
) -> None:
    query, key = (random_normal(2, heads, length, 3, seed=seed) for heads, length in ((4, queries), (2, keys)))
    query, key = query.to(dtype), key.to(dtype)
    shown = random_normal(2, 1, queries, keys, seed=seed + 1) > -0.5
    bias = random_normal(2, 1, queries, keys, seed=seed + 2).masked_fill(~shown, -torch.inf)
    mask = {"none": None, "boolean": shown, "bias": bias}[kind]
    call = AttentionCall(query, key, mask, causal, enable_gqa=True, softcap=softcap)
    expected = matrix(query, key, mask, causal=causal, softcap=softcap)
    maps = attention_maps(keep_call(call), "layer")
    assert maps.dims == ("batch", "head", "query", "key")
    np.testing.assert_allclose(maps, expected, atol=1e-12)
    sums = np.nansum(maps, axis=-1)
    assert np.all((np.abs(sums - 1) < 1e-12) | (np.isnan(maps).all("key") & (sums == 0)))
    rows, heads = seed % queries, [3, 0]
    window = attention_maps(keep_call(call), 0, heads, queries=slice(rows, None), keys=range(keys)[-1:])
    np.testing.assert_allclose(window, expected[:, heads, rows:, -1:], atol=1e-12)
    assert (window["head"].values.tolist(), window["query"].values[0], window["key"].values) == (heads, rows, keys - 1)


def test_biases_without_values_in_memory_positions_of_a_score_and_learned_sinks() -> None:
    query, key = random_normal(1, 2, 3, 4), random_normal(1, 2, 5, 4, seed=1)
    scores = (query.double() @ key.double().mT) / 2
    row, column = torch.arange(3)[:, None], torch.arange(5)
    late = attention_maps(keep_call(AttentionCall(query, key, causal_lower_right(3, 5))), "layer", queries=[2, 0])
    expected = scores.where(column <= row + 2, -torch.inf).softmax(-1)
    np.testing.assert_allclose(late, expected[:, :, [2, 0]], atol=1e-12)
    early = attention_maps(keep_call(AttentionCall(query, key, causal_upper_left(3, 5))), "layer")
    np.testing.assert_allclose(early, scores.where(column <= row, -torch.inf).softmax(-1), atol=1e-12)
    slopes = AttentionCall(query, key, score_mod=lambda score, _, h, i, j: score - (h + 1) * (i - j) ** 2)
    expected = (scores - torch.tensor([[[1.0]], [[2.0]]]) * (row - column) ** 2).softmax(-1)
    np.testing.assert_allclose(attention_maps(keep_call(slopes), "layer", 1), expected[:, [1]], atol=1e-6)
    sinks = torch.tensor([0.5, -1.0])
    weights = attention_maps(keep_call(AttentionCall(query, key, sink_logits=sinks)), "layer")
    exponentials = scores.exp()
    expected = exponentials / (exponentials.sum(-1, keepdim=True) + sinks.double().exp()[:, None, None])
    np.testing.assert_allclose(weights, expected, atol=1e-12)


def test_logits_and_tensors_of_two_three_and_five_axes() -> None:
    logits = random_normal(2, 3, 4, 5).masked_fill(torch.arange(5) > 3, torch.finfo(torch.float32).min)
    maps = attention_maps(keep_call(AttentionCall(logits=logits)), "layer", 2)
    np.testing.assert_allclose(maps, logits.double().softmax(-1)[:, [2]], atol=1e-12)
    assert (maps.isel(key=4) == 0).all()
    five = random_normal(2, 3, 2, 4, 6)
    weights = matrix(five.flatten(0, 1), five.flatten(0, 1), None, causal=False, softcap=None)
    np.testing.assert_allclose(attention_maps(keep_call(AttentionCall(five, five)), "layer"), weights, atol=1e-12)
    three = five[0, 0]
    weights = matrix(three[:, None], three[:, None], None, causal=False, softcap=None)
    np.testing.assert_allclose(attention_maps(keep_call(AttentionCall(three, three)), "layer"), weights, atol=1e-12)
    assert attention_maps(keep_call(AttentionCall(three[0], three[0])), "layer").shape == (1, 1, 4, 4)


def test_what_is_kept_is_a_copy_without_gradients_and_without_repetition() -> None:
    query = torch.zeros(1, 1, 2, 4, requires_grad=True)
    key = torch.ones(1, 1, 3, 4)
    mask = torch.tensor([True, True, False]).expand(1, 1, 2, 3)
    calls = keep_call(AttentionCall(query, key, mask), limit=(8 + 12) * 4 + 3)
    key.add_(torch.arange(3.0)[:, None])
    mask[0, 0, 0, 1].fill_(False)
    maps = attention_maps(calls, "layer")
    np.testing.assert_allclose(maps.values[0, 0], [[0.5, 0.5, 0.0]] * 2)
    _, call = calls.call("layer")
    assert not call.query.requires_grad
    assert call.mask.shape == (1, 1, 2, 3)
    assert call.mask.untyped_storage().nbytes() == 3


def test_layers_that_do_not_fit_are_named_with_the_size_that_would_do() -> None:
    call = AttentionCall(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))  # 256 bytes
    calls = KeptCalls(512)
    for layer in ("first", "second", "third"):
        calls.keep(layer, call)
    assert attention_maps(calls, "second").shape == (1, 1, 4, 4)
    with pytest.raises(InputError, match=r"'third' did not fit into; watch with maps=768 to keep all layers"):
        attention_maps(calls, -1)
    calls.start_pass()
    calls.keep("third", call)
    assert float(attention_maps(calls, 0)[0, 0, 0, 0]) == pytest.approx(0.25)
    with pytest.raises(InputError, match="`layer` must be"):
        attention_maps(calls, "secnd")
    with pytest.raises(InputError, match="`layer` must be"):
        attention_maps(calls, 1)


def test_maps_are_off_by_default_and_the_size_may_be_given() -> None:
    assert kept_calls(False) is None
    assert (kept_calls(True) or KeptCalls(0)).limit == DEFAULT_LIMIT
    assert (kept_calls(1000) or KeptCalls(0)).limit == 1000
    with pytest.raises(InputError, match="`maps` must be True, False or a number of bytes, got 'yes'"):
        kept_calls("yes")
    with pytest.raises(StateError, match="maps=True"):
        attention_maps(None, 0)
    with pytest.raises(StateError, match="has no forward pass"):
        attention_maps(KeptCalls(1), 0)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"head": 2}, "head"), ({"queries": slice(9, 10)}, "queries"), ({"keys": [-4]}, "keys"), ({"keys": 1.5}, "keys")],
)
def test_windows_outside_of_the_attention_are_refused(options: dict[str, Any], name: str) -> None:
    calls = keep_call(AttentionCall(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)))
    with pytest.raises(InputError, match=f"`{name}` must"):
        attention_maps(calls, "layer", **options)


def test_a_map_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = keep_call(AttentionCall(torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 64, 4)))
    monkeypatch.setattr("joma.memory.available", lambda: 100_000)
    with pytest.raises(OutOfMemory, match="choose a window, such as queries="):
        attention_maps(calls, "layer")
    assert attention_maps(calls, "layer", 0, queries=slice(0, 4)).shape == (1, 1, 4, 64)


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + number) for number in ids)


def test_tokens_become_coordinates() -> None:
    calls = keep_call(AttentionCall(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4)))
    words = ["The", " cat", "."]
    maps = attention_maps(calls, "layer", tokens=words, queries=[2], keys=slice(1, None))
    assert maps.query_token.values.tolist() == ["."]
    assert maps.key_token.values.tolist() == [" cat", "."]
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    for tokens in (ids, ids.tolist(), {"input_ids": ids}):
        maps = attention_maps(calls, "layer", tokens=tokens, tokenizer=Tokenizer())
        assert maps.key_token.values.tolist() == [["a", "b", "c"], ["d", "e", "f"]]
        assert maps.key_token.dims == ("batch", "key")
    with pytest.raises(InputError, match="`tokens` must be strings, got numbers"):
        attention_maps(calls, "layer", tokens=ids)
    with pytest.raises(InputError, match="`tokens` must be a list of strings or of token numbers"):
        attention_maps(calls, "layer", tokens=slice(0, 2))
    with pytest.raises(InputError, match="`tokens` must be 3 tokens, for one or all of 2 sequences, got 1 of 2 tokens"):
        attention_maps(calls, "layer", tokens=["a", "b"])


def test_tokens_of_a_cache_and_of_cross_attention() -> None:
    calls = keep_call(AttentionCall(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)))
    maps = attention_maps(calls, "layer", tokens=["a", "b", "c"])  # the queries are the last of the keys
    assert (maps.query_token.values.tolist(), maps.key_token.values.tolist()) == (["b", "c"], ["a", "b", "c"])
    maps = attention_maps(calls, "layer", tokens=["x", "y"], key_tokens=["a", "b", "c"])
    assert (maps.query_token.values.tolist(), maps.key_token.values.tolist()) == (["x", "y"], ["a", "b", "c"])
    assert "key_token" not in attention_maps(calls, "layer", tokens=["x", "y"]).coords


def test_the_output_of_a_fast_tokenizer_has_its_strings() -> None:
    from tokenizers import Tokenizer as Trained
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    trained = Trained(WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    trained.pre_tokenizer = Whitespace()
    batch = PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="[UNK]")(["the cat dog", "cat cat the"])
    calls = keep_call(AttentionCall(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4)))
    maps = attention_maps(calls, "layer", tokens=batch)
    assert maps.key_token.values.tolist() == [["the", "cat", "[UNK]"], ["cat", "cat", "the"]]
