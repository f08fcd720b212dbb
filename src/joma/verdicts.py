"""What kinds of claims there are, what their verdicts can be, and how many of each kind have which verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

Kind = Literal["theorem", "figure", "reading", "control", "check"]
Verdict = Literal["holds", "does not hold", "not tested"]

# What each kind of claim is. They are counted apart: a check that holds is no evidence for a paper.
KINDS: dict[Kind, str] = {
    "theorem": "proved, in a paper or in our documents, and tested under its premises",
    "figure": "a published figure or table",
    "reading": "what the authors conclude in words",
    "control": "our own experiment on what authors conclude",
    "check": "our implementation against itself or an earlier result",
}


def count_by_kind(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[Verdict, int]]:
    """Return how many claims of each kind have each verdict; kinds without a claim are left out.

    >>> count_by_kind([{"kind": "theorem", "verdict": "holds"}])
    {'theorem': {'holds': 1, 'does not hold': 0, 'not tested': 0}}
    """
    verdicts: tuple[Verdict, ...] = get_args(Verdict)
    pairs = Counter((record["kind"], record["verdict"]) for record in records)
    present = [kind for kind in KINDS if any((kind, verdict) in pairs for verdict in verdicts)]
    return {kind: {verdict: pairs[kind, verdict] for verdict in verdicts} for kind in present}


def present_form(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored record of a claim with the fields that earlier versions did not store.

    >>> present_form({"verdict": "not tested at this preset", "measured": {"values": [1.0]}})["verdict"]
    'not tested'
    """
    absent = {"kind": "check", "quantity": "", "low": None, "high": None, "reason": ""}
    if record["verdict"] == "not tested at this preset":
        absent |= {"reason": "decided at another preset only"}
        record = {**record, "verdict": "not tested"}
    return {**absent, **record, "measured": {"interval": None, **record["measured"]}}
