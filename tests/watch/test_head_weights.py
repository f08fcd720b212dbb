"""Which rows of which tensors belong to a head, and what is not known is named, not guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from joma.probes.balance import Rotary
from joma.watch import Checkpoints
from joma.watch.checkpoint_heads import heads_of, measure_heads
from joma.watch.head_weights import INTERLEAVED, JOINED, HeadWeights


def checkpoint_of(folder, tensors, fields=None):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if fields is not None:
        (folder / "config.json").write_text(json.dumps(fields))
    return Checkpoints(folder)[0]


SEPARATE = {f"layers.0.self_attn.{name}_proj.weight": torch.ones(8, 8) for name in "qkvo"}


@pytest.mark.parametrize(
    ("tensors", "fields", "reason"),
    [
        (SEPARATE, None, None),  # the audit names a config.json that is missing or refused anyway
        (SEPARATE, {"quantization_config": {"bits": 4}}, None),
        (SEPARATE, {"model_type": "llama"}, "does not say the number of heads"),
        (SEPARATE, {"model_type": "llama", "num_attention_heads": 3}, "do not fit the 3 heads"),
        (SEPARATE, {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}, "do not fit"),
        (SEPARATE, {"model_type": "novel", "num_attention_heads": 2}, "the model type 'novel' does not tell"),
        (SEPARATE, {"num_attention_heads": 2}, "no model type does not tell"),
        (SEPARATE, {"num_attention_heads": 2, "model_type": ["llama"]}, "the model type ['llama'] does not tell"),
        (SEPARATE | {"layers.0.self_attn.q_proj.bias": torch.ones(7)}, {"num_attention_heads": 2}, "biases do not fit"),
        (SEPARATE, {"model_type": "olmo", "num_attention_heads": 2, "clip_qkv": 8.0}, "are clipped"),
        (SEPARATE, {"model_type": "llama", "num_attention_heads": 8}, "1 of 1 dimensions cannot be rotated"),
        ({"h.0.attn.W_pack.weight": torch.ones(24, 8)}, {"num_attention_heads": 2}, "no name that is known"),
        ({"mixer.in_proj.weight": torch.ones(24, 8), "mixer.out_proj.weight": torch.ones(8, 8)}, {"n_head": 2}, None),
        ({"mlp.up_proj.weight": torch.ones(24, 8)}, {"n_head": 2}, None),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named_and_not_guessed(tensors, fields, reason, tmp_path):
    checkpoint = checkpoint_of(tmp_path / "model", tensors, fields)
    modules, reasons = heads_of(checkpoint)
    assert modules == []
    assert [reason in text for text in reasons] == [True] if reason else reasons == []
    assert set(measure_heads(checkpoint)) == ({"not_named"} if reason else set())


def weights_of(order: str, **changes: Any) -> HeadWeights:
    """Return a module of 4 heads of 3 dimensions, which share 2 key heads."""
    sizes = {"heads": 4, "key_heads": 2, "head_dim": 3, "rotary": None, "normed": False, "transposed": False}
    return HeadWeights(name="attn", weights={}, biases={}, order=order, **{**sizes, **changes})


def test_query_heads_that_share_a_key_head_stand_side_by_side():
    query, module = torch.randn(12, 5), weights_of("")
    rows = module.by_key_head("query", query)
    assert rows.shape == (2, 3, 10)
    torch.testing.assert_close(rows[1], torch.cat([query[6:9], query[9:12]], dim=1))
    key = torch.randn(6, 5)
    torch.testing.assert_close(module.by_key_head("key", key)[1], key[3:])
    output = torch.randn(5, 12)
    torch.testing.assert_close(module.by_key_head("output", output)[0], torch.cat([output.T[:3], output.T[3:6]], dim=1))


def test_joined_rows_stand_one_after_another():
    joined, module = torch.randn(24, 5), weights_of(JOINED)
    torch.testing.assert_close(module.by_key_head("query", joined)[0], torch.cat([joined[:3], joined[3:6]], dim=1))
    torch.testing.assert_close(module.by_key_head("key", joined)[1], joined[15:18])
    torch.testing.assert_close(module.by_key_head("value", joined)[0], joined[18:21])


def test_interleaved_rows_stand_head_by_head():
    joined, module = torch.randn(36, 5), weights_of(INTERLEAVED, key_heads=4)
    for index, role in enumerate(("query", "key", "value")):
        torch.testing.assert_close(module.by_key_head(role, joined)[2], joined[18 + 3 * index :][:3])


@pytest.mark.parametrize(
    ("fields", "rotary"),
    [
        ({"model_type": "llama"}, Rotary(4)),
        ({"model_type": "gpt2"}, None),
        ({"model_type": "phi"}, Rotary(2)),
        ({"model_type": "phi", "partial_rotary_factor": 1.0}, Rotary(4)),
        ({"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 1.0}}, Rotary(4)),
        ({"model_type": "gptj", "rotary_dim": 2}, Rotary(2, interleaved=True)),
        ({"model_type": "gpt_neox", "rotary_pct": 0.2}, None),  # 0.2 of 4 dimensions: transformers rotates none
    ],
)
def test_a_config_says_what_is_rotated(fields, rotary, tmp_path):
    checkpoint = checkpoint_of(tmp_path / "model", SEPARATE, {**fields, "num_attention_heads": 2})
    ((module,), reasons) = heads_of(checkpoint)
    assert (module.rotary, module.key_heads, module.head_dim, reasons) == (rotary, 2, 4, [])


def test_a_norm_of_keys_is_noticed(tmp_path):
    for norm in ("k_norm", "q_layernorm", "key_layernorm"):
        tensors = {**SEPARATE, f"layers.0.self_attn.{norm}.weight": torch.ones(4)}
        fields = {"model_type": "llama", "num_attention_heads": 2}
        ((module,), _) = heads_of(checkpoint_of(tmp_path / norm, tensors, fields))
        assert module.normed
