"""Every family of `watch/families.py`: the entropies that `joma.watch.attention` records against their weights."""

from __future__ import annotations

import traceback
from collections import Counter
from itertools import islice

from watch.families import EXACT
from watch.test_families import check_family


def torture(scale: float) -> dict[str, int]:
    """Compare the first `scale` of the families with their own weights."""
    counts: Counter[str] = Counter({"families failed": 0})
    for name in islice(EXACT, round(min(1.0, scale) * len(EXACT))):
        try:
            check_family(name)
            counts["families exact"] += 1
        except Exception:
            counts["families failed"] += 1
            print(f"{name}\n{traceback.format_exc()}", flush=True)  # noqa: T201  (what to mend)
    return dict(counts)
