"""Foreign checkpoints: the fast part, three of the studies that train."""

import dataclasses
import json
from pathlib import Path

import pytest

from joma import studies
from joma.files import DamagedFile
from joma.manifest import write_manifest
from joma.progress import Task
from joma.studies import load, pretrained
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
    modules = {file.stem for file in folder.rglob("*.py") if "context.fit" in file.read_text(encoding="utf-8")}
    assert modules == {
        "invariance_training", "winner", "single_unit", "real_units", "alignment", "scan_snap", "hierarchy_order",
        "language_training", "addition_training", "position_emergence", "value_training", "value_ladder",
        "value_heads", "ladder_training", "ladder_flows", "bounce_cause_training", "polarise",
        "icl_regression_training", "max_margin_training", "entropy_floor_training", "even_pairs_training",
        "markov_unigram_training", "icl_autoregression", "induction_training", "induction_full", "panorama_training",
        "watched_block",  # of a page of the lab, which stores nothing
    }  # fmt: skip


PRETRAINED_CHANGES = {
    "models": ("a",), "revisions": ("step1",), "corpus": "another", "layers": 2, "heads": 2, "width": 32, "length": 32,
    "batch": 4, "steps": 200, "every": 40, "rate": 1e-3,
}  # fmt: skip


def test_a_series_that_was_trained_for_another_run_is_refused(tmp_path):
    """`pretrained` trains with the Trainer, not by `Context.fit`, and keeps its series in the run's folder."""
    config, run = pretrained.Config(), {"study": "pretrained, version 2", "run": "abc"}
    assert set(PRETRAINED_CHANGES) == {field.name for field in dataclasses.fields(config)}
    (tmp_path / "step0.txt").write_text("weights")
    identity = {"training": dataclasses.asdict(config), "seed": 0, "run": run}
    write_manifest(tmp_path, json.loads(json.dumps(identity)), ["step0.txt"])
    pretrained.train(config, 0, tmp_path, Task(), run=run)
    others = [(dataclasses.replace(config, **{name: value}), 0, run) for name, value in PRETRAINED_CHANGES.items()]
    others += [
        (config, 1, run),
        (config, 0, {**run, "run": "abd"}),
        (config, 0, {**run, "study": "pretrained, version 3"}),
    ]
    for changed, seed, other in others:
        with pytest.raises(DamagedFile, match=f"{tmp_path} holds checkpoints of another training"):
            pretrained.train(changed, seed, tmp_path, Task(), run=other)
