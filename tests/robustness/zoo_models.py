"""Hostile descriptions of models: config.json, weights that do not run, and tokenizers, each inside a good series."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from joma.watch.configs import quiet
from robustness.zoo import GoodSeries, Hostile

RUN = ("entropy", "entropy_sd", "sink_mass", "sink_mass_sd", "hidden_cosine")  # what needs a forward pass
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
WORDS = {"<unk>": 0, "The": 1, "the": 2, "cat": 3, "dog": 4, "mat": 5, "rug": 6, "on": 7, "and": 8, ",": 9, ".": 10}


def model(kind: str) -> Any:
    """Return a tiny model of two layers with two heads each, over bytes."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    neox = {"intermediate_size": 24, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
    opt = {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 256}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "neox":
            return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **neox))
        if kind == "opt":
            return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **opt))
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2, bos_token_id=0, eos_token_id=0))


def write_model(folder: Path, step: int, kind: str = "neox") -> None:
    """Write the checkpoint of a step: the weights move along one direction."""
    with quiet(), torch.no_grad():
        checkpoint, generator = model(kind), torch.Generator().manual_seed(1)
        for weight in checkpoint.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.002 * step)
        checkpoint.save_pretrained(folder)


def write_with_tokenizer(folder: Path, step: int) -> None:
    """Write the checkpoint of a step with a tokenizer of whole words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_model(folder, step)
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with quiet():
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def change_json(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a damage: a JSON file after `change`."""

    def damage(folder: Path) -> None:
        fields = json.loads((folder / file).read_text())
        change(fields)
        (folder / file).write_text(json.dumps(fields))

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    """Return a damage: entries of config.json."""
    return change_json(CONFIG, lambda fields: fields.update(changes))


def content(file: str, text: bytes) -> Callable[[Path], None]:
    """Return a damage: another content of a file."""
    return lambda folder: (folder / file).write_bytes(text) and None


