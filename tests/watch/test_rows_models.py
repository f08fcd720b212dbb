"""Padded and packed batches against the same sequences one by one: the rows that count are the real tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from joma.arguments import InputError
from joma.watch import attention, switches
from tiny_models import DECODERS, SIZES, with_large_weights
from watch.generation import generate, step_by_step, window_model
from watch.tiny_configs import tiny_model

VOCABULARY = 10
LENGTHS = st.lists(st.integers(1, 7), min_size=2, max_size=4)
SIDES = ("right", "left")
Call = tuple[dict[str, Any], list[dict[str, Any]]]  # the arguments of a batch, and those of its sequences one by one


@pytest.fixture(autouse=True)
def _warnings_given_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_warned", {"fast path", "compiled", "from eager"})


def sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Return sequences of random tokens of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def pad(parts: list[Tensor], side: str, value: float = 0) -> Tensor:
    """Return the parts as one batch, padded with `value`."""
    length = max(map(len, parts))
    room = [(0, length - len(part)) if side == "right" else (length - len(part), 0) for part in parts]
    return torch.stack([nn.functional.pad(part, width, value=value) for part, width in zip(parts, room, strict=True)])


def mask(parts: list[Tensor], side: str) -> Tensor:
    return pad([torch.ones(len(part), dtype=torch.long) for part in parts], side)


def means(model: nn.Module, calls: list[dict[str, Any]], **options: Any) -> dict[str, Tensor]:
    """Return the mean [head] of the first measure of each layer over all rows of all calls that are recorded."""
    rows: dict[str, list[Tensor]] = {}
    for call in calls:
        with torch.no_grad(), attention(model, reduce="none", **options) as recording:
            model(**call)
        for layer, entropy in recording.passes[0].items():
            rows.setdefault(layer, []).append(entropy.transpose(0, 1).flatten(1))
    return {layer: torch.cat(parts, dim=1).double().nanmean(1) for layer, parts in rows.items()}


def check(model: nn.Module, call: Call, layers: int, measure: str = "entropy") -> None:
    """The batch has the same mean of a measure by the model's own masks as its sequences alone with all rows."""
    batch, alone = call
    expected = means(model, alone, rows="all", measures=measure)
    padded = means(model, [batch], measures=measure)
    assert len(padded) == layers
    for layer, entropy in expected.items():
        torch.testing.assert_close(padded[layer], entropy, atol=1e-5, rtol=0, msg=layer)


@functools.cache
def decoder(name: str) -> nn.Module:
    return with_large_weights(DECODERS[name]()[0])


@functools.cache
def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZES)
    return with_large_weights(transformers.BertModel(config))


@functools.cache
def encoder_decoder(name: str) -> nn.Module:
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        return with_large_weights(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **options)))
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
    }
    config = transformers.BartConfig(d_model=16, max_position_embeddings=16, **sides, **options)
    return with_large_weights(transformers.BartForConditionalGeneration(config))


def decoder_call(name: str, lengths: list[int], side: str) -> Call:
    parts = sequences(lengths)
    batch = {"input_ids": pad(parts, side), "attention_mask": mask(parts, side)}
    if name != "opt":  # which numbers positions by the mask
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return batch, [{"input_ids": part[None]} for part in parts]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["llama", "neox", "opt"])
def test_decoders(name: str, side: str) -> None:
    check(decoder(name), decoder_call(name, [2, 7, 4], side), layers=2)


@settings(max_examples=6)
@given(lengths=LENGTHS, side=st.sampled_from(SIDES))
def test_random_lengths(lengths: list[int], side: str) -> None:
    check(decoder("gpt2"), decoder_call("gpt2", lengths, side), layers=2)


@pytest.mark.parametrize("side", SIDES)
def test_bert(side: str) -> None:
    check(bert(), decoder_call("bert", [7, 3], side), layers=2)


def sides_call(lengths: list[int], targets: list[int], form: str, side: str) -> Call:
    """Return a batch for an encoder-decoder with padding on both sides, the decoder's by a mask or by its labels."""
    count = min(len(lengths), len(targets))
    sources, targeted = sequences(lengths[:count]), sequences(targets[:count], seed=1)
    batch = {"input_ids": pad(sources, side), "attention_mask": mask(sources, side)}
    name = "labels" if form == "labels" else "decoder_input_ids"
    batch[name] = pad(targeted, "right", value=-100 if form == "labels" else 0)
    if form == "mask":
        batch["decoder_attention_mask"] = mask(targeted, "right")
    return batch, [
        {"input_ids": source[None], name: target[None]} for source, target in zip(sources, targeted, strict=True)
    ]


