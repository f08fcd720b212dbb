"""Sweeps on a Ray cluster of two nodes, which share no file system: a node leaves, the driver is killed."""

from __future__ import annotations

import pytest

from engine.ray_cluster import add_worker, environment, two_nodes
from engine.ray_warnings import LEFT_TO_COLLECTOR
from joma.engine import RayEngine
from joma.sweeps import open_sweep
from sweep_study import GRID, STUDY, ToyConduct, assert_equal, executions, kill_and_repeat, plan, sweep

pytest.importorskip("ray", reason="Ray is not installed: pip install 'joma[ray]'")

pytestmark = LEFT_TO_COLLECTOR


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def counts(tmp_path):
    folder = tmp_path / "counts"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The Dataset of the sweep, made in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("joma.units.load", lambda _: STUDY)
        return open_sweep(sweep(tmp_path_factory.mktemp("undisturbed"), GRID).path)


def test_a_node_that_leaves_in_the_midst(cluster, tmp_path, counts, undisturbed, monkeypatch):
    monkeypatch.setattr("joma.engine.ray.CLUSTER_SECONDS", 0.5)
    ended = []

    def remove_node(result):
        ended.append(result.unit.name)
        if len(ended) == 6:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    sweep_run = ToyConduct(plan(tmp_path / "out", GRID), STUDY, counts=str(counts), seconds=0.1)
    with RayEngine(cluster.address, warn=lambda _: None) as engine:
        result = sweep_run.run(engine, ended=remove_node)
    add_worker(cluster)
    assert sorted(ended) == sorted(unit.label for unit in result.units)
    assert_equal(result.path, undisturbed)


def test_a_killed_sweep_is_resumed(cluster, tmp_path, counts, undisturbed):
    with environment():
        finished = kill_and_repeat(cluster.address, tmp_path / "out", counts)
    assert_equal(plan(tmp_path / "out", GRID).path, undisturbed)
    assert all(executions(counts)[slope] == 1 for slope in finished)
