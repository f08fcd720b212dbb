"""Claims as rows of the report's tables: a statement, a verdict, one number and one small picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from joma.report.dots import dots
from joma.report.table import count_text, number
from joma.verdicts import KINDS, Verdict, count_by_kind

# The sign and the CSS class of each verdict.
VERDICTS: dict[Verdict, tuple[str, str]] = {
    "holds": ("✓", "yes"),
    "does not hold": ("✗", "no"),
    "not tested": ("–", "open"),
}
HEADINGS = {
    "theorem": "Theorems",
    "figure": "Figures and tables",
    "reading": "Readings",
    "control": "Controls",
    "check": "Checks",
}
JUDGED = {"every": "every seed", "mean": "the mean", "interval": "the 95 % interval"}
NO_BREAK = "\u00a0"
SCIENTIFIC = re.compile(r"(?<![\w.=])([-−]?)(\d+(?:\.\d+)?)e([+-]?\d+)(?![\w.]*\w)")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def row(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the templates show of a claim's record."""
    sign, name = VERDICTS[claim["verdict"]]
    return {
        "statement": readable(claim["statement"]),
        "quantity": readable(claim["quantity"]),
        "expected": readable(claim["expected"]),
        "verdict": claim["verdict"],
        "sign": sign,
        "css": name,
        "reason": readable(claim["reason"]),
        "number": _number(claim["measured"]),
        "judged": _judged(claim),
        "picture": dots(claim),
    }


def by_kind(claims: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return claims as rows, by kind; kinds without a claim are left out.

    Args:
        claims: the record of each claim, and what else its row has, such as a link to its section.
    """
    claims, about = list(claims), {str(kind): text for kind, text in KINDS.items()}
    groups = []
    for kind, counts in count_by_kind(claim for claim, _ in claims).items():
        rows = [row(claim) | dict(more) for claim, more in claims if claim["kind"] == kind]
        counted = count_text(counts)
        groups.append({"kind": kind, "heading": HEADINGS[kind], "about": about[kind], "counts": counted, "rows": rows})
    return groups


def readable(text: str) -> str:
    """Return text with its numbers like 3e-09 written as powers of ten.

    >>> readable("1e+05 to 2"), readable("(3.2e-09)").split(NO_BREAK)
    ('10⁵ to 2', ['(3.2', '×', '10⁻⁹)'])
    """
    return SCIENTIFIC.sub(_power, text)


def _power(match: re.Match[str]) -> str:
    sign, mantissa, exponent = match.groups()
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return f"{sign}{power}" if mantissa == "1" else f"{sign}{NO_BREAK.join((mantissa, '×', power))}"


def _number(measured: Mapping[str, Any]) -> str:
    """Return the mean, and the standard deviation over seeds if there are several."""
    mean = readable(number(measured["mean"]))
    sd = measured["sd"]
    if len(measured["values"]) == 1 or measured["mean"] is None or sd is None:
        return mean
    return f"{mean} ± {readable(f'{sd:.2g}')}"


def _judged(claim: Mapping[str, Any]) -> str:
    """Return the range over seeds, and what of them the claim is judged by; nothing if there is one number only."""
    measured = claim["measured"]
    values: Sequence[float | None] = measured["values"]
    if len(values) == 1:
        return ""
    missing = sum(value is None for value in values)
    if missing:
        return f"{missing} of {len(values)} seeds are not finite"
    ends = measured["interval"] if claim["across"] == "interval" and measured["interval"] else None
    low, high = (readable(f"{end:.3g}") for end in ends or (measured["min"], measured["max"]))
    if ends and claim["reason"].startswith("undecided"):  # the reason has the interval
        return f"over {len(values)} seeds"
    if ends:
        return f"judged by the 95 % interval {low} to {high} over {len(values)} seeds"
    return f"{low} to {high} over {len(values)} seeds; judged by {JUDGED[claim['across']]}"
