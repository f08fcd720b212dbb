"""The trained ladder: groups train as single arms do, a training written out by hand, and measures on drawn curves."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.models import OneLayer
from joma.studies.theorems import ladder_optimum, ladder_training
from joma.studies.theorems.ladder import STUDY
from joma.studies.theorems.ladder_arms import ARMS, Arm
from joma.studies.theorems.ladder_task import Task, TrainedLadderConfig
from joma.studies.theorems.ladder_training import (
    CLAIMS,
    bounced,
    growth_ratio,
    judged_trajectory,
    long_enough,
    outcome,
    product_excess,
    settled_share,
    share_bounced,
    share_regained,
    step_of_fall,
    still_falling,
    train,
)
from joma.study import Context, NotInRun

SMALL = TrainedLadderConfig(
    trained_arms=("base", "product", "separable", "constant", "base-slow"), trained_rates=(1.0, 3.0), trained_steps=20,
    trained_classes=3, trained_distinct=4, trained_common=3, trained_length=6, trained_batch=5, trained_probe=7,
)  # fmt: skip
CONTEXT = Context((3, 8))


@pytest.fixture(scope="module")
def run():
    return train(SMALL, CONTEXT)


def test_the_run_has_every_arm_rate_and_seed(run):
    assert run.arm.values.tolist() == list(SMALL.trained_arms)
    assert run.trained_entropy.dims == ("seed", "arm", "rate", "trained_step")
    assert run.rate.values.tolist() == [1.0, 3.0]
    assert run.seed.values.tolist() == [3, 8]
    assert bool(run.trained_loss.notnull().all())
    assert int(run.trained_step[-1]) == 20


@pytest.mark.parametrize("name", SMALL.trained_arms)
def test_an_arm_trains_among_others_as_it_does_alone(run, name):
    alone = train(replace(SMALL, trained_arms=(name,), trained_rates=(3.0,)), CONTEXT)
    for variable in ("trained_entropy", "trained_loss"):
        np.testing.assert_allclose(run[variable].sel(arm=[name], rate=[3.0]), alone[variable], rtol=2e-4, atol=2e-6)


FROZEN = Arm("frozen", "question", {"positions": "all"}, speed=4.0, frozen_at=6)


@pytest.mark.parametrize(
    ("name", "arm"), [("base-slow", None), ("last-product", None), ("separable", None), ("frozen", FROZEN)]
)
def test_training_follows_the_update_rule_written_out(monkeypatch, name, arm):
    if arm is not None:
        monkeypatch.setitem(ladder_training.ARMS, name, arm)
    arm, factor = ARMS[name], 3.0
    config = replace(SMALL, trained_arms=(name,), trained_rates=(factor,), trained_steps=6)
    trained = train(config, CONTEXT)
    task = Task(config, CONTEXT, [arm])
    model = OneLayer(task.model_config, generators=CONTEXT.generators("ladder, weights"), dtype=torch.float32)
    of_attention = [p for name, p in model.named_parameters() if name in ("z", "W_Q", "W_K")]
    others = [p for name, p in model.named_parameters() if name not in ("z", "W_Q", "W_K")]
    rate = arm.rate * factor
    groups = [{"params": others, "lr": rate}, {"params": of_attention, "lr": rate * arm.speed}]
    solver = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[arm.optimiser](groups)
    for step in range(6):
        if arm.frozen_at is not None and step >= arm.frozen_at / factor:
            solver.param_groups[0]["lr"] = 0.0
        solver.zero_grad()
        task.losses(model, task.draw(step, 5)).sum().backward()
        solver.step()
    for variable, value in zip(("entropy", "loss", "spread"), task.measure(model, 6).values(), strict=True):
        end = trained[f"trained_{variable}"].isel(trained_step=-1).squeeze()
        np.testing.assert_allclose(end, value, rtol=1e-5)


def test_the_optimum_is_computed_if_sequences_are_given(monkeypatch, run):
    assert "trained_optimum_entropy" not in run
    marker = xr.Dataset({"trained_optimum_entropy": 0.5})
    monkeypatch.setattr(ladder_training, "optimum", lambda *_: marker)
    with_optimum = train(replace(SMALL, trained_arms=("base",), trained_steps=1, trained_optimum=4), CONTEXT)
    assert float(with_optimum.trained_optimum_entropy) == 0.5


STEPS = np.array([0, 1, 10, 50, 100, 200, 950, 1000])
LOSSES = {"fast": [1, 0.5, 0.05, 0.03, 0.02, 0.01, 0, 0], "slow": [1, 0.9, 0.8, 0.7, 0.6, 0.4, 0.05, 0]}
CURVES = {
    "returns": [1.0, 0.9, 0.8, 0.6, 0.5, 0.6, 0.7, 0.7],  # falls by 0.5 and regains 0.2
    "falls": [1.0, 0.9, 0.8, 0.6, 0.5, 0.4, 0.31, 0.3],
    "stays low": [1.0, 0.9, 0.8, 0.6, 0.3, 0.3, 0.31, 0.31],
    "hardly moves": [1.0, 1.0, 0.99, 0.99, 0.985, 0.985, 1.0, 1.0],
}


def drawn(arms: dict[str, tuple[str, str]], rates=(1.0,)) -> xr.Dataset:
    """Return a run of one seed whose arms have a curve of `CURVES` and a loss of `LOSSES`."""
    dims, coords = ("seed", "arm", "rate", "trained_step"), {"rate": list(rates), "trained_step": STEPS, "seed": [0]}
    entropy = np.array([[[CURVES[curve]] * len(rates) for curve, _ in arms.values()]])
    loss = np.array([[[LOSSES[kind]] * len(rates) for _, kind in arms.values()]])
    # The logits of arm k grow as k · step, from 5 k² at the start.
    number = np.arange(1.0, 1 + len(arms))[:, None, None]
    spread = np.broadcast_to(number * STEPS + 5 * number**2, entropy.shape)
    variables = {"trained_entropy": (dims, entropy), "trained_loss": (dims, loss), "trained_spread": (dims, spread)}
    return xr.Dataset(variables, {**coords, "arm": list(arms)})


@pytest.mark.parametrize(
    ("curve", "kind", "share", "bounces", "falling"),
    [
        ("returns", "fast", 0.4, True, False),
        ("returns", "slow", 0.4, True, False),
        ("falls", "fast", 0.0, False, True),
        ("stays low", "fast", 0.01 / 0.7, False, False),
        ("stays low", "slow", 0.01 / 0.7, False, True),
        ("hardly moves", "fast", 0.0, False, False),
    ],
)
def test_measures_of_drawn_curves(curve, kind, share, bounces, falling):
    trajectory = judged_trajectory(drawn({"base": (curve, kind)}), "base")
    assert float(share_regained(trajectory.trained_entropy)[0]) == pytest.approx(share)
    assert bool(bounced(trajectory)[0]) == bounces
    assert bool(still_falling(trajectory)[0]) == falling
    assert int(step_of_fall(trajectory)[0]) == {"fast": 10, "slow": 950}[kind]
    if falling:
        with pytest.raises(NotInRun, match="arm base that was trained until"):
            settled_share("base")(drawn({"base": (curve, kind)}))
    else:
        assert float(settled_share("base")(drawn({"base": (curve, kind)}))[0]) == pytest.approx(share)


def test_an_arm_whose_loss_never_falls_was_not_trained_long_enough():
    run = drawn({"all-free": ("falls", "fast"), "all-product": ("falls", "fast")})
    run = run.assign(trained_loss=xr.ones_like(run.trained_loss))
    trajectory = judged_trajectory(run, "all-free")
    assert np.isnan(step_of_fall(trajectory)).all()
    assert not long_enough(trajectory).any()
    with pytest.raises(NotInRun, match="arm all-free whose loss falls"):
        growth_ratio(run)


def test_an_arm_is_judged_at_the_rate_of_the_lowest_loss_at_which_no_seed_diverged():
    run = drawn({"base": ("returns", "fast"), "product": ("stays low", "fast")}, rates=(1.0, 3.0, 9.0))
    run.trained_loss.loc[{"arm": "base", "trained_step": 1000}] = [[0.3, 0.2, np.nan]]
    run.trained_entropy.loc[{"rate": 3.0, "trained_step": 1000}] += 0.05
    assert float(share_regained(judged_trajectory(run, "base").trained_entropy)[0]) == pytest.approx(0.5)
    assert float(product_excess(run)[0]) == pytest.approx(0.06 - 0.25)
    run.trained_loss.loc[{"arm": "base", "trained_step": 1000}] = np.nan
    with pytest.raises(NotInRun, match="arm base in which no seed diverged"):
        judged_trajectory(run, "base")
    with pytest.raises(NotInRun, match="arm top"):
        judged_trajectory(run, "top")
    assert outcome(run).startswith(
        "Of 2 models between this block and a language model, with one or two things changed, 0 turn dense"
    )


def test_arms_that_may_fall_without_bound_are_judged_once_they_fall_visibly():
    measure = {claim.name: claim.measure for claim in CLAIMS}["trained-separable"]
    assert float(measure(drawn({"separable": ("falls", "slow")}))[0]) == 0.0
    with pytest.raises(NotInRun, match="arm separable that was trained until its entropy fell visibly"):
        measure(drawn({"separable": ("hardly moves", "slow")}))
    with pytest.raises(NotInRun, match="arm product that was trained until its entropy stopped falling"):
        product_excess(drawn({"base": ("returns", "fast"), "product": ("falls", "fast")}))
    with pytest.raises(NotInRun, match="arm base that was trained until its entropy stopped falling"):
        product_excess(drawn({"base": ("falls", "fast"), "product": ("returns", "fast")}))


def test_the_share_of_arms_that_bounce_counts_all_that_were_trained_long_enough():
    arms = {name: ("returns", "fast") for name, arm in ARMS.items() if arm.rung == "one-out"}
    assert len(arms) == 6
    assert float(share_bounced("one-out")(drawn(arms))[0]) == 1.0
    arms |= {"top-free": ("falls", "fast"), "top-one": ("stays low", "fast")}
    assert float(share_bounced("one-out")(drawn(arms))[0]) == pytest.approx(4 / 6)
    brief = arms | {"top-linear": ("returns", "slow"), "top-one": ("stays low", "slow")}
    assert float(share_bounced("one-out")(drawn(brief))[0]) == pytest.approx(3 / 4)
    brief |= {"top-sgd": ("returns", "slow")}
    assert float(share_bounced("one-out")(drawn(brief))[0]) == pytest.approx(2 / 3)
    brief |= {"top-fixed": ("returns", "slow")}
    with pytest.raises(NotInRun, match="one-out arms of which half were trained long enough, but in some seed 2"):
        share_bounced("one-out")(drawn(brief))
    with pytest.raises(NotInRun, match="arm top-sgd"):
        share_bounced("one-out")(drawn(arms).drop_sel(arm="top-sgd"))
    one_in = {name for name, arm in ARMS.items() if arm.rung == "one-in"} - {"constant", "separable"}
    assert float(share_bounced("one-in")(drawn(dict.fromkeys(one_in, ("falls", "fast"))))[0]) == 0.0


def test_speeds_are_compared_from_the_same_logits_and_product_logits_start_larger():
    arms = ("all-free", "all-free-fast", "all-product", "all-product-slow")
    config = replace(SMALL, trained_arms=arms, trained_rates=(1.0,), trained_steps=1)
    start = train(config, CONTEXT).trained_spread.isel(trained_step=0, rate=0)
    for fast, slow in (("all-free", "all-free-fast"), ("all-product", "all-product-slow")):
        np.testing.assert_array_equal(start.sel(arm=fast), start.sel(arm=slow))
    # Standard deviations 0.01 of z, and 0.1² √width of products over a width of 7 tokens.
    ratio = start.sel(arm="all-product") / start.sel(arm="all-free")
    np.testing.assert_allclose(ratio, np.sqrt(7), rtol=0.4)


SPEED = {
    "all-free": ("falls", "fast"),
    "all-free-fast": ("returns", "fast"),
    "all-product": ("returns", "fast"),
    "all-product-slow": ("falls", "fast"),
    "all-frozen": ("falls", "fast"),
}


def test_the_claims_on_speed_compare_arms_and_the_optimum():
    run = drawn(SPEED).assign(trained_optimum_entropy=(("seed", "logits"), [[0.28, 0.55]]))
    run = run.assign_coords(logits=["free", "product"])
    measured = {claim.name: claim for claim in ladder_training.SPEED_CLAIMS}
    expected = {
        "speed-free": 0.4, "speed-product": 0.4, "product-speed": 3.0, "same-optimum": 0.27, "overshoot": 0.05,
        "no-overshoot": -0.02, "early-weights": -0.02,
    }  # fmt: skip
    for name, value in expected.items():
        assert float(measured[name].measure(run)[0]) == pytest.approx(value)
    assert "parameters themselves regain 0 % of their fall, and 40 %" in outcome(run)
    brief = drawn(SPEED | {"all-product": ("returns", "slow"), "all-frozen": ("falls", "slow")})
    for name, arm in {"speed-product": "all-product", "early-weights": "all-frozen"}.items():
        with pytest.raises(NotInRun, match=f"arm {arm} that was trained for ten times as long"):
            measured[name].measure(brief.merge(run[["trained_optimum_entropy"]]))
    steep = run.assign(trained_optimum_gradient=(("seed", "logits"), [[1e-5, 1e-3]]))
    for name in ("overshoot", "same-optimum"):
        with pytest.raises(NotInRun, match="optimum with product logits at which the gradient of every seed is below"):
            measured[name].measure(steep)
    for name in ("no-overshoot", "early-weights"):
        assert float(measured[name].measure(steep)[0]) == pytest.approx(-0.02)
        with pytest.raises(NotInRun, match="optimum with free logits"):
            measured[name].measure(steep.assign(trained_optimum_gradient=1e-2 * (steep.logits == "free")))
    without = run.drop_vars("trained_optimum_entropy")
    assert "this run has no optimum" in measured["overshoot"].judge(without, "paper")["reason"]


@pytest.mark.parametrize(
    ("curve", "target", "reason"),
    [("hardly moves", 0.9, "fell visibly"), ("falls", 0.9, "nearer to its optimum"), ("stays low", 0.0, None)],
)
def test_free_logits_that_do_not_approach_the_optimum_do_not_show_that_they_come_from_above(curve, target, reason):
    run = drawn({"all-free": (curve, "fast")}).assign(trained_optimum_entropy=(("seed", "logits"), [[target]]))
    run = run.assign_coords(logits=["free"])
    measure = {claim.name: claim.measure for claim in CLAIMS}["no-overshoot"]
    if reason is None:
        assert float(measure(run)[0]) == pytest.approx(-0.3)
        return
    with pytest.raises(NotInRun, match=reason):
        measure(run)


def test_the_preset_of_all_arms_decides_every_claim():
    config = STUDY.presets["paper"].config
    assert config.trained_optimum > 0
    arms = {**dict.fromkeys(config.trained_arms, ("returns", "fast")), "all-free": ("falls", "fast")}
    run = drawn(arms, config.trained_rates).assign(trained_optimum_entropy=(("seed", "logits"), [[0.28, 0.55]]))
    run = xr.concat([run.assign_coords(logits=["free", "product"], seed=[seed]) for seed in range(8)], dim="seed")
    reasons = {claim.name: claim.judge(run, "paper")["reason"] for claim in CLAIMS}
    assert {name: reason for name, reason in reasons.items() if reason and "undecided" not in reason} == {}


def test_every_claim_is_judged_on_a_run_and_says_what_it_lacks(run):
    verdicts = {claim.name: claim.judge(run, "quick") for claim in CLAIMS}
    assert len(verdicts) == len(CLAIMS)
    assert verdicts["top"]["reason"] == "this run has no arm top"
    assert verdicts["base"]["reason"] == "this run has no arm base that was trained until its entropy stopped falling"
    assert verdicts["speed-free"]["verdict"] == "not tested"
    kinds = {name: verdict["kind"] for name, verdict in verdicts.items()}
    assert {name for name, kind in kinds.items() if kind != "control"} == {"same-optimum"}
    assert kinds["same-optimum"] == "check"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"trained_arms": ("bottom",)}, "trained_arms"),
        ({"trained_arms": ("base", "base")}, "trained_arms"),
        ({"trained_arms": ()}, "trained_arms"),
        ({"trained_rates": ()}, "trained_rates"),
        ({"trained_rates": (0.0,)}, "trained_rates"),
        ({"trained_rates": (1.0, 1.0)}, "trained_rates"),
        ({"trained_steps": 0}, "trained_steps"),
        ({"trained_length": 2}, "trained_length"),
        ({"trained_classes": 0}, "trained_classes"),
    ],
)
def test_bad_configs_are_named(change, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        train(replace(SMALL, **change), CONTEXT)


CHANGES = {
    "trained_arms": ("base",), "trained_rates": (2.0,), "trained_steps": 19, "trained_classes": 4,
    "trained_distinct": 5, "trained_common": 4, "trained_scale": 1.0, "trained_length": 7, "trained_batch": 6,
    "trained_probe": 8, "trained_optimum": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(TrainedLadderConfig)])
def test_every_field_changes_the_run(monkeypatch, run, name):
    monkeypatch.setattr(ladder_optimum, "ITERATIONS", 2)
    assert not train(replace(SMALL, **{name: CHANGES[name]}), CONTEXT).identical(run)


def test_the_same_config_gives_the_same_run(run):
    xr.testing.assert_identical(train(SMALL, CONTEXT), run)
