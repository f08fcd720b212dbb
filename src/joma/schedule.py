"""When to save and to probe: a policy is a sorted tuple of steps that begins at 0 and ends at the last step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from joma.arguments import whole


def every(interval: int, total: int) -> tuple[int, ...]:
    """Every `interval` steps, and the last one.

    >>> every(4, 10)
    (0, 4, 8, 10)
    """
    interval, total = whole("interval", interval), whole("total", total, low=0)
    return tuple(sorted({*range(0, total + 1, interval), total}))


def logarithmic(count: int, total: int) -> tuple[int, ...]:
    """About `count` steps, dense at the start and evenly spaced in log(step + 1) thereafter.

    >>> logarithmic(6, 1000)
    (0, 3, 15, 62, 250, 1000)
    """
    count, total = whole("count", count, low=2), whole("total", total, low=0)
    spaced = np.expm1(np.linspace(0.0, np.log1p(total), count))
    return tuple(sorted({0, *np.rint(spaced).astype(int).tolist(), total}))


def listed(steps: Iterable[int], total: int) -> tuple[int, ...]:
    """The steps given, with the first and the last.

    >>> listed([5, 2], 10)
    (0, 2, 5, 10)
    """
    total = whole("total", total, low=0)
    return tuple(sorted({0, total, *(whole("steps", step, low=0, high=total) for step in steps)}))
