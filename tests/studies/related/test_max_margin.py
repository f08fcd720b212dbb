"""The study of attention as a support vector machine: its verdicts, its config, and its seeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.common_axes import NAMES
from joma.studies.related import max_margin
from joma.studies.related.max_margin import STUDY, Config, outcome, run
from joma.study import Context

SMALL = Config(sequences=2, tokens=3, dim=5, steps=800, descent_steps=400, late_length=200.0, late_factor_length=40.0)
TINY = replace(
    SMALL, length=20.0, late_length=30.0, steps=32, descent_steps=20, factor_length=3.0, late_factor_length=6.0
)
FIELDS = Fields(
    max_margin,
    TINY,
    {
        "sequences": 1, "tokens": 2, "dim": 6, "length": 21.0, "late_length": 31.0, "matrix_sequences": 2,
        "matrix_tokens": 3, "matrix_dim": 7, "factor_scale": 2e-3, "factor_length": 2.5, "late_factor_length": 7.0,
        "steps": 48, "descent_steps": 300, "descent_rate": 0.4,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1, 2)))


@pytest.fixture(scope="module")
def records(trajectory):
    return {claim.name: claim.judge(trajectory, "quick") for claim in STUDY.claims}


@pytest.mark.parametrize(
    "name", ["best", "direction", "lost", "local", "frobenius", "certificate", "trained", "first-order"]
)
def test_what_is_proved_holds_in_a_small_run(records, name):
    assert records[name]["verdict"] == "holds", records[name]["measured"]


def test_vectors_trained_by_normalised_steps_follow_the_path_of_the_flow(trajectory):
    assert float(trajectory.path_distance.isel(trained_length=-1).max()) < 5e-3
    assert float(trajectory.trained_gap.isel(trained_length=-1).max()) < 5e-3


def test_trained_matrices_have_the_margins_of_the_flows(trajectory):
    np.testing.assert_allclose(trajectory.trained_share, trajectory.margin_share, atol=0.05)


def test_the_common_axes_are_those_of_keys_and_queries(trajectory):
    for name in NAMES:
        assert trajectory[name].dims == ("seed", "axes_step")
        assert bool(np.isfinite(trajectory[name]).all())
    entropy = trajectory.axes_entropy
    assert float(entropy.isel(axes_step=0).min()) > 0.999
    assert float(entropy.isel(axes_step=-1).max()) < 0.01


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((2,)))
    for name in ("half_slope_error", "margin_share", "trained_share", "trained_gap", "axes_rank", "descent_norm"):
        np.testing.assert_allclose(alone[name].sel(seed=2), trajectory[name].sel(seed=2), rtol=0, atol=1e-9)


def test_the_outcome_states_the_slope_and_the_margins(trajectory):
    text = outcome(trajectory)
    worst = 100 * float(trajectory.half_slope_error.sel(scores="equal").max())
    assert f"within {worst:.1f} %" in text
    assert "nan" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"sequences": 0}, {"tokens": 1}, {"dim": 3}, {"length": 0.0}, {"late_length": 100.0}, {"matrix_sequences": 0},
        {"matrix_tokens": 1}, {"matrix_dim": 2}, {"factor_scale": 0.0}, {"factor_length": -1.0},
        {"late_factor_length": 20.0}, {"steps": 40}, {"descent_steps": 11}, {"descent_rate": 0.0},
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))


def test_every_field_is_changed():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", FIELDS.changes)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()


def test_every_claim_has_a_short_statement_and_its_quantity():
    assert {claim.kind for claim in STUDY.claims} == {"reading", "control", "check"}  # limits at a finite time
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert claim.quantity, claim.name
