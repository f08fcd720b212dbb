"""LoRA adapters: every merged tensor against peft's own merge, and by name what cannot be merged."""

import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fake_hub import REPOSITORY, serve
from joma.arguments import InputError
from joma.watch import Checkpoints, configs
from joma.watch.adapters import LoraConfig
from joma.watch.probing import probe
from joma.watch.store import Store
from tiny_models import gpt2_decoder, llama_decoder, neox

peft = pytest.importorskip("peft")
TEXT = "The attention of an adapted model is measured on this text, which is long enough. " * 8


def small_llama():
    return llama_decoder()[0]


def small_gpt2():
    return gpt2_decoder()[0]


def save_base(build, folder, dtype=torch.float32):
    with torch.random.fork_rng(), configs.quiet():
        torch.manual_seed(0)
        model = build().to(dtype)
        model.save_pretrained(folder)
    return model


def save_adapter(base, folder, *, seed=1, scale=0.3, **options):
    """Save an adapter of the model in `base` with random factors, and return peft's merged state dict."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), configs.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, "lora_alpha": 3, **options}))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=scale)
        adapted.save_pretrained(folder)
        merged = adapted.merge_and_unload()
    return {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def edit_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


CASES = {
    "plain": (neox, {"target_modules": ["query_key_value", "dense"]}),
    "rank-stabilised": (neox, {"target_modules": ["query_key_value"], "use_rslora": True, "r": 3}),
    "patterns": (
        small_llama,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 4},
            "alpha_pattern": {r"layers\.(0|7)\.self_attn\.q_proj": 11, "q_proj": 5, "layers.1.mlp.down_proj": 7},
        },
    ),
    "conv1d": (small_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "whole modules": (small_llama, {"target_modules": ["q_proj"], "modules_to_save": ["gate_proj", "norm"]}),
    "biases": (neox, {"target_modules": ["query_key_value"], "bias": "all"}),
    "embeddings": (small_llama, {"target_modules": ["embed_tokens", "o_proj"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_that_of_pefts_own_merge(case, tmp_path):
    build, options = CASES[case]
    save_base(build, tmp_path / "base")
    expected = save_adapter(tmp_path / "base", tmp_path / "adapter", **options)
    (merged,) = Checkpoints(tmp_path / "adapter")
    base = load_file(tmp_path / "base" / "model.safetensors")
    changed = 0
    for name, before in base.items():
        if name in expected:
            torch.testing.assert_close(merged.tensor(name), expected[name], rtol=0, atol=1e-6)
            middle = before.numel() // 3
            span = merged.part(name, middle, middle + 7)
            torch.testing.assert_close(span, merged.tensor(name).flatten()[middle : middle + 7], rtol=0, atol=1e-6)
            changed += not torch.equal(before, expected[name])
    assert changed >= 2
    assert set(base) <= set(merged.names())


def test_a_base_in_half_precision_is_merged_in_float32(tmp_path):
    save_base(neox, tmp_path / "base", torch.bfloat16)
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["dense"])
    (merged,) = Checkpoints(tmp_path / "adapter")
    name = "gpt_neox.layers.0.attention.dense"
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")
    base = load_file(tmp_path / "base" / "model.safetensors")
    expected = base[f"{name}.weight"].double() + 1.5 * b @ a
    assert merged.tensor(f"{name}.weight").dtype == torch.float32
    torch.testing.assert_close(merged.tensor(f"{name}.weight").double(), expected, rtol=0, atol=1e-6)
    assert merged.tensor("gpt_neox.embed_in.weight").dtype == torch.bfloat16


def test_a_series_of_adapters_is_measured_like_merged_models(tmp_path):
    model = save_base(neox, tmp_path / "base")
    for step, scale in ((0, 0.0), (10, 0.2), (20, 0.4), (30, 0.6)):
        options = {"target_modules": ["query_key_value", "dense_h_to_4h"], "scale": scale}
        expected = save_adapter(tmp_path / "base", tmp_path / "run" / f"checkpoint-{step}", **options)
        model.load_state_dict(expected)
        with configs.quiet():
            model.save_pretrained(tmp_path / "merged" / f"checkpoint-{step}")
    store = Store(tmp_path / "store")
    measured = probe(Checkpoints(tmp_path / "run"), text=TEXT, store=store)
    assert measured.audit.faults == ()
    plain = probe(Checkpoints(tmp_path / "merged"), text=TEXT)
    for name in ("entropy", "stable_rank", "embedding_cosine", "hidden_cosine"):
        np.testing.assert_allclose(measured.data[name], plain.data[name], rtol=1e-5, atol=1e-6)
    assert float(np.ptp(measured.data.entropy.mean(("layer", "head")).values)) > 0.01
    again = Checkpoints(tmp_path / "run")
    assert probe(again, text=TEXT, store=store).data.identical(measured.data)


def test_a_base_saved_without_its_head_is_found_by_its_names(tmp_path):
    model = save_base(neox, tmp_path / "base")
    expected = save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["dense"])
    with configs.quiet():
        model.gpt_neox.save_pretrained(tmp_path / "headless")
    (merged,) = Checkpoints(tmp_path / "adapter", base=tmp_path / "headless")
    name = "layers.1.attention.dense.weight"
    torch.testing.assert_close(merged.tensor(name), expected[f"gpt_neox.{name}"], rtol=0, atol=1e-6)


def test_a_base_that_is_not_at_hand_is_asked_for(tmp_path):
    save_base(neox, tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["dense"])
    edit_config(tmp_path / "adapter", base_model_name_or_path="someone/model")
    message = r"the base 'someone/model', which is no folder here.*; give the base as `--base`.*merge_and_unload"
    with pytest.raises(InputError, match=message):
        probe(Checkpoints(tmp_path / "adapter"), text=TEXT)
    given = probe(Checkpoints(tmp_path / "adapter", base=tmp_path / "base"), text=TEXT)
    assert given.data.entropy.notnull().all()
    (tmp_path / "empty").mkdir()
    for base, problem in ((tmp_path / "adapter", "an adapter"), (tmp_path / "empty", "without a model")):
        with pytest.raises(InputError, match=rf"`base` must be a full model, got .*{problem}"):
            Checkpoints(tmp_path / "adapter", base=base)[0].names()


def test_base_and_adapters_on_the_hub(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    save_base(neox, tmp_path / "hub" / "main")
    expected = save_adapter(tmp_path / "hub" / "main", tmp_path / "hub" / "step7", target_modules=["dense"])
    name = "gpt_neox.layers.0.attention.dense.weight"
    with serve(tmp_path / "hub") as hub:
        places = [(REPOSITORY, tmp_path / "hub" / "main"), (tmp_path / "hub" / "step7", REPOSITORY)]
        for source, base in places:
            revisions = ["step7"] if source == REPOSITORY else None
            series = Checkpoints(source, base=base, revisions=revisions, endpoint=hub.endpoint)
            torch.testing.assert_close(series[0].tensor(name), expected[name], rtol=0, atol=1e-6)
            assert series.bases == (str(base),)
        result = probe(series, text=TEXT)
    assert result.audit.faults == ()
    assert result.data.entropy.notnull().all()
    assert result.data.attrs["base"] == REPOSITORY


def test_a_path_beside_the_adapter_is_its_base(tmp_path):
    save_base(neox, tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "run" / "checkpoint-5", target_modules=["dense"])
    edit_config(tmp_path / "run" / "checkpoint-5", base_model_name_or_path="../base")
    (merged,) = Checkpoints(tmp_path / "run")
    assert len(merged.names()) == len(load_file(tmp_path / "base" / "model.safetensors"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "a LoRA adapter that adds a product of two matrices, got one with use_dora"),
        ({"layer_replication": [[0, 2]]}, "got one with layer_replication"),
        ({"trainable_token_indices": [3]}, "got one with trainable_token_indices"),
        ({"an_option_of_tomorrow": 1}, "got one with an_option_of_tomorrow"),
        ({"peft_type": "IA3"}, "an adapter of the type LORA, got the type 'IA3'"),
        ({"init_lora_weights": "pissa"}, "of an unchanged base, got one that started from 'pissa'"),
        ({"lora_alpha": "8"}, "numbers for α, got '8' for lora_alpha"),
        ({"lora_alpha": float("nan")}, "numbers for α"),
        ({"alpha_pattern": [1]}, "a table as `alpha_pattern`, got a list"),
        ({"alpha_pattern": {"(": 3}}, "`pattern` must be a regular expression"),
    ],
)
def test_what_is_more_than_a_sum_is_refused_by_name(fields, message, tmp_path):
    save_base(neox, tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["dense"])
    edit_config(tmp_path / "adapter", **fields)
    with pytest.raises(InputError) as raised:
        Checkpoints(tmp_path / "adapter")[0].names()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: {k.replace("attention.dense", "attention.none"): v for k, v in t.items()}, "which it lacks"),
        (lambda t: {k: v for k, v in t.items() if "lora_A" not in k}, "an adapter of matrices that fit its base"),
        (lambda t: {k: v[:, :-1] if "lora_A" in k else v for k, v in t.items()}, "that fit its base"),
        (lambda t: t | {"base_model.model.x.lora_magnitude_vector": torch.ones(3)}, "x.lora_magnitude_vector"),
    ],
)
def test_factors_that_do_not_fit_are_refused(edit, message, tmp_path):
    save_base(neox, tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["dense"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in edit(load_file(file)).items()}, file)
    with pytest.raises(InputError, match="merge_and_unload") as raised:
        Checkpoints(tmp_path / "adapter")[0].names()
    assert message in str(raised.value)


def test_a_square_weight_of_unknown_orientation_is_refused(tmp_path):
    save_base(small_gpt2, tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    edit_config(tmp_path / "adapter", fan_in_fan_out=False)
    with pytest.raises(InputError, match=r"`fan_in_fan_out` False, against the shapes, for the square .*attn.c_proj"):
        Checkpoints(tmp_path / "adapter")[0].names()


def test_a_pattern_of_alpha_that_never_ends_is_stopped():
    fields = {"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {r"((a|a)*)b": 2}}
    config = LoraConfig.from_fields(fields, "step0")
    with pytest.raises(InputError, match="must be matched within 2 seconds"):
        config.alphas([f"layers.{'a' * 40}!"])


def test_a_changed_base_or_adapter_is_another_checkpoint(tmp_path):
    save_base(neox, tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["dense"])
    identities = {Checkpoints(tmp_path / "adapter")[0].identity}
    edit_config(tmp_path / "adapter", lora_alpha=99)
    identities.add(Checkpoints(tmp_path / "adapter")[0].identity)
    save_base(lambda: neox(seed=5), tmp_path / "base")
    identities.add(Checkpoints(tmp_path / "adapter")[0].identity)
    assert len(identities) == 3
