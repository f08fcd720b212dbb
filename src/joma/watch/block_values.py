"""What a probe measures around attention, by block: residual norms, ranks of hidden states, gradient norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from joma.watch.distributed import Processes
from joma.watch.hidden_states import ATTENTION, HIDDEN, NORMS, RANKS, HiddenStates, activations

GRADIENT = "gradient_norm"
BlockValues = dict[str, dict[str, float]]  # by variable and block


def watch_blocks(model: nn.Module, options: Mapping[str, Any]) -> AbstractContextManager[HiddenStates | None]:
    """Record residual norms and ranks of hidden states if `options` ask for them, else nothing."""
    if not options["residual"] and not options["activation_ranks"]:
        return nullcontext()
    names = {"residual": options["residual"], "ranks": options["activation_ranks"]}
    return activations(model, **names, rows=options["rows"], blocks=options["blocks"])


class Part(NamedTuple):
    """What one process knows of a mean over passes and processes: the weighted sum, and the sum of the weights."""

    total: float
    weight: float


def hidden_parts(states: HiddenStates | None) -> dict[str, dict[str, Part]]:
    """Return the norms and ranks of each block, summed over passes: norms over tokens, ranks over passes.

    The variables are `residual_rms`, whose squares are summed, `residual_norm`, and for the hidden states and what
    attention returns `hidden_stable_rank`, `hidden_participation_ratio`, `attention_output_stable_rank` …
    """
    parts: dict[str, dict[str, Part]] = {}
    if states is None:
        return parts
    dataset, counts = states.dataset(), states.token_counts()
    blocks = [str(block) for block in dataset.block.values]
    for name in (name for name in (*NORMS, *RANKS) if name in dataset):
        streams = [str(stream) for stream in dataset.stream.values] if name in RANKS else [None]
        weights = np.ones_like(counts) if name in RANKS else counts
        for stream in streams:
            array = dataset[name].values if stream is None else dataset[name].sel(stream=stream).values
            variable = name if stream is None else f"{_stream_name(stream)}_{name}"
            defined = np.isfinite(array)
            totals = np.where(defined, weights * _summed(variable, array), 0.0).sum(axis=0)
            sums = zip(totals.tolist(), np.where(defined, weights, 0.0).sum(axis=0).tolist(), strict=True)
            parts[variable] = {block: Part(*pair) for block, pair in zip(blocks, sums, strict=True)}
    return parts


def _summed(variable: str, values: np.ndarray) -> np.ndarray:
    """Return what is summed of a variable: a root mean square is the root of a mean of squares."""
    return values**2 if variable == NORMS[0] else values


def _stream_name(stream: str) -> str:
    """Return the beginning of a variable's name: "attention[1]" becomes "attention_output_1"."""
    if stream == HIDDEN:
        return HIDDEN
    number = stream.removeprefix(ATTENTION).strip("[]")
    return "attention_output" + (f"_{number}" if number else "")


def has_gradients(model: nn.Module) -> bool:
    """Return whether any parameter has a gradient."""
    return any(parameter.grad is not None for parameter in model.parameters())


def combine_blocks(parts: Mapping[str, Mapping[str, Part]], processes: Processes) -> BlockValues:
    """Return the mean of each value over all passes of all processes that have it, NaN if none has."""
    by_process = processes.gather(parts)
    combined: BlockValues = {}
    for variable in dict.fromkeys(variable for values in by_process for variable in values):
        blocks = dict.fromkeys(block for values in by_process for block in values.get(variable, {}))
        for block in blocks:
            known = [values[variable][block] for values in by_process if block in values.get(variable, {})]
            weight = sum(part.weight for part in known)
            mean = sum(part.total for part in known) / weight if weight else math.nan
            combined.setdefault(variable, {})[block] = math.sqrt(mean) if variable == NORMS[0] else mean
    return combined
