"""What units report becomes tasks, warnings and lines of this process; `test_local` shows it with real units."""

from __future__ import annotations

from engine.test_local import Recorded
from joma.engine import Unit
from joma.engine.display import Display, Report

UNIT = Unit("unit", "module:function")


def task(number, **fields):
    return Report(UNIT, {"kind": "task", "number": number, "done": 0, "skipped": 0, "note": "", **fields})


def test_counts_are_shown_as_differences_and_reports_that_were_dropped_do_no_harm():
    progress = Recorded()
    display = Display(progress, print, several=False)
    display.show(task(0, label="steps", total=9))
    display.show(task(0, done=4, skipped=2, note="warm"))
    display.show(task(7, done=3))  # its beginning was dropped
    display.show(task(7, done=3, ended=True))
    display.show(task(0, done=6, skipped=2, note="warm", ended=True))
    steps = progress.tasks["steps"][1]
    assert (steps.done, steps.skipped, steps.notes, steps.calls) == (6, 2, ["warm"], 2)
    assert set(progress.tasks) == {"steps"}
    assert progress.open_tasks == 0


def test_the_end_of_a_unit_or_of_the_display_ends_its_tasks():
    progress = Recorded()
    display = Display(progress, print, several=True)
    display.show(task(0, label="first", total=1))
    display.show(task(1, label="second", total=1))
    other = Unit("other", "module:function")
    display.show(Report(other, {**task(0).message, "label": "third", "total": 1}))
    display.end(UNIT)
    assert progress.open_tasks == 1
    display.close()
    assert progress.open_tasks == 0
    assert set(progress.tasks) == {"unit: first", "unit: second", "other: third"}


def test_a_warning_is_passed_on_once_and_lines_are_shown_without_control_characters(capsys):
    messages = []
    display = Display(Recorded(), messages.append, several=True)
    for text in ("beware", "beware", "again"):
        display.show(Report(UNIT, {"kind": "warning", "message": text}))
    display.show(Report(None, {"kind": "line", "text": "a\x1b[2Jb"}))
    assert messages == ["beware", "again"]
    assert capsys.readouterr().err == "a worker: a\\x1b[2Jb\n"
