"""How long calls take: the time once a device has finished, and the ratio of two calls made in turn."""

from __future__ import annotations

import time
from collections.abc import Callable


def synchronised() -> float:
    """Return the time in seconds, once the device has finished all its work."""
    import torch  # not every benchmark that is timed needs it

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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
