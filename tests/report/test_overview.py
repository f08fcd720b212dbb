"""What the report shows of all runs together: one run of each study, pictures and outcomes in a stated order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.report.overview import MAX_OUTCOMES, OUTCOMES, PICTURES, main_runs, overview, run_counts
from joma.runs import Description
from joma.studies import STUDIES, load
from joma.verdicts import KINDS

PRESETS = st.sampled_from(["quick", "paper", "wikitext-103"])


def claim(kind="theorem", verdict="holds"):
    measured = {"mean": 1.0, "sd": 0.0, "min": 1.0, "max": 1.0, "values": [1.0], "interval": None}
    record = {"name": "c", "statement": "So.", "quantity": "", "expected": "≥ 1", "low": 1.0, "high": None}
    return {**record, "kind": kind, "across": "every", "measured": measured, "verdict": verdict, "reason": ""}


def section(study, *, preset="quick", seeds=1, label="", outcome="It is so.", anchor=None, claims=()):
    about = Description(highlight=label, outcome=outcome)
    fields = {
        "study": study,
        "preset": preset,
        "seeds": seeds,
        "anchor": study if anchor is None else anchor,
        "about": about,
    }
    return {**fields, "highlight": {"image": label} if label else None, "claims": list(claims)}


@given(st.lists(st.tuples(st.sampled_from("abc"), PRESETS, st.integers(1, 3))))
def test_no_other_run_of_a_study_is_larger_than_the_main_one(runs):
    sections = [
        section(study, preset=preset, seeds=seeds, anchor=index) for index, (study, preset, seeds) in enumerate(runs)
    ]
    chosen = {run["study"]: run for run in main_runs(sections)}
    assert [run["study"] for run in main_runs(sections)] == list(dict.fromkeys(study for study, _, _ in runs))
    order = ["quick", "wikitext-103", "paper"]
    for run in sections:
        best = chosen[run["study"]]
        keys = [
            (order.index(candidate["preset"]), candidate["seeds"], candidate["anchor"]) for candidate in (run, best)
        ]
        assert keys[0] <= keys[1]


@given(st.permutations(PICTURES))
def test_pictures_and_outcomes_are_in_their_order(labels):
    shown = overview([section(f"of {label}", label=label) for label in labels])
    assert [run["about"].highlight for run in shown["highlights"]] == [*PICTURES]
    assert [run["about"].highlight for run in shown["outcomes"]] == [*OUTCOMES[:MAX_OUTCOMES]]


def test_every_picture_may_tell_its_outcome():
    assert {*PICTURES} == {*OUTCOMES}


def test_the_pictures_are_those_that_the_studies_have():
    studies = [load(name) for name in STUDIES]
    assert sorted(study.highlight.label for study in studies if study.highlight) == sorted(PICTURES)
    assert all(study.outcome for study in studies if study.highlight)


def test_outcomes_of_other_studies_fill_what_is_free():
    sections = [section("ladder"), section("silent", outcome=""), section("winner", label="Figure 3"), section("last")]
    sections += [section("mute", label="Figure 2", outcome="")]
    assert [run["study"] for run in overview(sections)["outcomes"]] == ["winner", "ladder", "last"]
    many = [section(str(index)) for index in range(9)]
    assert len(overview(many)["outcomes"]) == MAX_OUTCOMES


def test_checks_stand_apart_and_other_runs_are_named():
    claims = [claim(kind, "does not hold") for kind in KINDS]
    sections = [
        section("a", preset="paper", anchor="large", claims=claims),
        section("a", anchor="small", claims=claims),
    ]
    shown = overview(sections)
    assert [group["kind"] for group in shown["groups"]] == [kind for kind in KINDS if kind != "check"]
    assert [len(group["rows"]) for group in shown["groups"]] == [1, 1, 1, 1]
    assert shown["checks"]["counts"] == "1 does not hold"
    assert shown["verdicts"] == {"holds": 0, "does not hold": 4, "not tested": 0}
    assert [run["anchor"] for run in shown["other_runs"]] == ["small"]
    assert {row["link"] for group in shown["groups"] for row in group["rows"]} == {"large"}


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ([], "no claims"),
        ([claim("check")], "check: 1 holds"),
        (
            [claim("check"), claim("control", "does not hold"), claim("theorem")],
            "theorem: 1 holds; control: 1 does not hold; check: 1 holds",
        ),
    ],
)
def test_the_counts_of_a_run_are_by_kind(claims, text):
    assert run_counts(claims) == text
