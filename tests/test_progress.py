"""Bars: nothing below the patience and nothing off a terminal; label, count and note above it."""

import pytest

from joma.progress import SILENT, Bars


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes a forced colour for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")


def work(bars):
    with bars.task("training", total=10) as task:
        task.advance(3)
        task.say("loss 0.25")
        task.advance(1)
        if isinstance(bars, Bars):
            bars.display.refresh()  # the display itself draws ten times a second at most


@pytest.mark.usefixtures("terminal")
def test_a_bar_shows_label_count_and_note(capsys):
    bars = Bars(patience=-1.0)
    with bars.task("studies", total=2) as outer:
        outer.advance()
        work(bars)
    shown = capsys.readouterr()
    assert shown.out == ""
    for words in ("studies", "training", "4/10", "loss 0.25", "left"):
        assert words in shown.err
    assert not bars.started


@pytest.mark.usefixtures("terminal")
def test_what_was_done_earlier_counts_but_not_in_the_rate(capsys, monkeypatch):
    clock = iter((100.0, 110.0))
    monkeypatch.setattr("joma.progress.time.monotonic", lambda: next(clock))
    bars = Bars(patience=2.0)
    with bars.task("training", total=1000) as task:
        task.skip(900)
        task.advance(20)
        bars.display.refresh()
    shown = capsys.readouterr().err
    assert "920/1000" in shown
    assert "2/s" in shown


@pytest.mark.usefixtures("terminal")
def test_what_is_quick_shows_nothing(capsys):
    work(Bars(patience=1000.0))
    assert capsys.readouterr().err == ""


def test_nothing_is_shown_off_a_terminal(capsys, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    work(Bars(patience=-1.0))
    assert capsys.readouterr().err == ""


def test_the_silent_one_is_silent(capsys):
    work(SILENT)
    assert capsys.readouterr() == ("", "")
