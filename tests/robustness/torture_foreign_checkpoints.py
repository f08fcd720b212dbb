"""Checkpoints of one run in the folder of another, for all studies that train and every field of their configs."""

from __future__ import annotations

from collections import Counter

from robustness.foreign_checkpoints import STUDIES, try_study


def torture(scale: float) -> dict[str, int]:
    """Try every field of every study once with an unfinished training's checkpoints, once with a finished one's."""
    counts: Counter[str] = Counter()
    for name in STUDIES:
        for finished in (False, True):
            foreign = try_study(name, finished=finished, share=max(1, round(1 / scale)))
            counts.update(foreign.counts)
            counts["foreign checkpoints failed"] += len(foreign.failures)
            for failure in foreign.failures:
                print(failure, flush=True)  # noqa: T201  (what to mend)
    return dict(counts)
