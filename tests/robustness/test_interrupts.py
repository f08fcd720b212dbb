"""Ctrl-C in commands, once and twice, and in calls of C: what is printed, in which order, and that nothing is lost."""

from pathlib import Path

import pytest

from joma.train.interrupt import EXIT_CODE, LAST_LINE
from robustness.interrupt_study import FOREVER, LONG_STEP
from robustness.torture_interrupts import NOTICE, SECOND, Command, content, run_command


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run stores that was never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert Command.fork(run_command(out)).wait() == 0
    return content(out)


def in_long_call(out, place, iterations):
    """Start a run, and return it when it is in a call of C at `place`."""
    command = Command.fork(run_command(out), place, iterations)
    command.wait_for(lambda: command.call_began)
    return command


def resumed(out):
    """Finish the run in `out` by the same command and return what it stores."""
    command = Command.fork(run_command(out))
    assert (command.wait(), command.errors) == (0, "")
    return content(out)


def saved_steps(out):
    files = out.glob("interrupted/*/checkpoints/training/[0-9]*.sha256")
    return {int(file.name.split(".")[0]) for file in files}


ACTIVITIES = {
    "step": f"step {LONG_STEP} to end and be saved",
    "save": "the checkpoint of step 8 to be saved",  # the first of five, which are 40 / 5 steps apart
}


@pytest.mark.parametrize("place", sorted(ACTIVITIES))
def test_a_long_step_or_save_is_named_while_it_lasts_and_then_saved(tmp_path, whole, place):
    command = in_long_call(tmp_path, place, 2 * SECOND)
    command.interrupt()
    assert not command.call_ended
    assert command.errors.startswith(f"{NOTICE}{ACTIVITIES[place]} (")
    assert command.wait() == EXIT_CODE
    assert command.call_ended
    notice, last = command.errors.splitlines(keepends=True)
    assert notice.endswith("; press Ctrl-C again to leave at once, without it.\n")
    assert last == LAST_LINE
    assert saved_steps(tmp_path) == {LONG_STEP + 1 if place == "step" else 8}
    assert resumed(tmp_path) == whole


@pytest.mark.parametrize("place", sorted(ACTIVITIES))
def test_a_second_ctrl_c_leaves_at_once_without_damage(tmp_path, whole, place):
    command = in_long_call(tmp_path, place, FOREVER)
    command.interrupt()
    command.interrupt()
    assert command.wait() == EXIT_CODE
    notice, last = command.errors.splitlines(keepends=True)
    assert notice.startswith(NOTICE)
    assert last == LAST_LINE
    assert saved_steps(tmp_path) == set()
    assert resumed(tmp_path) == whole


@pytest.mark.parametrize("place", ["run", "draw"])
def test_a_long_calculation_with_nothing_to_save_is_left_at_the_first_ctrl_c(tmp_path, whole, place):
    command = in_long_call(tmp_path, place, FOREVER)
    command.interrupt()
    assert (command.wait(), command.errors) == (EXIT_CODE, LAST_LINE)
    assert resumed(tmp_path) == whole


def test_a_training_of_short_steps_is_saved_where_it_was(tmp_path):
    out = {name: tmp_path / name for name in ("whole", "torn")}
    assert Command.fork(run_command(out["whole"], steps=400)).wait() == 0
    command = Command.fork(run_command(out["torn"], steps=400))
    command.wait_for(lambda: bool(saved_steps(out["torn"])))
    command.interrupt()
    assert command.wait() == EXIT_CODE
    *notices, last = command.errors.splitlines(keepends=True)
    assert last == LAST_LINE
    assert len(notices) < 2  # on a busy machine a save may take half a second
    assert all(line.startswith(NOTICE) for line in notices)
    command = Command.fork(run_command(out["torn"], steps=400))
    assert (command.wait(), command.errors) == (0, "")
    assert content(out["torn"]) == content(out["whole"])


def test_ctrl_c_while_modules_load_is_one_line(tmp_path):
    command = Command.start("run", "alignment", "--preset", "paper", "--device", "cpu", "--out", tmp_path)
    maps = Path(f"/proc/{command.pid}/maps")
    command.wait_for(lambda: "libtorch_cpu" in maps.read_text())  # it is importing torch
    command.interrupt()
    assert (command.wait(), command.errors) == (EXIT_CODE, LAST_LINE)
