"""Steps at which to record, to probe or to save: schedules for arguments such as `at` and `save_steps`.

A schedule is a sorted tuple of steps that begins with 0 and ends with the last step of training, `total`. Step 0 is the
state before the first update. Other sorted steps can be used as well; these are the common choices.

>>> from joma import schedule
>>> schedule.every(100, total=250)
(0, 100, 200, 250)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from joma.arguments import InputError, sequence, whole

MAX_STEPS = 10**7  # of one schedule


def every(interval: int, total: int) -> tuple[int, ...]:
    """Return every multiple of `interval` up to `total`, and `total` itself.

    Args:
        interval: number of steps from one to the next.
        total: number of steps of the training, which is the last step.

    >>> every(4, 10)
    (0, 4, 8, 10)
    """
    interval, total = whole("interval", interval), whole("total", total, low=0)
    if total // interval > MAX_STEPS:
        expected = f"such that there are at most {MAX_STEPS} steps"
        raise InputError("interval", expected, f"{total // interval}", "give a longer interval")
    return tuple(sorted({*range(0, total + 1, interval), total}))


def logarithmic(count: int, total: int) -> tuple[int, ...]:
    """Return about `count` steps that are evenly spaced in log(step + 1): many early ones, few late ones.

        step_i = (total + 1)^(i / (count − 1)) − 1,  i = 0..count − 1,  rounded

    Args:
        count: number of steps, at least 2. Steps that round to the same number are returned once.
        total: number of steps of the training, which is the last step.

    >>> logarithmic(6, 1000)
    (0, 3, 15, 62, 250, 1000)
    """
    count, total = whole("count", count, low=2, high=MAX_STEPS), whole("total", total, low=0)
    spaced = np.minimum(np.expm1(np.linspace(0.0, np.log1p(total), count)), float(total))
    return tuple(sorted({0, *(min(round(step), total) for step in spaced.tolist()), total}))


def listed(steps: Iterable[int], total: int) -> tuple[int, ...]:
    """Return the given steps in order, with 0 and `total` added.

    Args:
        steps: steps from 0 to `total`, in any order.
        total: number of steps of the training, which is the last step.

    >>> listed([5, 2], 10)
    (0, 2, 5, 10)
    """
    total = whole("total", total, low=0)
    given = sequence("steps", steps, "steps in any order", ordered=False)
    return tuple(sorted({0, total, *(whole("steps", step, low=0, high=total) for step in given)}))
