"""Whole models and tokens from a checkpoint's folder, by transformers: never with code of the folder's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from joma.arguments import InputError
from joma.data.text import corpus
from joma.watch.series import CONFIG
from joma.watch.weight_files import Unreadable

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
POOLER = "pooler."  # of encoders, which their pretraining has no use for: it comes after all attention
ONLY_WEIGHTS = "(its weights are measured all the same)"


def transformers() -> Any:
    """The package, or what to install."""
    try:
        import transformers
    except ImportError:
        remedy = "run `pip install 'joma[hf]'`"
        raise InputError("transformers", "installed, to run a model", "no such package", remedy) from None
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub from writing to the terminal, and put their settings back afterwards."""
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


def configuration(folder: Path, name: str) -> Any:
    """The config of the model in `folder`, or in the folder above as for a series that shares one."""
    place = next((place for place in (folder, folder.parent) if (place / CONFIG).is_file()), None)
    if place is None:
        raise Unreadable(
            name, "a model with a config.json", "none", f"add it to have attention measured {ONLY_WEIGHTS}"
        )
    with _told(name):
        return transformers().AutoConfig.from_pretrained(place, trust_remote_code=False)


def load(folder: Path, name: str) -> nn.Module:
    """The model in `folder` without its head, in float32, ready to be run."""
    with quiet(), _told(name):
        config = configuration(folder, name)
        options = {"config": config, "trust_remote_code": False, "output_loading_info": True}
        model, found = transformers().AutoModel.from_pretrained(folder, **options)
    missing = sorted(own for own in found["missing_keys"] if not own.startswith(POOLER))
    if missing:  # transformers would have drawn them at random
        got = f"no {missing[0]}" + (f" and {len(missing) - 1} more missing" if len(missing) > 1 else "")
        remedy = f"check its config.json against the names of its weights {ONLY_WEIGHTS}"
        raise Unreadable(name, f"weights of the {type(model).__name__} that its config.json describes", got, remedy)
    return model.float().eval()


@contextmanager
def _told(name: str) -> Iterator[None]:
    """What transformers cannot load, in one line."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as cause:
        text = str(cause).strip()
        reason = text.splitlines()[0] if text else type(cause).__name__
        if "trust_remote_code" in text:
            reason = "an architecture that is code of its own, which is never run"
        remedy = f"check its config.json against transformers {transformers().__version__} {ONLY_WEIGHTS}"
        raise Unreadable(name, "a model that transformers can load", reason, remedy) from None


def default_text(size: int = 200_000) -> str:
    """The beginning of the embedded corpus."""
    return bytes(corpus(tokeniser="bytes").train[:size].astype("uint8")).decode(errors="replace")


def encode(text: str, folder: Path, name: str, *, length: int, count: int) -> Int[Tensor, "sequence position"]:
    """Up to `count` x `length` tokens, by the model's own tokenizer or, without one, as bytes.

    A model that takes shorter sequences gets more of them.
    """
    config = configuration(folder, name)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(config, "vocab_size", None)
    if not words:
        remedy = "give a language model, or use `joma.watch.attention` on your own input"
        raise Unreadable(name, "a model of text", f"one of {type(config).__name__}", f"{remedy} {ONLY_WEIGHTS}")
    ids = _tokens(text, folder, name)
    if len(ids) < 2:
        raise InputError("text", "at least two tokens long", f"{len(ids)}", "give a longer text")
    if max(ids) >= words:
        got = f"token {max(ids)} where {words} are known"
        raise Unreadable(name, "a model with its tokenizer", got, f"add its tokenizer's files {ONLY_WEIGHTS}")
    longest = min(length, getattr(config, "max_position_embeddings", None) or length, len(ids))
    rows = min(count * length, len(ids)) // longest
    return torch.tensor(ids[: rows * longest], device="cpu").reshape(rows, longest)


def _tokens(text: str, folder: Path, name: str) -> list[int]:
    place = next((p for p in (folder, folder.parent) if any((p / file).is_file() for file in TOKENIZERS)), None)
    if place is None:
        return list(text.encode())
    with quiet(), _told(name):
        tokenizer = transformers().AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
