"""The dynamics by others: the wall time of all their quick studies, two at a time, on two cores that are free."""

import os
from collections.abc import Iterator

from benchmarks import Row
from benchmarks.side_by_side import seconds
from joma.studies import STUDIES

FAMILY = "joma.studies.related."
TARGET = 90  # seconds


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    studies = [name for name, module in STUDIES.items() if module.startswith(FAMILY)]
    before = os.times()
    elapsed = seconds(2, studies)
    after = os.times()
    computed = sum(after[2:4]) - sum(before[2:4])
    what = f"the {len(studies)} quick studies of dynamics by others, two at a time"
    yield what, f"≤ {TARGET} s", f"{elapsed:.1f} s", elapsed <= TARGET
    yield "    their time on the CPU, of which two free cores take half each", "–", f"{computed:.1f} s", True
