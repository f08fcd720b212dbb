"""Units of work, called as an engine calls them: with what JSON has."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import xarray as xr

from joma.progress import SILENT
from joma.runs import open_run
from joma.studies import load
from joma.study import execute
from joma.units import run_study, tuple_of

STUDY = "cooccurrence"


def test_a_study_run_as_a_unit_stores_the_same_bits(tmp_path):
    study = load(STUDY)
    preset = study.presets["quick"]
    config = json.loads(json.dumps(dataclasses.asdict(preset.config)))
    output = run_study(tmp_path / "unit", SILENT, study=STUDY, preset="quick", config=config, seeds=preset.seeds)
    outcome = execute(study, out=tmp_path / "here")
    assert output.folders == (str(outcome.path.relative_to(tmp_path / "here")),)
    json.dumps(output.value)
    assert [claim["verdict"] for claim in output.value["claims"]] == [claim["verdict"] for claim in outcome.claims]
    first, second = open_run(output.value["path"]), open_run(outcome.path)
    xr.testing.assert_identical(first.drop_attrs(), second.drop_attrs())
    assert all(np.array_equal(first[name], second[name], equal_nan=first[name].dtype.kind == "f") for name in first)


def test_lists_become_tuples_at_every_depth():
    assert tuple_of({"a": [1]}) == {"a": [1]}  # a config has no mappings
    assert tuple_of([[1], ["b", [2.0]]]) == ((1,), ("b", (2.0,)))
