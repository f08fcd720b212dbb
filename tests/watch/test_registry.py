# ruff: noqa: ARG001 - the signatures are those of transformers
"""transformers' registry of attention functions: FlexAttention, and FlashAttention and hub kernels by a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # noqa: E402

from joma.watch import attention  # noqa: E402
from joma.watch.registry import flash_interface_call, flex_interface_call  # noqa: E402
from tiny_models import TOKENS, eager_entropies, llama_decoder, random_normal, textbook_entropy, with_large_weights  # noqa: E402

PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])


def weights(query: Tensor, key: Tensor, visible: Tensor, scaling: float) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (scaling * query @ key.mT).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)


def stand_in(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    """Compute what FlashAttention computes, from the whole matrix: a softmax that must not be counted again."""
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
    if options.get("sliding_window"):
        visible = visible.triu(key.shape[-2] - query.shape[-2] - options["sliding_window"] + 1)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None].bool()
    positions = options.get("position_ids")
    if positions is not None and bool((positions.diff() != 1).any()):
        sequence = (positions == 0).cumsum(-1)
        visible = visible & (sequence[:, :, None] == sequence[:, None])[:, None]
    p = weights(query, key, visible, options["scaling"])
    return (p @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)).transpose(1, 2), None


@pytest.fixture(params=["flash_attention_2", "org/flash-kernel"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a Llama whose attention is the stand-in."""
    decoder, _ = llama_decoder()
    with_large_weights(decoder)
    monkeypatch.setitem(AttentionInterface._global_mapping, request.param, stand_in)
    decoder.config._attn_implementation_internal = request.param
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(masks._global_mapping, request.param, masks["flash_attention_2"])
    return decoder


INPUTS = {
    "whole": {"input_ids": TOKENS},
    "padded": {"input_ids": TOKENS, "attention_mask": PADDED},
    "packed": {"input_ids": TOKENS[:1], "position_ids": PACKED, "use_cache": False},
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_flash_attention_has_the_entropies_of_eager_attention(model: Any, inputs: dict[str, Any]) -> None:
    eager, names = llama_decoder()
    with_large_weights(eager)
    expected = eager_entropies(eager, names, **inputs)
    with torch.no_grad():
        plain = model(**inputs).logits
        with attention(model, reduce="none") as seen:
            assert torch.equal(model(**inputs).logits, plain)
    rows = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    assert list(seen.passes[0]) == list(expected)
    assert not seen.not_seen
    for layer, values in expected.items():
        entropy = seen.passes[0][layer].transpose(1, 2)[rows]
        torch.testing.assert_close(entropy, values.transpose(1, 2)[rows], atol=2e-5, rtol=0)
    assert "__getitem__" not in vars(AttentionInterface)
    name = model.config._attn_implementation
    assert ALL_ATTENTION_FUNCTIONS[name] is stand_in


def test_decoding_with_a_cache(model: Any) -> None:
    eager, names = llama_decoder()
    with_large_weights(eager)
    expected = eager_entropies(eager, names, input_ids=TOKENS)
    with torch.no_grad(), attention(model, reduce="none") as seen:
        past = model(input_ids=TOKENS[:, :4], use_cache=True).past_key_values
        model(input_ids=TOKENS[:, 4:], past_key_values=past)
    for layer, values in expected.items():
        torch.testing.assert_close(seen.passes[1][layer], values[:, :, 4:], atol=2e-5, rtol=0)


def test_contexts_that_end_in_any_order_restore_the_registry(model: Any) -> None:
    first, second = attention(model), attention(model, reduce="none")
    seen = first.__enter__(), second.__enter__()
    model(input_ids=TOKENS)
    first.__exit__(None, None, None)
    model(input_ids=TOKENS)
    second.__exit__(None, None, None)
    assert [len(recording.passes) for recording in seen] == [1, 2]
    assert all(len(layers) == 2 for recording in seen for layers in recording.passes)
    assert "__getitem__" not in vars(AttentionInterface)


class Module:
    is_causal = True


def test_windows_caps_sinks_and_given_starts() -> None:
    query, key = 2 * random_normal(1, 2, 7, 4), random_normal(1, 2, 7, 4, seed=1)
    call = flash_interface_call(
        Module(), query, key, key, scaling=0.5, sliding_window=3, softcap=2.0, s_aux=torch.tensor([0.5, 1.0])
    )
    assert (call.scale, call.softcap, call.sink_logits.tolist()) == (0.5, 2.0, [0.5, 1.0])
    numbers = torch.meshgrid(*(torch.arange(n) for n in (1, 2, 7, 7)), indexing="ij")
    visible = call.score_mod(torch.zeros(1, 2, 7, 7), *numbers)[0, 0] == 0
    assert torch.equal(visible, torch.ones(7, 7, dtype=torch.bool).tril().triu(-2))
    starts = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    call = flash_interface_call(
        Module(), query, key, key, None, is_causal=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts
    )
    visible = call.score_mod(torch.zeros(1, 2, 7, 7), *numbers)[0, 0] == 0
    assert torch.equal(visible, torch.block_diag(*(torch.ones(n, n) for n in (3, 2, 2))) == 1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("inputs", [INPUTS["whole"], INPUTS["padded"]], ids=["whole", "padded"])
def test_flex_attention_has_the_entropies_of_eager_attention(
    inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncompiled(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **options: Any) -> Tensor:
        return torch.nn.attention.flex_attention.flex_attention(query, key, value, **options)

    def uncompiled_mask(*args: Any, _compile: bool = False, **options: Any) -> Any:
        return torch.nn.attention.flex_attention.create_block_mask(*args, **options)

    monkeypatch.setattr(transformers.masking_utils, "create_block_mask", uncompiled_mask)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(transformers.integrations.flex_attention, "compile_friendly_flex_attention", uncompiled)
    decoder, names = llama_decoder()
    with_large_weights(decoder)
    expected = eager_entropies(decoder, names, **inputs)
    decoder.set_attn_implementation("flex_attention")
    with torch.no_grad():
        plain = decoder(**inputs).logits
        with attention(decoder, reduce="none") as seen:
            assert torch.equal(decoder(**inputs).logits, plain)
    rows = inputs.get("attention_mask", torch.ones_like(TOKENS)).bool()
    for layer, values in expected.items():
        entropy = seen.passes[0][layer].transpose(1, 2)[rows]
        torch.testing.assert_close(entropy, values.transpose(1, 2)[rows], atol=2e-5, rtol=0)


def test_a_bias_of_flex_attention_is_added_to_its_mask() -> None:
    query, key = random_normal(1, 2, 5, 4), random_normal(1, 2, 5, 4, seed=1)
    bias, mask = random_normal(1, 2, 5, 5, seed=2), torch.full((1, 1, 5, 8), -torch.inf).triu(1)
    call = flex_interface_call(Module(), query, key, key, mask, scaling=1.0, position_bias=bias)
    assert torch.equal(call.mask, mask[..., :5] + bias)
    p = (query @ key.mT + call.mask).softmax(-1)
    assert textbook_entropy(p)[0, 0, 0] == 0
