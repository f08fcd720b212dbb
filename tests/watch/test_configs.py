"""Reading of config.json, whatever it contains: what it decides, what it does not, and how configs are compared."""

import builtins
import json
import os
import sys
import warnings

import pytest

from joma.arguments import InputError
from joma.watch import configs
from joma.watch.configs import (
    clipped,
    compare_configs,
    computed_fields,
    is_failure,
    load_config,
    loading_errors,
    offline,
    quiet,
)
from joma.watch.weight_files import Unreadable

transformers = pytest.importorskip("transformers")

NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a config.json, and returns the config that is loaded from it."""

    def write(content=None, **changes):
        text = json.dumps(NEOX | changes) if content is None else content
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(tmp_path, "step0")

    return write


def test_checkpoints_may_share_the_config_of_their_parent_folder(tmp_path):
    folder = tmp_path / "step0"
    folder.mkdir()
    with pytest.raises(Unreadable, match=r"`step0` must be a model with a config.json, got none; add it"):
        load_config(folder, "step0")
    (tmp_path / "config.json").write_text(json.dumps(NEOX | {"hidden_size": 24}))
    assert load_config(folder, "step0").hidden_size == 24
    (folder / "config.json").write_text(json.dumps(NEOX))
    assert load_config(folder, "step0").hidden_size == 16


def test_an_unknown_architecture_is_named_with_the_version_of_transformers(write):
    version = transformers.__version__.replace(".", r"\.")
    message = rf"`step0` must be a model that transformers can load, got .*against transformers {version}"
    for model_type in ("no such thing", "", None, 3, ["gpt2"], {"a": 1}):
        with pytest.raises(Unreadable, match=message):
            write(model_type=model_type)


def test_code_of_a_folder_is_never_run(write, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')")
    code = {"AutoConfig": "mine.Mine", "AutoModel": "mine.Model"}
    with pytest.raises(Unreadable, match="an architecture with code of its own, which is never run"):
        write(model_type="mine", auto_map=code)
    assert not hasattr(write(auto_map=code), "auto_map")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "must be valid JSON"),
        (b"\xff\xfe{", "must be valid JSON"),
        (b"[" * 100_000, "must be valid JSON, got maximum recursion depth"),
        (b'{"a":' * 50 + b"1" + b"}" * 50, "must have at most 4,096 entries, 32 deep, got more"),
        (b'{"a":' + b"[" * 50 + b"]" * 50 + b"}", "must have at most 4,096 entries, 32 deep, got more"),
        (b"{" + b",".join(b'"%d":0' % i for i in range(5000)) + b"}", "must have at most 4,096 entries"),
        (b"[1, 2]", "must be a JSON object, got a list"),
        (b"null", "must be a JSON object, got a NoneType"),
        (b'{"layer_norm_eps": NaN}', "must be valid JSON, got NaN, which is no number"),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "must be valid JSON, got Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(write, content, problem):
    with pytest.raises(Unreadable, match=f"`step0/config.json` {problem}"):
        write(content)


def test_a_config_that_is_no_readable_file_is_named(tmp_path):
    file = tmp_path / "config.json"
    file.mkdir()
    with pytest.raises(Unreadable, match=r"`step0/config.json` must be a file, got a folder"):
        load_config(tmp_path, "step0")
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(Unreadable, match=r"`step0/config.json` must be a file, got something else"):
        load_config(tmp_path, "step0")
    file.unlink()
    file.symlink_to("nowhere")
    with pytest.raises(Unreadable, match=r"`step0/config.json` must be a file, got something else"):
        load_config(tmp_path, "step0")
    file.unlink()
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)
    with pytest.raises(Unreadable, match=r"must be a file of at most 16.8 MB, got 1.07 GB"):
        load_config(tmp_path, "step0")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_attention_heads": 0}, "must have sizes of at least 1, got num_attention_heads 0"),
        ({"model_type": "gpt2", "n_head": -2}, "must have sizes of at least 1, got n_head -2"),
        ({"num_hidden_layers": 10_000_000}, "must have sizes of at most 4,096, got num_hidden_layers 10000000"),
        ({"attention_types": [[["global"], 10**9]]}, "must have sizes of at most 4,096, got attention_types"),
        ({"vocab_size": 10**30}, "must have sizes of at most 16,777,216, got vocab_size 1000000000"),
        ({"vocab_size": 0}, "must have sizes of at least 1, got vocab_size 0"),
        ({"max_position_embeddings": -5}, "must have sizes of at least 1, got max_position_embeddings -5"),
        ({"max_position_embeddings": 0}, "must have sizes of at least 1, got max_position_embeddings 0"),
        ({"num_hidden_layers": -1}, "must have sizes of at least 1, got num_hidden_layers -1"),
        ({"hidden_size": "16"}, "Field 'hidden_size' expected int"),
        ({"hidden_size": True}, "Field 'hidden_size' expected int"),
        ({"hidden_size": 16.0}, "Field 'hidden_size' expected int"),
        ({"hidden_size": None}, "Field 'hidden_size' expected int"),
        ({"hidden_size": [16]}, "Field 'hidden_size' expected int"),
        ({"rope_scaling": "linear"}, "Field 'rope_parameters' with value 'linear'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised weights"),
        ({"text_config": {"quantization_config": {"bits": 4}}}, "quantization_config: quantised weights"),
        ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files: a reference to other files"),
    ],
)
def test_what_describes_no_model_is_named(write, changes, problem):
    with pytest.raises(Unreadable, match=problem):
        write(**changes)


def test_what_a_config_does_not_decide_is_ignored(write):
    plain = write().to_dict()
    ignored = write(
        attn_implementation="kernels-community/flash-attn",
        _attn_implementation="paged|flash_attention_2",
        experts_implementation="somebody/experts",
        torch_dtype="nonsense",
        dtype=5,
        return_dict=False,
        output_attentions=True,
        num_labels=10**12,
        id2label=[1],
        transformers_weights="../../secret.safetensors",
        fusion_config={"patch_embeddings": True},
        quantization_config=None,
    )
    assert ignored._attn_implementation is None
    same = {
        key: value for key, value in ignored.to_dict().items() if key not in ("quantization_config", "_name_or_path")
    }
    assert same == {key: value for key, value in plain.items() if key != "_name_or_path"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_attention_heads": 4}, ["num_attention_heads is 4 here and 2 in the others"]),
        ({"rotary_emb_base": 500}, ["rope_parameters.rope_theta is 500 here and 10000 in the others"]),
        ({"rotary_pct": 0.5}, ["rope_parameters.partial_rotary_factor is 0.5 here and 0.25 in the others"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_parameters.factor is 2 here and none in the others"],
        ),
        ({"hidden_act": "relu"}, ['hidden_act is "relu" here and "gelu" in the others']),
        ({"layer_norm_eps": 1e-3}, ["layer_norm_eps is 0.001", "here and 1.0000000000000001e-05 in the others"]),
        ({"use_parallel_residual": False}, ["use_parallel_residual is false here and true in the others"]),
        ({"model_type": "gptj"}, ['has another architecture by its config.json: model_type is "gptj" here']),
    ],
)
def test_a_config_that_computes_something_else_is_named_with_the_field(write, changes, parts):
    both = {"step0": write(), "step1": write(**changes), "step2": write()}
    (fault,) = compare_configs(both)
    assert (fault.kind, fault.checkpoints, fault.left_out, fault.loses_data) == ("architecture", ("step1",), (), True)
    assert all(part in fault.message for part in parts)


def test_fields_that_change_nothing_are_not_compared(write):
    changes = {
        "transformers_version": "4.0.0",
        "architectures": ["GPTNeoXModel"],
        "use_cache": False,
        "torch_dtype": "float16",
        "_name_or_path": "elsewhere",
        "attention_dropout": 0.1,
        "initializer_range": 1.0,
        "eos_token_id": 3,
        "training_step": 2000,
        "rotary_emb_base": 10000,
    }
    assert list(compare_configs({"step0": write(), "step1": write(**changes), "step2": write()})) == []
    assert computed_fields(write()).keys() >= {
        "hidden_size",
        "hidden_act",
        "layer_norm_eps",
        "rope_parameters.rope_theta",
    }
    assert "training_step" not in computed_fields(write(**changes))
    scaled = {"type": "linear", "rope_type": "linear", "factor": 2.0}
    assert "rope_parameters.type" not in computed_fields(write(rope_scaling=scaled))


def test_where_two_disagree_the_first_counts(write):
    (fault,) = compare_configs({"step0": write(), "step1": write(num_attention_heads=4)})
    assert fault.checkpoints == ("step1",)


def test_the_failures_of_libraries_become_errors_and_interrupts_do_not():
    class PanicException(BaseException):
        """What a library in Rust raises."""

    for error in (KeyError("a"), MemoryError(), SystemExit(3), PanicException("index out of bounds"), RecursionError()):
        with (
            pytest.raises(Unreadable, match="`step0` must be a model that transformers can load"),
            loading_errors("step0"),
        ):
            raise error
    with pytest.raises(KeyboardInterrupt), loading_errors("step0"):
        raise KeyboardInterrupt
    assert not is_failure(GeneratorExit())


def test_messages_are_one_line_without_control_characters():
    assert clipped("a\x1b[31m\n b") == "a\\x1b[31m b"
    assert clipped("é" * 300) == "é" * 199 + "…"
    with pytest.raises(Unreadable, match=r"got red \\x1b\[31m;"), loading_errors("step0"):
        raise ValueError("red\n\x1b[31m")


def test_an_entry_with_the_name_of_a_method_does_not_replace_it(write):
    plain = computed_fields(write())
    names = ("to_dict", "get_text_config", "attribute_map", "sub_configs_defaults", "__class__", "__dict__", "validate")
    config = write(**{name: {"hidden_size": "vocab_size"} for name in names})
    assert computed_fields(config) == plain
    assert config.get_text_config().hidden_size == 16


def test_quiet_restores_the_settings_and_nothing_reaches_the_terminal(capfd):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), sys.stdout

    def fail_inside() -> None:
        with quiet():
            assert logging.get_verbosity() == logging.CRITICAL
            assert not logging.is_progress_bar_enabled()
            sys.stdout.write("a model that prints\n")
            warnings.warn("a model that warns", stacklevel=1)
            logging.get_logger("transformers.models").error("a model that logs")
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), sys.stdout) == before
    assert capfd.readouterr() == ("", "")


def test_offline_is_restored():
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with offline():
        assert constants.HF_HUB_OFFLINE
    assert before == constants.HF_HUB_OFFLINE


def test_without_transformers_the_remedy_is_named(monkeypatch):
    real_import = builtins.__import__

    def without_transformers(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    with pytest.raises(InputError, match=r"`transformers` must be installed .*; run `pip install 'joma\[hf\]'`"):
        configs.transformers()
