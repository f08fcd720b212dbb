"""The thread behind the local engine; its faults and processes are tested through the engine in `test_local`."""

from __future__ import annotations

import time
from pathlib import Path

from engine.chores import chore
from joma.engine import Result
from joma.engine.performing import INTERRUPTED
from joma.engine.scheduling import Machine, Schedule
from joma.engine.worker_pool import WorkerPool


def test_a_pool_without_units_ends_at_once_and_twice(tmp_path):
    pool = WorkerPool(Machine(jobs=1, cores=1, memory=10**9), str(tmp_path))
    pool.cancel()
    pool.close()
    pool.cancel()
    pool.close()


def test_units_wait_while_many_results_are_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("joma.engine.worker_pool.MAX_UNREAD", 3)
    pool = WorkerPool(Machine(jobs=1, cores=1, memory=10**9), str(tmp_path))
    try:
        for number in range(20):
            pool.submit(chore(str(number), "double", number=number))
        limit = time.monotonic() + 20
        while pool.events.qsize() < 3:
            assert time.monotonic() < limit, "no unit ended"
            time.sleep(0.02)
        time.sleep(0.3)  # in which all others would end
        assert pool.events.qsize() == 3
        assert [event.value for event in pool.read()] == [2 * number for number in range(20)]
    finally:
        pool.close()


def test_a_defect_of_the_pool_reaches_who_reads_and_ends_its_processes(tmp_path, monkeypatch):
    pool = WorkerPool(Machine(jobs=1, cores=1, memory=10**9), str(tmp_path))
    pool.submit(chore("unit", "wait", out=tmp_path, name="unit"))
    worker = wait_for(tmp_path / "unit.begun")
    monkeypatch.setattr(Schedule, "start", lambda _: 1 / 0)
    pool.submit(chore("next", "double", number=1))
    events = list(pool.read())
    assert [type(event) for event in events] == [ZeroDivisionError, Result]
    assert events[1].failure == INTERRUPTED
    pool.cancel()
    pool.close()
    assert not Path(f"/proc/{worker}").exists()


def wait_for(file):
    limit = time.monotonic() + 20
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < limit, f"{file.name} did not appear"
        time.sleep(0.02)
    return int(file.read_text())
