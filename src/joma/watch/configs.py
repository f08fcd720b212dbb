"""Read the config.json of checkpoints, whatever it contains, and compare it over a series.

A config.json says what a model computes. It does not decide which code runs, what is fetched, or in which precision and
with which attention kernel: those entries are ignored, and nested too deeply or too large it is refused before anything
is built from it.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from joma.arguments import InputError
from joma.memory import readable
from joma.terminal import printable
from joma.watch.locations import CONFIG
from joma.watch.series import Fault
from joma.watch.weight_files import Unreadable

MAX_BYTES, MAX_DEPTH, MAX_ENTRIES = 1 << 24, 32, 1 << 12  # of a config.json; real ones have 4 levels and 200 entries
MAX_LAYERS, MAX_SIZE = 1 << 12, 1 << 24  # lists of so many layers are made before anything else is known of a model
ONLY_WEIGHTS = "(its weights are measured anyway)"
LAYERS = re.compile(r"(layers?|\[\])$")
SIZES = re.compile(r"(layers?|heads?|size|dim|embd|embeddings|positions|inner|ctx|d_model|d_ff|d_kv|experts|buckets)$")
POSITIVE = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
ALIASES = (
    "n_layer",
    "num_layers",
    "n_head",
    "num_heads",
    "n_embd",
    "d_model",
    "n_positions",
)  # their other names
# What a config.json does not decide: code, kernels, files and precision, and the form in which a model answers.
IGNORED = frozenset(
    [
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "auto_map",
        "fusion_config",
        "kernel_config",
        "use_kernels",
        "distributed_config",
        "transformers_weights",
        "dtype",
        "torch_dtype",
        "name_or_path",
        "_name_or_path",
        "gradient_checkpointing",
        "return_dict",
        "use_return_dict",
        "torchscript",
        "output_attentions",
        "output_hidden_states",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
    ]
)
REFUSED = {
    "quantization_config": "quantised weights, which are not run",
    "compression_config": "compressed weights, which are not run",
    "configuration_files": "a reference to other files",
}
# Of the fields that all configs have, these change what a model computes; the others are about outputs, labels, text
# generation and the file itself. Padding counts because some models derive positions from it.
COMPUTED = frozenset(
    [
        "model_type",
        "is_encoder_decoder",
        "is_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "pruned_heads",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "pad_token_id",
    ]
)
# Of the fields of an architecture, these act in training or in a model's head alone.
HARMLESS = re.compile(r"drop|^init|initializer|_loss|_coef$|cache|^summary_|^classifier|(?<!^pad)_token_id$")


def transformers() -> Any:
    """Return the package `transformers`, or raise an error that says how to install it."""
    try:
        import transformers
    except ImportError:
        remedy = "run `pip install 'joma[hf]'`"
        raise InputError("transformers", "installed to run a model", "no such package", remedy) from None
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Keep models from writing to the terminal inside the block; all settings are restored afterwards."""
    logging = transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with redirect_stdout(StringIO()), catch_warnings():
            simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def offline() -> Iterator[None]:
    """Keep huggingface_hub, and so transformers, from using the network inside the block."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_failure(error: BaseException) -> bool:
    """Return whether `error` is the failure of a model, and not an interrupt by the user.

    Libraries in Rust panic with an error that is no `Exception`.
    """
    return isinstance(error, Exception | SystemExit) or type(error).__name__ == "PanicException"


def reason(error: BaseException) -> str:
    """Return the message of an error on one line, or the name of its type.

    >>> reason(ValueError("no\\nsuch \\x1b[31mfile")), reason(MemoryError())
    ('no such \\\\x1b[31mfile', 'MemoryError')
    """
    return clipped(str(error)) or type(error).__name__


def clipped(text: str, width: int = 200) -> str:
    """Return `text` on one line, with control characters escaped, and shortened to `width` characters."""
    line = printable(" ".join(text[: 4 * width].split()))
    return line if len(line) <= width else f"{line[: width - 1]}…"


@contextmanager
def loading_errors(
    name: str, expected: str = "a model that transformers can load", files: str = CONFIG
) -> Iterator[None]:
    """Run the block quietly and offline; its failures become one-line errors about the `files` of checkpoint `name`."""
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(offline())
        try:
            yield
        except InputError:
            raise
        except BaseException as cause:
            if not is_failure(cause):
                raise
            got = reason(cause)
            if "trust_remote_code" in str(cause):
                got = "an architecture with code of its own, which is never run"
            raise Unreadable(name, expected, got, version_remedy(files)) from None


def version_remedy(files: str = CONFIG) -> str:
    """Return what to do about files that do not describe a model or a tokenizer."""
    return f"check its {files} against transformers {transformers().__version__} {ONLY_WEIGHTS}"


def folder_with(folder: Path, files: Collection[str]) -> Path | None:
    """Return `folder` or its parent, the first that has any of `files`, whether they can be read or not."""
    candidates = (folder, folder.parent)
    return next((path for path in candidates if any(_exists(path / file) for file in files)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except OSError:  # in a folder that may not be entered, where reading it will say so
        return True


def read_bytes(file: Path, name: str, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; a pipe would wait for ever."""
    remedy = f"download it again or leave it out {ONLY_WEIGHTS}"
    try:
        if not file.is_file():
            raise Unreadable(name, "a file", "a folder" if file.is_dir() else "something else", remedy)
        if (size := file.stat().st_size) > limit:
            raise Unreadable(name, f"a file of at most {readable(limit)}", readable(size), remedy)
        return file.read_bytes()
    except OSError as cause:
        raise Unreadable(name, "a readable file", cause.strerror, remedy) from None


