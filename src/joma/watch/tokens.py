"""Turn a text into tokens with the tokenizer that the checkpoints of a series share; its code is never run."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from joma.arguments import InputError
from joma.data.text import corpus
from joma.watch.configs import ONLY_WEIGHTS, clipped, folder_with, loading_errors, read_bytes, transformers
from joma.watch.locations import CONFIG
from joma.watch.series import Fault
from joma.watch.weight_files import Unreadable

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
TRIAL = 10_000  # characters that a tokenizer is tried on
MAX_BYTES = 1 << 28  # of one file of a tokenizer; the largest known has 35 MB


def default_text(size: int = 200_000) -> str:
    """Return the first `size` bytes of the embedded corpus."""
    return bytes(corpus(tokeniser="bytes").train[:size].astype("uint8")).decode(errors="replace")


def encode(
    text: str, folders: Mapping[str, Path], config: Any, *, length: int, count: int
) -> tuple[Int[Tensor, "sequence position"], list[Fault]]:
    """Return up to `count` sequences of `length` tokens of `text`, and the faults of checkpoints that disagree on them.

    The tokens are those of most tokenizers in the series, or bytes if there is none. A model with a smaller maximum
    length gets more sequences.

    Args:
        text: the text.
        folders: the folder of each checkpoint, by name.
        config: the config that the checkpoints share.
        length: tokens per sequence.
        count: sequences.

    Raises:
        Unreadable: no checkpoint can read the text.
        InputError: the text is too short.
    """
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary, first = getattr(text_config, "vocab_size", None), next(iter(folders))
    if not vocabulary:
        remedy = f"give a language model, or use `joma.watch.attention` with your own input {ONLY_WEIGHTS}"
        raise Unreadable(first, "a language model", f"one described by {type(config).__name__}", remedy)
    by_name, errors = _tokenise_all(text, folders, config, vocabulary)
    if not by_name and errors:
        raise next(iter(errors.values()))
    usual = Counter(tokens for tokens in by_name.values() if tokens is not None).most_common(1)
    tokens = usual[0][0] if usual else _as_bytes(text, first, vocabulary)
    faults = [Fault.from_error("tokenizer", name, error, left_out=False) for name, error in errors.items()]
    faults += [_other_tokens(name) for name, other in by_name.items() if other not in (None, tokens)]
    positions = min(length, getattr(text_config, "max_position_embeddings", None) or length, len(tokens))
    sequences = min(count * length, len(tokens)) // positions
    return torch.tensor(tokens[: sequences * positions], device="cpu").reshape(sequences, positions), faults


def _other_tokens(name: str) -> Fault:
    message = f"{name} has another tokenizer, which turns the text into other tokens than the others'"
    return Fault("tokenizer", (name,), message, f"check its tokenizer or leave it out {ONLY_WEIGHTS}")


def _as_bytes(text: str, name: str, vocabulary: int) -> tuple[int, ...]:
    tokens = tuple(text.encode())
    if len(tokens) < 2:
        raise InputError("text", "at least two tokens long", f"{len(tokens)}", "give a longer text")
    _check_tokens(tokens, name, vocabulary)
    return tokens


def _tokenise_all(
    text: str, folders: Mapping[str, Path], config: Any, vocabulary: int
) -> tuple[dict[str, tuple[int, ...] | None], dict[str, Unreadable]]:
    """Return the tokens of each checkpoint, None without a tokenizer, and the errors of those that cannot be used.

    Tokenizers with the same files are loaded once.
    """
    results: dict[str, tuple[int, ...] | Unreadable] = {}
    tokens: dict[str, tuple[int, ...] | None] = {}
    errors: dict[str, Unreadable] = {}
    for name, folder in folders.items():
        tokenizer_folder = folder_with(folder, VOCABULARIES)
        if tokenizer_folder is None:
            tokens[name] = None
            continue
        try:
            digest = _digest(tokenizer_folder, name)
        except Unreadable as error:
            errors[name] = error
            continue
        if digest not in results:
            results[digest] = _tokenise(text, tokenizer_folder, name, config, vocabulary)
        result = results[digest]
        if isinstance(result, Unreadable):
            errors[name] = Unreadable(name, result.expected, result.got, result.remedy, must=result.must)
        else:
            tokens[name] = result
    return tokens, errors


def _digest(folder: Path, name: str) -> str:
    """Return a hash of a tokenizer's files; anything in the folder that is no plain file is refused.

    transformers opens further files, and a pipe would wait for ever.
    """
    try:
        others = [file for file in sorted(folder.iterdir()) if not file.is_file() and not file.is_dir()]
    except OSError as cause:
        raise Unreadable(name, "a readable folder", cause.strerror, f"check its permissions {ONLY_WEIGHTS}") from None
    for file in others:
        label = clipped(f"{name}/{file.name}")
        raise Unreadable(label, "a file", "something else", f"remove it {ONLY_WEIGHTS}")
    digest = hashlib.sha256()
    for file_name in (*VOCABULARIES, *SETTINGS):
        if (folder / file_name).exists():
            content = read_bytes(folder / file_name, f"{name}/{file_name}", MAX_BYTES)
            digest.update(f"{file_name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _tokenise(text: str, folder: Path, name: str, config: Any, vocabulary: int) -> tuple[int, ...] | Unreadable:
    """Return the tokens of the text, or the error if the tokenizer in `folder` cannot be used."""
    package = transformers()
    config = config if (folder / CONFIG).is_file() else package.PretrainedConfig()
    try:
        with loading_errors(name, "a checkpoint whose tokenizer transformers can load", "tokenizer's files"):
            with _without_panics():  # not for the whole text: what other threads have to say would wait as long
                options = {"trust_remote_code": False, "local_files_only": True, "config": config}
                tokenizer = package.AutoTokenizer.from_pretrained(folder, **options)
                tokenizer(text[:TRIAL], add_special_tokens=False)
            tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        _check_tokens(tokens, name, vocabulary)
    except Unreadable as error:
        return error
    return tokens


@contextmanager
def _without_panics() -> Iterator[None]:
    """Hide what a library in Rust writes to the standard error stream where it panics; all else is passed on."""
    try:
        stream = os.dup(2)
    except OSError:  # a closed stream has no reader
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                os.ftruncate(written.fileno(), 0)
            raise
        finally:
            os.dup2(stream, 2)
            os.close(stream)
            written.seek(0)
            os.write(2, written.read())


def _check_tokens(tokens: tuple[int, ...], name: str, vocabulary: int) -> None:
    """Raise an error unless there are two tokens or more, all of them in the vocabulary."""
    if len(tokens) < 2:
        remedy = f"give a longer text, or check its tokenizer {ONLY_WEIGHTS}"
        raise Unreadable(name, "the text as two tokens or more", f"{len(tokens)}", remedy, must="encode")
    outside = next((token for token in (max(tokens), min(tokens)) if not 0 <= token < vocabulary), None)
    if outside is not None:
        got = f"token {outside} for a vocabulary of {vocabulary}"
        raise Unreadable(name, "a model with its tokenizer", got, f"add the tokenizer's files {ONLY_WEIGHTS}")
