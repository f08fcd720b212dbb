"""Load models and tokenise text from a checkpoint's folder with transformers; code in the folder is never run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from joma.arguments import InputError, short_reason
from joma.data.text import corpus
from joma.watch.locations import CONFIG
from joma.watch.weight_files import Unreadable

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
POOLER = "pooler."  # an encoder's pooler follows all attention, and pretrained models often come without its weights
ONLY_WEIGHTS = "(its weights are measured anyway)"


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
    """Keep transformers from writing to the terminal inside the block; its settings are restored afterwards."""
    logging = transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_config(folder: Path, name: str) -> Any:
    """Load the config of the model in `folder`, or of its parent folder if the checkpoints of a series share one.

    Args:
        folder: the checkpoint's folder.
        name: the checkpoint's name in error messages.
    """
    config_folder = _folder_with(folder, (CONFIG,))
    if config_folder is None:
        remedy = f"add it to have attention measured {ONLY_WEIGHTS}"
        raise Unreadable(name, "a model with a config.json", "none", remedy)
    with _loading_errors(name):
        return transformers().AutoConfig.from_pretrained(config_folder, trust_remote_code=False)


def load(folder: Path, name: str) -> nn.Module:
    """Load the model in `folder` without its head, in float32 and evaluation mode."""
    with quiet(), _loading_errors(name):
        config = load_config(folder, name)
        options = {"config": config, "trust_remote_code": False, "output_loading_info": True}
        model, info = transformers().AutoModel.from_pretrained(folder, **options)
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(POOLER))
    if missing:  # transformers has initialised them at random
        got = f"no {missing[0]}" + (f" and {len(missing) - 1} more missing" if len(missing) > 1 else "")
        remedy = f"check its config.json against the names of its weights {ONLY_WEIGHTS}"
        expected = f"all weights of the {type(model).__name__} that its config.json describes"
        raise Unreadable(name, expected, got, remedy, must="have")
    return model.float().eval()


@contextmanager
def _loading_errors(name: str) -> Iterator[None]:
    """Turn the errors of transformers into one-line errors about the checkpoint `name`."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as cause:
        reason = short_reason(cause)
        if "trust_remote_code" in str(cause):
            reason = "an architecture with code of its own, which is never run"
        remedy = f"check its config.json against transformers {transformers().__version__} {ONLY_WEIGHTS}"
        raise Unreadable(name, "a model that transformers can load", reason, remedy) from None


def default_text(size: int = 200_000) -> str:
    """Return the first `size` bytes of the embedded corpus."""
    return bytes(corpus(tokeniser="bytes").train[:size].astype("uint8")).decode(errors="replace")


def encode(text: str, folder: Path, name: str, *, length: int, count: int) -> Int[Tensor, "sequence position"]:
    """Return up to `count` sequences of `length` tokens of `text`, by the model's tokenizer, or bytes if it has none.

    A model with a smaller maximum length gets more sequences.

    Args:
        text: the text.
        folder: the checkpoint's folder.
        name: the checkpoint's name in error messages.
        length: tokens per sequence.
        count: sequences.
    """
    config = load_config(folder, name)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(config, "vocab_size", None)
    if not vocabulary:
        remedy = f"give a language model, or use `joma.watch.attention` with your own input {ONLY_WEIGHTS}"
        raise Unreadable(name, "a language model", f"one described by {type(config).__name__}", remedy)
    tokens = _tokenise(text, folder, name)
    if len(tokens) < 2:
        raise InputError("text", "at least two tokens long", f"{len(tokens)}", "give a longer text")
    if max(tokens) >= vocabulary:
        got = f"token {max(tokens)} for a vocabulary of {vocabulary}"
        raise Unreadable(name, "a model with its tokenizer", got, f"add the tokenizer's files {ONLY_WEIGHTS}")
    positions = min(length, getattr(config, "max_position_embeddings", None) or length, len(tokens))
    sequences = min(count * length, len(tokens)) // positions
    return torch.tensor(tokens[: sequences * positions], device="cpu").reshape(sequences, positions)


def _tokenise(text: str, folder: Path, name: str) -> list[int]:
    tokenizer_folder = _folder_with(folder, TOKENIZERS)
    if tokenizer_folder is None:
        return list(text.encode())
    with quiet(), _loading_errors(name):
        tokenizer = transformers().AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


def _folder_with(folder: Path, files: Collection[str]) -> Path | None:
    """Return `folder` or its parent, the first that has any of `files`."""
    candidates = (folder, folder.parent)
    return next((path for path in candidates if any((path / file).is_file() for file in files)), None)