def load_config(folder: Path, name: str) -> Any:
    """Load the config of the model in `folder`, or of its parent folder if the checkpoints of a series share one.

    Args:
        folder: the checkpoint's folder.
        name: the checkpoint's name in error messages.
    """
    fields, label = read_fields(folder, name), f"{name}/{CONFIG}"
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers().CONFIG_MAPPING:
        got = f"the model type {clipped(repr(model_type), 60)}"
        if fields.get("auto_map"):
            got = "an architecture with code of its own, which is never run"
        raise Unreadable(name, "a model that transformers can load", got, version_remedy())
    with loading_errors(name), tempfile.TemporaryDirectory(prefix="joma-") as copy:
        fields = _without_ignored(fields, transformers().CONFIG_MAPPING[model_type])
        (Path(copy) / CONFIG).write_text(json.dumps(fields | {"torch_dtype": "float32"}))
        config = transformers().AutoConfig.from_pretrained(copy, trust_remote_code=False, local_files_only=True)
        _check_sizes(config, label)
        computed_fields(config)  # what cannot be compared fails here, under the checkpoint's name
    return config


def read_fields(folder: Path, name: str) -> dict[str, Any]:
    """Return the entries of the config.json in `folder` or its parent, checked, but not those of a known model alone.

    Args:
        folder: the checkpoint's folder.
        name: the checkpoint's name in error messages.
    """
    config_folder = folder_with(folder, (CONFIG,))
    if config_folder is None:
        remedy = f"add it to have attention and its heads measured {ONLY_WEIGHTS}"
        raise Unreadable(name, "a model with a config.json", "none", remedy)
    label = f"{name}/{CONFIG}"
    fields = _parse(read_bytes(config_folder / CONFIG, label, MAX_BYTES), label)
    _check_fields(fields, label)
    return fields


def _parse(content: bytes, label: str) -> dict[str, Any]:
    """Return the fields of a config.json, or raise an error if it is not a JSON object of moderate depth."""
    remedy = f"download it again or leave it out {ONLY_WEIGHTS}"
    try:
        fields = json.loads(content.decode(), parse_constant=_infinity)
    except (ValueError, RecursionError) as cause:
        raise Unreadable(label, "valid JSON", reason(cause), remedy) from None
    if not isinstance(fields, dict):
        raise Unreadable(label, "a JSON object", f"a {type(fields).__name__}", remedy)
    return fields


def _infinity(constant: str) -> float:
    """Return an infinity, which some limits are; NaN is no value that a model can compute with."""
    if constant == "NaN":
        raise ValueError("NaN, which is no number")
    return float(constant)


