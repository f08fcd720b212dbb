"""The study of in-context autoregression: its verdicts on a small run, its config, and its sentence."""

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.related import icl_autoregression
from joma.studies.related.icl_autoregression import STUDY, Config, outcome, run
from joma.study import Context
from joma.theory.in_context_autoregression import best_loss

SMALL = Config(dim=2, lengths=(3, 4), length=4, steps=500, batch=64, rate=0.03, probe=3000, searches=2, search_dim=2)
TINY = replace(SMALL, steps=3, batch=2, records=3, probe=10, searches=1)
FIELDS = Fields(
    icl_autoregression,
    TINY,
    {
        "dim": 4, "lengths": (3,), "length": 5, "steps": 4, "batch": 3, "rate": 0.02, "scale": 0.2, "records": 2,
        "probe": 11, "search_dim": 4, "searches": 2,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_training_finds_one_step_of_gradient_descent(trajectory):
    records = {claim.name: claim.judge(trajectory, "quick") for claim in STUDY.claims}
    holding = {name for name, record in records.items() if record["verdict"] == "holds"}
    assert {"loss", "optimum", "plain", "rotations", "rotations-trained", "fixed-start", "non-commuting"} <= holding
    assert records["step"]["measured"]["max"] < 0.06
    assert records["diagonal"]["measured"]["max"] < 0.06


def test_only_what_is_proved_is_a_theorem():
    """That training arrives at the optimum is not proved: it is seen, and judged by bounds of ours."""
    assert {claim.name for claim in STUDY.claims if claim.kind == "theorem"} == {"optimum", "plain"}


def test_arms_are_named_and_have_their_formula(trajectory):
    names = ["unitary, 3", "unitary, 4", "fixed, 4", "plain, 4", "rotations, 4", "haar, 4"]
    assert trajectory.arm.values.tolist() == names
    np.testing.assert_allclose(trajectory.formula, best_loss(trajectory.length, 2))


def test_the_best_scalar_is_below_the_trained_loss_or_beside_it(trajectory):
    """The layer contains all multiples of the identity, and the probe is the same."""
    haar = trajectory.sel(arm="haar, 4")
    assert (haar.best_scalar_loss < 1).all()
    assert (haar.loss.isel(record=-1) > haar.best_scalar_loss - 0.003).all()


def test_the_outcome_states_the_formula_and_the_controls(trajectory):
    sentence = outcome(trajectory)
    assert "At T = 4 the formula is 0.2500" in sentence
    assert "without the one before 1.00" in sentence


def test_every_field_is_changed_below():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", FIELDS.changes)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 3}, {"search_dim": 5}, {"lengths": ()}, {"lengths": (1,)}, {"length": 2}, {"steps": 0}, {"records": 1},
        {"batch": 0}, {"probe": 0}, {"searches": 0}, {"rate": 0.0}, {"scale": 0.0},
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(TINY, **change), Context((0,)))


def test_statements_are_short_and_have_a_quantity():
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert claim.quantity, claim.name


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_layers_that_diverge_are_nan_and_hold_no_claim():
    diverged = run(replace(TINY, rate=1e30), Context((0, 1)))
    assert np.isnan(diverged.loss.isel(record=-1)).all()
    records = {claim.name: claim.judge(diverged, "quick") for claim in STUDY.claims}
    holding = {name for name, record in records.items() if record["verdict"] == "holds"}
    assert holding <= {"optimum", "rotations"}  # nothing is trained for these
