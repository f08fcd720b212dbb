"""Sweeps in processes of this machine: killed, interrupted, resumed, and equal to single runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import xarray as xr

from joma.engine import LocalEngine
from joma.runs import open_run
from joma.studies import load
from joma.study import execute
from joma.sweeps import open_sweep, read_sweep
from robustness.torture_interrupts import obey_ctrl_c
from sweep_study import GRID, STUDY, ToyConduct, assert_equal, executions, kill_and_repeat, plan, sweep


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


def test_a_killed_local_sweep_is_resumed(tmp_path, counts, undisturbed):
    finished = kill_and_repeat("local", tmp_path / "out", counts)
    assert_equal(plan(tmp_path / "out", GRID).path, undisturbed)
    assert all(executions(counts)[slope] == 1 for slope in finished)


def test_a_sweep_by_command_stores_what_single_runs_store(tmp_path):
    command = [sys.executable, "-m", "joma", "sweep", "cooccurrence", "--grid", "samples=10,1000", "--set", "trees=1"]
    command += ["--seeds", "1", "--json", "--out", str(tmp_path / "sweep")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 2
    assert "samples=10: `samples` must be a whole number of at least 1000" in result.stderr
    refused, finished = json.loads(result.stdout)["units"]
    assert (refused["state"], finished["state"]) == ("failed", "finished")
    study = load("cooccurrence")
    config = type(study.presets["quick"].config)(samples=1000, trees=1)
    outcome = execute(study, config=config, seeds=1, out=tmp_path / "single")
    assert outcome.path.name == Path(finished["path"]).name
    assert outcome.claims == finished["claims"]
    xr.testing.assert_identical(open_run(outcome.path).drop_attrs(), open_run(finished["path"]).drop_attrs())


def test_ctrl_c_stops_a_sweep_that_can_be_resumed(tmp_path):
    command = [sys.executable, "-m", "joma", "sweep", "winner", "--grid", "tokens=4,5,6", "--set", "steps=2000000"]
    command += ["--jobs", "2", "--out", str(tmp_path)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=obey_ctrl_c, **options) as process:  # noqa: PLW1509
        assert process.stdout is not None
        assert process.stderr is not None
        while "estimated from" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("the same command resumes the others.\n")
    assert not [file for file in tmp_path.rglob("sweep.json") if read_sweep(file.parent).finished]


def test_a_local_sweep_has_the_numbers_of_one_in_this_process(tmp_path, counts, undisturbed):
    sweep_run = ToyConduct(plan(tmp_path, GRID), STUDY, counts=str(counts))
    with LocalEngine(2) as engine:
        result = sweep_run.run(engine)
    assert_equal(result.path, undisturbed)
    assert set(executions(counts).values()) == {1}
