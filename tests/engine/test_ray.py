"""Units on a Ray cluster of two nodes without a common file system: the same results as of a process here."""

from __future__ import annotations

import contextlib
import os
import tempfile
from ipaddress import ip_address

import psutil
import pytest

from engine.chores import chore
from engine.ray_cluster import commands_with, contents, environment, executions, two_nodes, unit, wait_for_no_process
from engine.ray_warnings import LEFT_TO_COLLECTOR
from joma.engine import Needs, RayEngine
from joma.engine.performing import perform
from joma.progress import Progress, Task

pytest.importorskip("ray", reason="Ray is not installed: pip install 'joma[ray]'")

pytestmark = LEFT_TO_COLLECTOR


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def address(cluster):
    return cluster.address


class Shown(Progress):
    """Progress that notes what was shown."""

    def __init__(self):
        self.labels, self.done = [], {}

    def task(self, label, total):
        return ShownTask(self, label, total)


class ShownTask(Task):
    def __init__(self, shown, label, total):
        self.shown, self.label = shown, label
        shown.labels.append((label, total))

    def advance(self, amount=1):
        self.shown.done[self.label] = self.shown.done.get(self.label, 0) + amount

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_results_and_files_are_those_of_a_process_here(address, tmp_path):
    names = [f"unit-{number}" for number in range(6)]
    shown, counts = Shown(), tmp_path / "counts"
    counts.mkdir()
    arguments = {name: {"name": name, "number": number} for number, name in enumerate(names)}
    units = [unit(n, "store", out=tmp_path / "ray", counts=str(counts), seconds=1.2, **arguments[n]) for n in names]
    with RayEngine(address, progress=shown) as engine:
        results = {result.unit.name: result for result in engine.run(units)}
    for name in names:
        local, _ = perform(unit(name, "store", out=tmp_path / "here", **arguments[name]))
        assert results[name].failure is None
        assert results[name].value == local.value | {"path": str(tmp_path / "ray" / name)}
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
    assert executions(counts) == dict.fromkeys(names, 1)
    assert {total for _, total in shown.labels} == {10}
    assert {label for label, _ in shown.labels} <= {f"{name}: numbers" for name in names}
    assert shown.labels
    assert all(done <= 10 for done in shown.done.values())


def test_workers_write_into_a_folder_that_they_share(address, tmp_path):
    units = [unit(name, "store", out=tmp_path / "shared", name=name, number=3) for name in ("a", "b")]
    with RayEngine(address, shared=True) as engine:
        results = list(engine.run(units))
        assert [path.name[:6] for path in (tmp_path / "shared").glob(".joma-*")] == [".joma-"]
    assert sorted(result.value["path"] for result in results) == [str(tmp_path / "shared" / name) for name in "ab"]
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["a", "b"]


def test_a_unit_has_the_threads_of_its_cores_and_no_gpu_that_it_does_not_need(address, tmp_path):
    with RayEngine(address) as engine:
        (result,) = engine.run([chore("where", "surroundings", out=tmp_path)])
    assert result.value["OMP_NUM_THREADS"] == "1"
    assert result.value["CUDA_VISIBLE_DEVICES"] == ""
    assert result.value["process"] != os.getpid()


def test_warnings_of_units_are_passed_on_once(address):
    warnings = []
    with RayEngine(address, warn=warnings.append) as engine:
        list(engine.run([chore(f"warn-{number}", "warn", text="a warning") for number in range(3)]))
    assert warnings == ["a warning"]


def test_cancelled_units_are_interrupted_and_the_cluster_stays(address, tmp_path):
    with RayEngine(address) as engine:
        for number in range(5):
            engine.submit(chore(f"wait-{number}", "wait", out=tmp_path, name=str(number)))
        engine.submit(chore("first", "double", number=4))
        results = engine.results()
        engine.cancel()
        assert {result.failure.kind for result in results} == {"interrupted"}
        (after,) = engine.run([chore("after", "double", number=4)])
        assert after.value == 8


def test_a_cluster_without_the_needed_machine_is_named(address):
    warnings = []
    with RayEngine(address, warn=warnings.append) as engine:
        engine.submit(chore("large", "double", number=1, needs=Needs(cores=64)))
        engine.submit(chore("small", "double", number=1))
        assert next(engine.results()).unit.name == "small"
    assert len(warnings) == 1
    assert "no machine of the cluster has 64 cores" in warnings[0]


def listening():
    """Return the addresses and ports at which this process and its descendants accept connections."""
    addresses = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since it was listed: it listens no longer
            connections = process.net_connections(kind="inet")
            addresses |= {connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN}
    return addresses


def is_loopback(text):
    address = ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_without_an_address_ray_is_started_here_and_stopped(monkeypatch):
    folders, mkdtemp, before = [], tempfile.mkdtemp, listening()

    def noted(*arguments, **options):
        folders.append(mkdtemp(*arguments, **options))
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with environment(), RayEngine() as engine:
        large, small = chore("large", "double", number=1, needs=Needs(gpus=1000)), chore("small", "double", number=2)
        results = {result.unit.name: result for result in engine.run([large, small])}
        assert commands_with(folders[0])
        opened = listening() - before
    assert opened
    assert [address.ip for address in opened if not is_loopback(address.ip)] == []  # other machines cannot reach it
    assert results["small"].value == 4
    assert results["large"].failure.kind == "input"
    assert "1000 GPUs" in results["large"].failure.message
    assert wait_for_no_process(folders[0]) == []
    assert not os.path.exists(folders[0])
