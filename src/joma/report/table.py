"""Tables of claims, studies and checks on the terminal, and numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from joma.terminal import printable
from joma.verdicts import KINDS, count_by_kind

# The verdicts in their colours.
MARKS = {
    "holds": Text("holds", "green"),
    "does not hold": Text("does not hold", "bold red"),
    "not tested": Text("not tested", "dim"),
}


def number(value: float | None) -> str:
    """Return a number as text with four significant digits, or a dash for None.

    >>> number(0.99553), number(None)
    ('0.9955', '–')
    """
    return "–" if value is None else f"{value:.4g}"


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
    """Return the table of stored claims by kind: sentence, expected and measured value, and verdict."""
    ordered = sorted(records, key=lambda record: list(KINDS).index(record["kind"]))
    return grid(title, ("kind", "claim", "expected", "measured", "verdict"), map(_claim_row, ordered), note)


def _claim_row(record: Mapping[str, Any]) -> tuple[str | Text, ...]:
    statement = Text(printable(record["statement"]))
    if record["quantity"]:
        statement.append(f"\n{printable(record['quantity'])}", "dim")
    verdict = MARKS[record["verdict"]]
    if record["reason"]:
        verdict = verdict.copy().append(f": {printable(record['reason'])}")
    return record["kind"], statement, record["expected"], spread(record["measured"]), verdict


def totals(records: Iterable[Mapping[str, Any]]) -> str:
    """Return how many claims of each kind hold, do not hold and are not tested, as one line of text.

    >>> totals([{"kind": "theorem", "verdict": "holds"}, {"kind": "check", "verdict": "not tested"}])
    'theorem: 1 holds, 0 do not, 0 not tested; check: 0 hold, 0 do not, 1 not tested'
    """
    counts = count_by_kind(records).items()
    return "; ".join(
        f"{kind}: {count['holds']} hold{'s' * (count['holds'] == 1)}, {count['does not hold']} "
        f"do{'es' * (count['does not hold'] == 1)} not, {count['not tested']} not tested"
        for kind, count in counts
    )


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
