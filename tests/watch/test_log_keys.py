"""Keys are short, distinct and the same at every probe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from joma.watch import Recorder
from joma.watch.collapse import Collapsed
from joma.watch.log_keys import LogKeys, short_names
from joma.watch.trajectory import Measurement, Probe

FAMILIES = {
    "gpt2": (["transformer.h.0.attn", "transformer.h.1.attn"], ["h.0", "h.1"]),
    "t5": (
        ["encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention"],
        ["encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention"],
    ),
    "torch decoder": (
        ["decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"],
        ["layers.0.self_attn", "layers.0.multihead_attn"],
    ),
    "swin": (["layers.0.blocks.1.attn", "layers.1.blocks.1.attn"], ["layers.0.blocks.1", "layers.1.blocks.1"]),
    "llama": (
        ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"],
        ["layers.0.gate_proj", "layers.0.up_proj"],
    ),
    "albert": (
        ["albert.layer.attention", "albert.layer.attention[1]"],
        ["albert.layer.attention", "albert.layer.attention-1"],
    ),
    "one": (["self_attn"], ["self_attn"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_families(family: str) -> None:
    names, expected = FAMILIES[family]
    assert list(short_names(names).values()) == expected


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "0", "1", "attn", "weight"]), min_size=1).map(".".join), unique=True)
)
def test_no_two_names_have_one_key(names: list[str]) -> None:
    short = short_names(names)
    assert list(short) == names
    assert len(set(short.values())) == len(names)
    assert short == short_names(names)


BLOCKS = {"gradient_norm": {"m.layers.0": 0.5, "m.layers.1": 0.25, "embedding": 2.0, "other": 3.0}}


def probe(layers: list[str], collapsed: list[list[bool]]) -> Probe:
    values = {
        "entropy": np.array([[1.0, 3.0], [np.nan, np.nan]]),
        "largest_logit": np.array([[5.0, 7.0], [2.0, np.nan]]),
    }
    measurement = Measurement(layers, values, np.array([2.0, 4.0, 8.0]), BLOCKS)
    return Probe(0, measurement, Collapsed(np.array(collapsed), np.zeros(3, dtype=bool)))


WEIGHTS = ["m.layers.0.experts.0.w1.weight", "m.layers.0.experts.1.w1.weight", "m.layers.1.fc1.weight"]


def test_scalars_are_means_over_heads_and_the_largest_logit_is_a_maximum() -> None:
    keys = LogKeys(WEIGHTS, measures=("entropy", "largest_logit"), summary=False)
    scalars = keys.scalars(probe(["m.layers.0.attn", "m.layers.1.attn"], [[False, False]] * 2))
    expected = {
        "attention_entropy/layers.0": 2.0,
        "attention_entropy_min/layers.0": 1.0,
        "attention_largest_logit/layers.0": 7.0,
        "attention_entropy/layers.1": np.nan,
        "attention_entropy_min/layers.1": np.nan,
        "attention_largest_logit/layers.1": 2.0,
        "stable_rank/layers.0.experts.0": 2.0,
        "stable_rank/layers.0.experts.1": 4.0,
        "stable_rank/layers.1": 8.0,
        "gradient_norm/layers.0": 0.5,
        "gradient_norm/layers.1": 0.25,
        "gradient_norm/embedding": 2.0,
        "gradient_norm/other": 3.0,
    }
    assert list(scalars) == list(expected)
    np.testing.assert_array_equal(list(scalars.values()), list(expected.values()))


def test_a_summary_has_one_rank_a_layer_and_collapsed_heads_are_counted_once_there_are_any() -> None:
    keys = LogKeys(WEIGHTS, measures=("entropy",), summary=True)
    layers = ["m.layers.0.attn", "m.layers.1.attn"]
    scalars = keys.scalars(probe(layers, [[True, True], [False, False]]))
    assert set(scalars) == {
        *(f"{kind}/layers.{n}" for kind in ("attention_entropy", "stable_rank", "gradient_norm") for n in (0, 1)),
        "collapsed/layers.0",
        "gradient_norm/embedding",
        "gradient_norm/other",
    }
    assert (scalars["stable_rank/layers.0"], scalars["collapsed/layers.0"]) == (3.0, 2.0)
    assert keys.scalars(probe(layers, [[False, False]] * 2))["collapsed/layers.0"] == 0.0
    later = keys.layers(["m.layers.0.attn", "m.extra.attn"])
    assert (later["m.layers.0.attn"], later["m.extra.attn"]) == ("layers.0", "m.extra.attn")


def test_blocks_without_a_value_are_not_logged_until_they_have_one() -> None:
    keys, layers = LogKeys([], measures=("entropy",), summary=False), ["m.layers.0.attn", "m.layers.1.attn"]
    logged = []
    for norm in (np.nan, 0.5, np.nan):
        blocks = {"gradient_norm": {"m.layers.0": norm, "m.layers.1": np.nan}}
        measurement = Measurement(layers, {"entropy": np.ones((2, 2))}, np.zeros(0), blocks)
        scalars = keys.scalars(Probe(0, measurement, Collapsed(np.zeros((2, 2), dtype=bool), np.zeros(0, dtype=bool))))
        logged.append({key: value for key, value in scalars.items() if key.startswith("gradient")})
    assert logged[:2] == [{}, {"gradient_norm/layers.0": 0.5}]
    assert list(logged[2]) == ["gradient_norm/layers.0"]
    assert np.isnan(logged[2]["gradient_norm/layers.0"])


class Block(nn.Module):
    """A block whose MLP is a list of layers; its attention is a module, or SDPA without one."""

    def __init__(self, *, module: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True) if module else None
        self.project = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.attn is not None:
            return x + self.mlp(x + self.attn(x, x, x, need_weights=False)[0])
        return x + self.mlp(nn.functional.scaled_dot_product_attention(*self.project(x).chunk(3, dim=-1)))


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("ranks", [True, "weight$"])
@pytest.mark.filterwarnings("ignore::joma.watch.AttentionSwitched")
def test_a_summary_has_one_stable_rank_for_each_block_whatever_its_layers_are_called(
    module: bool, ranks: bool | str
) -> None:
    model = nn.ModuleDict({"h": nn.Sequential(Block(module=module), Block(module=module)), "head": nn.Linear(8, 4)})
    options = {"ranks": ranks, "forward": lambda model, batch: model["h"](batch), "at": 1}
    recorder, every = Recorder(model, torch.randn(2, 5, 8), summary=True, **options), Recorder(model, None, **options)
    scalars = {key: value for key, value in recorder(0).items() if key.startswith("stable_rank/")}
    assert list(scalars) == ["stable_rank/h.0", "stable_rank/h.1", "stable_rank/head"]
    assert "head" in every._keys.weights.values()
    values = recorder.dataset().stable_rank[0]
    for block in (0, 1):
        inside = [weight for weight in values.weight.values if weight.startswith(f"h.{block}.")]
        assert scalars[f"stable_rank/h.{block}"] == pytest.approx(float(values.sel(weight=inside).mean()))


def test_the_ranks_of_an_encoder_and_a_decoder_have_the_names_of_their_blocks() -> None:
    config = T5Config(vocab_size=12, d_model=16, d_ff=24, num_layers=2, num_heads=2, d_kv=8)
    tokens = torch.randint(12, (2, 6))
    batch = {"input_ids": tokens, "decoder_input_ids": tokens}
    scalars = Recorder(T5ForConditionalGeneration(config), batch, summary=True, residual=True)(0)
    blocks = [f"{side}.block.{block}" for side in ("encoder", "decoder") for block in (0, 1)]
    for kind in ("stable_rank", "residual_norm"):
        assert [key for key in scalars if key.startswith(f"{kind}/")] == [f"{kind}/{block}" for block in blocks]
