"""Loading of models: complete weights, an attention of our choice, and no more than files and machine can hold."""

import json
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from joma import memory
from joma.arguments import InputError
from joma.watch import Checkpoints
from joma.watch.configs import load_config, quiet
from joma.watch.loading import build_skeleton, load
from joma.watch.weight_files import Unreadable
from tiny_models import neox

transformers = pytest.importorskip("transformers")
WEIGHT = "gpt_neox.layers.0.attention.dense.weight"


@pytest.fixture
def folder(tmp_path):
    with quiet():
        neox().save_pretrained(tmp_path / "series" / "step0")
    return tmp_path / "series" / "step0"


def load_folder(folder):
    (checkpoint,) = Checkpoints(folder)
    return load(checkpoint, load_config(folder, checkpoint.name))


def change_weights(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def change_config(folder, **changes):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | changes))


@pytest.mark.parametrize("stated", ["float32", "bfloat16", "nonsense"])
def test_a_model_is_loaded_without_its_head_in_float32_and_evaluation_mode(folder, stated):
    before = load_file(folder / "model.safetensors")
    change_weights(folder, lambda state: state.update({name: weight.bfloat16() for name, weight in state.items()}))
    change_config(folder, dtype=stated)
    model = load_folder(folder)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    loaded = model.state_dict()
    expected = {name.removeprefix("gpt_neox."): weight for name, weight in before.items() if "gpt_neox." in name}
    for name, weight in expected.items():
        assert torch.equal(loaded[name], weight.bfloat16().float())


def test_a_stated_precision_does_not_round_the_weights(folder):
    change_config(folder, torch_dtype="float16", dtype="float16")
    expected = load_file(folder / "model.safetensors")[WEIGHT]
    assert torch.equal(load_folder(folder).state_dict()[WEIGHT.removeprefix("gpt_neox.")], expected)


def test_a_missing_weight_is_refused_but_a_missing_pooler_is_not(folder, tmp_path):
    change_weights(folder, lambda state: state.pop(WEIGHT))
    message = r"`step0` must have all weights of the GPTNeoXModel .*, got no layers\.0\.attention\.dense\.weight;"
    with pytest.raises(Unreadable, match=message):
        load_folder(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng(), quiet():
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path / "bert")
        model = load_folder(tmp_path / "bert")
    assert any(name.startswith("pooler.") for name in model.state_dict())


@pytest.mark.parametrize("prefix", ["gpt_neox.", ""])
def test_a_weight_that_the_config_does_not_describe_is_refused(folder, prefix):
    change_weights(folder, lambda state: _rename(state, prefix))
    load_folder(folder)
    change_config(folder, num_hidden_layers=1)
    message = rf"must have only weights of the GPTNeoXModel .*, got also {prefix}layers\.1\..* and \d+ more;"
    with pytest.raises(Unreadable, match=message):
        load_folder(folder)


def _rename(state, prefix):
    for name in list(state):
        state[name.replace("gpt_neox.", prefix)] = state.pop(name)


def test_buffers_that_older_versions_stored_are_no_unexpected_weights(folder):
    buffers = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
    }
    change_weights(folder, lambda state: state.update(buffers))
    load_folder(folder)


def test_weights_of_another_shape_or_in_whole_numbers_are_refused(folder):
    change_weights(folder, lambda state: state.update({WEIGHT: (100 * state[WEIGHT]).to(torch.int8)}))
    with pytest.raises(Unreadable, match=r"must have weights in floating point, got torch.int8 for gpt_neox.layers.0"):
        load_folder(folder)
    change_weights(folder, lambda state: state.update({WEIGHT: torch.ones(3, 3)}))
    with pytest.raises(Unreadable, match="`step0` must be a model that transformers can load, got"):
        load_folder(folder)


@pytest.mark.parametrize(
    "name",
    ["kernels-community/flash-attn", "paged|flash_attention_2", "flash_attention_2", "eager", "no such thing", 3],
)
def test_the_attention_is_of_our_choice_and_nothing_is_fetched(folder, name, monkeypatch):
    attempts = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: attempts.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: attempts.append(address))
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = load_folder(folder)(tokens).last_hidden_state
        change_config(folder, attn_implementation=name, _attn_implementation=name, _attn_implementation_internal=name)
        model = load_folder(folder)
        assert torch.equal(model(tokens).last_hidden_state, before)
    assert model.config._attn_implementation == "sdpa"
    assert attempts == []


def test_a_model_beyond_the_memory_is_refused_with_its_size_before_it_is_built(folder, monkeypatch):
    (checkpoint,) = Checkpoints(folder)
    config = load_config(folder, "step0")
    values = sum(parameter.numel() for parameter in build_skeleton(checkpoint, config).parameters())
    monkeypatch.setattr(memory, "available", lambda: 4 * values)
    monkeypatch.setattr(checkpoint, "folder", None)  # no weight may be asked for
    size = memory.readable(4 * values).split(" ")[0]
    with pytest.raises(
        InputError, match=rf"`step0` must be small enough for this machine's memory, got a size of {size}"
    ):
        load(checkpoint, config)


def test_more_layers_than_the_file_can_hold_are_not_built(folder):
    change_config(folder, num_hidden_layers=4096)
    (checkpoint,) = Checkpoints(folder)
    stored = len(checkpoint.names())
    message = f"a model of its size, by its config.json, got more than {1000 + 64 * stored:,} tensors for the {stored}"
    with pytest.raises(Unreadable, match=message):
        load(checkpoint, load_config(folder, "step0"))
    assert not torch.nn.modules.module._global_parameter_registration_hooks
