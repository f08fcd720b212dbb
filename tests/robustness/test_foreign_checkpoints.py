"""Foreign checkpoints: the fast part, three of the studies that train."""

import dataclasses
from pathlib import Path

import pytest

from joma import studies
from joma.studies import load
from robustness.foreign_checkpoints import STUDIES, config_and_changes, try_study


@pytest.fixture(autouse=True)
def _no_shape_checks(monkeypatch):
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(("name", "finished"), [("invariance", False), ("winner", True), ("activation-control", False)])
def test_a_run_that_differs_in_anything_refuses_the_checkpoints(name, finished):
    foreign = try_study(name, finished=finished)
    assert foreign.failures == []
    _, changes = config_and_changes(name)
    assert foreign.counts["refused"] + foreign.counts["not started, as the value is refused"] >= len(changes) + 3
    assert foreign.counts["refused, as the run alone differs"] > 0


@pytest.mark.parametrize("name", STUDIES)
def test_every_field_of_every_study_that_trains_is_changed(name):
    config, changes = config_and_changes(name)
    assert set(changes) == {field.name for field in dataclasses.fields(config)}
    assert all(getattr(config, field) != value for field, value in changes.items())
    assert type(config) is type(load(name).presets["quick"].config)


def test_a_new_study_that_trains_must_be_tried_as_well():
    folder = Path(studies.__file__).parent
    modules = {file.stem for file in folder.rglob("*.py") if "context.fit(" in file.read_text(encoding="utf-8")}
    assert modules == {
        "invariance", "winner", "single_unit", "alignment", "scan_snap", "hierarchy_order", "language_training",
        "addition_training", "position_emergence",
    }  # fmt: skip
