"""What the probes of a training have measured, as labelled arrays over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from joma.probes.summary import MEASURES
from joma.watch.block_values import BlockValues
from joma.watch.collapse import Collapsed


class Measurement(NamedTuple):
    """The result of one probe: measures by layer and head, stable ranks by weight, other variables by block."""

    layers: list[str]
    values: dict[str, Float[np.ndarray, "layer head"]]
    ranks: Float[np.ndarray, " weight"]
    blocks: BlockValues


class Probe(NamedTuple):
    """A measurement at a step, and what has collapsed by then."""

    step: int
    measurement: Measurement
    collapsed: Collapsed


def trajectory_dataset(probes: Sequence[Probe], weights: Sequence[str]) -> xr.Dataset:
    """Return a variable for each measure and `collapsed` (step, layer, head), and `stable_rank` (step, weight).

    `collapsed` and `rank_collapsed` say which heads and weights have been low for several probes in a row. What was
    measured by block has dims step, block.
    """
    measurements = [probe.measurement for probe in probes]
    layers = list(dict.fromkeys(layer for measurement in measurements for layer in measurement.layers))
    names = list(dict.fromkeys(name for measurement in measurements for name in measurement.values))
    heads = max(values.shape[1] for measurement in measurements for values in measurement.values.values())
    block = np.full((len(names), len(probes), len(layers), heads), np.nan)
    collapsed = np.zeros((len(probes), len(layers), heads), dtype=bool)
    for index, (_, measurement, low) in enumerate(probes):
        positions = [layers.index(layer) for layer in measurement.layers]
        collapsed[index, positions, : low.heads.shape[1]] = low.heads
        for name, values in measurement.values.items():
            block[names.index(name), index, positions, : values.shape[1]] = values
    dims = ("step", "layer", "head")
    variables = {name: (dims, values) for name, values in zip(names, block, strict=True)}
    steps = [probe.step for probe in probes]
    dataset = xr.Dataset(variables, {"step": steps, "layer": layers, "head": np.arange(heads)})
    dataset["collapsed"] = (dims, collapsed)
    if weights:
        dataset = dataset.assign_coords(weight=list(weights))
        dataset["stable_rank"] = (("step", "weight"), np.array([measurement.ranks for measurement in measurements]))
        dataset["rank_collapsed"] = (("step", "weight"), np.array([probe.collapsed.weights for probe in probes]))
    for name in names:
        dataset[name].attrs.update(long_name=MEASURES[name].label, units=MEASURES[name].unit)
    return dataset.assign(_block_variables(measurements))


def _block_variables(measurements: Sequence[Measurement]) -> dict[str, xr.DataArray]:
    """Return the variables (step, block); NaN where a block was not measured."""
    names = dict.fromkeys(name for measurement in measurements for name in measurement.blocks)
    tables = [table for measurement in measurements for table in measurement.blocks.values()]
    blocks = list(dict.fromkeys(block for table in tables for block in table))
    variables = {}
    for name in names:
        rows = [
            [measurement.blocks.get(name, {}).get(block, np.nan) for block in blocks] for measurement in measurements
        ]
        variables[name] = xr.DataArray(np.array(rows), dims=("step", "block"), coords={"block": blocks})
    return variables
