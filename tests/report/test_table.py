"""What the tables on the terminal show."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console

from joma.report.table import MARKS, claims, count_text, duration, grid, number, show, spread, totals
from joma.verdicts import KINDS


def text_of(table, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (0.0, "0"), (1 / 3, "0.3333"), (123456.0, "1.235e+05"), (-2.50001, "-2.5"), (float("inf"), "inf")],
)
def test_numbers_have_four_significant_digits(value, expected):
    assert number(value) == expected


def test_times_are_text():
    assert [duration(seconds) for seconds in (0.5, 75, 600, 7200)] == ["0.5 s", "75 s", "10 min", "2 h"]


def test_a_spread_is_the_number_alone_for_one_seed():
    assert spread({"mean": 0.5, "sd": 0.0, "min": 0.5, "max": 0.5, "values": [0.5]}) == "0.5"


def test_a_spread_shows_seeds_that_were_not_measured_as_dashes():
    measured = {"mean": None, "sd": None, "min": None, "max": None, "values": [None, None]}
    assert spread(measured) == "– ± – (– to –)"


def test_a_grid_shows_brackets_as_they_are_and_colours_verdicts_only():
    table = grid("Title [x]", ("first", "second"), [("[red]text[/]", "a [1] b"), ("plain", MARKS["holds"])])
    assert [str(column.header) for column in table.columns] == ["first", "second"]
    assert table.row_count == 2
    text = text_of(table)
    assert "[red]text[/]" in text
    assert "a [1] b" in text
    assert "holds" in text
    assert "[green]" not in text


def test_cells_that_are_too_wide_are_wrapped():
    text = text_of(grid("", ("words",), [("abcdefghij" * 5,)]), width=30)
    assert max(map(len, text.splitlines())) <= 30
    assert text.count("abcdefghij"[0]) == 5  # nothing is cut off


def test_claims_are_rows_of_sentence_values_and_verdict():
    record = {
        "kind": "reading",
        "statement": "Entropy falls.",
        "quantity": "nats",
        "reason": "",
        "expected": "at most 0.1",
        "measured": {"mean": 0.05, "sd": 0.01, "min": 0.04, "max": 0.06, "values": [0.04, 0.06]},
    }
    records = [{**record, "verdict": verdict} for verdict in MARKS]
    table = claims("study", records)
    lines = [line for line in text_of(table).splitlines() if "Entropy falls." in line]
    assert len(lines) == len(MARKS)
    for line, verdict in zip(lines, MARKS, strict=True):
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells == ["reading", "Entropy falls.", "at most 0.1", "0.05 ± 0.01", verdict]
    assert text_of(table).count("0.04 to 0.06") == len(MARKS)


def record(kind, verdict="holds", reason=""):
    measured = {"mean": 1.0, "sd": 0.1234567, "min": 1.0, "max": 1.0, "values": [1.0, 1.0]}
    fields = {"expected": "0.4278 ± 0.001", "measured": measured, "verdict": verdict, "reason": reason}
    return {**fields, "kind": kind, "statement": f"A {kind}.", "quantity": "distance of closed form and sum " * 4}


def test_claims_stand_by_kind_with_the_reason_why_one_is_not_tested():
    records = [record(kind, "not tested", "one seed") for kind in reversed(KINDS)]
    text = text_of(claims("study", records), width=200)
    places = [text.index(f"A {kind}.") for kind in KINDS if kind != "check"]
    assert places == sorted(places)
    assert text.count("not tested: one seed") == len(KINDS) - 1


def test_checks_are_one_line_but_for_those_that_do_not_hold():
    records = [record("check"), record("check"), record("check", "not tested"), record("theorem")]
    text = text_of(claims("study", records))
    assert text.count("A check.") == 0
    assert "2 hold, 1 not tested (our own code; `--json` lists them)" in text
    text = text_of(claims("study", [*records, record("check", "does not hold")]))
    assert text.count("A check.") == 1
    assert "does not hold" in text


def test_claims_are_readable_on_a_terminal():
    width = 120
    reason = "undecided: the 95 % interval over seeds, -0.1 to 0.2, contains 0"
    text = text_of(claims("study", [record("theorem", "not tested", reason)]), width)
    assert max(map(len, text.splitlines())) <= width
    (line,) = (line for line in text.splitlines() if "A theorem." in line)
    assert "1 ± 0.1235" in line  # numbers are not broken
    assert "0.4278 ± 0.001" in line
    assert len(line.split("│")[2]) > width / 4


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((30, 2, 1), "30 hold, 2 do not, 1 not tested"),
        ((1, 1, 0), "1 holds, 1 does not"),
        ((0, 1, 2), "1 does not hold, 2 not tested"),
        ((0, 0, 0), "none"),
    ],
)
def test_counts_are_words(counts, text):
    assert count_text(dict(zip(MARKS, counts, strict=True))) == text


def test_totals_name_the_kinds_that_there_are():
    records = [record("theorem"), record("theorem", "does not hold"), record("check")]
    assert totals(records) == "theorem: 1 holds, 1 does not; check: 1 holds"


def test_output_to_a_pipe_is_120_columns_wide(capsys, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    show(grid("", ("words",), [("word " * 100,)]))
    assert max(map(len, capsys.readouterr().out.splitlines())) == 120


def test_a_pipe_that_is_closed_is_left_to_the_caller():
    script = textwrap.dedent(
        """
        import os, sys
        from joma.report.table import grid, show
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, sys.stdout.fileno())
        try:
            show(grid("", ("words",), [("word " * 10_000,)]))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(7)
        """
    )
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    assert subprocess.run([sys.executable, "-c", script], check=False, env=environment).returncode == 7