def text_change(file: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a damage: a part of a file's text replaced."""

    def damage(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text, f"{file} has no {old}"
        (folder / file).write_text(text.replace(old, new))

    return damage


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a damage: the weights after `change`."""

    def damage(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        change(state)
        save_file(state, folder / WEIGHTS)

    return damage


def set_value(name: str, value: float, index: int = 3) -> Callable[[Path], None]:
    """Return a damage: one number of one weight."""

    def change(state: dict[str, Any]) -> None:
        state[name].view(-1)[index] = value

    return weights(change)


def replaced(file: str, create: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a damage: something else in the place of a file."""

    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        create(folder / file)

    return damage


def sparse(path: Path) -> None:
    """Write a file of a gigabyte that takes no space on the disk."""
    with path.open("wb") as file:
        file.truncate(1 << 30)


def with_code(folder: Path) -> None:
    """Refer to code in the folder, which would end the process."""
    (folder / "mine.py").write_text("raise SystemExit('it was run')")
    config(model_type="mine", auto_map={"AutoConfig": "mine.Mine", "AutoModel": "mine.Model"})(folder)


NO_FILES = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a gigabyte": sparse,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a secret": lambda path: (path.write_text("{}"), path.chmod(0)),
}
NO_JSON = {
    "empty": b"",
    "a list": b"[1, 2]",
    "a number": b"3",
    "null": b"null",
    "cut": b'{"model_type": "gpt_neox", "hidden',
    "no UTF-8": b'{"model_type": "\xff\xfe"}',
    "UTF-16": '{"model_type": "gpt_neox"}'.encode("utf-16"),
    "lists in lists": b"[" * 200_000,
    "objects in objects": b'{"a":' * 200_000,
    "objects in objects, closed": b'{"a":' * 400 + b"1" + b"}" * 400,
    "spaces": b" " * (1 << 22),
    "a number of many digits": b'{"hidden_size": ' + b"9" * 10_000 + b"}",
}
OTHER_SIZES: dict[str, Any] = {
    "text": "16",
    "a float": 16.0,
    "a bool": True,
    "null": None,
    "a list": [16],
    "an object": {},
}
ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
DISAGREEING: dict[str, dict[str, Any]] = {
    "more heads": {"num_attention_heads": 4},
    "one head": {"num_attention_heads": 1},
    "another RoPE base": {"rope_parameters": ROPE | {"rope_theta": 500.0}},
    "a RoPE base of 0": {"rope_parameters": ROPE | {"rope_theta": 0}},
    "another RoPE fraction": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "no RoPE": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.0}},
    "scaled RoPE": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}},
    "RoPE scaled by 0": {"rope_scaling": {"type": "linear", "factor": 0}},
    "RoPE of an unknown kind": {"rope_scaling": {"type": "no such thing", "factor": 2.0}},
    "RoPE without a kind": {"rope_parameters": {"rope_theta": [1], "rope_type": {}}},
    "a base in words": {"rope_parameters": ROPE | {"rope_theta": "ten thousand"}},
    "another activation": {"hidden_act": "relu"},
    "an unknown activation": {"hidden_act": "no such thing"},
    "another epsilon": {"layer_norm_eps": 1e-3},
    "an infinite epsilon": {"layer_norm_eps": float("inf")},
    "a negative epsilon": {"layer_norm_eps": -1.0},
    "NaN in the manner of transformers": {"layer_norm_eps": {"__float__": "NaN"}},
    "a serial residual": {"use_parallel_residual": False},
    "no bias": {"attention_bias": False},
    "fewer layers": {"num_hidden_layers": 1},
    "more layers": {"num_hidden_layers": 3},
    "4,096 layers": {"num_hidden_layers": 4096},
    "a larger vocabulary": {"vocab_size": 257},
    "a smaller vocabulary": {"vocab_size": 200},
    "a huge vocabulary": {"vocab_size": 1 << 24},
    "a huge width": {"hidden_size": 1 << 24},
    "many positions": {"max_position_embeddings": 1 << 24},
    "few positions": {"max_position_embeddings": 1},
    "padding": {"pad_token_id": 5000},
    "tied embeddings": {"tie_word_embeddings": True},
    "an encoder": {"is_encoder_decoder": True},
    "another model": {"model_type": "gptj"},
    "a model without attention": {"model_type": "mamba"},
    "a model of pictures": {"model_type": "vit"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "no heads": {"num_attention_heads": 0},
    "negative heads": {"num_attention_heads": -2},
    "three heads": {"num_attention_heads": 3},
    "no width": {"hidden_size": 0},
    "a negative width": {"hidden_size": -16},
    "no layers": {"num_hidden_layers": 0},
    "negative layers": {"num_hidden_layers": -1},
    "ten million layers": {"num_hidden_layers": 10_000_000},
    "layers without end": {"num_hidden_layers": 10**30},
    "a vocabulary without end": {"vocab_size": 10**30},
    "an infinite width": {"hidden_size": float("inf")},
    "no positions": {"max_position_embeddings": 0},
    "negative positions": {"max_position_embeddings": -1},
    "RoPE by name": {"rope_scaling": "linear"},
    "many entries": {f"entry {i}": i for i in range(20_000)},
    "an unknown model": {"model_type": "no such thing"},
    "no model": {"model_type": None},
    "a list of models": {"model_type": ["gpt_neox"]},
    "quantised": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantised in 8 bits": {"quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}},
    "quantised by name": {"quantization_config": "fp8"},
    "another file": {"configuration_files": ["../../config.json"]},
    "an impossible dropout": {"attention_dropout": "a lot"},
}
IGNORED: dict[str, dict[str, Any]] = {
    "an attention kernel": {"attn_implementation": "kernels-community/flash-attn"},
    "a paged kernel": {"_attn_implementation": "paged|flash_attention_2", "attn_implementation": "paged|eager"},
    "flash attention": {
        "_attn_implementation_internal": "flash_attention_2",
        "attn_implementation": "flash_attention_2",
    },
    "an attention by number": {"attn_implementation": 3},
    "a precision": {"torch_dtype": "nonsense", "dtype": 5},
    "half precision": {"torch_dtype": "float16", "dtype": "float16"},
    "tuples": {"return_dict": False, "torchscript": True, "output_attentions": True},
    "labels": {"num_labels": 10**12, "id2label": [1], "label2id": 3, "problem_type": 4},
    "another weight file": {"transformers_weights": "../../secret.safetensors"},
    "code that is not needed": {"auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "somebody/model--mine.Model"}},
    "methods": {"to_dict": 3, "get_text_config": [], "attribute_map": {"hidden_size": "vocab_size"}, "__class__": 1},
    "strange names": {"\x1b[31m": "\x1b[2J", "": 1, "a" * 10_000: None, "é\n": [[[]]]},
    "training": {"attention_dropout": 0.5, "initializer_range": 7.0, "use_cache": False, "training_step": 10**30},
}


def hostile_configs() -> Iterator[Hostile]:
    """Yield config.json files of GPT-NeoX: none, refused, of another architecture, and with entries without effect."""
    for name, create in NO_FILES.items():
        yield Hostile(f"config: {name}", replaced(CONFIG, create), "partly", RUN, "config.json")
    for name, text in NO_JSON.items():
        yield Hostile(f"config: {name}", content(CONFIG, text), "partly", RUN, "config.json")
    yield Hostile("config: missing", replaced(CONFIG, lambda _: None), "partly", RUN, "a model with a config.json")
    yield Hostile("config: code", with_code, "partly", RUN, "which is never run")
    nan = text_change(CONFIG, '"layer_norm_eps": 1e-05', '"layer_norm_eps": NaN')
    yield Hostile("config: NaN", nan, "partly", RUN, "NaN, which is no number")
    for name, value in OTHER_SIZES.items():
        yield Hostile(f"config: a width that is {name}", config(hidden_size=value), "partly", RUN, "hidden_size")
        yield Hostile(f"config: heads that are {name}", config(num_attention_heads=value), "partly", RUN, "heads")
    for name, changes in DISAGREEING.items():
        yield Hostile(f"config: {name}", config(**changes), "partly", RUN, "another architecture by its config.json")
    for name, changes in REFUSED.items():
        yield Hostile(f"config: {name}", config(**changes), "partly", RUN, "must")
    for name, changes in IGNORED.items():
        yield Hostile(f"config: {name}", config(**changes), "measured")


def hostile_weights() -> Iterator[Hostile]:
    """Yield weights of GPT-NeoX that cannot be run, or not with a finite result."""
    layer = "gpt_neox.layers.{}."
    bias = layer.format(1) + "attention.query_key_value.bias"
    for value in (torch.nan, torch.inf, -torch.inf, 3e38):
        yield Hostile(f"weights: {value} in an attention", set_value(bias, value), "partly", RUN, "finite forward pass")
    for name in (layer.format(0) + "input_layernorm.weight", "gpt_neox.final_layer_norm.bias"):
        yield Hostile(f"weights: NaN in {name}", set_value(name, torch.nan), "partly", RUN, "finite forward pass")
    last = layer.format(1) + "mlp.dense_4h_to_h.bias"
    yield Hostile("weights: NaN after all attention", set_value(last, torch.nan), "partly", RUN, "its hidden vectors")
    lower = layer.format(0) + "mlp.dense_h_to_4h.weight"
    yield Hostile("weights: NaN in a lower matrix", set_value(lower, torch.nan), message="finite")
    yield Hostile(
        "weights: infinity in the embedding", set_value("gpt_neox.embed_in.weight", torch.inf), message="fini"
    )
    dense = layer.format(0) + "attention.dense.weight"
    yield Hostile("weights: one is missing", weights(lambda state: state.pop(dense)), message="architecture")
    extra = {layer.format(2) + "attention.dense.weight": torch.ones(16, 16)}
    yield Hostile("weights: one too many", weights(lambda state: state.update(extra)), message="architecture")
    doubles = weights(lambda state: state.update({name: weight.double() for name, weight in state.items()}))
    yield Hostile("weights: double precision", doubles, "measured")


def hostile_gpt2() -> Iterator[Hostile]:
    """Yield config.json files of GPT-2."""
    changes: dict[str, dict[str, Any]] = {
        "more heads": {"n_head": 4},
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "not scaled": {"scale_attn_weights": False},
        "other activation": {"activation_function": "relu"},
        "other epsilon": {"layer_norm_epsilon": 0.1},
        "many positions": {"n_positions": 1 << 24},
        "more layers": {"n_layer": 4096},
        "an inner width": {"n_inner": 1 << 20},
        "cross attention": {"add_cross_attention": True},
    }
    for name, change in changes.items():
        yield Hostile(f"GPT-2: {name}", config(**change), "partly", RUN, "another architecture by its config.json")
    for key in ("n_head", "n_layer", "n_embd", "n_positions", "vocab_size"):
        for value in (0, -1, "2", 10**30):
            yield Hostile(f"GPT-2: {key} {value}", config(**{key: value}), "partly", RUN, "must")
    yield Hostile("GPT-2: dropout", config(attn_pdrop=2.0), "partly", RUN, "dropout probability")


def hostile_opt() -> Iterator[Hostile]:
    """Yield config.json files of OPT."""
    changes: dict[str, dict[str, Any]] = {
        "norm after": {"do_layer_norm_before": False},
        "other activation": {"activation_function": "gelu"},
        "fewer positions": {"max_position_embeddings": 16},
        "projected": {"word_embed_proj_dim": 8},
        "other width": {"ffn_dim": 25},
        "no bias": {"enable_bias": False},
        "no affine": {"layer_norm_elementwise_affine": False},
        "no final norm": {"_remove_final_layer_norm": True},
        "padding": {"pad_token_id": 3},
    }
    for name, change in changes.items():
        yield Hostile(f"OPT: {name}", config(**change), "partly", RUN, "another architecture by its config.json")


def tokenizer(*path: str, value: Any) -> Callable[[Path], None]:
    """Return a damage: one entry of tokenizer.json."""

    def change(fields: dict[str, Any]) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return change_json(TOKENIZER, change)


BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(([a-z ])+)+[0-9]"}, "behavior": "Isolated", "invert": False}
ERASED = {"type": "Replace", "pattern": {"Regex": "[^\n]"}, "content": ""}


def hostile_tokenizers() -> Iterator[Hostile]:
    """Yield tokenizers: none, of other words, and without effect."""
    for file in (TOKENIZER, "tokenizer_config.json"):
        for name, create in NO_FILES.items():
            yield Hostile(f"{file}: {name}", replaced(file, create), "partly", RUN, "must be")
        for name, text in NO_JSON.items():
            yield Hostile(f"{file}: {name}", content(file, text), "partly", RUN, "tokenizer")
    by_number = change_json("tokenizer_config.json", lambda fields: fields.update(tokenizer_class=3))
    yield Hostile("tokenizer: a class by number", by_number, "partly", RUN, "tokenizer")
    for code in ("mine.Mine", "somebody/model--mine.Mine"):
        changes = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [code, None]}}
        with_code = change_json("tokenizer_config.json", lambda fields, changes=changes: fields.update(changes))
        yield Hostile(f"tokenizer: {code}, which is not needed", with_code, "measured")
    pipe = replaced("chat_template.jinja", os.mkfifo)
    yield Hostile("tokenizer: a pipe beside it", pipe, "partly", RUN, "must be a file")
    entries = {
        "no words": (("model", "vocab"), {}),
        "words in a list": (("model", "vocab"), list(WORDS)),
        "other words": (("model", "vocab"), WORDS | {"cat": 40}),
        "words outside": (("model", "vocab"), WORDS | {"cat": 5000}),
        "negative words": (("model", "vocab"), WORDS | {"cat": -1}),
        "an unknown kind": (("model", "type"), "no such thing"),
        "no kind": (("model",), None),
        "a kind in a list": (("model",), [1]),
        "nothing left of the text": (("normalizer",), ERASED),
        "an expression that backtracks": (("pre_tokenizer",), BACKTRACKING),
        "no expression": (("pre_tokenizer",), {**BACKTRACKING, "pattern": {"Regex": "(("}}),
        "added by number": (("added_tokens",), 3),
    }
    for name, (path, value) in entries.items():
        yield Hostile(f"tokenizer: {name}", tokenizer(*path, value=value), "partly", RUN, "token")
    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    yield Hostile("tokenizer: padded without end", tokenizer("padding", value=padding), "measured")


