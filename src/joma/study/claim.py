"""Claims as data: a sentence, how it is measured on a run, and the interval that the measured value must lie in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import xarray as xr

Values = TypeVar("Values", xr.Dataset, xr.DataArray)
Verdict = Literal["holds", "does not hold", "not tested at this preset"]


class NotInRun(Exception):
    """The run lacks what a claim is about, such as an arm that was left out or a size that was not trained."""


def select(values: Values, **labels: Any) -> Values:
    """Select by label; raise `NotInRun` if the run has no such label.

    >>> select(xr.DataArray([1.0, 2.0], {"depth": [1, 5]}, ("depth",)), depth=5).item()
    2.0
    """
    for dim, label in labels.items():
        if label not in values[dim].values:
            raise NotInRun(f"{dim} {label}")
    return values.sel(labels, drop=True)


@dataclass(frozen=True)
class Expected:
    """The interval that a measured value must lie in, and its text."""

    low: float
    high: float
    text: str

    def __contains__(self, value: float) -> bool:
        return bool(self.low <= value <= self.high)


def at_most(high: float) -> Expected:
    """The measured value must not exceed `high`.

    >>> 3.0 in at_most(2.0)
    False
    """
    return Expected(-math.inf, high, f"≤ {high:g}")


def at_least(low: float) -> Expected:
    """The measured value must reach `low`.

    >>> at_least(0.9).text
    '≥ 0.9'
    """
    return Expected(low, math.inf, f"≥ {low:g}")


def above(low: float) -> Expected:
    """The measured value must be greater than `low`.

    >>> 0.0 in above(0.0), 1e-300 in above(0.0), above(0.0).text
    (False, True, '> 0')
    """
    return Expected(math.nextafter(low, math.inf), math.inf, f"> {low:g}")


def below(high: float) -> Expected:
    """The measured value must be less than `high`.

    >>> 0.0 in below(0.0), -1e-300 in below(0.0), below(0.0).text
    (False, True, '< 0')
    """
    return Expected(-math.inf, math.nextafter(high, -math.inf), f"< {high:g}")


def between(low: float, high: float) -> Expected:
    """The measured value must lie in [low, high].

    >>> 0.5 in between(0, 1)
    True
    """
    return Expected(low, high, f"{low:g} to {high:g}")


def near(value: float, tolerance: float) -> Expected:
    """The measured value must lie within `tolerance` of `value`.

    >>> near(0.4278, 1e-3).text
    '0.4278 ± 0.001'
    """
    return Expected(value - tolerance, value + tolerance, f"{value:g} ± {tolerance:g}")


@dataclass(frozen=True)
class Claim:
    """What is claimed, as data.

    Attributes:
        name: a short name, unique within the study.
        statement: the sentence, with its source.
        measure: a function of the run's Dataset that returns one number, or an array over `seed`. It raises `NotInRun`
            if the run lacks what the claim is about; the claim is then not tested.
        expected: where the number must lie: `at_most`, `at_least`, `above`, `below`, `between` or `near`.
        across: whether `every` seed must lie there, or the `mean` over seeds.
        presets: the presets at which the claim can be decided; elsewhere it is measured but not judged.
        seeds: the smallest number of seeds with which it can be decided; a bound over seeds needs two.
    """

    name: str
    statement: str
    measure: Callable[[xr.Dataset], xr.DataArray | float]
    expected: Expected
    across: Literal["every", "mean"] = "every"
    presets: tuple[str, ...] = ("quick", "paper")
    seeds: int = 1

    @property
    def declaration(self) -> dict[str, Any]:
        """The claim as it is stored and listed: all of it but how it is measured."""
        return {
            "name": self.name,
            "statement": self.statement,
            "expected": self.expected.text,
            "across": self.across,
            "presets": list(self.presets),
            "seeds": self.seeds,
        }

    def judge(self, trajectory: xr.Dataset, preset: str) -> dict[str, Any]:
        """Measure the claim on a run and return its record: the declaration, the measured values and the verdict."""
        tested = preset in self.presets and trajectory.sizes.get("seed", 1) >= self.seeds
        try:
            values = np.atleast_1d(np.asarray(self.measure(trajectory), dtype=np.float64))
        except NotInRun:
            values, tested = np.array([np.nan]), False
        if values.ndim != 1:
            raise TypeError(f"claim {self.name!r}: `measure` must return a number or one value for each seed")
        judged = values if self.across == "every" else values.mean(keepdims=True)
        verdict: Verdict = "holds" if all(value in self.expected for value in judged) else "does not hold"
        if not tested:
            verdict = "not tested at this preset"
        return {**self.declaration, "measured": summary(values), "verdict": verdict}


def summary(values: np.ndarray) -> dict[str, Any]:
    """Return mean, standard deviation, minimum and maximum over seeds; None for what JSON cannot hold, such as NaN."""
    spread = values.std(ddof=1) if values.size > 1 and np.isfinite(values).all() else 0.0
    statistics = {"mean": values.mean(), "sd": spread, "min": values.min(), "max": values.max()}
    finite = {name: _finite(value) for name, value in statistics.items()}
    return finite | {"values": [_finite(value) for value in values]}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
