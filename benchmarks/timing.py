"""How long one call takes beside another, measured in turn in one process."""

from __future__ import annotations

import time
from collections.abc import Callable


def time_ratio(
    first: Callable[[], object],
    second: Callable[[], object],
    *,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how many times as long as `second` `first` takes: the ratio of the shortest of `repeats` times of each.

    Both are called once beforehand, as the first call may load or compile something; then they take turns, so that a
    machine that slows down slows both.

    Args:
        first, second: what to call.
        repeats: number of times that are taken of each.
        clock: returns the time in seconds, such as `time.process_time` for processor time.
    """
    calls = (first, second)
    for call in calls:
        call()
    shortest = [float("inf"), float("inf")]
    for _ in range(repeats):
        for index, call in enumerate(calls):
            start = clock()
            call()
            shortest[index] = min(shortest[index], clock() - start)
    return shortest[0] / shortest[1]
