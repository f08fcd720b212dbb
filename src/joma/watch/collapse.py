"""Warn when attention entropy or stable rank has collapsed: one warning a probe, whatever the number of heads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float


class EntropyCollapse(UserWarning):
    """Heads have put nearly all their weight on one token for several probes in a row."""


class RankCollapse(UserWarning):
    """Weights have acted along a single direction for several probes in a row."""


class Collapsed(NamedTuple):
    """Which heads and weights have been low for at least `patience` probes in a row, this one included."""

    heads: Bool[np.ndarray, "layer head"]
    weights: Bool[np.ndarray, " weight"]


class CollapseDetector:
    """Count the low probes in a row of each head and weight, and warn of each once.

    Args:
        floor: a head is low below this mean entropy in nats.
        rank_floor: a weight is low if its stable rank began at or above this value and is below it.
        patience: the number of low probes in a row that count as a collapse.
    """

    def __init__(self, *, floor: float, rank_floor: float, patience: int) -> None:
        self.floor, self.rank_floor, self.patience = floor, rank_floor, patience
        self._low_probes: dict[str, int] = {}  # in a row, by head or weight
        self._warned: set[str] = set()
        self._first_ranks: np.ndarray | None = None

    def heads(
        self,
        step: int,
        layers: Sequence[str],
        entropy: Float[np.ndarray, "layer head"],
        short: Mapping[str, str],
        *,
        quiet: bool = False,
    ) -> Bool[np.ndarray, "layer head"]:
        """Return which heads have collapsed, and warn of new ones unless `quiet`; `short` has the names to print."""
        keys = [[f"{layer}, {head}" for head in range(entropy.shape[1])] for layer in layers]
        collapsed = self._count(keys, entropy < self.floor)
        new = self._newly(keys, collapsed)
        if new.any() and not quiet:
            layer, head = divmod(int(np.where(new, entropy, np.inf).argmin()), entropy.shape[1])
            count = f"{_plural(int(new.sum()), 'head')} of {_plural(int(new.any(axis=1).sum()), 'layer')}"
            lowest = f"lowest {entropy[layer, head]:.2g} nats: layer {short[layers[layer]]}, head {head}"
            message = f"attention entropy has collapsed in {count} ({lowest}), step {step}{_total(new, collapsed)}"
            warnings.warn(message, EntropyCollapse, stacklevel=5)
        return collapsed

    def weights(
        self,
        step: int,
        names: Sequence[str],
        ranks: Float[np.ndarray, " weight"],
        short: Mapping[str, str],
        *,
        quiet: bool = False,
    ) -> Bool[np.ndarray, " weight"]:
        """Return which weights have collapsed, and warn of new ones unless `quiet`."""
        if self._first_ranks is None:
            self._first_ranks = ranks
        keys = [[name] for name in names]
        low = (self._first_ranks >= self.rank_floor) & (ranks < self.rank_floor)
        collapsed = self._count(keys, low[:, None])
        new = self._newly(keys, collapsed)[:, 0]
        if new.any() and not quiet:
            lowest = int(np.where(new, ranks, np.inf).argmin())
            where = f"lowest {ranks[lowest]:.3g}, from {self._first_ranks[lowest]:.3g}: {short[names[lowest]]}"
            count = _plural(int(new.sum()), "weight")
            message = f"stable rank has collapsed in {count} ({where}), step {step}{_total(new, collapsed)}"
            warnings.warn(message, RankCollapse, stacklevel=5)
        return collapsed[:, 0]

    def _count(self, keys: list[list[str]], low: Bool[np.ndarray, "row column"]) -> Bool[np.ndarray, "row column"]:
        """Count the low probes, and return where there have been at least `patience` in a row."""
        names = [key for row in keys for key in row]
        for key, is_low in zip(names, low.ravel().tolist(), strict=True):
            self._low_probes[key] = self._low_probes.get(key, 0) + 1 if is_low else 0
        collapsed = [self._low_probes[key] >= self.patience for key in names]
        return np.array(collapsed, dtype=bool).reshape(low.shape)

    def _newly(self, keys: list[list[str]], collapsed: Bool[np.ndarray, "row column"]) -> np.ndarray:
        new = np.zeros(collapsed.shape, dtype=bool)
        for row, column in zip(*np.nonzero(collapsed), strict=True):
            new[row, column] = keys[row][column] not in self._warned
            self._warned.add(keys[row][column])
        return new


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _total(new: np.ndarray, collapsed: np.ndarray) -> str:
    return f"; {int(collapsed.sum())} in all" if collapsed.sum() > new.sum() else ""
