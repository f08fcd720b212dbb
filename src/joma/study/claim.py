"""Claims as data: a sentence, how it is measured on a run, and the interval that the measured value must lie in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import xarray as xr
from scipy import special

from joma.verdicts import Kind, Verdict

Values = TypeVar("Values", xr.Dataset, xr.DataArray)
CONFIDENCE = 0.95


class NotInRun(Exception):
    """The run lacks what a claim is about, such as an arm that was left out or a size that was not trained.

    Its text completes the sentence "this run has no …".
    """


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
        statement: what is claimed, in one short sentence.
        measure: a function of the run's Dataset that returns one number, or an array over `seed`. It raises `NotInRun`
            if the run lacks what the claim is about; the claim is then not tested.
        expected: where the number must lie: `at_most`, `at_least`, `above`, `below`, `between` or `near`.
        kind: one of `joma.verdicts.KINDS`.
        quantity: what number is measured, for the small print below the statement.
        across: whether `every` seed must lie there, the `mean` over seeds, or the whole 95 % confidence `interval` of
            that mean. A claim whose interval contains a bound is undecided, which counts as not tested.
        presets: the presets at which the claim can be decided; elsewhere it is measured but not judged.
        seeds: the smallest number of seeds with which it can be decided; an interval over seeds needs two.
    """

    name: str
    statement: str
    measure: Callable[[xr.Dataset], xr.DataArray | float]
    expected: Expected
    kind: Kind
    quantity: str = ""
    across: Literal["every", "mean", "interval"] = "every"
    presets: tuple[str, ...] = ("quick", "paper")
    seeds: int = 1

    @property
    def declaration(self) -> dict[str, Any]:
        """The claim as it is stored and listed: all of it but how it is measured."""
        return {
            "name": self.name,
            "kind": self.kind,
            "statement": self.statement,
            "quantity": self.quantity,
            "expected": self.expected.text,
            "low": _finite(self.expected.low),
            "high": _finite(self.expected.high),
            "across": self.across,
            "presets": list(self.presets),
            "seeds": self.seeds,
        }

    def judge(self, trajectory: xr.Dataset, preset: str) -> dict[str, Any]:
        """Measure the claim on a run and return its record.

        The record is the declaration with the `measured` values, the `verdict`, and the `reason` if the claim is not
        tested.
        """
        reason = self._too_little(trajectory, preset)
        try:
            values = np.atleast_1d(np.asarray(self.measure(trajectory), dtype=np.float64))
        except NotInRun as missing:
            values, reason = np.array([np.nan]), f"this run has no {missing}" if str(missing) else "not in this run"
        if values.ndim != 1:
            raise TypeError(f"claim {self.name!r}: `measure` must return a number or one value for each seed")
        if not reason and self.across == "interval":
            reason = self._undecided(values)
        verdict: Verdict = "not tested" if reason else "holds" if self._holds(values) else "does not hold"
        return {**self.declaration, "measured": summary(values), "verdict": verdict, "reason": reason}

    def _too_little(self, trajectory: xr.Dataset, preset: str) -> str:
        """Return why a run of this preset and number of seeds cannot decide the claim, or an empty text if it can."""
        seeds, needed = trajectory.sizes.get("seed", 1), max(self.seeds, 2 if self.across == "interval" else 1)
        if preset not in self.presets:
            return f"decided at preset {' or '.join(self.presets)} only"
        return f"needs {needed} seeds, this run has {seeds}" if seeds < needed else ""

    def _undecided(self, values: np.ndarray) -> str:
        """Return why the confidence interval of the mean decides nothing, or an empty text if it does."""
        if values.size < 2:
            return "the measure is one number for all seeds, which has no interval over seeds"
        bound = self._bound_inside(values)
        if bound is None:
            return ""
        low, high = mean_interval(values)
        contained = f"{round(bound, 300) + 0.0:.3g}"  # `above(0.0)` begins at 5e-324, `below(0.0)` ends at −5e-324
        return f"undecided: the 95 % interval over seeds, {low:.3g} to {high:.3g}, contains {contained}"

    def _holds(self, values: np.ndarray) -> bool:
        if self.across == "interval":
            return all(bound in self.expected for bound in mean_interval(values))
        judged = values if self.across == "every" else values.mean(keepdims=True)
        return all(value in self.expected for value in judged)

    def _bound_inside(self, values: np.ndarray) -> float | None:
        """Return the bound of what is expected that lies inside the confidence interval of the mean, if one does."""
        low, high = mean_interval(values)
        bounds = (bound for bound in (self.expected.low, self.expected.high) if math.isfinite(bound))
        return next((bound for bound in bounds if low < bound < high), None)


def mean_interval(values: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Student's confidence interval of the mean of independent values, one for each seed; NaN for one value.

    >>> low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    if values.size < 2:
        return math.nan, math.nan
    quantile = float(special.stdtrit(values.size - 1, (1 + confidence) / 2))
    half = quantile * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()) - half, float(values.mean()) + half


def summary(values: np.ndarray) -> dict[str, Any]:
    """Return mean, standard deviation, range and 95 % interval over seeds; None for what JSON cannot hold, as NaN."""
    several = values.size > 1 and bool(np.isfinite(values).all())
    spread = values.std(ddof=1) if several else 0.0
    statistics = {"mean": values.mean(), "sd": spread, "min": values.min(), "max": values.max()}
    finite = {name: _finite(value) for name, value in statistics.items()}
    interval = mean_interval(values) if several else (math.nan, math.nan)
    is_finite = all(map(math.isfinite, interval))  # the squares of numbers above 1e154 are not
    return finite | {"interval": list(interval) if is_finite else None, "values": [_finite(value) for value in values]}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
