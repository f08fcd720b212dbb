from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import ttest_1samp

from joma.arguments import InputError
from joma.studies import load
from joma.studies.text import bounce_control, language_training
from joma.studies.text.bounce_control import CLAIMS, STUDY, Config, bound, loss_gap, minima, recovery, run, schedules
from joma.study import Context, NotInRun

SMALL = Config(
    width=8, hidden=8, length=8, batch=4, steps=12, every=3, rate=2e-2, dropout=0.1, depths=(1, 2), glance=40
)
CONTEXT = Context((0, 1))


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, CONTEXT)


@pytest.fixture(scope="module")
def judged(trajectory):
    """The same, as if something had been held in every arm: with one layer entropies are least at the last step."""
    holds = {name: np.minimum(trajectory[name], 9) for name in ("hold", "turn")}
    return trajectory.assign(holds)


def weights(model):
    """Attention's own parameters, [seed, layer, number], and one that is never held, the value weights."""
    parts = {"held": ("query", "key"), "other": ("value",)}
    stacked = {}
    for name, members in parts.items():
        own = [[getattr(layer.attention, one).weight.flatten(1) for one in members] for layer in model.layers]
        stacked[name] = torch.stack([torch.cat(pieces, dim=1) for pieces in own], dim=1)
    return stacked


def trained(hold):
    text, dims = language_training.read_text(SMALL, CONTEXT), ("layer", "number")
    return language_training.train(
        SMALL, CONTEXT, text, layers=2, label="test", schedules=schedules(hold, "cpu"), probe=weights,
        dims={"held": dims, "other": ("layer", "value_number")},
    )  # fmt: skip


def test_held_is_free_until_the_minimum_and_stays_there():
    hold = np.array([[3, 6], [9, 12]])
    free, held = trained(np.full((2, 2), 12)), trained(hold)
    for seed in range(2):
        until = hold[seed].min()
        for name in ("loss", "valid_loss", "entropy", "other", "held"):
            both = [one[name].isel(seed=seed).sel(step=slice(0, until)).values for one in (free, held)]
            np.testing.assert_array_equal(*both)
        for layer in range(2):
            own = held.held.isel(seed=seed, layer=layer)
            after = own.sel(step=slice(int(hold[seed, layer]), None))
            np.testing.assert_array_equal(after, after.isel(step=[0] * after.sizes["step"]))
            moving = own.sel(step=slice(0, int(hold[seed, layer])))
            assert bool((moving.diff("step") != 0).any("number").all())
    moves = held.other.diff("step").rename(value_number="number")
    assert bool((moves != 0).any("number").all())  # the rest trains on
    assert bool((free.held.diff("step") != 0).any("number").all())


def test_the_arms_of_a_run(trajectory):
    assert trajectory.arm.values.tolist() == ["free", "held", "steady", "frozen"]
    assert trajectory.depth.values.tolist() == [1, 2]
    free = trajectory.sel(arm="free")
    for depth in (1, 2):
        own = free.sel(depth=depth).isel(layer=slice(depth)).entropy.mean("head")
        at_hold = own.sel(step=trajectory.hold.sel(depth=depth).isel(layer=slice(depth)).astype(int))
        np.testing.assert_array_equal(at_hold.transpose("seed", "layer"), own.min("step").transpose("seed", "layer"))
        for seed in CONTEXT.seeds:
            until = int(trajectory.hold.sel(depth=depth, seed=seed).min())
            pair = trajectory.valid_loss.sel(depth=depth, seed=seed).sel(step=slice(0, until))
            np.testing.assert_array_equal(pair.sel(arm="free"), pair.sel(arm="held"))
    assert bool(trajectory.entropy.sel(depth=1).isel(layer=1).isnull().all())
    start = trajectory.valid_loss.isel(step=0)
    np.testing.assert_array_equal(start.sel(arm="frozen"), start.sel(arm="free"))
    assert bool((trajectory.valid_loss.isel(step=-1).sel(arm="frozen") != free.valid_loss.isel(step=-1)).all())


def test_minima_are_the_earliest_least_of_each_layer():
    curves = np.array([[[3.0, 3.0], [1.0, 2.0], [1.0, 1.0]], [[np.nan] * 2, [4.0, 5.0], [6.0, 4.5]]])
    entropy = xr.DataArray(curves[..., None], dims=("seed", "step", "layer", "head"), coords={"step": [0, 10, 25]})
    assert minima(entropy).tolist() == [[10, 25], [10, 25]]


