"""The blocks of models of every library, by name, and the attention inside each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny_models
from joma.arguments import InputError
from joma.watch.blocks import all_modules, all_parameters, find_blocks, named_modules


class SelfAttention(nn.Module):
    """Attention by its class's name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        return self.project(x)


class Block(nn.Module):
    """A block in the manner of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = SelfAttention(), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.mlp(x + self.attn(x))


class Mixer(nn.Module):
    """A block without attention, as in hybrid models."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.mlp(x)


class Stage(nn.Module):
    def __init__(self, count) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(count)))

    def forward(self, x):
        return self.blocks(x)


class Named(nn.Module):
    """A model of the given parts, which are called in turn."""

    def __init__(self, **parts) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def hugging_face(kind, **options):
    import transformers

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    with torch.device("meta"):
        return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **(options or sizes)))


T5 = {"d_model": 8, "d_kv": 4, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2, "d_ff": 8, "vocab_size": 9}
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "image_size": 32}
FAMILIES = {
    "llama": ({}, ["layers.0", "layers.1"], ["layers.0.self_attn"]),
    "bert": ({}, ["encoder.layer.0", "encoder.layer.1"], ["encoder.layer.0.attention.self"]),
    "albert": ({}, ["encoder.albert_layer_groups.0"], ["encoder.albert_layer_groups.0.albert_layers.0.attention"]),
    "gpt2": ({"n_embd": 8, "n_layer": 2, "n_head": 2}, ["h.0", "h.1"], ["h.0.attn"]),
    "swin": (SWIN, [f"encoder.layers.{i}.blocks.{j}" for i in range(2) for j in range(2)], None),
    "t5": (T5, [f"{p}.block.{i}" for p, n in (("encoder", 2), ("decoder", 3)) for i in range(n)], None),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_of_hugging_face_models(kind):
    options, names, attention = FAMILIES[kind]
    blocks = find_blocks(hugging_face(kind, **options))
    assert list(blocks) == names
    if attention is not None:
        assert list(blocks[names[0]].attention) == attention
    if kind == "t5":
        decoder = blocks["decoder.block.2"].attention
        assert list(decoder) == [
            f"decoder.block.2.layer.{i}.{n}" for i, n in ((0, "SelfAttention"), (1, "EncDecAttention"))
        ]


def test_blocks_of_torch():
    blocks = find_blocks(nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=1, batch_first=True))
    assert list(blocks) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"]
    assert list(blocks["decoder.layers.0"].attention) == [f"decoder.layers.0.{n}_attn" for n in ("self", "multihead")]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Embedding(3, 4), Block(), Block(), nn.Linear(4, 3)), ["1", "2"]),
        (Named(h=nn.ModuleList([Mixer(), Block(), Mixer()])), ["h.0", "h.1", "h.2"]),
        (Named(layers=nn.Sequential(Stage(2), Stage(3))), ["layers.0.blocks.0", "layers.0.blocks.1"]),
        (Named(layers=nn.Sequential(Stage(1), Stage(1))), ["layers.0", "layers.1"]),
        (Named(block=Block()), ["block"]),
        (Block(), [""]),
    ],
    ids=["sequential", "hybrid", "stages", "stages of one", "one block", "itself"],
)
def test_blocks_of_other_models(model, names):
    assert list(find_blocks(model))[: len(names)] == names


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # as torch.compile is imported
def test_wrappers_leave_no_trace_in_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Named(h=nn.ModuleList([checkpoint_wrapper(Block()), checkpoint_wrapper(Block())]))
    wrapped = nn.DataParallel(torch.compile(model))
    assert list(find_blocks(wrapped)) == ["h.0", "h.1"]
    assert list(find_blocks(wrapped)["h.1"].attention) == ["h.1.attn"]
    assert set(named_modules(wrapped)) == set(named_modules(Named(h=nn.ModuleList([Block(), Block()]))))
    assert list(named_modules(Named(module=Block())))[1] == "module"  # a user's own name stays


def test_a_model_with_adapters_has_the_names_of_its_base():
    from peft import LoraConfig, PrefixTuningConfig, get_peft_model

    lora = LoraConfig(target_modules=["query_key_value"], r=2)
    prefix = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")  # leaves the model's layers as they are
    for config in (lora, prefix):
        base = tiny_models.neox()
        names = list(find_blocks(base))
        adapted = get_peft_model(base, config)
        assert list(find_blocks(adapted)) == names
        assert list(find_blocks(nn.DataParallel(adapted))) == names


def test_a_pattern_names_the_blocks():
    model = tiny_models.neox()
    assert list(find_blocks(model, r"layers\.1")) == ["gpt_neox.layers.1"]
    assert list(find_blocks(model, r"mlp$")) == ["gpt_neox.layers.0.mlp", "gpt_neox.layers.1.mlp"]


@pytest.mark.parametrize("pattern", ["no such module", "("])
def test_a_bad_pattern_is_named(pattern):
    with pytest.raises(InputError, match="`blocks` must be"):
        find_blocks(tiny_models.neox(), pattern)


def test_a_model_without_attention_lists_what_it_has():
    with pytest.raises(InputError, match=r"whose lists are layers \(2 x Mixer\); name them"):
        find_blocks(Named(layers=nn.Sequential(Mixer(), Mixer())))
    with pytest.raises(InputError, match="whose lists are none"):
        find_blocks(nn.Linear(2, 2))
    pairs = nn.ModuleList([nn.ModuleList([SelfAttention(), Mixer()])])  # nothing to hook: lists are not called
    with pytest.raises(InputError, match=r"layers \(1 x ModuleList\)"):
        find_blocks(Named(layers=pairs))


def test_all_modules_are_those_of_torch_in_its_order() -> None:
    shared, block = nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2)
    inner = nn.ModuleDict({"b": shared, "a": nn.Sequential(nn.ReLU(), shared, block)})
    inner.register_module("none", None)
    for model in (nn.Sequential(inner, block, shared), shared, nn.Sequential(nn.ModuleList([inner]), inner)):
        modules = all_modules(model)
        assert list(modules.items()) == list(model.named_modules())
        assert all(modules[name] is module for name, module in model.named_modules())
        assert list(all_parameters(model)) == [name for name, _ in model.named_parameters()]
        assert all(all_parameters(model)[name] is parameter for name, parameter in model.named_parameters())
