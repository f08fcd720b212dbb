"""Tables of claims, studies and checks on the terminal, and numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from joma.terminal import printable
from joma.verdicts import KINDS, Verdict, count_by_kind

REASON_WIDTH = 24  # columns of the terminal for a verdict and the reason why a claim is not tested
# The verdicts in their colours.
MARKS = {
    "holds": Text("holds", "green"),
    "does not hold": Text("does not hold", "bold red"),
    "not tested": Text("not tested", "dim"),
}


def number(value: float | None) -> str:
    """Return a number as text with four significant digits, or a dash for None.

    >>> number(0.99553), number(-0.0), number(None)
    ('0.9955', '0', '–')
    """
    return "–" if value is None else f"{value + 0.0:.4g}"  # the sum of −0 and 0 is 0


def duration(seconds: float) -> str:
    """Return a time as text, in the unit that suits it.

    >>> duration(9.6), duration(600), duration(90_000)
    ('9.6 s', '10 min', '25 h')
    """
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def spread(measured: Mapping[str, Any]) -> str:
    """Return mean ± standard deviation and range over the seeds as text, or the number alone if there is just one.

    >>> spread({"mean": 1.0, "sd": 0.1, "min": 0.9, "max": 1.1, "values": [0.9, 1.1]})
    '1 ± 0.1 (0.9 to 1.1)'
    """
    if len(measured["values"]) == 1:
        return number(measured["mean"])
    low, high = number(measured["min"]), number(measured["max"])
    return f"{number(measured['mean'])} ± {number(measured['sd'])} ({low} to {high})"


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[str | Text]], note: str = "") -> Table:
    """Return a table with wrapped cells, and a note in plain letters below its bold title.

    Text is shown as it is: brackets are no markup, and control characters are escaped.
    """
    heading = Text(printable(title)).append(f"\n{printable(note)}" if note else "", "not bold")
    table = Table(title=heading, title_justify="left", title_style="bold", show_lines=False, expand=False)
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return table


def claims(title: str, records: Iterable[Mapping[str, Any]], note: str = "") -> Table:
    """Return the table of stored claims by kind: sentence, expected and measured value, and verdict.

    Of the checks it has those that do not hold, and one line about the others.
    """
    ordered = sorted(records, key=lambda record: list(KINDS).index(record["kind"]))
    others = [record for record in ordered if record["kind"] == "check" and record["verdict"] != "does not hold"]
    rows = [_claim_row(record) for record in ordered if record not in others]
    if others:
        summary = count_text(count_by_kind(others)["check"])
        rows.append(("check", Text(f"{summary} (our own code; `--json` lists them)", "dim"), "", "", ""))
    table = grid(title, ("kind", "claim", "expected", "measured", "verdict"), rows, note)
    table.columns[-1].max_width = REASON_WIDTH
    return table


def _claim_row(record: Mapping[str, Any]) -> tuple[str | Text, ...]:
    verdict = MARKS[record["verdict"]]
    if record["reason"]:
        verdict = verdict.copy().append(f": {printable(record['reason'])}")
    measured = record["measured"]
    several = len(measured["values"]) > 1
    value = number(measured["mean"]) + (f" ± {number(measured['sd'])}" if several else "")
    extent = f"{number(measured['min'])} to {number(measured['max'])}" if several else ""
    statement = _with_small_print(record["statement"], record["quantity"])
    return record["kind"], statement, record["expected"], _with_small_print(value, extent), verdict


def _with_small_print(text: str, below: str) -> Text:
    return Text(printable(text)).append(f"\n{printable(below)}" if below else "", "dim")


def count_text(counts: Mapping[Verdict, int]) -> str:
    """Return how many claims have each verdict, in words; verdicts without a claim are left out.

    >>> count_text({"holds": 1, "does not hold": 2, "not tested": 0})
    '1 holds, 2 do not'
    """
    hold, fail, untested = counts["holds"], counts["does not hold"], counts["not tested"]
    parts = [f"{hold} hold{'s' * (hold == 1)}"] * (hold > 0)
    parts += [f"{fail} do{'es' * (fail == 1)} not{' hold' * (hold == 0)}"] * (fail > 0)
    return ", ".join(parts + [f"{untested} not tested"] * (untested > 0)) or "none"


def totals(records: Iterable[Mapping[str, Any]]) -> str:
    """Return how many claims of each kind hold, do not hold and are not tested, as one line of text.

    >>> totals([{"kind": "theorem", "verdict": "holds"}, {"kind": "check", "verdict": "not tested"}])
    'theorem: 1 holds; check: 1 not tested'
    """
    return "; ".join(f"{kind}: {count_text(counts)}" for kind, counts in count_by_kind(records).items())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line decide what a closed pipe means (rich would exit with 1): `joma ... | head` is fine."""
        raise BrokenPipeError


def show(table: Table) -> None:
    """Print a table to standard output, 120 columns wide if that is not a terminal."""
    console = _Console()
    if not console.is_terminal:
        console = _Console(width=120)
    console.print(table)
