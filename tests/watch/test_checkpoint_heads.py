"""The heads of real architectures: their laws hold in a step of SGD, and what is not known is named."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from joma.probes.balance import Rotary, head_drift, head_gram, head_imbalance
from joma.watch import Checkpoints, checkpoint_heads, configs
from joma.watch.checkpoint_heads import LAWS, ReferenceHeads, head_grams, heads_of, measure_heads
from joma.watch.head_weights import ROTATED, WITHOUT_ROTATION
from joma.watch.probing import probe
from moved_models import moved
from tiny_models import neox

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}
FAMILIES = {
    "llama": ("LlamaConfig", SIZES),
    "llama, shared keys": ("LlamaConfig", {**SIZES, "num_key_value_heads": 2, "attention_bias": True}),
    "mistral, one key head": ("MistralConfig", {**SIZES, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {**SIZES, "num_key_value_heads": 2}),
    "gemma, wide heads": ("GemmaConfig", {**SIZES, "head_dim": 8, "num_key_value_heads": 2}),
    "gemma2": ("Gemma2Config", {**SIZES, "head_dim": 4, "num_key_value_heads": 2}),
    "phi": ("PhiConfig", SIZES),
    "phi3": ("Phi3Config", {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2Config", {**SIZES, "num_key_value_heads": 2}),
    "stablelm": ("StableLmConfig", {**SIZES, "hidden_size": 32, "num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, "hidden_size": 32}),
    "gpt_neox, all rotated": ("GPTNeoXConfig", {**SIZES, "rotary_pct": 1.0}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 2}),
    "gpt2": ("GPT2Config", GPT),
    "gpt_neo": ("GPTNeoConfig", {"vocab_size": 40, "hidden_size": 16, "num_layers": 1, "num_heads": 4,
                                 "attention_types": [[["global"], 1]], "max_position_embeddings": 16}),
    "opt": ("OPTConfig", {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
                          "ffn_dim": 24, "max_position_embeddings": 16, "word_embed_proj_dim": 16}),
    "bloom": ("BloomConfig", {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "bert": ("BertConfig", SIZES),
    "distilbert": ("DistilBertConfig", {"vocab_size": 40, "dim": 16, "n_layers": 1, "n_heads": 4, "hidden_dim": 24}),
    "t5": ("T5Config", {"vocab_size": 40, "d_model": 16, "d_kv": 3, "d_ff": 24, "num_layers": 1, "num_heads": 4,
                        "decoder_start_token_id": 0}),
    "camembert": ("CamembertConfig", {**SIZES, "pad_token_id": 39}),
    "deit": ("DeiTConfig", {**SIZES, "image_size": 8, "patch_size": 4}),
    "electra": ("ElectraConfig", {**SIZES, "embedding_size": 16}),
    "granite": ("GraniteConfig", {**SIZES, "num_key_value_heads": 2}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 2}),
    "mt5": ("MT5Config", {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4,
                          "decoder_start_token_id": 0}),
    "olmo": ("OlmoConfig", {**SIZES, "pad_token_id": 0}),
    "olmo2, normed": ("Olmo2Config", {**SIZES, "pad_token_id": 0}),
    "olmoe, normed": ("OlmoeConfig", {**SIZES, "num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}),
    "qwen2_moe": ("Qwen2MoeConfig", {**SIZES, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                                     "shared_expert_intermediate_size": 8, "num_key_value_heads": 2}),
    "qwen3_moe, normed": ("Qwen3MoeConfig", {**SIZES, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 4,
                                             "moe_intermediate_size": 8, "num_key_value_heads": 2}),
    "roberta": ("RobertaConfig", {**SIZES, "pad_token_id": 39}),
    "vit": ("ViTConfig", {**SIZES, "image_size": 8, "patch_size": 4}),
    "qwen3, normed": ("Qwen3Config", {**SIZES, "head_dim": 4, "num_key_value_heads": 2}),
}  # fmt: skip


def build(family, seed=0):
    """Return a tiny model in float64, with biases that are not zero and attention that is not uniform."""
    name, fields = FAMILIES[family]
    config = getattr(transformers, name)(**fields)
    config._experts_implementation = "eager"  # the grouped products of experts have no float64
    model = transformers.AutoModel.from_config(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def gradients_of(model):
    """Return a copy of the model whose parameters are the gradients of a loss."""
    tokens = torch.tensor([[1, 7, 3, 9, 4, 2], [5, 3, 8, 6, 0, 11]])
    inputs = {"decoder_input_ids": tokens.flip(1)} if model.config.is_encoder_decoder else {}
    if model.main_input_name == "pixel_values":
        tokens = torch.linspace(0, 9, 2 * 3 * 8 * 8, dtype=torch.float64).reshape(2, 3, 8, 8).sin()
    state = model(tokens, **inputs).last_hidden_state
    target = torch.linspace(-1, 1, state.numel(), dtype=torch.float64).reshape(state.shape).sin()
    parameters = dict(model.named_parameters())
    values = torch.autograd.grad((state - target).square().sum(), list(parameters.values()), allow_unused=True)
    gradient = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, value in zip(gradient.parameters(), values, strict=True):
            parameter.copy_(torch.zeros_like(parameter) if value is None else value)
    return gradient


def saved(model, folder):
    with configs.quiet():
        model.save_pretrained(folder)
    return Checkpoints(folder)[0]


def checkpoint_of(folder, tensors, fields=None):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if fields is not None:
        (folder / "config.json").write_text(json.dumps(fields))
    return Checkpoints(folder)[0]


def grams_of(checkpoint):
    modules, reasons = heads_of(checkpoint)
    assert modules
    assert reasons == []
    return [(module, head_grams(checkpoint, module)) for module in modules]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_sgd_changes_the_balance_by_that_of_the_gradients(family, tmp_path):
    """To first order it does not change at all: true only for the right rows, heads, biases and rotated pairs."""
    model, rate = build(family), 0.01
    gradient, after = gradients_of(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter, slope in zip(after.parameters(), gradient.parameters(), strict=True):
            parameter.sub_(rate * slope)
    models = {"before": model, "gradient": gradient, "after": after}
    measured = {name: grams_of(saved(state, tmp_path / name)) for name, state in models.items()}
    for (module, before), (_, slopes), (_, end) in zip(*measured.values(), strict=True):
        for first, second in list(LAWS.values())[module.normed :]:
            change = {role: end[role] - before[role] for role in (first, second)}
            expected = rate**2 * (slopes[first] - slopes[second])
            size = torch.linalg.matrix_norm(change[first])
            error = torch.linalg.matrix_norm(change[first] - change[second] - expected)
            assert (size > 1e-4).all()
            assert (error < 1e-3 * size + 1e-6).all(), (error / size).tolist()


def test_every_model_type_of_the_tables_is_tested():
    configs_of = [getattr(transformers, name) for name, _ in FAMILIES.values()]
    assert {config.model_type for config in configs_of} == WITHOUT_ROTATION | ROTATED.keys()


def literal_heads(model):
    """Return W_Q, W_K, W_V and W_Oᵀ [head, head_dim, width] of a GPT-NeoX, a GPT-2 or a Llama, as their code has it."""
    if isinstance(model, transformers.GPTNeoXModel):
        attention = model.layers[0].attention
        joined = attention.query_key_value.weight.view(4, 3, -1, model.config.hidden_size)
        return joined[:, 0], joined[:, 1], joined[:, 2], attention.dense.weight.T.unflatten(0, (4, -1))
    if isinstance(model, transformers.GPT2Model):
        attention = model.h[0].attn
        parts = attention.c_attn.weight.T.split(16)
        return *(part.unflatten(0, (4, -1)) for part in parts), attention.c_proj.weight.unflatten(0, (4, -1))
    attention = model.layers[0].self_attn
    parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight.T)
    return tuple(part.unflatten(0, (-1, 4)) for part in parts)


@pytest.mark.parametrize("family", ["gpt_neox, all rotated", "gpt2", "llama"])
def test_the_measures_are_those_of_the_models_own_modules(family, tmp_path):
    states = {"start": build(family), "end": build(family, seed=1)}
    checkpoints = {name: saved(model, tmp_path / name) for name, model in states.items()}
    measures = measure_heads(checkpoints["end"], reference=ReferenceHeads(checkpoints["start"]))
    rotary = None if family == "gpt2" else Rotary(4)
    grams = {}
    for name, model in states.items():
        biases = {"gpt2": lambda model: model.h[0].attn.c_attn.bias.view(3, 4, 4)}
        biases["gpt_neox, all rotated"] = lambda model: (
            model.layers[0].attention.query_key_value.bias.view(4, 3, 4).transpose(0, 1)
        )
        rows = biases[family](model) if family in biases else torch.zeros(3, 4, 4).double()
        weights = [weight.detach().float() for weight in literal_heads(model)]
        grams[name] = [
            head_gram(weight, bias.detach().float(), rotary=rotary if index < 2 else None)
            for index, (weight, bias) in enumerate(zip(weights, [*rows, torch.zeros(4, 4)], strict=True))
        ]
    for law, pair in (("query_key", (0, 1)), ("value_output", (2, 3))):
        end, start = ([grams[name][index] for index in pair] for name in ("end", "start"))
        expected = {
            f"{law}_imbalance": head_imbalance(*end),
            f"{law}_drift": head_drift(*end, *start),
            f"{law}_imbalance_others": head_imbalance(end[0], end[1][[3, 0, 1, 2]]),
            f"{law}_drift_others": head_drift(end[0], end[1][[3, 0, 1, 2]], start[0], start[1][[3, 0, 1, 2]]),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(measures[name][0], values, rtol=1e-6)


class Layer(nn.Module):
    """Attention in the manner of nanoGPT, or torch's own."""

    def __init__(self, kind):
        super().__init__()
        if kind == "torch":
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        else:
            self.attn = nn.ModuleDict({"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8)})
            self.wpe = nn.Embedding(4, 8)

    def forward(self, x):
        if isinstance(self.attn, nn.MultiheadAttention):
            return self.attn(x, x, x)[0]
        x = x + self.wpe.weight
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.attn["c_attn"](x).split(8, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attn["c_proj"](attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["torch", "nanoGPT"])
def test_a_module_without_transformers_has_its_number_of_heads_in_a_config(kind, tmp_path):
    torch.manual_seed(0)
    layer, rate = Layer(kind).double(), 0.05
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    loss = layer(x).sin().sum()
    slopes = torch.autograd.grad(loss, list(layer.parameters()))
    states = {"before": dict(layer.named_parameters())}
    states["gradient"] = dict(zip(states["before"], slopes, strict=True))
    states["after"] = {name: states["before"][name] - rate * slope for name, slope in states["gradient"].items()}
    grams = {}
    for name, tensors in states.items():
        stored = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        ((_, grams[name]),) = grams_of(checkpoint_of(tmp_path / name, stored, {"n_head": 2}))
    for first, second in LAWS.values():
        change = {role: grams["after"][role] - grams["before"][role] for role in (first, second)}
        expected = rate**2 * (grams["gradient"][first] - grams["gradient"][second])
        torch.testing.assert_close(change[first] - change[second], expected, rtol=1e-3, atol=1e-5)
        assert change[first].abs().max() > 1e-3


def test_normed_queries_have_no_law_and_values_have_one(tmp_path):
    measures = measure_heads(saved(build("qwen3, normed"), tmp_path))
    assert np.isnan(measures["query_key_imbalance"]).all()
    assert not np.isnan(measures["value_output_imbalance"]).any()
    assert "norms or positions are applied" in measures["not_named"].tobytes().decode()


def test_a_series_is_compared_with_its_first_checkpoint(tmp_path):
    with configs.quiet():
        for step in (0, 1, 2):
            moved(neox(), 0.03 * step).save_pretrained(tmp_path / f"step{step}")
    result = probe(Checkpoints(tmp_path), text="A text of a few words. " * 20)
    data = result.data
    assert dict(data.query_key_drift.sizes) == {"step": 3, "module": 2, "key_head": 2}
    assert data.module.values.tolist() == [f"gpt_neox.layers.{layer}.attention" for layer in range(2)]
    for law in LAWS:
        assert data[f"{law}_drift"].isel(step=0).isnull().all()
        assert data[f"{law}_drift"].isel(step=slice(1, None)).notnull().all()
        assert data[f"{law}_imbalance"].notnull().all()
    alone = probe(Checkpoints(tmp_path, revisions=["step2"]), text="A text of a few words. " * 20).data
    assert "query_key_drift" not in alone
    np.testing.assert_array_equal(alone.query_key_imbalance[0], data.query_key_imbalance.sel(step=2))


def test_a_reference_that_does_not_fit_into_memory_is_read_again(tmp_path, monkeypatch):
    first, second = saved(build("gpt2"), tmp_path / "a"), saved(build("gpt2", seed=1), tmp_path / "b")
    measured = measure_heads(second, reference=ReferenceHeads(first))
    monkeypatch.setattr(checkpoint_heads, "MAX_KEPT", 0)
    reference = ReferenceHeads(first)
    before = [measure_heads(second, reference=reference), first.counter.total][1]
    again = measure_heads(second, reference=reference)
    assert first.counter.total > before
    assert all(np.array_equal(measured[name], again[name], equal_nan=True) for name in measured if name != "module")
