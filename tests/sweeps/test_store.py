"""A sweep on disk: what is read is what was planned, damage is named, and runs are shared."""

import json

import pytest

from joma.files import DamagedFile, StorageError, write_json
from joma.runs import find_runs
from joma.study import execute
from joma.sweeps import Draws, Grid, Range, find_sweeps, read_sweep
from sweep_study import STUDY, plan, sweep


@pytest.mark.parametrize(
    "points",
    [Grid({"slope": [2.0, 1.0], "levels": [(1.0,), (1.0, 2.0)]}), Draws({"slope": Range(1.0, 3.0)}, 3, seed=4)],
)
def test_a_stored_sweep_is_the_planned_one(tmp_path, points):
    planned = plan(tmp_path, points)
    planned.begin()
    stored = read_sweep(planned.path)
    assert stored.content == json.loads(json.dumps(planned.content))
    assert [dict(unit.point) for unit in stored.units] == json.loads(json.dumps(points.points()))
    assert find_sweeps(tmp_path) == [planned.path]


def test_other_sweeps_have_other_folders(tmp_path):
    grids = [Grid({"slope": [1.0]}), Grid({"slope": [2.0]}), Grid({"points": [4]})]
    paths = {plan(tmp_path, grid).path for grid in grids} | {plan(tmp_path, grids[0], seeds=3).path}
    assert len(paths) == 4


def test_a_damaged_sweep_is_named(tmp_path):
    planned = plan(tmp_path, Grid({"slope": [1.0]}))
    with pytest.raises(StorageError, match="no sweep at"):
        read_sweep(planned.path)
    planned.begin()
    file = planned.path / "sweep.json"
    file.write_text(file.read_text().replace('"seeds": 2', '"seeds": 3'))
    with pytest.raises(DamagedFile, match="altered"):
        read_sweep(planned.path)
    with pytest.raises(StorageError, match=r"sweeps below it: .*sweeps/toy/"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("grid", [5, {"slope": 1.0}, {"slope": []}, {"slope": [1.0, 1.0]}])
def test_a_stored_grid_that_is_none_is_damage(tmp_path, grid):
    planned = plan(tmp_path, Grid({"slope": [1.0]}))
    planned.begin()
    write_json(planned.path / "sweep.json", {**planned.content, "grid": grid})
    planned._write_manifest(["sweep.json"], complete=False)
    with pytest.raises(DamagedFile, match="is not what a sweep writes"):
        read_sweep(planned.path)


def test_the_runs_of_a_sweep_are_no_runs_of_the_folder_and_those_of_the_folder_are_used(tmp_path):
    outcome = execute(STUDY, out=tmp_path, seeds=2)
    result = sweep(tmp_path, Grid({"slope": [2.0, 1.0]}))
    assert find_runs(tmp_path) == [outcome.path]
    assert result.run_path(result.units[0]) == outcome.path
    (other,) = find_runs(tmp_path / "sweeps" / "runs")
    assert result.run_path(result.units[1]) == other
    assert {result.state(unit) for unit in result.units} == {"finished"}
