"""Symmetry: the permutation table's time, what it says, and the ceiling of addition without order."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

from joma.data.addition import ceiling
from joma.studies import execute, load
from joma.studies.base import Outcome

SECONDS = 30


def rows() -> Iterator[tuple[str, str, str, bool]]:
    """Yield what is measured, what is asked, what is reached, and whether that is enough."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        outcome = execute(load("permutation"), preset="quick", out=folder)
        taken = time.perf_counter() - begun
        yield "permutation table, 144 cells x 5 seeds: seconds", f"≤ {SECONDS}", f"{taken:.1f}", taken <= SECONDS
        yield from _claims(outcome)
    for digits, reverse in ((2, False), (2, True), (3, False), (3, True)):
        found = ceiling(digits, reverse=reverse)
        what = f"addition without order, {digits} digits, {'reversed' if reverse else 'plain'}: exact match"
        if digits == 2:
            yield what, "0.285", f"{found.exact:g}", found.exact == 0.285
        else:
            yield what, f"≤ {found.bound:g}", f"{found.exact:g}", found.greedy <= found.exact <= found.bound


def _claims(outcome: Outcome) -> Iterator[tuple[str, str, str, bool]]:
    for claim in outcome.claims:
        end = "max" if claim["expected"].startswith("≤") else "min"
        reached = f"{claim['measured'][end]:.2g}"
        yield f"permutation table, {claim['name']}", claim["expected"], reached, claim["verdict"] == "holds"
