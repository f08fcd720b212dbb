"""Claims, studies and checks as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

MARKS = {
    "holds": "[green]holds[/]",
    "does not hold": "[bold red]does not hold[/]",
    "not tested at this preset": "[dim]not tested at this preset[/]",
}


def number(value: float | None) -> str:
    """Four significant figures, or a dash for what is not a number.

    >>> number(0.99553), number(None)
    ('0.9955', '–')
    """
    return "–" if value is None else f"{value:.4g}"


def spread(measured: Mapping[str, Any]) -> str:
    """Mean ± standard deviation with the range over seeds, or the value alone where there is one.

    >>> spread({"mean": 1.0, "sd": 0.1, "min": 0.9, "max": 1.1, "values": [0.9, 1.1]})
    '1 ± 0.1 (0.9 to 1.1)'
    """
    if len(measured["values"]) == 1:
        return number(measured["mean"])
    low, high = number(measured["min"]), number(measured["max"])
    return f"{number(measured['mean'])} ± {number(measured['sd'])} ({low} to {high})"


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table with wrapped cells, in the house style."""
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=False, expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell if cell in MARKS.values() else escape(cell) for cell in row))
    return table


def claims(title: str, records: Iterable[Mapping[str, Any]]) -> Table:
    """What was said, what was expected, what was measured over the seeds, and the verdict."""
    rows = (
        (record["said"], record["expected"], spread(record["measured"]), MARKS[record["verdict"]]) for record in records
    )
    return grid(title, ("said", "expected", "measured", "verdict"), rows)


class _Pipe(Console):
    def on_broken_pipe(self) -> None:
        """A reader that has seen enough, `head` say, is no error: leave the verdict to the command line."""
        raise BrokenPipeError


def show(table: Table) -> None:
    """Print a table to standard output; a pipe gets 120 columns."""
    console = _Pipe()
    if not console.is_terminal:
        console = _Pipe(width=120)
    console.print(table)