def test_bounds_are_students():
    values = xr.DataArray(np.random.default_rng(0).normal(0.3, 1.0, 7), dims="seed")
    test = ttest_1samp(values, 0.0, alternative="greater")
    assert bound(values, -1) == pytest.approx(test.confidence_interval(0.95).low, rel=1e-12)
    other = ttest_1samp(values, 0.0, alternative="less")
    assert bound(values, 1) == pytest.approx(other.confidence_interval(0.95).high, rel=1e-12)
    assert np.isnan(bound(values[:1], 1))
    assert np.isnan(bound(values.where(np.arange(7) != 2), 1))  # a lost seed


def test_measures_see_what_is_put_in(judged):
    made = judged.copy(deep=True)
    free = made.valid_loss.sel(arm="free")
    made.valid_loss.loc[{"arm": "held"}] = free + xr.DataArray([0.1, 0.3], dims="seed")
    np.testing.assert_allclose(loss_gap(made, 2), [0.1, 0.3], rtol=1e-9)
    with pytest.raises(NotInRun):
        loss_gap(made, 5)
    verdicts = {claim.name: claim.judge(made, "quick")["verdict"] for claim in CLAIMS}
    assert (verdicts["loss-1"], verdicts["loss-2"]) == ("does not hold", "does not hold")  # two seeds, far apart
    made.valid_loss.loc[{"arm": "held"}] = free + xr.DataArray([0.1, 0.11], dims="seed")
    verdicts = {claim.name: claim.judge(made, "quick")["verdict"] for claim in CLAIMS}
    assert (verdicts["loss-1"], verdicts["loss-2"]) == ("does not hold", "holds")
    made.valid_loss.loc[{"arm": "held"}] = free - xr.DataArray([0.1, 0.11], dims="seed")
    verdicts = {claim.name: claim.judge(made, "quick")["verdict"] for claim in CLAIMS}
    assert (verdicts["loss-1"], verdicts["loss-2"], verdicts["loss-5"]) == (
        "holds", "does not hold", "not tested at this preset",
    )  # fmt: skip
    one = {claim.name: claim.judge(made.isel(seed=[0]), "quick")["verdict"] for claim in CLAIMS}
    assert one["loss-1"] == one["loss-2"] == "not tested at this preset"  # one seed has no bound
    assert one["bounce-1"] != "not tested at this preset"


def test_arms_are_held_where_they_say(monkeypatch):
    """By entropies that are made up: two layers have their least at steps 6 and 3, their mean at 6; or 9, 6 and 9."""
    curves = np.array([[[4.0, 4], [3, 1], [1, 2], [2, 2], [2, 2]], [[4.0, 4], [3, 3], [3, 1], [1, 2], [2, 2]]])
    asked = {}

    def trained(*given, turn=None):
        arm, hold = given[-2:]
        asked[arm] = (hold.tolist(), None if turn is None else turn.tolist())
        dims, steps = ("seed", "step", "layer", "head"), [0, 3, 6, 9, 12]
        return xr.Dataset({"entropy": (dims, curves[..., None])}, {"step": steps, "seed": [0, 1]})

    monkeypatch.setattr(bounce_control, "_trained", trained)
    found = run(replace(SMALL, depths=(2,)), CONTEXT)
    never = [[12, 12], [12, 12]]
    assert asked == {
        "free": (never, None),
        "held": ([[6, 3], [9, 6]], None),
        "steady": (never, [6, 9]),
        "frozen": ([[0, 0], [0, 0]], None),
    }
    np.testing.assert_allclose(recovery(found, 2, "steady").values.ravel(), [2 - 1.5, 2 - 1.5])
    np.testing.assert_allclose(recovery(found, 2, "held").values.ravel(), [2 - 1, 2 - 1])


def test_where_nothing_was_held_nothing_is_judged(trajectory):
    late = trajectory.copy(deep=True)
    late["hold"] = late.hold.where(late.hold.isnull(), 12)
    late["turn"] = late.turn * 0 + 12
    found = {claim.name: claim.judge(late, "quick")["verdict"] for claim in CLAIMS}
    assert {found[f"{name}-{depth}"] for name in ("loss", "steady") for depth in (1, 2)} == {
        "not tested at this preset"
    }
    late.turn[0] = 9
    late.valid_loss[:] = late.valid_loss.sel(arm="free")  # equal losses are neither higher nor lower
    found = {claim.name: claim.judge(late, "quick")["verdict"] for claim in CLAIMS}
    assert found["steady-1"] == found["steady-2"] == "does not hold"