def all_series(folder: Path) -> Iterator[tuple[GoodSeries, Hostile]]:
    """Yield every hostile checkpoint with the good series that it belongs to, which are written into `folder`."""
    for hostiles, write in (
        ([*hostile_configs(), *hostile_weights()], write_model),
        (list(hostile_tokenizers()), write_with_tokenizer),
        (list(hostile_gpt2()), lambda path, step: write_model(path, step, "gpt2")),
        (list(hostile_opt()), lambda path, step: write_model(path, step, "opt")),
    ):
        good = GoodSeries(Path(tempfile.mkdtemp(dir=folder)), write)
        yield from ((good, hostile) for hostile in hostiles)


def torture(scale: float) -> dict[str, int]:
    """Probe every hostile checkpoint inside its good series; at a smaller scale every n-th of them."""
    every, failures, tried = max(1, round(1 / min(1.0, scale))), [], 0
    with tempfile.TemporaryDirectory() as folder:
        for index, (good, hostile) in enumerate(all_series(Path(folder))):
            if index % every == 0:
                tried += 1
                try:
                    good.check(hostile)
                except AssertionError as problem:
                    failures.append(str(problem))
    if failures:
        raise AssertionError("\n".join([f"{len(failures)} of {tried} hostile models failed:", *failures]))
    return {"hostile configs, models and tokenizers": tried}
