"""The scalars of a probe that are logged, and their keys, which are short and stay the same during a training.

Keys are `attention_<measure>/<layer>`, `attention_entropy_min/<layer>`, `stable_rank/<weight>` and `collapsed/<layer>`,
and, if asked for, `residual_rms/<block>`, `gradient_norm/<block>` and the like. TensorBoard, Weights & Biases and
others group charts by the part before the slash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from joma.watch.averages import MAXIMA
from joma.watch.block_values import BlockValues
from joma.watch.gradients import EMBEDDING, OTHER
from joma.watch.trajectory import Probe

OUTSIDE_BLOCKS = (EMBEDDING, OTHER)
_INDEX = re.compile(r"\[(\d+)\]$")  # of a layer's second call in one pass
_EXPERT = re.compile(r"\bexperts\.\d+\.")


class LogKeys:
    """The keys of a model's layers and weights.

    Args:
        weights: the names of the weights whose stable rank is measured.
        measures: the measures of attention; effective tokens are logged only without the entropy, their logarithm.
        summary: one value for each layer and measure, and one stable rank for each layer: the mean of its weights.
        blocks: the names of the model's blocks, whose stable ranks are then one each; by default as names tell.
    """

    def __init__(
        self, weights: Sequence[str], *, measures: Collection[str], summary: bool, blocks: Collection[str] = ()
    ) -> None:
        logged = [name for name in measures if name != "effective_tokens"]
        self.measures, self.summary = logged if "entropy" in logged else measures, summary
        self.weights = short_names(weights)
        self._rank_keys = _block_keys(self.weights, blocks) if summary else list(self.weights.values())
        self._layers: dict[str, str] = {}
        self._blocks: dict[str, str] = {}
        self._has_collapsed: set[str] = set()
        self._has_value: set[str] = set()

    def layers(self, names: Sequence[str]) -> dict[str, str]:
        """Return the short names of layers; a layer that is first called later keeps its full name."""
        self._layers = self._layers or short_names(names)
        return self._layers | {name: name for name in names if name not in self._layers}

    def _block_scalars(self, values: BlockValues) -> Iterator[tuple[str, float]]:
        """Yield the values of blocks; NaN only where there was a value before.

        An encoder's block has no cross attention, and frozen parameters have no gradient.
        """
        blocks = dict.fromkeys(block for table in values.values() for block in table)
        known = {*self._blocks, *OUTSIDE_BLOCKS}
        self._blocks |= short_names([block for block in blocks if block not in known]) if not self._blocks else {}
        for variable, table in values.items():
            for block, value in table.items():
                key = f"{variable}/{self._blocks.get(block, block)}"
                self._has_value |= set() if math.isnan(value) else {key}
                if key in self._has_value:
                    yield key, value

    def scalars(self, probe: Probe) -> dict[str, float]:
        """Return what is logged: measures by layer, stable ranks, and the number of collapsed heads of a layer."""
        measurement, short = probe.measurement, self.layers(probe.measurement.layers)
        scalars: dict[str, float] = {}
        for index, layer in enumerate(measurement.layers):
            for measure in self.measures:
                scalars |= self._layer_scalars(measure, short[layer], measurement.values[measure][index])
        ranks: dict[str, list[float]] = {}
        for name, rank in zip(self._rank_keys, measurement.ranks.tolist(), strict=True):
            ranks.setdefault(name, []).append(rank)
        scalars |= {f"stable_rank/{name}": sum(values) / len(values) for name, values in ranks.items()}
        return scalars | dict(self._block_scalars(measurement.blocks)) | dict(self._collapsed(probe, short))

    def _layer_scalars(self, measure: str, layer: str, heads: np.ndarray) -> dict[str, float]:
        defined = heads[~np.isnan(heads)]  # empty if the model has diverged
        reduce = np.max if measure in MAXIMA else np.mean
        scalars = {f"attention_{measure}/{layer}": float(reduce(defined)) if defined.size else math.nan}
        if measure == "entropy" and not self.summary:
            scalars[f"attention_entropy_min/{layer}"] = float(defined.min()) if defined.size else math.nan
        return scalars

    def _collapsed(self, probe: Probe, short: dict[str, str]) -> Iterator[tuple[str, float]]:
        """Yield the number of collapsed heads of each layer that has or has had any."""
        for layer, heads in zip(probe.measurement.layers, probe.collapsed.heads, strict=True):
            if heads.any() or layer in self._has_collapsed:
                self._has_collapsed.add(layer)
                yield f"collapsed/{short[layer]}", float(heads.sum())


def _block_keys(weights: Mapping[str, str], blocks: Collection[str]) -> list[str]:
    """Return for each weight the short name of its block; a weight outside all blocks has its own, which is given."""
    owners = {name: next((block for block in blocks if name.startswith(f"{block}.")), None) for name in weights}
    if not blocks:
        owners = {name: _block(name) for name in weights}
        blocks = dict.fromkeys(block for block in owners.values() if block is not None)
    short = short_names(blocks)
    return [short.get(owners[name] or "", weight) for name, weight in weights.items()]


def _block(weight: str) -> str | None:
    """Return the block that a weight seems to belong to: its name up to the last number, or None without a number.

    The numbers of experts do not count, nor that of a layer inside a block, such as 2 in `h.0.mlp.2.weight`.
    """
    path = _EXPERT.sub("", weight).split(".")
    numbers = [index for index, part in enumerate(path) if part.isdigit()]
    if len(numbers) > 1 and numbers[-1] == len(path) - 2:
        numbers.pop()
    return ".".join(path[: numbers[-1] + 1]) if numbers else None


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short form of each name, the shortest of three kinds in which no two names are equal.

    The kinds are the numbered blocks alone, these and the last part, and all but the beginning that all names share.

    >>> short_names(["model.layers.0.self_attn", "model.layers.1.self_attn"])
    {'model.layers.0.self_attn': 'layers.0', 'model.layers.1.self_attn': 'layers.1'}
    >>> list(short_names(["h.0.attn", "h.0.cross", "h.0.cross[1]"]).values())
    ['h.0.attn', 'h.0.cross', 'h.0.cross-1']
    >>> list(short_names(["model.encoder.0.attn", "model.decoder.0.attn"]).values())
    ['encoder.0', 'decoder.0']
    """
    names = list(names)
    parts = {name: _INDEX.sub("", name).removesuffix(".weight").split(".") for name in names}
    common = 0
    while len({tuple(path[: common + 1]) for path in parts.values()}) == 1 and all(
        len(path) > common + 1 for path in parts.values()
    ):
        common += 1
    kinds: list[Callable[[list[str]], list[str]]] = [
        _numbered,
        lambda path: _numbered(path) + [part for part in path[-1:] if part not in _numbered(path)],
        lambda path: path[common:],
    ]
    for kind in kinds:
        short = {name: _with_index(name, ".".join(kind(path))) for name, path in parts.items()}
        if len(set(short.values())) == len(names):
            return short
    return {name: name for name in names}


def _numbered(path: list[str]) -> list[str]:
    """Return the parts from the one before the first number to the last number, or all if there is no number."""
    numbers = [index for index, part in enumerate(path) if part.isdigit()]
    return path[max(0, numbers[0] - 1) : numbers[-1] + 1] if numbers else path


def _with_index(name: str, short: str) -> str:
    """Append the number of the call as `-1`: MLflow refuses brackets in keys."""
    index = _INDEX.search(name)
    return f"{short}-{index.group(1)}" if index else short
