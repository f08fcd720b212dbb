"""What a probe measures around attention, by block: residual norms, ranks of hidden states, gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from torch import nn

from joma.watch.distributed import Processes
from joma.watch.hidden_states import ATTENTION, HIDDEN, NORMS, RANKS, HiddenStates, activations

GRADIENT = "gradient_norm"
BlockValues = dict[str, dict[str, float]]  # by variable and block


@contextmanager
def watch_blocks(model: nn.Module, options: Mapping[str, Any]) -> Iterator[HiddenStates | None]:
    """Record residual norms and ranks of hidden states if `options` ask for them, else nothing."""
    wanted = options["residual"] or options["activation_ranks"]
    names = {"residual": options["residual"], "ranks": options["activation_ranks"]}
    others = {"rows": options["rows"], "blocks": options["blocks"]}
    with activations(model, **names, **others) if wanted else nullcontext() as states:
        yield states


def hidden_values(states: HiddenStates | None) -> BlockValues:
    """Return the norms and ranks of each block, averaged over passes.

    The variables are `residual_rms`, `residual_norm`, and for the hidden states and what attention returns
    `hidden_stable_rank`, `hidden_participation_ratio`, `attention_output_stable_rank` …
    """
    values: BlockValues = {}
    if states is None:
        return values
    dataset = states.dataset()
    blocks = [str(block) for block in dataset.block.values]
    for name in (name for name in (*NORMS, *RANKS) if name in dataset):
        streams = [str(stream) for stream in dataset.stream.values] if name in RANKS else [None]
        for stream in streams:
            array = dataset[name].values if stream is None else dataset[name].sel(stream=stream).values
            variable = name if stream is None else f"{_stream_name(stream)}_{name}"
            means = [_mean(column[np.isfinite(column)].tolist()) for column in array.T]
            values[variable] = dict(zip(blocks, means, strict=True))
    return values


def _stream_name(stream: str) -> str:
    """Return the beginning of a variable's name: "attention[1]" becomes "attention_output_1"."""
    if stream == HIDDEN:
        return HIDDEN
    number = stream.removeprefix(ATTENTION).strip("[]")
    return "attention_output" + (f"_{number}" if number else "")


def has_gradients(model: nn.Module) -> bool:
    """Return whether any parameter has a gradient."""
    return any(parameter.grad is not None for parameter in model.parameters())


def combine_blocks(values: BlockValues, processes: Processes) -> BlockValues:
    """Return the mean of each value over the processes that have it."""
    if processes.count == 1:
        return values
    parts = processes.gather(values)
    combined: BlockValues = {}
    for variable in dict.fromkeys(variable for part in parts for variable in part):
        blocks = dict.fromkeys(block for part in parts for block in part.get(variable, {}))
        for block in blocks:
            numbers = [part.get(variable, {}).get(block, math.nan) for part in parts]
            defined = [number for number in numbers if not math.isnan(number)]
            combined.setdefault(variable, {})[block] = _mean(defined)
    return combined


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
