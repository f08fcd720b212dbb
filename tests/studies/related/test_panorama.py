"""The study `panorama`: its config, and what it says of a small run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from config_fields import Fields
from joma.studies.related import panorama
from joma.studies.related.panorama import STUDY, Config, outcome, run
from joma.studies.related.panorama_measures import contested, curves
from joma.studies.related.panorama_sources import SOURCES
from joma.study import Context

SMALL = Config(
    records=10, block_steps=20, overlap_steps=20, scan_steps=20, text_steps=10, text_width=4, addition_width=8,
    addition_batch=4, addition_steps=10,
)  # fmt: skip
CHANGES = {
    "trained": ("block", "overlap"), "records": 12, "block_steps": 21, "overlap_steps": 21, "scan_steps": 21,
    "text_steps": 11, "text_width": 6, "text_rate": 1e-3, "addition_digits": 2, "addition_layers": 2,
    "addition_width": 12, "addition_batch": 5, "addition_steps": 11, "addition_rate": 1e-3,
    "runs": str(Path(__file__).parents[3] / "docs" / "runs"),
}  # fmt: skip
FIELDS = Fields(panorama, SMALL, CHANGES)


@pytest.fixture(scope="module")
def trajectory():
    return run(replace(SMALL, trained=("block", "overlap", "scan-snap")), Context((0, 1)))


def test_trained_and_stored_curves_stand_side_by_side(trajectory):
    assert {"block", "overlap", "scan-snap", "winner", "wikitext"} <= set(curves(trajectory))


def test_every_claim_is_judged_and_the_outcome_counts(trajectory):
    records = [claim.judge(trajectory, "quick") for claim in STUDY.claims]
    assert {record["kind"] for record in records} == {"control"}
    assert f"of {len(curves(trajectory))} models." in outcome(trajectory)
    contest = contested(trajectory)
    assert not any(SOURCES[name].from_ladder for name in contest)
    assert f"There are {len(contest)} models, outside the study that suggested it," in outcome(trajectory)


def test_the_figures_are_drawn_from_the_run_alone(trajectory):
    for drawing in STUDY.figures.values():
        assert drawing.draw(trajectory).axes


def test_the_packaged_curves_are_part_of_the_runs_identity():
    assert set(STUDY.inputs(SMALL)) == {"stored_axes_sha256"}
    assert set(STUDY.inputs(replace(SMALL, runs="docs"))) == {"stored_runs"}


def test_every_field_has_another_value():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {"runs"}))
def test_every_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_another_folder_of_runs_changes_the_run(tmp_path):
    shutil.copytree(Path(CHANGES["runs"]) / "winner", tmp_path / "winner")
    assert not FIELDS.run(runs=str(tmp_path)).identical(FIELDS.baseline)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()
