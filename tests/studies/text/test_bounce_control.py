"""Attention frozen from its minimum on: what is frozen and when, the measures, and what is drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.drawing import COLOURS
from joma.studies.text import bounce_control
from joma.studies.text.bounce_control import (
    ARMS,
    CLAIMS,
    STUDY,
    Config,
    draw_arms,
    draw_gaps,
    freeze_schedules,
    loss_gap,
    minimum_steps,
    outcome,
    recovery,
    recovery_left,
    run,
)
from joma.studies.text.language_training import Freezing, FurtherMeasures, Variant, read_text, train
from joma.study import Context, NotInRun, mean_interval

SMALL = Config(
    tokeniser="bytes",
    width=8,
    hidden=8,
    length=8,
    batch=4,
    steps=12,
    every=3,
    rate=2e-2,
    dropout=0.1,
    depths=(1, 2),
    glance=40,
)
CONTEXT = Context((0, 1))
UNTESTED = "not tested"
AT_FIVE_LAYERS = {f"{name}-5" for name in ("bounce", "loss", "steady", "clamped", "prevented", "clamp")}


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, CONTEXT)


@pytest.fixture(scope="module")
def frozen_early(trajectory):
    """Return the run with minima before the last step: with one layer nothing would be frozen otherwise."""
    return trajectory.assign({name: np.minimum(trajectory[name], 9) for name in ("hold", "turn")})


def verdicts(trajectory, preset="quick"):
    return {claim.name: claim.judge(trajectory, preset)["verdict"] for claim in CLAIMS}


def absent_claims(trajectory, preset="quick"):
    """The claims about something that the run has not."""
    judged = [claim.judge(trajectory, preset) for claim in CLAIMS]
    return {record["name"] for record in judged if record["reason"].startswith("this run has no")}


def attention_weights(model):
    """The weights that can be frozen, W_Q and W_K, and those that are never, W_V, each [seed, layer, number]."""
    attentions = [layer.attention for layer in model.layers]
    query_key = [torch.cat([part.query.weight.flatten(1), part.key.weight.flatten(1)], dim=1) for part in attentions]
    value = [part.value.weight.flatten(1) for part in attentions]
    return {"query_key": torch.stack(query_key, dim=1), "value": torch.stack(value, dim=1)}


def train_frozen(freeze_steps):
    dims = {"query_key": ("layer", "number"), "value": ("layer", "value_number")}
    return train(
        SMALL,
        CONTEXT,
        read_text(SMALL, CONTEXT),
        Variant(2),
        rate=SMALL.rate,
        label="test",
        freezing=Freezing(freeze_schedules(freeze_steps, "cpu")),
        further=FurtherMeasures(attention_weights, dims),
    )


def test_weights_train_as_in_the_free_run_and_stay_from_their_step_on():
    freeze_steps = np.array([[3, 6], [9, 12]])
    free, frozen = train_frozen(np.full((2, 2), 12)), train_frozen(freeze_steps)
    for seed in range(2):
        until = freeze_steps[seed].min()
        for name in ("loss", "valid_loss", "entropy", "value", "query_key"):
            before = [run[name].isel(seed=seed).sel(step=slice(0, until)).values for run in (free, frozen)]
            np.testing.assert_array_equal(*before)
        for layer in range(2):
            weights, step = frozen.query_key.isel(seed=seed, layer=layer), int(freeze_steps[seed, layer])
            after = weights.sel(step=slice(step, None))
            np.testing.assert_array_equal(after, after.isel(step=[0] * after.sizes["step"]))
            assert bool((weights.sel(step=slice(0, step)).diff("step") != 0).any("number").all())
    assert bool((frozen.value.diff("step") != 0).any("value_number").all())  # the rest trains on
    assert bool((free.query_key.diff("step") != 0).any("number").all())


def test_the_held_arm_equals_the_free_one_until_the_minimum(trajectory):
    assert trajectory.arm.values.tolist() == ["free", "held", "steady", "frozen", "clamped"]
    assert trajectory.depth.values.tolist() == [1, 2]
    free = trajectory.sel(arm="free")
    for depth in (1, 2):
        entropy = free.sel(depth=depth).isel(layer=slice(depth)).entropy.mean("head")
        hold = trajectory.hold.sel(depth=depth).isel(layer=slice(depth)).astype(int)
        minima = entropy.min("step").transpose("seed", "layer")
        np.testing.assert_array_equal(entropy.sel(step=hold).transpose("seed", "layer"), minima)
        for seed in CONTEXT.seeds:
            until = int(trajectory.hold.sel(depth=depth, seed=seed).min())
            loss = trajectory.valid_loss.sel(depth=depth, seed=seed).sel(step=slice(0, until))
            np.testing.assert_array_equal(loss.sel(arm="free"), loss.sel(arm="held"))
    assert bool(trajectory.entropy.sel(depth=1).isel(layer=1).isnull().all())
    start = trajectory.valid_loss.isel(step=0)
    np.testing.assert_array_equal(start.sel(arm="frozen"), start.sel(arm="free"))
    assert bool((trajectory.valid_loss.isel(step=-1).sel(arm="frozen") != free.valid_loss.isel(step=-1)).all())


def test_the_minimum_is_the_earliest_least_value_of_each_layer():
    curves = np.array([[[3.0, 3.0], [1.0, 2.0], [1.0, 1.0]], [[np.nan] * 2, [4.0, 5.0], [6.0, 4.5]]])
    entropy = xr.DataArray(curves[..., None], dims=("seed", "step", "layer", "head"), coords={"step": [0, 10, 25]})
    assert minimum_steps(entropy).tolist() == [[10, 25], [10, 25]]


def with_gaps(trajectory, gaps):
    """The run with these gaps [seed] between the losses of the arm `held` and of the free run."""
    shifted = trajectory.copy(deep=True)
    shifted.valid_loss.loc[{"arm": "held"}] = shifted.valid_loss.sel(arm="free") + xr.DataArray(gaps, dims="seed")
    return shifted


def test_the_loss_gap_is_the_difference_of_paired_runs(frozen_early):
    np.testing.assert_allclose(loss_gap(with_gaps(frozen_early, [0.1, 0.3]), 2), [0.1, 0.3], rtol=1e-9)
    with pytest.raises(NotInRun):
        loss_gap(frozen_early, 5)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([0.1, 0.3], (UNTESTED, UNTESTED)),  # two seeds, far apart
        ([0.1, 0.11], ("does not hold", "holds")),
        ([-0.1, -0.11], ("holds", "does not hold")),
    ],
)
def test_the_sign_of_the_gap_is_judged_by_its_interval(frozen_early, gaps, expected):
    trajectory = with_gaps(frozen_early, gaps)
    judged = verdicts(trajectory)
    assert (judged["loss-1"], judged["loss-2"]) == expected
    assert judged["loss-5"] == UNTESTED
    one_seed = verdicts(trajectory.isel(seed=[0]))
    assert one_seed["loss-1"] == one_seed["loss-2"] == UNTESTED  # one seed has no bound
    assert one_seed["bounce-1"] != UNTESTED


def test_each_arm_is_frozen_at_its_own_minima(monkeypatch):
    """Entropies are made up: two layers have minima at steps 6 and 3, and their mean at 6; or at 9 and 6, and at 9."""
    curves = np.array([[[4.0, 4], [3, 1], [1, 2], [2, 2], [2, 2]], [[4.0, 4], [3, 3], [3, 1], [1, 2], [2, 2]]])
    frozen_at = {}

    def train_arms(_config, _context, _text, freezings):
        return {key: train_arm(*key, freezing) for key, freezing in freezings.items()}

    def train_arm(arm, depth, freezing):
        factors = [[schedule(torch.tensor(step)) for step in range(13)] for schedule in freezing.schedules.values()]
        frozen = torch.stack([torch.stack(layer).sum(0) for layer in factors], dim=-1)  # the steps with factor 1
        others = (freezing.attention_steps, freezing.entropy_steps)
        frozen_at[arm] = (frozen.int().tolist(), *(None if steps is None else steps.tolist() for steps in others))
        assert depth == 2
        dims, steps = ("seed", "step", "layer", "head"), [0, 3, 6, 9, 12]
        return xr.Dataset({"entropy": (dims, curves[..., None])}, {"step": steps, "seed": [0, 1]})

    monkeypatch.setattr(bounce_control, "_train_arms", train_arms)
    trajectory = run(replace(SMALL, depths=(2,)), CONTEXT)
    never = [[12, 12], [12, 12]]
    assert frozen_at == {
        "free": (never, None, None),
        "held": ([[6, 3], [9, 6]], None, None),
        "steady": (never, [6, 9], None),
        "frozen": ([[0, 0], [0, 0]], None, None),
        "clamped": (never, None, [[6, 3], [9, 6]]),
    }
    np.testing.assert_allclose(recovery(trajectory, 2, "steady").values.ravel(), [2 - 1.5, 2 - 1.5])
    np.testing.assert_allclose(recovery(trajectory, 2, "held").values.ravel(), [2 - 1, 2 - 1])


def test_where_nothing_was_frozen_nothing_is_judged(trajectory):
    late = trajectory.copy(deep=True)
    late["hold"] = late.hold.where(late.hold.isnull(), 12)
    late["turn"] = late.turn * 0 + 12
    never_frozen, judged = late.copy(deep=True), verdicts(late)
    assert {judged[f"{name}-{depth}"] for name in ("loss", "steady", "clamped") for depth in (1, 2)} == {UNTESTED}
    late.turn[0] = 9
    late.valid_loss[:] = late.valid_loss.sel(arm="free")  # equal losses are neither higher nor lower
    judged = verdicts(late)
    assert judged["steady-1"] == judged["steady-2"] == "does not hold"
    reasons = {claim.judge(never_frozen, "quick")["reason"] for claim in CLAIMS if claim.name == "steady-1"}
    assert reasons == {"this run has no minimum of entropy before its last step"}


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        (lambda x: 1 + abs(x - 0.5), "holds"),
        (lambda x: 1 + x, "does not hold"),
        (lambda x: 2 - x, "does not hold"),
        (lambda x: 2 - 1.02 * abs(x - 0.5), "does not hold"),
    ],
)
def test_only_what_falls_and_recovers_bounces(curve, verdict):
    steps = np.arange(40)
    noise = 1e-3 * np.random.default_rng(0).standard_normal((2, 40))
    entropy = xr.DataArray(curve(steps / 39) + noise, dims=("seed", "step"))
    entropy = entropy.expand_dims(depth=[2], arm=["free"], layer=range(2), head=[0])
    trajectory = xr.Dataset({"entropy": entropy}).assign_coords(seed=[0, 1], step=steps)
    (claim,) = [claim for claim in CLAIMS if claim.name == "bounce-2"]
    assert claim.judge(trajectory, "paper")["verdict"] == verdict


@pytest.mark.parametrize("depth", [1, 2])
def test_a_depth_that_was_not_trained_is_not_judged(frozen_early, depth):
    absent = absent_claims(frozen_early.sel(depth=[depth]), "paper")
    assert absent == {claim.name for claim in CLAIMS if not claim.name.endswith(f"-{depth}")}


def test_recovery_is_from_each_layers_own_minimum(trajectory):
    linear = trajectory.copy(deep=True)
    linear.entropy[:] = linear.entropy * 0 + xr.DataArray([1.0, 2.0], dims="layer") * linear.step
    expected = (2 * 12 + 12 - 2 * linear.hold.sel(depth=2, layer=1) - linear.hold.sel(depth=2, layer=0)) / 2
    np.testing.assert_allclose(recovery(linear, 2, "free"), expected)


@pytest.mark.parametrize("arm", ["free", "held"])
def test_a_seed_that_diverged_is_not_one_whose_recovery_was_prevented(trajectory, arm):
    diverged = trajectory.copy(deep=True)
    diverged.entropy.loc[{"arm": arm, "seed": 0, "step": [12]}] = np.nan
    judged = verdicts(diverged)
    assert judged["prevented-1"] == judged["prevented-2"] == "does not hold"
    assert np.isnan(recovery_left(diverged, 2, "held"))
    assert np.isfinite(recovery_left(trajectory, 2, "held"))


@pytest.mark.parametrize("arms", [["held"], ["steady"], ["clamped"], ["frozen", "steady"], []])
def test_arms_that_were_left_out_are_not_judged(frozen_early, arms):
    absent = absent_claims(frozen_early.sel(arm=["free", *arms]))
    needs = {"loss": "held", "prevented": "held", "steady": "steady", "clamped": "clamped", "clamp": "clamped"}
    missing = {f"{name}-{depth}" for name, arm in needs.items() for depth in (1, 2) if arm not in arms}
    assert absent == AT_FIVE_LAYERS | missing


@pytest.mark.parametrize("arms", [["held"], ["steady", "clamped"], ["frozen", "steady"], []])
def test_the_arms_of_a_run_are_drawn(frozen_early, arms):
    trajectory = frozen_early.sel(arm=["free", *arms])
    figure = draw_arms(trajectory)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [ARMS[arm] for arm in ("free", *arms)]
    panels = np.reshape(figure.axes, (3, 2))
    assert [panel.get_title(loc="left") for panel in panels[0]] == ["(a)  Entropy, 1 layer", "(b)  Entropy, 2 layers"]
    for depth, (entropy, loss, gap) in zip((1, 2), panels.T, strict=True):
        run = trajectory.sel(depth=depth)
        expected = run.valid_loss.mean("seed").transpose("arm", "step")
        np.testing.assert_allclose([line.get_ydata() for line in loss.lines], expected)
        gaps = (run.valid_loss - run.valid_loss.sel(arm="free")).mean("seed").transpose("arm", "step")[1:]
        assert len(gap.lines) == len(arms) + 1  # and a line at 0
        for line, expected in zip(gap.lines, gaps, strict=False):
            np.testing.assert_allclose(line.get_ydata(), expected)
        ticks = [line for line in entropy.lines if line.get_color() == COLOURS[2] and len(line.get_xdata()) == 2]
        assert {line.get_xdata()[0] for line in ticks} == ({*run.turn.values} if "steady" in arms else set())
    late = trajectory.valid_loss.where(trajectory.step >= 1.2)
    assert panels[1, 0].get_ylim()[1] == pytest.approx(float(late.max()) + 0.05)


@pytest.mark.parametrize("arms", [["held"], ["frozen", "steady"], []])
def test_gaps_and_recoveries_are_drawn_with_their_bounds(frozen_early, arms):
    trajectory = frozen_early.sel(arm=["free", *arms])
    loss, recovered = draw_gaps(trajectory).axes
    points = np.array([line.get_ydata() for line in loss.lines if line.get_marker() != "None"]).reshape(len(arms), 2, 2)
    for arm, by_seed in zip(arms, points, strict=True):
        np.testing.assert_allclose(by_seed, np.stack([loss_gap(trajectory, depth, arm) for depth in (1, 2)], axis=-1))
    for arm, bars in zip(arms, loss.collections, strict=True):
        bounds = [mean_interval(loss_gap(trajectory, depth, arm).values) for depth in (1, 2)]
        np.testing.assert_allclose([segment[:, 1] for segment in bars.get_segments()], bounds)
    labels = [line.get_label() for line in recovered.lines if not line.get_label().startswith("_")]
    assert labels == [ARMS[arm] for arm in ("free", *arms)]
    assert [label.get_text() for label in recovered.get_xticklabels()] == ["1", "2"]
    assert recovered.get_xlim() == loss.get_xlim() == (-0.5, 1.5)


def test_the_outcome_lists_the_gaps_of_each_arm(frozen_early):
    shifted = with_gaps(frozen_early.sel(arm=["free", "held"]), [0.1, 0.3])
    assert outcome(shifted) == (
        "With 1, 2 layers the final loss differs from the free run's by +0.200, +0.200 nats with W_Q and W_K frozen."
    )
    clamped = outcome(shifted.assign_coords(arm=["free", "clamped"]))  # 12.706 · 0.1 on both sides of the mean
    gap = "+0.2000 (-1.0706 to +1.4706)"
    assert f"by {gap}, {gap} nats with entropy clamped. In brackets: 95 % intervals over seeds." in clamped
    with pytest.raises(NotInRun):
        outcome(frozen_early.sel(arm=["free"]))


def test_it_is_drawn_where_every_seed_diverged(trajectory):
    diverged = trajectory.assign({name: trajectory[name] * np.nan for name in ("valid_loss", "entropy")})
    assert np.isnan(draw_arms(diverged).axes[2].lines[0].get_ydata()).all()
    assert np.isnan(draw_gaps(diverged).axes[0].lines[0].get_ydata()).all()


def test_frozen_attention_keeps_its_entropy_and_is_free_before(trajectory):
    for depth in (1, 2):
        run = trajectory.sel(depth=depth).isel(layer=slice(depth))
        mean = run.entropy.sel(arm="free").mean(("layer", "head"))
        np.testing.assert_array_equal(run.turn, mean.idxmin("step"))
        for seed in CONTEXT.seeds:
            turn = int(run.turn.sel(seed=seed))
            for name in ("loss", "valid_loss", "entropy"):
                before = run[name].sel(seed=seed, step=slice(0, turn))
                np.testing.assert_array_equal(before.sel(arm="steady"), before.sel(arm="free"))
            after = run.entropy.sel(seed=seed, arm="steady", step=slice(turn, None))
            np.testing.assert_array_equal(after, after.isel(step=0).broadcast_like(after))
            if turn < SMALL.steps:
                final = run.sel(seed=seed).isel(step=-1)
                assert float(final.valid_loss.sel(arm="steady")) != float(final.valid_loss.sel(arm="free"))
    assert bool((trajectory.turn < SMALL.steps).any())


def test_clamped_entropy_stays_at_each_layers_minimum_and_is_free_before():
    """All validation text is in the windows that the clamp reads, so that what is recorded is what is clamped."""
    config = replace(SMALL, arms=("clamped",), columns=2, glance=16, steps=60, every=3, rate=1e-3)
    trajectory = run(config, CONTEXT)
    left = []
    for depth in (1, 2):
        at_depth = trajectory.sel(depth=depth).isel(layer=slice(depth), head=0)
        for seed in CONTEXT.seeds:
            first = int(at_depth.hold.sel(seed=seed).min())
            before = at_depth.valid_loss.sel(seed=seed, step=slice(0, first))
            np.testing.assert_array_equal(before.sel(arm="clamped"), before.sel(arm="free"))
            for layer in range(depth):
                hold = int(at_depth.hold.sel(seed=seed, layer=layer))
                after = at_depth.entropy.sel(seed=seed, layer=layer, step=slice(hold, None))
                moved = abs(after - after.sel(arm="clamped").isel(step=0)).mean("step")
                if moved.sel(arm="free") > 0.002:
                    left.append(float(moved.sel(arm="clamped") / moved.sel(arm="free")))
    assert left
    assert max(left) < 0.1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"arms": ("free",)}, "arms"),
        ({"arms": ("held", "held")}, "arms"),
        ({"arms": ("melted",)}, "arms"),
        ({"depths": ()}, "depths"),
        ({"depths": (0,)}, "depths"),
        ({"depths": (2, 2)}, "depths"),
        ({"steps": 0}, "steps"),
        ({"every": 0}, "every"),
        ({"batch": 10**6}, "corpus"),
    ],
)
def test_an_error_names_the_field(change, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_the_claims_of_five_layers_need_the_paper_preset():
    depths = {name: STUDY.presets[name].config.depths for name in ("quick", "paper")}
    assert depths == {"quick": (1, 2), "paper": (1, 2, 5)}
    assert {claim.name for claim in CLAIMS if claim.presets == ("paper",)} == AT_FIVE_LAYERS


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has warnings of its own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_arm_trains_in_captured_steps():
    """On CUDA a step is captured, and cannot wait for the device; the clamped arm measures entropy in each."""
    config = replace(SMALL, width=16, hidden=16, depths=(2,))
    trajectory = run(config, Context((0, 1), "cuda"))
    assert trajectory.arm.values.tolist() == ["free", *config.arms]
    assert bool(np.isfinite(trajectory.entropy).all())