def bounce_of(curve, depth=2):
    """The verdict on a free run whose entropy is `curve` in every layer that its depth has, with a little noise."""
    steps = np.arange(40)
    noise = 1e-3 * np.random.default_rng(0).standard_normal((2, 40))
    entropy = xr.DataArray(curve(steps / 39) + noise, dims=("seed", "step")).expand_dims(
        depth=[depth], arm=["free"], layer=range(depth), head=[0]
    )
    made = xr.Dataset({"entropy": entropy}).assign_coords(seed=[0, 1], step=steps)
    (claim,) = [claim for claim in CLAIMS if claim.name == f"bounce-{depth}"]
    return claim.judge(made, "paper")["verdict"]


def test_only_what_falls_and_comes_back_bounces():
    assert bounce_of(lambda at: 1 + abs(at - 0.5)) == "holds"
    assert bounce_of(lambda at: 1 + at) == "does not hold"
    assert bounce_of(lambda at: 2 - at) == "does not hold"
    assert bounce_of(lambda at: 2 - 1.02 * abs(at - 0.5)) == "does not hold"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_depth_that_was_not_trained_is_not_judged(judged, depth):
    found = {claim.name: claim.judge(judged.sel(depth=[depth]), "paper")["verdict"] for claim in CLAIMS}
    left_out = {name for name, verdict in found.items() if verdict == "not tested at this preset"}
    assert left_out == {name for name in found if not name.endswith(f"-{depth}")}


def test_recovery_is_from_each_layers_own_minimum(trajectory):
    made = trajectory.copy(deep=True)
    made.entropy[:] = made.entropy * 0 + xr.DataArray([1.0, 2.0], dims="layer") * made.step
    expected = (2 * 12 + 12 - 2 * made.hold.sel(depth=2, layer=1) - made.hold.sel(depth=2, layer=0)) / 2
    np.testing.assert_allclose(recovery(made, 2, "free"), expected)


@pytest.mark.parametrize("arms", [["held"], ["steady"], ["frozen", "steady"], []])
def test_it_is_drawn_and_judged_with_the_arms_that_there_are(judged, arms):
    own = judged.sel(arm=["free", *arms])
    for drawing in STUDY.figures.values():
        assert drawing.draw(own).axes
    found = {claim.name: claim.judge(own, "quick")["verdict"] for claim in CLAIMS}
    left_out = {name for name, verdict in found.items() if verdict == "not tested at this preset"}
    needs = {"loss": "held", "prevented": "held", "steady": "steady"}
    missing = {f"{name}-{depth}" for name, arm in needs.items() for depth in (1, 2) if arm not in arms}
    assert left_out == {"bounce-5", "loss-5", "steady-5", "prevented-5"} | missing


def test_attention_that_is_held_keeps_its_entropy_and_is_free_before(trajectory):
    for depth in (1, 2):
        own = trajectory.sel(depth=depth).isel(layer=slice(depth))
        mean = own.entropy.sel(arm="free").mean(("layer", "head"))
        np.testing.assert_array_equal(own.turn, mean.idxmin("step"))
        for seed in CONTEXT.seeds:
            turn = int(own.turn.sel(seed=seed))
            for name in ("loss", "valid_loss", "entropy"):
                pair = own[name].sel(seed=seed, step=slice(0, turn))
                np.testing.assert_array_equal(pair.sel(arm="steady"), pair.sel(arm="free"))
            after = own.entropy.sel(seed=seed, arm="steady", step=slice(turn, None))
            np.testing.assert_array_equal(after, after.isel(step=0).broadcast_like(after))
            if turn < SMALL.steps:
                late = own.sel(seed=seed).isel(step=-1)
                assert float(late.valid_loss.sel(arm="steady")) != float(late.valid_loss.sel(arm="free"))
    assert bool((trajectory.turn < SMALL.steps).any())


@pytest.mark.parametrize(
    "change",
    [
        {"arms": ("free",)},
        {"arms": ("held", "held")},
        {"depths": ()},
        {"depths": (0,)},
        {"depths": (2, 2)},
        {"steps": 0},
        {"every": 0},
        {"batch": 10**6},
    ],
)
def test_bad_config(change):
    with pytest.raises(InputError):
        run(replace(SMALL, **change), Context((0,)))


def test_presets_are_configs_of_this_study():
    assert load("bounce-control") is STUDY
    assert all(isinstance(preset.config, Config) for preset in STUDY.presets.values())


def test_it_is_drawn_where_every_seed_was_lost(trajectory):
    lost = trajectory.assign({name: trajectory[name] * np.nan for name in ("valid_loss", "entropy")})
    for drawing in STUDY.figures.values():
        assert drawing.draw(lost).axes
