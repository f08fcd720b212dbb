"""What commands print, and the codes that they exit with."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from joma.terminal import json_document, printable

MAX_LINE = 4000  # characters of a message; a longer one loses its middle
DONE, CLAIM_FAILED, BAD_INPUT, INTERNAL = 0, 1, 2, 3


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(f"{json_document(value)}\n")


def write_line(text: object) -> None:
    """Print one line on standard output."""
    sys.stdout.write(f"{printable(text)}\n")


def print_error(problem: object) -> None:
    """Print one line on standard error."""
    line = printable(problem)
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE // 2]} … {line[-MAX_LINE // 2 :]}"
    sys.stderr.write(f"joma: {line}\n")


def show_claims(study: Any, outcome: Any, note: str | None = None) -> None:
    """Print the claims of one run as a table, with a note below the title such as how long it took."""
    from joma.report.table import claims, show, totals

    note = note or ("was finished already" if outcome.reused else f"took {outcome.wall_time:.1f} s")
    title, counts = study.description(outcome.preset).title, totals(outcome.claims)
    show(claims(f"{outcome.study}: {title}", outcome.claims, f"{outcome.path}, {note} ({counts})"))


def exit_code(outcomes: list[Any], expected: int, *, as_json: bool) -> int:
    """Return the exit code of these of the `expected` runs, after printing them as JSON if that is wanted."""
    if as_json:
        print_json([dataclasses.asdict(outcome) | {"failed": outcome.failed} for outcome in outcomes])
    if len(outcomes) < expected:
        return BAD_INPUT
    return CLAIM_FAILED if any(outcome.failed for outcome in outcomes) else DONE
