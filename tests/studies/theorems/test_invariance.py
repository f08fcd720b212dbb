"""The study of Theorem 1: its arms, its verdicts, and what came out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy.stats import t as student

from joma.arguments import InputError
from joma.studies.theorems.invariance import CHANCE, STUDY, Config, early, outcome, own_gain, run
from joma.study import Context

SMALL = Config(classes=4, distinct=3, common=2, dim=8, steps=40)


@pytest.fixture(scope="module")
def small():
    return run(SMALL, Context((0, 1)))


def test_a_seed_is_the_same_alone_and_among_others(small):
    alone = run(SMALL, Context((1,))).sel(seed=1)
    for name in ("correlation", "loss", "law", "predicted", "broken"):
        np.testing.assert_allclose(alone[name], small[name].sel(seed=1).transpose(*alone[name].dims), atol=1e-9)


def test_every_setting_is_in_the_trajectory_and_judged(small):
    assert small.error.dims[:2] == ("seed", "step")
    assert small.sizes["attention"] * small.sizes["activation"] * small.sizes["kind"] == 18
    assert not any(
        small[name].isnull().any() for name in ("error", "size", "loss", "law", "predicted", "broken", "small", "zero")
    )
    verdicts = {claim.name: claim.judge(small, "quick")["verdict"] for claim in STUDY.claims}
    for name in ("ledger", "sum", "finite-steps", "unequal-rates", "zero-start"):
        assert verdicts[name] == "holds"
    for name in ("residual", "residual-small-rate"):
        assert verdicts[name] == "does not hold"
    baseline = small.error.sel(attention="exp", activation="gelu", correction="step")
    np.testing.assert_array_equal(small.broken.sel(breaker="none"), baseline)


def test_sizes_of_the_ledgers_terms_are_relative_to_the_movement(small):
    selected = small.sel(attention="softmax", activation="gelu", kind="random", seed=1)
    corrections = selected.predicted.transpose("correction", "token").values
    moved = np.linalg.norm(selected.law - selected.predicted.sel(correction="none")) / float(
        selected.error.isel(step=-1).sel(correction="none")
    )
    sizes = np.linalg.norm(np.diff(corrections, axis=0), axis=-1) / moved
    np.testing.assert_allclose(selected["size"].isel(step=-1), sizes, rtol=1e-5)  # stored as float32


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate_z": -0.1}, "rate_z"),
        ({"rate": float("nan")}, "rate"),
        ({"temperature": 0.0}, "temperature"),
        ({"dim": 5}, "dim"),
        ({"dim": 6}, "dim"),
        ({"overlap": 1.5}, "overlap"),
        ({"decay": -1.0}, "weight_decay"),
        ({"classes": 9}, "hidden"),
        ({"small_rate": 0.0}, "small_rate"),
        ({"ratio": -1.0}, "ratio"),
    ],
)
def test_bad_configs_are_named_before_any_training(changes, name, monkeypatch):
    monkeypatch.setattr(Context, "fit", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **changes), Context((0,)))


@pytest.mark.parametrize(("changes", "name"), [({"steps": 0}, "steps"), ({"long_steps": -1}, "long_steps")])
def test_bad_numbers_of_steps_are_named(changes, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **changes), Context((0,)))


def test_a_claim_about_a_training_that_was_left_out_is_not_tested(small):
    claim = next(claim for claim in STUDY.claims if claim.name == "exp-long")
    assert claim.judge(small, "paper")["reason"].startswith("this run has no training at the small rate")
    long = small.small.sel(unit="linear", drop=True).rename(step="long_step")
    measured = claim.judge(small.assign(long_error=long), "paper")["measured"]["values"]
    np.testing.assert_allclose(measured, long.isel(long_step=-1).max("kind"))


def test_chance_is_the_correlation_of_twenty_independent_pairs():
    quantile = student.ppf(0.975, 18)
    assert pytest.approx(quantile / np.sqrt(18 + quantile**2), abs=5e-4) == CHANCE


def test_a_prediction_is_compared_with_the_logits_of_other_seeds():
    """Three seeds whose logits are orthogonal: a prediction correlates with its own seed by 1, with the others by 0."""
    axes = {"attention": ["softmax"], "activation": ["linear"], "kind": ["gaussian"]}
    logits = np.linalg.qr(np.vander(np.linspace(-1, 1, 8), 4, increasing=True))[0].T[1:]  # their means are 0
    shape = (3, 1, 1, 1, 8)
    dims = ("seed", *axes, "token")
    run = xr.Dataset(
        {
            "law": (dims, logits.reshape(shape)),
            "predicted": ((*dims, "correction"), logits.reshape(*shape, 1)),
        },
        {**axes, "seed": [0, 1, 2], "correction": ["none"]},
    )
    np.testing.assert_allclose(own_gain(run, "gaussian"), 1.0)
    swapped = run.assign(predicted=run.predicted.roll(seed=1))
    np.testing.assert_allclose(own_gain(swapped, "gaussian"), -0.5, atol=1e-12)
    same = run.assign(predicted=run.predicted.isel(seed=[0, 0, 0]).assign_coords(seed=[0, 1, 2]))
    np.testing.assert_allclose(own_gain(same, "gaussian"), [1.0, -0.5, -0.5], atol=1e-12)


def test_one_seed_alone_cannot_be_compared_with_others(small):
    claim = next(claim for claim in STUDY.claims if claim.name == "own-seed")
    assert claim.judge(small.isel(seed=[0]), "quick")["verdict"] == "not tested"


def test_early_is_a_fifth_of_training(small):
    np.testing.assert_array_equal(early(small, "loss"), small.loss.sel(step=8))


def test_the_outcome_states_the_errors_of_figure_2(small):
    figure_2 = small.sel(attention="softmax", activation="linear", kind="gaussian")
    late = figure_2.error.sel(correction="none").isel(step=-1)
    assert f"{float(late.min()):.2g} to {float(late.max()):.2g} times at the end" in outcome(small)


def test_the_outcome_says_that_a_residual_connection_breaks_the_law(small):
    """Of both kinds of tokens the one on which the law is less wrong counts, seed by seed."""
    broken = small.broken.sel(breaker="skip").isel(step=-1).min("kind")
    slow = small.residual_small.isel(step=-1).min("kind")
    errors = [f"{float(error.min()):.2g} to {float(error.max()):.2g} times" for error in (broken, slow)]
    assert f"the law is off by {errors[0]}, and at the smaller learning rate by {errors[1]}." in outcome(small)


def test_every_claim_has_its_kind_and_a_short_statement():
    assert {claim.kind for claim in STUDY.claims} == {"theorem", "figure", "reading", "control", "check"}
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert claim.quantity, claim.name