@pytest.mark.parametrize("targets", [[7, 3], [2, 4]])
@pytest.mark.parametrize("form", ["mask", "labels"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders(name: str, form: str, targets: list[int]) -> None:
    check(encoder_decoder(name), sides_call([2, 7], targets, form, "right"), layers=6)


@settings(max_examples=4)
@given(lengths=LENGTHS, targets=LENGTHS)
def test_random_lengths_on_both_sides(lengths: list[int], targets: list[int]) -> None:
    check(encoder_decoder("bart"), sides_call(lengths, targets, "mask", "right"), layers=6)


def test_the_padding_of_one_side_is_not_that_of_the_other() -> None:
    batch, _ = sides_call([4, 2], [2, 4], "mask", "right")
    with torch.no_grad(), attention(encoder_decoder("bart"), reduce="none") as recording:
        encoder_decoder("bart")(**batch)
    for layer, entropy in recording.passes[0].items():
        counted = entropy.isnan().logical_not().all(1)
        expected = batch["attention_mask" if layer.startswith("model.encoder") else "decoder_attention_mask"]
        assert counted.tolist() == expected.bool().tolist(), layer


class Torch(nn.Module):
    """Torch's own modules on token embeddings, with masks of padding under torch's names."""

    def __init__(self, kind: str, *, batch_first: bool) -> None:
        super().__init__()
        self.embedding, self.batch_first = nn.Embedding(VOCABULARY, 8), batch_first
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": batch_first}
        if kind == "both":
            encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, **options), 1, None, False)
            self.body = nn.Transformer(8, 2, 1, 1, 12, custom_encoder=encoder, **options)
        elif kind == "encoder":
            layer = nn.TransformerEncoderLayer(8, 2, 12, **options)
            self.body = nn.TransformerEncoder(layer, 2, None, False)  # without nested tensors
        else:
            self.body = nn.MultiheadAttention(8, 2, **options)
        self.kind = kind

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) if self.batch_first else self.embedding(tokens).transpose(0, 1)

    def forward(self, source: Tensor, target: Tensor, padding: list[Tensor | None]) -> Tensor:
        x, y = self.embed(source), self.embed(target)
        if self.kind == "both":
            return self.body(x, y, None, None, None, padding[0], padding[1], padding[0])
        if self.kind == "encoder":
            return self.body(x, None, padding[0])
        return self.body(x, x, x, padding[0], self.kind == "weights")[0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kind", "layers"), [("both", 3), ("encoder", 2), ("attention", 1), ("weights", 1)])
def test_torch_modules(kind: str, layers: int, batch_first: bool) -> None:
    model = with_large_weights(Torch(kind, batch_first=batch_first))
    sources, targeted = sequences([2, 7, 4]), sequences([7, 1, 3], seed=1)
    padding = [mask(parts, "right") == 0 for parts in (sources, targeted)]
    batch = {"source": pad(sources, "right"), "target": pad(targeted, "right"), "padding": padding}
    alone = [
        {"source": source[None], "target": target[None], "padding": [None, None]}
        for source, target in zip(sources, targeted, strict=True)
    ]
    check(model, (batch, alone), layers)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("measure", ["entropy", "sink_mass", "distance"])
def test_packed_sequences(name: str, measure: str) -> None:
    parts = sequences([3, 1, 5, 2])
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    batch = {"input_ids": torch.cat(parts)[None], "position_ids": positions, "use_cache": False}  # else not separated
    call = batch, [{"input_ids": part[None]} for part in parts]
    check(decoder(name), call, layers=2, measure=measure)


def test_sinks_are_first_tokens_whatever_the_padding() -> None:
    for side in SIDES:
        check(decoder("gpt2"), decoder_call("gpt2", [2, 7, 4], side), layers=2, measure="sink_mass")
        check(bert(), decoder_call("bert", [7, 3], side), layers=2, measure="sink_mass")
    batch, alone = sides_call([2, 7], [7, 3], "mask", "right")
    check(encoder_decoder("bart"), (batch, alone), layers=6, measure="sink_mass")
    left = {**batch, "input_ids": pad(sequences([2, 7]), "left"), "attention_mask": mask(sequences([2, 7]), "left")}
    with torch.no_grad(), attention(encoder_decoder("t5"), measures="sink_mass", reduce="none") as first:
        encoder_decoder("t5")(**left)
    with torch.no_grad(), attention(encoder_decoder("t5"), measures="sink_mass", reduce="none", sinks=5) as fifth:
        encoder_decoder("t5")(**left)
    crosses = [layer for layer in first.passes[0] if not layer.startswith("decoder.") or "EncDec" in layer]
    for layer in crosses:  # the first sequence starts at key 5
        torch.testing.assert_close(first.passes[0][layer][0], fifth.passes[0][layer][0], equal_nan=True)


def test_the_padding_of_a_text_says_nothing_of_an_image_of_as_many_patches() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "eos_token_id": 9, **sizes}
    config = transformers.CLIPConfig(text_config=text, vision_config={"image_size": 8, "patch_size": 4, **sizes})
    model, parts = transformers.CLIPModel(config).eval(), sequences([5, 2])
    with torch.no_grad(), attention(model, reduce="none") as recording:
        model(pad(parts, "right"), torch.ones(2, 3, 8, 8), mask(parts, "right"))
    counted = {layer: ~entropy.isnan().all(1) for layer, entropy in recording.passes[0].items()}
    assert counted["vision_model.encoder.layers.0.self_attn"].all()
    assert torch.equal(counted["text_model.encoder.layers.0.self_attn"], mask(parts, "right").bool())


