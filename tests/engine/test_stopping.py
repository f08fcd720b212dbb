"""Ctrl-C, a driver that is killed, and the end of the block: no process of the local engine stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.chores import chore
from joma.engine import LocalEngine
from joma.engine.performing import INTERRUPTED

PATIENCE = 15  # seconds: units would run for longer; how long it takes is a matter of the benchmark `engine`
FUNCTIONS = {"a": "save", "b": "wait", "c": "refuse_to_stop"}


def processes_of(folder):
    """Wait until the units have begun; return their processes and the child of one."""
    limit = time.monotonic() + 30
    files = [folder / f"{name}.begun" for name in FUNCTIONS]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < limit, "the units did not begin"
        time.sleep(0.02)
    return [int(file.read_text()) for file in [*files, folder / "c.child"]]


def is_alive(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def are_gone(processes):
    """Return whether all processes end, and do not run until their units end."""
    limit = time.monotonic() + PATIENCE
    while any(map(is_alive, processes)) and time.monotonic() < limit:
        time.sleep(0.01)
    return not any(map(is_alive, processes))


def submit_all(engine, folder):
    for name, function in FUNCTIONS.items():
        engine.submit(chore(name, function, out=folder, name=name))
    engine.submit(chore("d", "wait", out=folder, name="d"))


def test_cancel_lets_units_save_and_ends_the_others(tmp_path):
    with LocalEngine(3) as engine:
        submit_all(engine, tmp_path)
        processes = processes_of(tmp_path)
        engine.cancel()
        assert are_gone(processes)
        results = list(engine.results())
        engine.submit(chore("after", "double", number=2))
        assert [result.value for result in engine.results()] == [4]
    assert sorted(result.unit.name for result in results) == ["a", "b", "c", "d"]
    assert all(result.failure == INTERRUPTED for result in results)
    assert (tmp_path / "a.saved").exists()
    assert not (tmp_path / "d.begun").exists()


def test_leaving_the_block_ends_everything(tmp_path):
    with LocalEngine(3) as engine:
        submit_all(engine, tmp_path)
        processes = processes_of(tmp_path)
    assert are_gone(processes)
    assert (tmp_path / "a.saved").exists()
    assert list(engine.results()) == []


def test_units_are_cancelled_while_their_process_starts(tmp_path):
    with LocalEngine(1) as engine:
        for pause in (0.0, 0.03, 0.1, 0.2, 0.3):
            engine.submit(chore("b", "wait", out=tmp_path, name="b"))
            time.sleep(pause)
            engine.cancel()
            assert [result.failure for result in engine.results()] == [INTERRUPTED]


def test_an_engine_without_units_can_be_cancelled_and_closed_twice():
    engine = LocalEngine(1)
    engine.cancel()
    engine.close()
    engine.submit(chore("unit", "double", number=3))
    assert [result.value for result in engine.results()] == [6]
    engine.close()
    engine.close()


DRIVER = """
import json, sys
from pathlib import Path
from joma.engine import LocalEngine, Unit
from joma.train import interrupt

def main():
    units = [Unit(name, "engine.chores:" + function, {"name": name}, Path(sys.argv[1]))
             for name, function in json.loads(sys.argv[2]).items()]
    with LocalEngine(3) as engine:
        for result in engine.run(units):
            pass

if sys.argv[3] == "answering":
    with interrupt.answering():
        main()
else:
    main()
"""


@pytest.fixture
def driver(tmp_path, request):
    """A process that runs the units in an engine, in a process group of its own, as a shell starts it."""
    command = [sys.executable, "-c", DRIVER, str(tmp_path), json.dumps(FUNCTIONS), request.param]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.parametrize("driver", ["plain", "answering"], indirect=True)
def test_ctrl_c_in_a_terminal_lets_units_save_and_ends_all(driver, tmp_path):
    processes = processes_of(tmp_path)
    os.killpg(driver.pid, signal.SIGINT)
    assert are_gone([*processes, driver.pid])
    assert (tmp_path / "a.saved").exists()
    assert driver.wait() == 130 or driver.returncode == -signal.SIGINT


@pytest.mark.parametrize("driver", ["answering"], indirect=True)
def test_a_second_ctrl_c_ends_all_at_once(driver, tmp_path):
    processes = processes_of(tmp_path)
    os.killpg(driver.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(driver.pid, signal.SIGINT)
    assert are_gone([*processes, driver.pid])
    assert driver.wait() == 130


@pytest.mark.parametrize("driver", ["plain"], indirect=True)
def test_workers_end_when_their_driver_is_killed(driver, tmp_path):
    processes = processes_of(tmp_path)
    driver.kill()
    assert are_gone(processes)
