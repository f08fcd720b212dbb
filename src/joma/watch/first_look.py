"""A first look at a model: load it by name or folder, run it on a text, and record its attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joma.arguments import InputError, whole
from joma.watch.configs import folder_with, is_failure, load_config, loading_errors, quiet, reason, transformers
from joma.watch.loading import load
from joma.watch.recording import Recording
from joma.watch.series import Checkpoints
from joma.watch.tokens import VOCABULARIES, encode
from joma.watch.watching import attention

MEASURES = ("entropy", "sink_mass")


@dataclass(frozen=True)
class LoadedModel:
    """A model without its head in evaluation mode, with its config and the folder that its tokenizer is in."""

    name: str
    model: nn.Module
    config: Any
    folder: Path


@dataclass(frozen=True)
class FirstLook:
    """The attention of one sequence, with maps, and the tokens of the sequence as strings."""

    recording: Recording
    tokens: list[str]


def open_model(source: str | Path, revision: str | None = None) -> LoadedModel:
    """Load a model of the Hugging Face hub or a folder; of a series the last checkpoint, or the one that is named.

    No code of the model is run: see `joma.watch.Checkpoints`.

    Args:
        source: a repository, the folder of a model, or a folder of checkpoints.
        revision: the name of a revision or subfolder.
    """
    series = Checkpoints(source, revisions=revision)
    checkpoint = series[len(series) - 1]
    with quiet():
        folder = checkpoint.folder(weights=False)
    config = load_config(folder, checkpoint.name)
    return LoadedModel(checkpoint.name, load(checkpoint, config), config, folder)


def look(loaded: LoadedModel, text: str, *, length: int = 64) -> FirstLook:
    """Run a model on the beginning of a text, and return what was recorded of its attention.

    Args:
        loaded: what `open_model` returns.
        text: a text of at least two tokens.
        length: at most this many tokens.
    """
    length = whole("length", length, low=2)
    if len(text.strip()) < 2:
        raise InputError("text", "a few words", repr(text), "write some")
    tokens, _ = encode(text, {loaded.name: loaded.folder}, loaded.config, length=length, count=1)
    inputs = {"input_ids": tokens[:1]}
    if getattr(loaded.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens[:1]
    try:
        with quiet(), torch.no_grad(), attention(loaded.model, measures=MEASURES, maps=True) as recording:
            loaded.model(**inputs)
    except BaseException as error:  # a model may refuse the call with any error
        if not is_failure(error) or isinstance(error, InputError):
            raise
        got = f"{type(loaded.model).__name__} ({reason(error)})"
        raise InputError("source", "a model that runs on tokens", got, "try another model") from None
    return FirstLook(recording, token_strings(loaded, tokens[0].tolist()))


def token_strings(loaded: LoadedModel, tokens: list[int]) -> list[str]:
    """Return the text of each token by the model's tokenizer, or its character if the model reads bytes."""
    folder = folder_with(loaded.folder, VOCABULARIES)
    if folder is None:
        return [bytes([token]).decode("latin-1") for token in tokens]
    with loading_errors(loaded.name), quiet():
        options = {"trust_remote_code": False, "local_files_only": True, "config": loaded.config}
        tokenizer = transformers().AutoTokenizer.from_pretrained(folder, **options)
    return [tokenizer.decode([token]) for token in tokens]
