"""What brings attention back: the arms of a small run, how claims are judged, and what came out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.text.bounce_cause import (
    CLAIMS,
    KEEPS_MOST_OF,
    LATE_CLAIMS,
    LATE_LESS,
    LATE_MOST,
    LESS,
    NO_RETURN,
    PAPER_ARMS,
    QUICK_ARMS,
    RETURNS,
    STUDY,
    Config,
    outcome,
    run,
)
from joma.studies.text.bounce_cause_arms import ARMS, UNCHANGED, select_arms
from joma.studies.text.bounce_cause_measures import TRAIN
from joma.studies.text.entropy_bounce import bounces
from joma.study import Context
from studies.text.test_bounce_cause_measures import made_up, with_best

SMALL = Config(
    tokeniser="bytes",
    width=8,
    hidden=8,
    length=8,
    batch=4,
    steps=12,
    every=2,
    rate=2e-2,
    dropout=0.1,
    dropout_at="embedding",
    glance=40,
    memorised=2,
    attention_rate=1e-2,
    attention_steps=4,
    arms=("linear", "value-path-later", "depth-2", "memorised", "mlp"),
)
CONTEXT = Context((0, 1))


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, CONTEXT)


def judged(trajectory, preset="quick"):
    return {claim.name: claim.judge(trajectory, preset) for claim in CLAIMS}


def verdict(trajectory, name):
    return judged(trajectory)[name]["verdict"]


def without_noise(**recoveries):
    """A run whose recoveries are exact, and of which noise alone would recover 0.05 nats."""
    run = made_up(noise=0.0, **recoveries)
    return run.assign({name: xr.full_like(run[name], 0.05) for name in ("chance", f"{TRAIN}chance")})


def test_the_arms_of_a_run_stand_in_the_order_of_the_config(trajectory):
    assert trajectory.arm.values.tolist() == [UNCHANGED, *SMALL.arms]
    assert dict(trajectory.sizes) == {
        "seed": 2, "arm": 6, "step": trajectory.sizes["step"], "layer": 2, "head": 1, "position": 8, "start": 2,
        "attention_step": 5,
    }  # fmt: skip
    assert bool(trajectory.entropy.isel(layer=1).sel(arm="mlp").isnull().all())
    assert bool(trajectory.entropy.isel(layer=1).sel(arm="depth-2").notnull().all())
    for name, text in (("entropy", ""), ("train_entropy", TRAIN)):
        measures = bounces(trajectory[name])
        for measure in measures:
            xr.testing.assert_equal(
                measures[measure].drop_vars("head", errors="ignore"), trajectory[f"{text}{measure}"]
            )


def test_an_arm_that_is_frozen_later_is_the_unchanged_model_until_its_minimum(trajectory):
    for seed in CONTEXT.seeds:
        turn = int(trajectory.turn.sel(arm=UNCHANGED, seed=seed))
        for name in ("valid_loss", "train_loss", "position_entropy"):
            curve = trajectory[name].sel(seed=seed)
            before, after = curve.sel(step=slice(0, turn)), curve.sel(step=slice(turn + 1, None))
            np.testing.assert_allclose(
                before.sel(arm="value-path-later"), before.sel(arm=UNCHANGED), rtol=1e-4, atol=1e-6
            )
            if after.sizes["step"]:
                assert bool((after.sel(arm="value-path-later") != after.sel(arm=UNCHANGED)).any())


def test_attention_alone_begins_at_the_end_of_the_unchanged_model(trajectory):
    end = trajectory.entropy.sel(arm=UNCHANGED).isel(step=-1).mean(("layer", "head"))
    np.testing.assert_allclose(trajectory.best_entropy.sel(start="end").isel(attention_step=0), end, rtol=1e-5)
    without = run(replace(SMALL, attention_steps=0, arms=("mlp",)), CONTEXT)
    assert "best_entropy" not in without
    assert "floor" not in without
    reasons = {name: record["reason"] for name, record in judged(without).items()}
    assert reasons["best-end"] == reasons["one-optimum"] == "this run has no training of attention alone"


@pytest.mark.parametrize("changes", [{"arms": ("free",)}, {"arms": ("mpl",)}, {"arms": ("dropout-embedding",)}])
def test_arms_that_make_no_sense_are_refused_by_name(changes):
    with pytest.raises(InputError, match="`arms`"):
        run(replace(SMALL, **changes), CONTEXT)


def test_the_presets_train_arms_that_differ():
    for name, arms in (("quick", QUICK_ARMS), ("paper", PAPER_ARMS)):
        config = STUDY.presets[name].config
        assert config.arms == arms
        assert len(select_arms(arms, dropout=config.dropout_at, restart=config.restart)) == 1 + len(arms)


def test_arms_of_one_model_start_as_the_unchanged_model_does():
    arms = [arm for arm in ARMS if arm not in (UNCHANGED, "dropout-embedding", "linear-dropout-embedding")]
    tiny = replace(SMALL, width=4, hidden=4, steps=2, every=2, attention_steps=0, arms=tuple(arms))
    trajectory = run(tiny, Context((0,)))
    assert trajectory.arm.values.tolist() == [UNCHANGED, *arms]
    start, end = (trajectory.valid_loss.isel(step=step, seed=0) for step in (0, -1))
    for name, arm in ARMS.items():
        if name in trajectory.arm:
            same_model = (arm.layers, arm.activation, arm.norm, arm.positions) == (1, "relu", "post", "sinusoidal")
            assert bool(abs(start.sel(arm=name) - start.sel(arm=UNCHANGED)) < 1e-6) == same_model, name
    assert bool((abs(end - start) > 1e-4).all())


def test_every_claim_about_an_arm_is_decided_by_a_preset():
    named = {*RETURNS, *NO_RETURN, *KEEPS_MOST_OF, *KEEPS_MOST_OF.values(), *LESS, *LATE_MOST, *LATE_LESS}
    assert named <= {*ARMS}
    assert named - {UNCHANGED} <= {*PAPER_ARMS, *QUICK_ARMS}


@pytest.mark.parametrize(
    ("recoveries", "expected"),
    [
        ((0.7, 0.71), {"nonlinear-only": "does not hold", "nonlinear-more": "holds", "most-linear": "holds"}),
        ((0.9, 0.91), {"nonlinear-only": "does not hold", "nonlinear-more": "does not hold", "most-linear": "holds"}),
        ((-0.3, -0.3), {"nonlinear-only": "holds", "nonlinear-more": "holds", "most-linear": "does not hold"}),
        ((0.1, 0.7), {"nonlinear-more": "not tested", "most-linear": "not tested"}),
    ],
)
def test_the_reading_is_judged_by_the_linear_arm(recoveries, expected):
    run = without_noise(free=(0.8, 0.81), linear=recoveries)
    assert {name: verdict(run, name) for name in expected} == expected
    assert verdict(run, "bounce") == "holds"


@pytest.mark.parametrize(
    ("recoveries", "expected"),
    [
        ((0.0, 0.0), ("holds", "holds")),
        ((-0.3, -0.3), ("not tested", "not tested")),  # still falling
        ((0.3, 0.31), ("does not hold", "holds")),
        ((0.8, 0.81), ("does not hold", "does not hold")),
    ],
)
def test_the_value_path_is_judged_by_noise_and_by_half_of_the_recovery(recoveries, expected):
    run = without_noise(free=(0.8, 0.81), value_path=recoveries)
    assert (verdict(run, "stays-value-path"), verdict(run, "less-value-path")) == expected


def test_the_late_recovery_of_arms_is_judged_beside_the_whole_one():
    run = without_noise(free=(0.8, 0.81), linear=(0.7, 0.71), mlp=(0.7, 0.71), value_path=(0.0, 0.0))
    records = judged(run)
    late = {claim.name: records[claim.name]["verdict"] for claim in LATE_CLAIMS}
    assert late == {
        "late-most-linear": "holds", "late-most-mlp": "holds", "late-less-value-path": "holds",
        "late-less-no-positions": "not tested", "late-less-dropout-none": "not tested", "late-memorised": "not tested",
    }  # fmt: skip
    assert records["late-less-no-positions"]["reason"] == "this run has no arm no-positions"


@pytest.mark.parametrize(
    ("recovery", "expected"), [(0.0, "holds"), (0.03, "holds"), (0.2, "does not hold"), (0.8, "does not hold")]
)
def test_a_flat_noisy_tail_is_no_return_and_a_bounce_is_a_return(recovery, expected):
    """Entropy starts at 2 nats, so that a bounce has 0.1 beyond chance, and ends with noise of 0.02."""
    run = made_up(noise=0.02, free=(0.8,) * 8, linear=(recovery,) * 8, value_path=(recovery,) * 8)
    for name in ("nonlinear-only", "stays-value-path"):
        assert verdict(run, name) == expected, name


def test_a_memorised_text_is_judged_on_the_training_text():
    run = without_noise(free=(0.8, 0.81), memorised=(-0.3, -0.3))
    losses = xr.DataArray([[[2.0, 0.02]] * 2] * 2, dims=("arm", "seed", "end"), coords={"arm": run.arm})
    run = run.assign(train_loss=losses.rename(end="step").isel(step=[0] * 39 + [1]), floor=0.01)
    assert (verdict(run, "memorises"), verdict(run, "memorised")) == ("holds", "holds")
    returned = run.assign(train_recovery=run.train_recovery + 1.0)
    assert verdict(returned, "memorised") == "does not hold"
    missed = judged(run.assign(floor=-0.1))
    assert missed["memorises"]["verdict"] == "does not hold"
    assert missed["memorised"]["reason"] == "this run has no model that memorised its text in every seed"


@pytest.mark.parametrize(("best", "expected"), [(1.75, "holds"), (0.5, "does not hold")])
def test_the_best_attention_is_judged_by_where_entropy_ends(best, expected):
    run = with_best(without_noise(free=(0.8, 0.81)), np.array([best, best]), np.array([best, best]) + 0.01)
    assert verdict(run, "best-end") == verdict(run, "best-fresh") == expected
    assert verdict(run, "one-optimum") == "holds"
    apart = with_best(run, np.array([best, best]), np.array([best, best]) + 1.5)
    assert verdict(apart, "one-optimum") == "does not hold"
    assert verdict(apart, "best-end") == verdict(apart, "best-fresh") == "not tested"


def test_arms_that_were_left_out_are_not_judged():
    records = judged(without_noise(free=(0.8, 0.81)))
    missing = {name for name, record in records.items() if record["reason"].startswith("this run has no")}
    assert missing == set(records) - {"bounce"}
    assert records["most-mlp"]["reason"] == "this run has no arm mlp"


def test_the_outcome_gives_late_recoveries_of_what_has_settled():
    run = made_up(
        noise=0.0, free=(0.8, 0.9), linear=(0.6, 0.6), value_path=(0.0, 0.0), no_positions=(-0.3, -0.3),
        memorised=(0.01, 0.02),
    )  # fmt: skip
    assert outcome(run) == (
        "From its minimum after the first few hundred steps entropy recovers by 0.85 (0.80 to 0.90) nats with nothing "
        "changed, 0.60 (0.60 to 0.60) with a linear MLP and 0.000 (0.000 to 0.000) with W_V and W_O frozen at their "
        "start. In a model that memorises a small text it recovers by 0.015 (0.010 to 0.020) on that text. Means over "
        "seeds, their range in brackets."
    )
    free = run.sel(arm=[UNCHANGED])
    assert outcome(free) == (
        "From its minimum after the first few hundred steps entropy recovers by 0.85 (0.80 to 0.90) nats with nothing "
        "changed. Means over seeds, their range in brackets."
    )
    uneven = free.assign_coords(step=free.step**2)
    assert outcome(uneven).startswith("After its minimum entropy recovers by 0.85 (0.80 to 0.90) nats")
