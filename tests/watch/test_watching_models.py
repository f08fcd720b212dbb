"""`joma.watch.attention` on known models: the entropies of the matrices that they return themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration, ViTConfig, ViTModel

from joma.watch import attention
from tiny_models import (
    DECODERS,
    SIZES,
    TOKENS,
    eager_entropies,
    llama_decoder,
    random_normal,
    textbook_entropy,
    with_large_weights,
)

LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
RIGHT_PADDED = LEFT_PADDED.flip(1)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("mask", [None, LEFT_PADDED, RIGHT_PADDED], ids=["whole", "left", "right"])
def test_hugging_face_decoders_have_the_entropies_of_their_eager_matrices(family: str, mask: Tensor | None) -> None:
    model, names = DECODERS[family]()
    with_large_weights(model)
    inputs = {"input_ids": TOKENS} if mask is None else {"input_ids": TOKENS, "attention_mask": mask}
    plain = model(**inputs).logits
    with attention(model, reduce="none") as recording:
        inside = model(**inputs).logits
    assert torch.equal(inside, plain)
    assert torch.equal(model(**inputs).logits, plain)
    (entropies,) = recording.passes
    expected = eager_entropies(model, names, **inputs)
    assert list(entropies) == list(expected)
    actual = torch.ones_like(TOKENS) if mask is None else mask
    for layer, values in expected.items():
        torch.testing.assert_close(
            entropies[layer].transpose(1, 2)[actual.bool()], values.transpose(1, 2)[actual.bool()], atol=2e-5, rtol=0
        )
    assert min(values.std() for values in expected.values()) > 0.1


@pytest.mark.parametrize("family", DECODERS)
def test_means_are_over_the_selected_rows(family: str) -> None:
    model, names = DECODERS[family]()
    with_large_weights(model)
    inputs = {"input_ids": TOKENS, "attention_mask": RIGHT_PADDED}
    with attention(model, rows=RIGHT_PADDED) as recording, torch.no_grad():
        model(**inputs)
    for layer, values in eager_entropies(model, names, **inputs).items():
        rows = values.transpose(1, 2)[RIGHT_PADDED.bool()]
        mean = torch.as_tensor(recording.entropy.sel(layer=layer).values[0])
        torch.testing.assert_close(mean, rows.double().mean(0), atol=2e-5, rtol=0)
        tokens = torch.as_tensor(recording.effective_tokens.sel(layer=layer).values[0])
        torch.testing.assert_close(tokens, rows.double().exp().mean(0), atol=1e-4, rtol=0)


def test_a_vision_transformer_and_an_encoder_attend_to_all_positions() -> None:
    vit = ViTModel(ViTConfig(image_size=8, patch_size=4, num_channels=1, **SIZES), add_pooling_layer=False)
    bert = BertModel(BertConfig(vocab_size=10, max_position_embeddings=16, **SIZES), add_pooling_layer=False)
    image = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for model, inputs in ((vit, {"pixel_values": image}), (bert, {"input_ids": TOKENS, "attention_mask": LEFT_PADDED})):
        with_large_weights(model)
        plain = model(**inputs).last_hidden_state
        with attention(model, reduce="none", rows="all") as recording:
            assert torch.equal(model(**inputs).last_hidden_state, plain)
        expected = eager_entropies(model, "{}", **inputs)
        for entropy, values in zip(recording.passes[0].values(), expected.values(), strict=True):
            torch.testing.assert_close(entropy, values, atol=2e-5, rtol=0)


def test_decoding_with_a_cache_is_one_pass_per_token() -> None:
    model, names = llama_decoder()
    with_large_weights(model)
    with attention(model, reduce="none") as recording, torch.no_grad():
        past = model(input_ids=TOKENS[:, :5], use_cache=True).past_key_values
        model(input_ids=TOKENS[:, 5:6], past_key_values=past)
    expected = eager_entropies(model, names, input_ids=TOKENS[:, :6])
    assert len(recording.passes) == 2
    for layer, values in expected.items():
        torch.testing.assert_close(recording.passes[0][layer], values[:, :, :5], atol=2e-5, rtol=0)
        torch.testing.assert_close(recording.passes[1][layer], values[:, :, 5:], atol=2e-5, rtol=0)
    assert dict(recording.dataset().sizes) == {"pass": 2, "layer": 2, "batch": 2, "head": 4, "query": 5}
    assert recording.entropy[1, :, :, :, 1:].isnull().all()
    assert recording.longest == 6


def test_encoder_and_decoder_lengths_differ_and_cross_attention_is_named() -> None:
    config = T5Config(
        vocab_size=10,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    if model.config._attn_implementation != "sdpa":
        pytest.skip("this version of transformers has no SDPA for T5")
    with_large_weights(model)
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :3]}
    with attention(model, reduce="none") as recording, torch.no_grad():
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    expected = [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    assert [name.split(".")[-1] for name in recording.passes[0]] == [
        "SelfAttention",
        "SelfAttention",
        "EncDecAttention",
    ]
    for entropy, matrix in zip(recording.passes[0].values(), expected, strict=True):
        torch.testing.assert_close(entropy, textbook_entropy(matrix), atol=2e-5, rtol=0)


@given(seed=st.integers(0, 2**31), heads=st.sampled_from([1, 2, 4]), weights=st.booleans(), padded=st.booleans())
def test_multihead_attention_with_and_without_weights(seed: int, heads: int, weights: bool, padded: bool) -> None:
    module = nn.MultiheadAttention(8, heads, batch_first=True, add_zero_attn=bool(seed % 2))
    with_large_weights(module).train()
    x, y = random_normal(2, 5, 8, seed=seed), random_normal(2, 7, 8, seed=seed + 1)
    padding = torch.arange(7) >= torch.tensor([[4], [7]]) if padded else None
    plain, matrix = module(x, y, y, key_padding_mask=padding, average_attn_weights=False)
    without_weights, _ = module(x, y, y, key_padding_mask=padding, need_weights=False)
    with attention(module, reduce="none") as recording:
        inside, returned = module(x, y, y, key_padding_mask=padding, need_weights=weights)
    assert torch.equal(inside, plain if weights else without_weights)
    assert (returned is not None) == weights
    torch.testing.assert_close(recording.passes[0]["MultiheadAttention"], textbook_entropy(matrix), atol=2e-5, rtol=0)