def test_rows_of_one_shape_under_generation_are_refused_in_one_line() -> None:
    model, parts = decoder("gpt2"), sequences([3, 5])
    tokens, rows = pad(parts, "left"), mask(parts, "left")
    options = {"attention_mask": rows, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, **options)
    message = r'`rows` must be of shape \(2, 1\) .*, got \(2, 5\); use rows="masks"'
    with pytest.raises(InputError, match=message), attention(model, rows=rows):
        model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options), expected)


@pytest.mark.parametrize(("name", "cache"), [("gpt2", "dynamic"), ("llama", "dynamic"), ("llama", "static")])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_with_padding_on_the_left(name: str, cache: str, beams: int) -> None:
    model, parts = decoder(name), sequences([3, 5])
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    options["cache_implementation"] = cache

    def generate(tokens: Tensor, mask: Tensor, rows: str) -> list[dict[str, Tensor]]:
        with attention(model, reduce="none", rows=rows) as recording:
            model.generate(tokens, attention_mask=mask, **options)
        return recording.passes

    batch = generate(pad(parts, "left"), mask(parts, "left"), "masks")
    alone = [generate(part[None], torch.ones_like(part)[None], "all") for part in parts]
    assert len(batch) == 3
    for layers, *single in zip(batch, *alone, strict=True):
        for layer, entropy in layers.items():
            expected = torch.cat([other[layer].transpose(0, 1).flatten(1) for other in single], dim=1).double()
            mean = entropy.double().nanmean((0, 2))
            torch.testing.assert_close(mean, expected.mean(1), atol=1e-5, rtol=0)
    count = batch[0][next(iter(batch[0]))].isnan().any(1).sum()
    assert count == 2 * (beams if batch[0][next(iter(batch[0]))].shape[0] > 2 else 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("lengths", [[3, 6], [1, 2]])
def test_the_first_token_leaves_the_cache_of_a_sliding_window(
    lengths: list[int], cache: str, implementation: str
) -> None:
    parts = sequences(lengths)
    tokens, real = pad(parts, "left"), mask(parts, "left")
    generation = generate(window_model(4), tokens, real, cache=cache, implementation=implementation)
    recorded, expected = generation.rows("sink_mass")
    torch.testing.assert_close(recorded, expected, atol=1e-5, rtol=0)
    assert (expected == 0).any()
    assert (expected > 0.1).any()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_first_token_behind_a_sliding_window_of_a_whole_cache(implementation: str) -> None:
    tokens = pad(sequences([8, 8]), "left")
    generation = step_by_step(window_model(4), tokens, 2, implementation=implementation)
    torch.testing.assert_close(*generation.rows("sink_mass"), atol=1e-5, rtol=0)


def own_mask_call(name: str, lengths: list[int]) -> Call:
    """Return a batch whose padding is told by an argument of the model's own."""
    parts = sequences(lengths)
    if name == "xlm":
        batch = {"input_ids": pad(parts, "right"), "lengths": torch.tensor(lengths)}
    else:
        batch = {"input_ids": pad(parts, "left"), "input_mask": 1.0 - mask(parts, "left")}
    return batch, [{"input_ids": part[None]} for part in parts]


@pytest.mark.parametrize("name", ["xlm", "xlnet"])
def test_masks_of_other_names(name: str) -> None:
    check(tiny_model(name), own_mask_call(name, [2, 7, 4]), layers=2)


def test_sequences_that_are_shorter_than_a_block() -> None:
    model = tiny_model("longt5", "LongT5EncoderModel", local_radius=8, encoder_attention_type="local")
    parts = sequences([7, 3])
    batch = {"input_ids": pad(parts, "right"), "attention_mask": mask(parts, "right")}
    with torch.no_grad(), attention(model, reduce="none") as recording:
        model(**batch)
    expected = model(**batch, output_attentions=True).attentions
    for entropy, weights in zip(recording.passes[0].values(), expected, strict=True):
        padded_mask = torch.nn.functional.pad(batch["attention_mask"], (0, 2)).bool()
        assert torch.equal(~entropy.isnan().any(1), padded_mask)
        entropy_by_hand = torch.special.entr(weights[:, 0].double()).sum(-1)
        torch.testing.assert_close(
            entropy.double().transpose(1, 2)[padded_mask],
            entropy_by_hand.transpose(1, 2)[padded_mask],
            atol=1e-5,
            rtol=0,
        )
