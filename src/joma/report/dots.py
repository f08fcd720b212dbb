"""The small picture beside a claim: the seeds' values as dots on an axis, and the expected interval as a band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from joma.report.table import number

WIDTH, HEIGHT, MARGIN = 160, 26, 8  # in CSS pixels; the margin is left and right of the outermost number
DECADES = 1.5  # if positive numbers span more decades than this, their axis is logarithmic
TINY = 1e-300  # a bound nearer to zero is zero: "greater than 0" is stored as the smallest number above it


@dataclass(frozen=True)
class Scale:
    """Where a number stands on the horizontal axis of the picture."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def spanning(cls, numbers: Sequence[float]) -> Scale:
        """Return the scale on which all these finite numbers are seen."""
        low, high = min(numbers), max(numbers)
        if low > 0 and math.log10(high) - math.log10(low) > DECADES:
            return cls(math.log10(low), math.log10(high), logarithmic=True)
        return cls(low, high)

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.logarithmic else value
        # Each is divided first: the difference of two large numbers of opposite sign is not finite.
        half = self.high / 2 - self.low / 2
        share = 0.5 if half == 0 else (place / 2 - self.low / 2) / half
        return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)


def dots(claim: Mapping[str, Any]) -> Markup:
    """Return the picture of a claim's record as inline SVG with a text for screen readers, or nothing to be seen.

    The band is the expected interval; it reaches the edge where that has no bound. A bar is the 95 % interval of the
    mean, or a tick the mean, for a claim that is judged by it. Without a finite value the text is empty.
    """
    values = [value for value in claim["measured"]["values"] if value is not None and math.isfinite(value)]
    if not values:
        return Markup("")
    low, high = (_bound(claim.get(name)) for name in ("low", "high"))
    bounds = [bound for bound in (low, high) if bound is not None]
    interval = claim["measured"].get("interval") if claim.get("across") == "interval" else None
    scale = Scale.spanning([*values, *bounds, *(_within_reach(interval, values, bounds))])
    parts = [Markup('<path class="axis" d="M0 {0}H{1}"/>').format(HEIGHT // 2, WIDTH)]
    if bounds:
        parts.insert(0, _band(scale, low, high))
    parts += [Markup('<circle cx="{}" cy="{}" r="3.5"/>').format(x, HEIGHT // 2) for x in _places(scale, values)]
    parts += _judged(claim, scale, interval)
    text = description(claim, logarithmic=scale.logarithmic)
    opening = Markup('<svg class="dots" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, text)
    return opening + Markup("").join(parts) + Markup("</svg>")


def description(claim: Mapping[str, Any], *, logarithmic: bool = False) -> str:
    """Return in words what the picture of a claim shows.

    >>> description({"measured": {"values": [1.0, None, 3.0]}, "expected": "≥ 2"})
    '2 of 3 seeds have a value, from 1 to 3; expected ≥ 2'
    """
    stored = claim["measured"]["values"]
    values = [value for value in stored if value is not None and math.isfinite(value)]
    low, high = number(min(values)), number(max(values))
    reach = f"at {low}" if low == high else f"from {low} to {high}"
    if len(stored) == 1:
        shown = f"one value, {number(values[0])}"
    elif len(values) == len(stored):
        shown = f"{len(stored)} seeds {reach}"
    else:
        shown = f"{len(values)} of {len(stored)} seeds {'has' if len(values) == 1 else 'have'} a value, {reach}"
    return f"{shown}; expected {claim['expected']}{', logarithmic axis' if logarithmic else ''}"


def _bound(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return 0.0 if abs(value) < TINY else value


def _within_reach(interval: Sequence[float] | None, values: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """Return the ends of the interval, unless one would make a logarithmic axis impossible: the bar is then cut."""
    if interval is None or (min([*values, *bounds]) > 0 >= interval[0]):
        return []
    return list(interval)


def _places(scale: Scale, values: Sequence[float]) -> list[float]:
    """Return where the dots stand; dots less than half a pixel apart are one."""
    return sorted({round(2 * scale(value)) / 2 for value in values})


def _band(scale: Scale, low: float | None, high: float | None) -> Markup:
    left, right = 0.0 if low is None else scale(low), float(WIDTH) if high is None else scale(high)
    edges = "".join(f"M{place:g} 1V{HEIGHT - 1}" for place, bound in ((left, low), (right, high)) if bound is not None)
    width = max(round(right - left, 1), 1.0)
    band = Markup('<rect class="band" x="{:g}" y="1" width="{:g}" height="{}"/>').format(left, width, HEIGHT - 2)
    return band + Markup('<path class="edge" d="{}"/>').format(edges)


def _judged(claim: Mapping[str, Any], scale: Scale, interval: Sequence[float] | None) -> list[Markup]:
    """Return what a claim is judged by, if that is not every dot: the mean as a tick, or its 95 % interval as a bar."""
    mean = claim["measured"].get("mean")
    if claim.get("across") not in ("mean", "interval") or len(claim["measured"]["values"]) == 1 or mean is None:
        return []
    if interval is None:
        return [Markup('<path class="mean" d="M{:g} 4V{}"/>').format(scale(mean), HEIGHT - 4)]
    left, right = (_inside(scale, end) for end in interval)
    height = HEIGHT // 2
    line = f"M{left:g} {height}H{right:g}M{left:g} {height - 5}v10M{right:g} {height - 5}v10"
    return [Markup('<path class="mean" d="{}"/>').format(line)]


def _inside(scale: Scale, value: float) -> float:
    """Return where a number stands, or the nearer edge if it lies beyond it."""
    if scale.logarithmic and value <= 0:
        return 0.0
    return min(max(scale(value), 0.0), float(WIDTH))
