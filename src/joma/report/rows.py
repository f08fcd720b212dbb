"""Claims as rows of the report's tables: a statement, a verdict, one number and one small picture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
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
HYPHEN_AS_MINUS = re.compile(r"(?<![\w.=)-])-(?=\d)")
PERCENT = re.compile(r"(?<=\d) %")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
MIN_POSITIONAL, MAX_POSITIONAL = 1e-6, 1e5  # standard deviations beyond these are written as powers of ten
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
        "judged": readable(_judged(claim)),
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
    """Return text with numbers as people read them: powers of ten, minus signs, percent signs that stay beside them.

    >>> readable("1e+05 to 2"), readable("by -0.016"), readable("(3.2e-09)").split(NO_BREAK)
    ('10⁵ to 2', 'by −0.016', ['(3.2', '×', '10⁻⁹)'])
    """
    return PERCENT.sub(f"{NO_BREAK}%", HYPHEN_AS_MINUS.sub("−", SCIENTIFIC.sub(_power, text)))


def first_sentence(text: str) -> str:
    """Return the first sentence of a text.

    >>> first_sentence("It falls by 0.92 nats. Then it comes back.")
    'It falls by 0.92 nats.'
    """
    return SENTENCE_END.split(text, maxsplit=1)[0]


def _power(match: re.Match[str]) -> str:
    sign, mantissa, exponent = match.groups()
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return f"{sign}{power}" if mantissa == "1" else f"{sign}{NO_BREAK.join((mantissa, '×', power))}"


def _number(measured: Mapping[str, Any]) -> str:
    """Return the mean, and the standard deviation over seeds if their values differ."""
    mean, sd = measured["mean"], measured["sd"]
    if len(measured["values"]) == 1 or mean is None or not sd or measured["min"] == measured["max"]:
        return readable(number(mean))
    return _with_deviation(mean, sd)


def _with_deviation(mean: float, sd: float) -> str:
    """Return mean ± standard deviation as text; tiny and huge ones have one power of ten for both.

    >>> _with_deviation(5.092e-4, 2.4e-5), _with_deviation(2.0, 2.4e-7).split(NO_BREAK)
    ('0.0005092 ± 0.000024', ['2 ± 2.4', '×', '10⁻⁷'])
    >>> _with_deviation(9.437e-16, 1.3e-16).split(NO_BREAK)
    ['(9.437 ± 1.3)', '×', '10⁻¹⁶']
    """
    exponent = math.floor(math.log10(max(abs(mean), sd))) if math.isfinite(sd) else 0
    if "e" in number(mean) and not -4 <= exponent <= 3:
        mean, sd = (float(Decimal(value).scaleb(-exponent)) for value in (mean, sd))
        power = f"10{str(exponent).translate(SUPERSCRIPTS)}"
        return NO_BREAK.join((f"({readable(f'{mean:.4g} ± {sd:.2g}')})", "×", power))
    deviation = f"{sd:.2g}"
    if MIN_POSITIONAL <= sd < 1:
        deviation = f"{sd:.{1 - math.floor(math.log10(sd))}f}".rstrip("0").rstrip(".")
    elif 99.5 <= sd < MAX_POSITIONAL:
        deviation = f"{sd:.0f}"
    return readable(f"{number(mean)} ± {deviation}")


def _judged(claim: Mapping[str, Any]) -> str:
    """Return the range over seeds, and what of them the claim is judged by; nothing if there is one number only."""
    measured = claim["measured"]
    values: Sequence[float | None] = measured["values"]
    if len(values) == 1:
        return ""
    missing = sum(value is None for value in values)
    if missing:
        return f"{missing} of {len(values)} seeds {'has' if missing == 1 else 'have'} no finite value"
    bounds = (claim.get("low"), claim.get("high"))
    if f"{measured['min']:.6g}" == f"{measured['max']:.6g}":
        precision = "" if measured["min"] == measured["max"] else " to six digits"
        return f"the same{precision} in all {len(values)} seeds"
    ends = measured["interval"] if claim["across"] == "interval" and measured["interval"] else None
    if ends and claim["reason"].startswith("undecided"):  # the reason has the interval
        return f"over {len(values)} seeds"
    if ends:
        return f"judged by the 95 % interval {_extent(ends[0], ends[1], bounds)} over {len(values)} seeds"
    extent = _extent(measured["min"], measured["max"], bounds)
    return f"{extent} over {len(values)} seeds; judged by {JUDGED[claim['across']]}"


def _extent(low: float, high: float, bounds: Sequence[float | None] = ()) -> str:
    """Return a range as text, with three significant digits, or more where its ends, or an end and a bound, look alike.

    >>> _extent(0.9, 1.0), _extent(5.3593, 5.3642), _extent(1.003, 1.35, bounds=[None, 1.0])
    ('0.9 to 1', '5.359 to 5.364', '1.003 to 1.35')
    """
    digits = next((digits for digits in range(3, 17) if f"{low:.{digits}g}" != f"{high:.{digits}g}"), 17)
    digits = max([digits, *(_digits_apart(end, bound) for end in (low, high) for bound in bounds)])
    return f"{readable(f'{low:.{digits}g}')} to {readable(f'{high:.{digits}g}')}"


def _digits_apart(end: float, bound: float | None) -> int:
    """Return with how many digits, from three to six, a number looks different from a bound; three if never."""
    if bound is None:
        return 3
    return next((digits for digits in range(3, 7) if f"{end:.{digits}g}" != f"{bound:.{digits}g}"), 3)
