"""Plans of runs: what becomes units of work, and that shards give the run that is not split."""

import dataclasses
import json

import pytest
import xarray as xr

import toy_study
from joma import open_run
from joma.commands.plans import Plan
from joma.engine.performing import perform
from joma.progress import SILENT
from joma.study.execution import planned_run
from joma.study.shards import split_seeds

NAME, SEEDS = "toy", 3


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return a function that plans a run of the toy study, in a folder and in shards."""
    study = dataclasses.replace(toy_study.STUDY, threads=1)
    monkeypatch.setattr("joma.units.load", lambda _: study)
    config = study.presets["quick"].config

    def make(folder, shards):
        run = planned_run(study, config, seeds=SEEDS, out=tmp_path / folder)
        return Plan(study, "quick", config, "cpu", run, split_seeds(SEEDS, shards) if shards > 1 else ())

    return make


def test_units_are_what_json_has_and_need_the_threads_of_the_study(plan):
    (unit,) = plan("whole", 1).units(0.5)
    assert (unit.name, unit.needs.cores, unit.needs.gpus) == (NAME, 1, 0.5)
    shards = plan("split", 2).units(1.0)
    assert [shard.name for shard in shards] == [f"{NAME}, seeds 0 to 1", f"{NAME}, seeds 2 to 2"]
    for shard in (unit, *shards):
        assert json.loads(json.dumps(shard.as_json()))["arguments"]["config"]["levels"] == [1, 2]
    assert plan("split", 2).unit_seconds == plan("whole", 1).unit_seconds / 2


def test_a_run_in_shards_has_the_bits_of_one_that_is_not_split_wherever_they_are_trained(plan):
    whole = plan("whole", 1).execute(SILENT)
    first = plan("here", 2)
    assert not first.is_trained
    units = plan("units", 3)
    for unit in units.units(0.0):
        result, output = perform(unit)
        assert result.failure is None
        (folder,) = output.folders
        assert folder.startswith(f"toy/{units.run.path.name}/shards/")
    for outcome in (first.execute(SILENT), units.outcome(result.value)):
        xr.testing.assert_identical(
            open_run(outcome.path).drop_attrs(deep=False), open_run(whole.path).drop_attrs(deep=False)
        )
        assert outcome.claims == whole.claims
    assert first.is_trained
    assert first.execute(SILENT).reused


def test_a_study_without_a_number_of_threads_needs_all_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("joma.engine.devices.usable_cores", lambda: 6)
    config = toy_study.Config()
    run = planned_run(toy_study.STUDY, config, seeds=1, out=tmp_path)
    (unit,) = Plan(toy_study.STUDY, "quick", config, "cpu", run).units(0.0)
    assert unit.needs.cores == 6