def _check_fields(fields: Mapping[str, Any], label: str) -> None:
    """Raise an error if an entry, at any depth, is refused, or describes more than can be listed."""
    remedy = f"check it or leave the checkpoint out {ONLY_WEIGHTS}"
    entries: list[tuple[int, str, Any]] = [(1, key, value) for key, value in fields.items() if key not in IGNORED]
    for depth, key, value in entries:  # which grows
        if depth > MAX_DEPTH or len(entries) > MAX_ENTRIES:
            raise Unreadable(label, f"{MAX_ENTRIES:,} entries, {MAX_DEPTH} deep", "more", remedy, must="have at most")
        if key in REFUSED and value:
            raise Unreadable(label, "the description of a model as it is stored", f"{key}: {REFUSED[key]}", remedy)
        limit = MAX_LAYERS if LAYERS.search(key) else MAX_SIZE if SIZES.search(key) else None
        got = f"{clipped(key, 40)} {clipped(str(value), 40)}"
        if limit is not None and isinstance(value, int | float) and value > limit:
            raise Unreadable(label, f"sizes of at most {limit:,}", got, remedy, must="have")
        if depth == 1 and key in (*POSITIVE, *ALIASES) and type(value) is int and value < 1:
            raise Unreadable(label, "sizes of at least 1", got, remedy, must="have")
        if isinstance(value, list):  # in a list of lists, numbers may be repetitions
            parts = value if key.endswith("[]") else [part for part in value if isinstance(part, dict | list)]
            entries += [(depth + 1, f"{key}[]", part) for part in parts]
        elif isinstance(value, dict):
            entries += [(depth + 1, name, part) for name, part in value.items() if name not in IGNORED]


def _without_ignored(fields: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Return a copy without the entries, at any depth, that a config.json does not decide.

    An entry with the name of a method, or of what describes a whole class of configs, would replace it.
    """
    base = transformers().PretrainedConfig
    names = {key for key in dir(base) if not isinstance(inspect.getattr_static(base, key), property)}
    names -= _known_fields(base) or frozenset()

    def is_ignored(key: str) -> bool:
        return key in IGNORED or key in names or callable(getattr(config_class, key, None))

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(part) for key, part in value.items() if not is_ignored(key)}
        return [copied(part) for part in value] if isinstance(value, list) else value

    return copied(fields)


def _check_sizes(config: Any, label: str) -> None:
    """Raise an error unless the sizes that every language model has are positive whole numbers, where it has them."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in POSITIVE:
        value = getattr(text_config, key, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            remedy = f"check it or leave the checkpoint out {ONLY_WEIGHTS}"
            raise Unreadable(label, "sizes of at least 1", f"{key} {clipped(repr(value), 40)}", remedy, must="have")


def compare_configs(configs: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each checkpoint whose config computes something else than most others', naming the fields."""
    fields = {name: computed_fields(config) for name, config in configs.items()}
    keys = sorted({key for values in fields.values() for key in values}, key=lambda key: (key != "model_type", key))
    usual = {key: Counter(values.get(key, "none") for values in fields.values()).most_common(1)[0][0] for key in keys}
    for name, values in fields.items():
        different = [key for key in keys if values.get(key, "none") != usual[key]]
        if different:
            parts = [f"{key} is {values.get(key, 'none')} here and {usual[key]} in the others" for key in different[:3]]
            more = f", and {len(different) - 3} more" if len(different) > 3 else ""
            message = clipped(f"{name} has another architecture by its config.json: {', '.join(parts)}{more}", 400)
            remedy = f"check its config.json or leave it out {ONLY_WEIGHTS}"
            yield Fault("architecture", (name,), message, remedy)


def computed_fields(config: Any) -> dict[str, str]:
    """Return the fields of a config that change what its model computes, as text, nested ones under a dotted name."""
    fields, known = config.to_dict(), _known_fields(type(config))
    return dict(_flatten({key: value for key, value in fields.items() if known is None or key in known}))


@cache
def _known_fields(config_class: Any) -> frozenset[str] | None:
    """Return the fields of a kind of config, None if it has no default; a model does not read any others."""
    try:
        return frozenset(config_class().to_dict())
    except Exception:  # some cannot be built without arguments, each with an error of its own
        return None


def _flatten(fields: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    general = _known_fields(transformers().PretrainedConfig) or frozenset()
    for key, value in fields.items():
        if key not in COMPUTED and (key in general or HARMLESS.search(str(key))):
            continue
        if key == "type" and "rope_type" in fields:  # its name in older versions
            continue
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    """Return a value as text, the same for 10000 and 10000.0."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return f"{value:.17g}" if is_number else json.dumps(value, default=str)
    except OverflowError:  # a whole number beyond all floats
        return str(value)
