"""The Dataset of a sweep: every value is that of the single run, at its place."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from joma import memory
from joma.arguments import InputError
from joma.files import DamagedFile
from joma.memory import OutOfMemory
from joma.runs import open_run
from joma.sweep_execution import SweepRun
from joma.sweeps import Draws, Grid, Range, open_sweep
from sweep_study import STUDY, InlineEngine, plan, sweep

slopes = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=2, unique=True)
counts = st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=2, unique=True)  # 1 point is refused


@settings(max_examples=6, deadline=None)
@given(slopes=slopes, counts=counts, first=st.booleans())
def test_values_are_those_of_the_single_runs_at_their_place(tmp_path_factory, slopes, counts, first):
    lists = {"slope": slopes, "points": counts}
    lists = lists if first else dict(reversed(lists.items()))
    result = sweep(tmp_path_factory.mktemp("sweep"), Grid(lists))
    data = open_sweep(result.path)
    assert data.sizes["slope"] == len(slopes)
    assert data.slope.values.tolist() == slopes
    assert data.points.values.tolist() == counts
    for unit in result.units:
        cell = data.sel(dict(unit.point))
        if unit.point["points"] < 2:
            assert cell.state == "failed"
            assert set(cell.verdict.values.tolist()) <= {"failed"}
            assert "value" not in cell or bool(cell.value.isnull().all())
            continue
        run = open_run(result.run_path(unit))
        np.testing.assert_array_equal(cell.value.sel(time=run.time), run.value)
        others = cell.value.drop_sel(time=run.time.values)
        assert bool(others.isnull().all())
        ends = run.value.isel(time=-1)
        assert cell.measured.sel(claim="end") == pytest.approx(float(ends.mean()), rel=1e-12)
        assert cell.measured_max.sel(claim="end") == float(ends.max())
        assert cell.measured_min.sel(claim="end") == float(ends.min())


def test_what_was_not_run_yet_is_missing_and_whole_numbers_become_nan(tmp_path):
    grid = Grid({"slope": [1.0, 2.0], "mode": ["run", "crash"]})
    result = sweep(tmp_path, grid)
    data = open_sweep(result.path)
    assert data.state.values.tolist() == [["finished", "failed"], ["finished", "failed"]]
    assert data.value.sel(mode="crash").isnull().all()
    assert data.verdict.sel(claim="end", slope=1.0, mode="run") == "does not hold"
    assert data.verdict.sel(claim="end", slope=2.0, mode="run") == "holds"
    larger = plan(tmp_path, Grid({"slope": [1.0, 2.0, 3.0]}))
    larger.begin()
    state = open_sweep(larger.path).state
    assert state.values.tolist() == ["finished", "finished", "missing"]  # the first two of the other sweep


def test_lists_and_texts_are_labels_in_the_order_given(tmp_path):
    grid = Grid({"levels": [(2.0, 1.0), (1.0,)], "bold": [True, False], "names": [None, ("b", "a")]})
    data = open_sweep(sweep(tmp_path, grid, seeds=1).path)
    assert data.levels.values.tolist() == ["2.0,1.0", "1.0"]
    assert data.bold.values.tolist() == [True, False]
    assert data.names.values.tolist() == ["None", "b,a"]
    assert data.value.dims == ("levels", "bold", "names", "seed", "time")


def test_random_points_lie_along_one_dimension(tmp_path):
    result = sweep(tmp_path, Draws({"slope": Range(1.0, 3.0), "points": [3, 4]}, 4))
    data = open_sweep(result.path)
    assert data.value.dims == ("unit", "seed", "time")
    assert data.slope.dims == ("unit",)
    for number, unit in enumerate(result.units):
        assert data.slope[number] == unit.point["slope"]
        run = open_run(result.run_path(unit))
        np.testing.assert_array_equal(data.value.isel(unit=number).sel(time=run.time), run.value)


def test_names_of_runs_that_a_key_has_are_renamed(tmp_path, monkeypatch):
    result = sweep(tmp_path, Grid({"slope": [1.0, 2.0]}))
    renamed = {
        path: open_run(path).rename(value="verdict", time="slope") for path in map(result.run_path, result.units)
    }
    monkeypatch.setattr("joma.sweeps.joined.open_run", renamed.__getitem__)
    data = open_sweep(result.path)
    assert data.run_verdict.dims == ("slope", "seed", "run_slope")
    assert data.verdict.dims == ("claim", "slope")


def test_only_the_chosen_variables_are_loaded(tmp_path, monkeypatch):
    result = sweep(tmp_path, Grid({"slope": [1.0, 2.0]}))
    full = open_sweep(result.path)
    xr.testing.assert_identical(full, open_sweep(result.path, variables=["value"]))
    with pytest.raises(InputError, match="choose among value"):
        open_sweep(result.path, variables=["weight"])
    monkeypatch.setattr("joma.sweeps.joined.open_run", None)  # no trajectory is read for the claims
    assert "value" not in open_sweep(result.path, variables=())
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(OutOfMemory, match="choose fewer variables"):
        open_sweep(result.path)


def test_a_damaged_run_is_named(tmp_path):
    result = sweep(tmp_path, Grid({"slope": [1.0, 2.0]}))
    file = result.run_path(result.units[1]) / "trajectory.nc"
    file.write_bytes(file.read_bytes()[:-7] + b"changed")
    with pytest.raises(DamagedFile, match=file.parent.name):
        open_sweep(result.path)
    SweepRun(result, STUDY).run(InlineEngine())
    assert open_sweep(result.path, variables=()).state.values.tolist() == ["finished", "finished"]
