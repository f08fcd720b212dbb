"""Faults of a Ray cluster: every unit has one result, a failure is one line, and the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import joma
import joma.engine.ray as engine_module
from engine.chores import chore
from engine.ray_cluster import add_worker, contents, environment, executions, two_nodes, unit
from engine.ray_warnings import LEFT_TO_COLLECTOR
from joma.engine import Needs, RayEngine
from joma.engine.performing import perform
from joma.transport import unpack

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'joma[ray]'")

pytestmark = LEFT_TO_COLLECTOR
DRIVER = """
import sys
from pathlib import Path
from engine.ray_cluster import unit
from joma.engine import RayEngine
address, out, counts = sys.argv[1:]
names = [f"unit-{number:02}" for number in range(12)]
missing = [name for name in names if not (Path(out) / name / "manifest.json").exists()]
units = [unit(name, "store", out=out, name=name, number=int(name[-2:]), counts=counts, seconds=0.3) for name in missing]
with RayEngine(address) as engine:
    for result in engine.run(units):
        print(result.unit.name, result.failure, flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def warnings():
    return []


@pytest.fixture(scope="module")
def engine(cluster, warnings):
    with RayEngine(cluster.address, retries=1, warn=warnings.append) as shared:
        yield shared


@pytest.fixture
def counts(tmp_path):
    folder = tmp_path / "counts"
    folder.mkdir()
    return folder


def others(out, count=3):
    """Units that nothing happens to."""
    return [unit(f"other-{number}", "store", out=out, name=f"other-{number}", number=number) for number in range(count)]


def run_beside_others(engine, faulty, out):
    """Run a unit to which something happens, and return its result, when the others are as they should be."""
    results = {result.unit.name: result for result in engine.run([faulty, *others(out)])}
    assert sorted(results) == sorted([faulty.name, "other-0", "other-1", "other-2"])
    assert [results[f"other-{number}"].value["number"] for number in range(3)] == [0, 1, 2]
    return results[faulty.name]


def assert_failure(result, kind, *words):
    assert result.value is None
    assert result.failure.kind == kind
    assert "\n" not in result.failure.message
    assert not [word for word in words if word not in result.failure.message], result.failure


def test_a_unit_that_raises(engine, tmp_path):
    result = run_beside_others(engine, unit("faulty", "refuse", text="a defect"), tmp_path)
    assert_failure(result, "error", "RuntimeError", "a defect")
    assert "ray_cluster.py" in result.failure.details


def test_a_worker_that_is_killed_once_is_replaced(engine, counts, tmp_path):
    result = run_beside_others(engine, unit("faulty", "die_at_first", name="faulty", counts=str(counts)), tmp_path)
    assert result.value == "survived"
    assert executions(counts) == {"faulty": 2}


def test_a_worker_that_is_killed_every_time_is_given_up(engine, counts, tmp_path):
    faulty = unit("faulty", "die_at_first", name="faulty", counts=str(counts), times=9)
    assert_failure(run_beside_others(engine, faulty, tmp_path), "lost", "died 2 times")
    assert executions(counts) == {"faulty": 2}


def test_a_unit_that_takes_too_much_memory_is_ended_and_not_tried_again(engine, tmp_path):
    faulty = chore("faulty", "allocate", size=10**9, needs=Needs(memory=5 * 10**8))
    assert_failure(run_beside_others(engine, faulty, tmp_path), "memory", "500 MB")


class Damage:
    """Damages what arrives of one unit, some times."""

    def __init__(self, name, times):
        self.name, self.times = name, times

    def __call__(self, files, path):
        if Path(path).name == self.name and self.times:
            self.times -= 1
            text = files["numbers.txt"]
            files = {**files, "numbers.txt": text[:-1] + bytes([text[-1] ^ 1])}
        return unpack(files, path)


@pytest.mark.parametrize("times", [1, 2])
def test_a_result_that_is_damaged_on_its_way_is_sent_once_more(engine, counts, tmp_path, monkeypatch, times):
    monkeypatch.setattr(engine_module, "unpack", Damage("faulty", times))
    out = tmp_path / "out"
    faulty = unit("faulty", "store", out=out, name="faulty", number=7, counts=str(counts))
    result = run_beside_others(engine, faulty, out)
    assert executions(counts) == {"faulty": 2}
    if times == 1:
        assert result.value["number"] == 7
        perform(unit("faulty", "store", out=tmp_path / "here", name="faulty", number=7))
        assert contents(out / "faulty") == contents(tmp_path / "here" / "faulty")
    else:
        assert_failure(result, "storage", "numbers.txt")
        assert not (out / "faulty").exists()


def test_another_version_on_the_workers(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "versions", lambda: ["9.9.9", "3.11"])
    (result,) = engine.run([chore("faulty", "double", number=1)])
    assert_failure(result, "input", "9.9.9", joma.__version__)


def test_workers_without_joma(engine, tmp_path, monkeypatch):
    def without_joma(needs):
        options = real_needs(needs)
        options["runtime_env"]["env_vars"]["PYTHONPATH"] = os.pathsep.join(
            [str(hiding), str(Path(ray.__file__).parents[1])]
        )
        return options

    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "joma.py").write_text("raise ModuleNotFoundError(\"No module named 'joma'\")")
    real_needs = engine_module.ray_needs
    monkeypatch.setattr(engine_module, "ray_needs", without_joma)
    (result,) = engine.run([chore("faulty", "double", number=1)])
    monkeypatch.undo()
    assert_failure(result, "input", "cannot import joma", joma.__version__)
    assert [other.failure for other in engine.run(others(tmp_path))] == [None] * 3


