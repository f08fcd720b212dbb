"""The points of a sweep: the product of lists of values, or random draws from ranges and lists."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joma.arguments import MAX_WHOLE, InputError, described, flag, instance, whole

MAX_POINTS = 10**5
DIGITS = 6  # significant digits of a random float, so that `--set` can repeat it
DRAWS_PER_POINT = 200  # before a range is taken to hold too few different points


@dataclass(frozen=True)
class Grid:
    """The product of lists of values.

    Attributes:
        values: the values of each key, in the order in which they are shown.
    """

    values: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        instance("values", self.values, Mapping, "give a list of values for each key")
        for key, values in self.values.items():
            _check_values(key, values, "write for example steps=500,1000")
        count = math.prod(map(len, self.values.values()))
        if count > MAX_POINTS:
            raise InputError("--grid", f"at most {MAX_POINTS:,} points", f"{count:,}", "give fewer values", must="have")

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields of the config that vary."""
        return tuple(self.values)

    def points(self) -> list[dict[str, Any]]:
        """Return every combination of values once; the last key changes fastest.

        >>> Grid({"steps": [1, 2], "rate": [0.1]}).points()
        [{'steps': 1, 'rate': 0.1}, {'steps': 2, 'rate': 0.1}]
        """
        return [dict(zip(self.values, point, strict=True)) for point in itertools.product(*self.values.values())]

    def as_json(self) -> dict[str, Any]:
        """Return the grid as JSON has it."""
        return {"grid": {key: list(values) for key, values in self.values.items()}}


def _check_values(key: str, values: Sequence[Any], remedy: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InputError(f"--grid {key}", "a list of values", described(values), "give a list")
    if not values:
        raise InputError(f"--grid {key}", "at least one value", "none", remedy)
    try:
        texts = [json.dumps(value) for value in values]
    except (TypeError, ValueError):
        remedy = "give numbers, text, booleans, or lists of them"
        raise InputError(f"--grid {key}", "a list of values that JSON has", described(values), remedy) from None
    if duplicates := sorted({text for text in texts if texts.count(text) > 1}):
        remedy = "give each value once"
        raise InputError(f"--grid {key}", "different values", f"{', '.join(duplicates)} twice", remedy, must="have")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both among them; whole numbers if both are.

    Attributes:
        low, high: the ends.
        logarithmic: whether equal ratios are equally likely, not equal differences.
    """

    low: float
    high: float
    logarithmic: bool = False

    def __post_init__(self) -> None:
        for name, end in (("low", self.low), ("high", self.high)):
            if not isinstance(end, int | float) or isinstance(end, bool):
                raise InputError(name, "a number", described(end), "give the end of the range")
        object.__setattr__(self, "logarithmic", flag("logarithmic", self.logarithmic))
        text, largest = f"{self.low}:{self.high}", sys.float_info.max
        if not -largest <= self.low < self.high <= largest:
            raise InputError(
                "--grid", "a range low:high with low < high", text, "swap or correct its ends", must="have"
            )
        if self.logarithmic and self.low <= 0:
            raise InputError("--grid", "a logarithmic range above 0", text, "raise its lower end", must="have")

    def at(self, share: float) -> float:
        """Return the number at a share of the range, from 0 to below 1.

        >>> Range(1, 4).at(0.5), Range(0.01, 1.0, logarithmic=True).at(0.5)
        (3, 0.1)
        """
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        high = self.high + 1 if is_whole else self.high
        if self.logarithmic:
            number = self.low * math.exp(share * math.log(high / self.low))
        else:
            number = self.low + share * (high - self.low)
        number = math.floor(number) if is_whole else float(f"{number:.{DIGITS}g}")
        return min(max(number, self.low), self.high)


@dataclass(frozen=True)
class Draws:
    """Random points. A point depends on the seed and on its number alone, so that more of them keep the first ones.

    Attributes:
        sources: the range, or the list of values, that each key is drawn from.
        count: how many points.
        seed: of the draws.
    """

    sources: Mapping[str, Range | Sequence[Any]]
    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole("--random", self.count, high=MAX_POINTS))
        object.__setattr__(self, "seed", whole("seed", self.seed, low=-MAX_WHOLE - 1))
        instance("sources", self.sources, Mapping, "give a range or a list of values for each key")
        for key, source in self.sources.items():
            if not isinstance(source, Range):
                _check_values(key, source, "write for example rate=0.1:1:log")

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields of the config that vary."""
        return tuple(self.sources)

    def points(self) -> list[dict[str, Any]]:
        """Return `count` different points; raise `InputError` if the ranges do not hold as many.

        >>> Draws({"rate": Range(0.0, 1.0)}, 2).points()[:1] == Draws({"rate": Range(0.0, 1.0)}, 1).points()
        True
        """
        points: dict[str, dict[str, Any]] = {}
        for number in range(DRAWS_PER_POINT * self.count):
            point = {key: self._draw(key, source, number) for key, source in self.sources.items()}
            points.setdefault(json.dumps(point), point)
            if len(points) == self.count:
                return list(points.values())
        remedy = "draw fewer points or widen the ranges"
        raise InputError("--random", "at most the number of different points", f"only {len(points)} of them", remedy)

    def _draw(self, key: str, source: Range | Sequence[Any], number: int) -> Any:
        share = _share(f"{self.seed} {key} {number}")
        return source.at(share) if isinstance(source, Range) else source[int(share * len(source))]

    def as_json(self) -> dict[str, Any]:
        """Return what is drawn, as JSON has it."""
        sources = {
            key: {"low": source.low, "high": source.high, "logarithmic": source.logarithmic}
            if isinstance(source, Range)
            else list(source)
            for key, source in self.sources.items()
        }
        return {"random": sources, "count": self.count, "seed": self.seed}


def _share(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone: the first 53 bits of a hash."""
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11) / 2**53
