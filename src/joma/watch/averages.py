"""Average a probe's measures over rows: of all sequences and query positions, passes and processes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from joma.probes.summary import MEASURES
from joma.watch.distributed import Processes
from joma.watch.recording import Recording

MAXIMA = frozenset(name for name, measure in MEASURES.items() if measure.reduction == "maximum")  # over rows
Averages = tuple[list[str], dict[str, Float[np.ndarray, "layer head"]]]


class RowSums(NamedTuple):
    """Sums over the defined rows (maxima for some measures) and the number of those rows, by layer and head."""

    measures: tuple[str, ...]
    layers: list[str]
    sums: Float[np.ndarray, "measure layer head"]
    counts: Float[np.ndarray, "measure layer head"]


def means(recording: Recording) -> Averages:
    """Return the layers and the mean of each measure by layer and head, from a recording that is reduced already.

    Each pass counts by its rows: a pass of `generate` with one token weighs less than that of the prompt.
    """
    layers, block = recording.arrays()
    measures = recording.measures
    if block.shape[1] == 1:
        return layers, dict(zip(measures, block[:, 0], strict=True))
    defined = ~np.isnan(block)
    weights = defined * recording.pass_row_counts()[..., None]
    count = weights.sum(axis=1)
    total = np.where(defined, weights * block, 0.0).sum(axis=1)
    values = np.where(count, total / np.maximum(count, 1), np.nan)
    for index, name in enumerate(measures):
        if name in MAXIMA:
            largest = np.where(defined[index], block[index], -np.inf).max(axis=0)
            values[index] = np.where(count[index], largest, np.nan)
    return layers, dict(zip(measures, values, strict=True))


def row_sums(recording: Recording) -> RowSums:
    """Return the sums over the rows of an unreduced recording, computed on the model's device."""
    measures = recording.measures
    passes = recording.values()
    layers = list(dict.fromkeys(layer for values in passes for layer in values))
    heads = max(values.shape[2] for layers_of_pass in passes for values in layers_of_pass.values())
    is_maximum = np.array([name in MAXIMA for name in measures])
    sums = np.where(is_maximum, -np.inf, 0.0)[:, None, None] * np.ones((len(measures), len(layers), heads))
    counts = np.zeros_like(sums)
    for layers_of_pass in passes:
        for layer, values in layers_of_pass.items():
            position = (slice(None), layers.index(layer), slice(values.shape[2]))
            defined = ~values.isnan()
            total = values.nansum(dim=(1, 3), dtype=torch.float64).cpu().numpy()
            largest = values.masked_fill(~defined, -torch.inf).amax(dim=(1, 3)).double().cpu().numpy()
            sums[position] = np.where(is_maximum[:, None], np.maximum(sums[position], largest), sums[position] + total)
            counts[position] += defined.sum(dim=(1, 3)).cpu().numpy()
    return RowSums(measures, layers, sums, counts)


def combine(part: RowSums, processes: Processes) -> Averages:
    """Return the averages over the rows of all processes; a layer may have been called on some of them only."""
    layouts = processes.gather((part.layers, part.sums.shape[2]))
    layers = list(dict.fromkeys(layer for names, _ in layouts for layer in names))
    heads = max(count for _, count in layouts)
    is_maximum = np.array([name in MAXIMA for name in part.measures])[:, None, None]
    sums = np.where(is_maximum, -np.inf, 0.0) * np.ones((len(part.measures), len(layers), heads))
    counts = np.zeros_like(sums)
    positions = [layers.index(layer) for layer in part.layers]
    sums[:, positions, : part.sums.shape[2]] = part.sums
    counts[:, positions, : part.sums.shape[2]] = part.counts
    total, counts = processes.total(np.stack([np.where(is_maximum, 0.0, sums), counts]))
    if is_maximum.any():
        total = np.where(is_maximum, processes.largest(sums), total)
    values = np.where(counts > 0, total / np.where(is_maximum, 1.0, np.maximum(counts, 1.0)), np.nan)
    return layers, dict(zip(part.measures, values, strict=True))
