"""Progress bars show label, count and note on a terminal, and nothing for short work or without a terminal."""

import pytest

from joma.progress import SILENT, Bars


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich believe that standard error is a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")


def train(progress):
    with progress.task("training", total=10) as task:
        task.advance(3)
        task.say("loss 0.25")
        task.advance(1)
        if isinstance(progress, Bars):
            progress.display.refresh()  # rich redraws by itself at most ten times a second


@pytest.mark.usefixtures("terminal")
def test_a_bar_shows_label_count_and_note(capsys):
    bars = Bars(patience=-1.0)
    with bars.task("studies", total=2) as outer:
        outer.advance()
        train(bars)
    output = capsys.readouterr()
    assert output.out == ""
    for part in ("studies", "training", "4/10", "loss 0.25", "left"):
        assert part in output.err
    assert not bars.started


@pytest.mark.usefixtures("terminal")
def test_skipped_units_count_as_done_but_not_in_the_speed(capsys, monkeypatch):
    clock = iter((100.0, 110.0))
    monkeypatch.setattr("joma.progress.time.monotonic", lambda: next(clock))
    bars = Bars(patience=2.0)
    with bars.task("training", total=1000) as task:
        task.skip(900)
        task.advance(20)
        bars.display.refresh()
    output = capsys.readouterr().err
    assert "920/1000" in output
    assert "2/s" in output


@pytest.mark.usefixtures("terminal")
def test_the_display_stops_when_work_fails(capsys):
    bars = Bars(patience=-1.0)

    def fail():
        with bars.task("training", total=2) as task:
            task.advance()
            assert bars.started
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not bars.started
    assert bars.open_tasks == 0
    assert bars.display.tasks == []
    capsys.readouterr()


@pytest.mark.usefixtures("terminal")
def test_short_work_shows_nothing(capsys):
    train(Bars(patience=1000.0))
    assert capsys.readouterr().err == ""


def test_nothing_is_shown_without_a_terminal(capsys, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    train(Bars(patience=-1.0))
    assert capsys.readouterr().err == ""


def test_silent_progress_shows_nothing(capsys):
    train(SILENT)
    assert capsys.readouterr() == ("", "")