def test_units_that_run_stop_within_two_seconds(engine, tmp_path):
    for number in range(4):
        engine.submit(chore(f"wait-{number}", "wait", out=tmp_path, name=str(number)))
    results = engine.results()
    engine._look_at_cluster()
    while engine._waiting:
        engine._start(engine._waiting.popleft())
    time.sleep(1)
    start = time.monotonic()
    engine.cancel()
    assert time.monotonic() - start < 2.5
    assert [result.failure.kind for result in results] == ["interrupted"] * 4
    assert [other.failure for other in engine.run(others(tmp_path))] == [None] * 3


def test_work_goes_on_without_the_display(engine, tmp_path):
    ray.kill(engine._board)
    assert [other.failure for other in engine.run(others(tmp_path))] == [None] * 3


def test_the_driver_is_killed_and_the_command_repeated(cluster, counts, tmp_path):
    out = tmp_path / "out"
    with environment():
        command = [sys.executable, "-c", DRIVER, cluster.address, str(out), str(counts)]
        first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            lines = [first.stdout.readline() for _ in range(4)]
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
            first.stdout.close()
        finished = [path.parent.name for path in out.glob("*/manifest.json")]
        assert {line.split()[0] for line in lines} <= set(finished)
        assert len(finished) < 12
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    for number in range(12):
        perform(unit("", "store", out=tmp_path / "here", name=f"unit-{number:02}", number=number))
    assert contents(out) == contents(tmp_path / "here")
    assert {name: executions(counts)[name] for name in finished} == dict.fromkeys(finished, 1)


def test_a_machine_that_leaves_in_the_midst(cluster, engine, warnings, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "CLUSTER_SECONDS", 0.5)
    names = [f"unit-{number:02}" for number in range(24)]
    units = [
        unit(name, "store", out=tmp_path / "ray", name=name, number=number, seconds=0.2)
        for number, name in enumerate(names)
    ]
    results = []
    for result in engine.run(units):
        results.append(result)
        if len(results) == 6:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    add_worker(cluster)
    assert [result.failure for result in results] == [None] * 24
    assert sorted(result.unit.name for result in results) == names
    for number, name in enumerate(names):
        perform(unit(name, "store", out=tmp_path / "here", name=name, number=number))
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
    assert "the machine 127.0.0.1 has left the cluster; its units run again elsewhere." in warnings
