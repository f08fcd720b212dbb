"""Clocks of the benchmarks: the time once a device has finished, and the ratio of the times of two calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


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
    """Return the time of `first` over that of `second`, each the shortest of `repeats` times.

    Both are called once beforehand, because the first call may load or compile something. Then they take turns, so that
    a machine that slows down affects both.

    Args:
        first, second: what to call.
        repeats: number of timed calls of each.
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


class Ceilings(NamedTuple):
    """What a GPU can do at most: bytes per second moved, and operations per second of products in bf16."""

    bandwidth: float
    products: float

    def least_seconds(self, moved: float, operations: float) -> float:
        """Return the time of so many bytes and operations, one after the other."""
        return moved / self.bandwidth + operations / self.products


def ceilings() -> Ceilings:
    """Measure the ceilings by a copy of 1 GiB and an 8,192 x 8,192 product."""
    import torch

    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rates = []
    for call, amount in ((source.clone, 2.0 * source.numel()), (lambda: square @ square, 2.0 * 8192**3)):
        call()
        start = synchronised()
        for _ in range(20):
            call()
        rates.append(20 * amount / (synchronised() - start))
    return Ceilings(*rates)
