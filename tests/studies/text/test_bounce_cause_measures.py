"""The measures of `bounce-cause` on made-up curves whose answers are known."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.text.bounce_cause_measures import (
    TRAIN,
    approach,
    best_entropy,
    beyond_chance,
    excess_loss,
    final_position_entropy,
    half_margin,
    less_than_half,
    memorised_return,
    p_value,
    recovery,
    recovery_difference,
    relative_return,
    settled_return,
    start_difference,
)
from joma.studies.text.entropy_bounce import bounces
from joma.study import NotInRun

STEPS = np.arange(40)


def fall_and_return(recovery, fall=1.0):
    """A curve that falls from 2 by `fall` up to step 20 and recovers by `recovery` up to step 39."""
    return 2.0 - fall * np.minimum(STEPS / 20, 1) + recovery * np.maximum(STEPS - 20, 0) / 19


def made_up(noise=1e-3, **recoveries):
    """A run whose arms recover by the given numbers, one for each seed; names have _ for -."""
    random = np.random.default_rng(0)
    curves = [[fall_and_return(size) for size in sizes] for sizes in recoveries.values()]
    curves = np.array(curves)
    curves = curves + noise * random.standard_normal(curves.shape)
    names = [name.replace("_", "-") for name in recoveries]
    entropy = xr.DataArray(
        curves[..., None, None],
        {"arm": names, "seed": np.arange(curves.shape[1]), "step": STEPS, "layer": [0], "head": [0]},
        ("arm", "seed", "step", "layer", "head"),
    )
    measures, train = bounces(entropy), bounces(entropy)
    run = xr.Dataset({"entropy": entropy, f"{TRAIN}entropy": entropy}).merge(measures)
    return run.merge(train.rename({name: f"{TRAIN}{name}" for name in train}))


def test_what_a_seed_did_before_it_diverged_is_no_result():
    whole = made_up(free=(0.8, 0.6, 0.7), linear=(0.7, 0.6, 0.7))
    entropy = whole.entropy.where((whole.seed != 1) | (whole.arm != "linear") | (whole.step < 35))
    measured = bounces(entropy)
    run = whole.assign(entropy=entropy, **{name: measured[name] for name in measured})
    assert np.isfinite(run.recovery).all()
    for measure in (recovery, beyond_chance, relative_return, half_margin, recovery_difference, p_value):
        np.testing.assert_array_equal(np.isnan(measure(run, "linear")), [False, True, False], measure.__name__)
    assert not np.isnan(recovery(run, "free")).any()


def test_recoveries_are_compared_from_the_same_start():
    run = made_up(noise=0.0, free=(0.8, 0.6), linear=(0.7, 0.6), value_path=(0.0, 0.0))
    np.testing.assert_allclose(recovery_difference(run, "linear"), [0.1, 0.0], atol=1e-12)
    np.testing.assert_allclose(half_margin(run, "linear"), [0.3, 0.3], atol=1e-12)
    np.testing.assert_allclose(half_margin(run, "value-path"), [-0.4, -0.3], atol=1e-12)
    np.testing.assert_allclose(half_margin(run, "free", reference="linear"), [0.45, 0.3], atol=1e-12)


def test_what_never_recovers_lies_below_chance_and_what_does_above():
    run = made_up(noise=0.02, free=(0.8, 0.6), value_path=(-0.3, -0.3))
    assert (beyond_chance(run, "free") > 0.5).all()
    assert (beyond_chance(run, "value-path") <= 0).all()
    np.testing.assert_array_equal(beyond_chance(run, "free"), run.recovery.sel(arm="free") - run.chance.sel(arm="free"))
    assert (p_value(run, "free") <= 0.01).all()
    assert (p_value(run, "value-path") == 1).all()


@pytest.mark.parametrize("text", ["", TRAIN])
def test_what_did_not_fall_cannot_come_back(text):
    run = made_up(free=(0.8, 0.6))
    flat = run.assign({f"{text}fall": run[f"{text}fall"] * xr.DataArray([0.05, 1.0], dims="seed")})
    with pytest.raises(NotInRun, match="fall of entropy by 5 % in every seed of arm free"):
        beyond_chance(flat, "free", text)
    assert beyond_chance(run, "free", text).dims == ("seed",)


@pytest.mark.parametrize("text", ["", TRAIN])
def test_a_return_is_relative_to_the_entropy_at_the_start(text):
    run = made_up(noise=0.0, free=(0.8, 0.6))  # from 2
    run[f"{text}chance"] = xr.full_like(run.chance, 0.2)
    np.testing.assert_allclose(relative_return(run, "free", text), [0.3, 0.2], atol=1e-12)


def test_entropy_that_stays_low_lies_on_either_side_of_chance():
    """Without a return the measure has mean 0: only a bound above 0 can confirm that entropy stays low."""
    returns = relative_return(made_up(noise=0.02, value_path=(0.0,) * 40), "value-path")
    assert float(returns.min()) < 0 < float(returns.max())
    assert abs(float(returns.mean())) < 3 * float(returns.std()) / np.sqrt(40)


def test_there_is_no_share_of_a_recovery_that_noise_explains():
    run = made_up(noise=0.02, free=(0.8, 0.8), linear=(0.8, 0.8))
    assert (half_margin(run, "linear") > 0).all()
    run.recovery.loc[{"arm": "free", "seed": 1}] = run.chance.sel(arm="free", seed=1)
    with pytest.raises(NotInRun, match="recovery beyond chance in every seed of arm free"):
        half_margin(run, "linear")
    with pytest.raises(NotInRun, match="arm mlp"):
        half_margin(run, "mlp")


def judged_anew(run, name, curve):
    """The run with another curve [step] of an arm in all seeds, and its measures."""
    run = run.copy(deep=True)
    run.entropy.loc[{"arm": name}] = curve[:, None, None]
    return run.assign(bounces(run.entropy))


def test_an_arm_that_never_fell_keeps_no_small_part_of_the_recovery():
    run = judged_anew(made_up(free=(0.8, 0.8), query_key=(0.0, 0.0)), "query-key", 2.0 - 0.002 * STEPS)
    assert (half_margin(run, "query-key") < -0.3).all()
    with pytest.raises(NotInRun, match="fall of entropy by 5 % in every seed of arm query-key"):
        less_than_half(run, "query-key")


def test_entropy_that_is_still_falling_does_not_show_that_it_stays_low():
    run = made_up(free=(0.8, 0.8), value_path=(0.0, 0.0))
    falling = judged_anew(run, "value-path", 2.0 - STEPS / 39)
    for measure in (less_than_half, settled_return):
        with pytest.raises(NotInRun, match="final entropy of arm value-path: it is still falling at the end"):
            measure(falling, "value-path")
        assert (measure(run, "value-path") < 0.05).all()
        with pytest.raises(NotInRun, match="arm mlp"):
            measure(run, "mlp")


def test_entropy_that_came_back_and_falls_again_is_not_still_falling():
    curve = fall_and_return(0.8) - 0.03 * np.maximum(STEPS - 30, 0)
    run = judged_anew(made_up(free=(0.8, 0.8), value_path=(0.0, 0.0)), "value-path", curve)
    np.testing.assert_allclose(less_than_half(run, "value-path"), half_margin(run, "value-path"))
    assert (settled_return(run, "value-path") > 0.05).all()


@pytest.mark.parametrize(("pace", "falling"), [(0.9, False), (1.1, True)])
def test_a_fall_counts_as_going_on_if_at_its_pace_it_would_be_visible_in_as_many_steps_again(pace, falling):
    """Four probes are a tenth of the steps: 5 % of the start, 2 nats, in 39 steps are a tenth of that in 3.9."""
    curve = fall_and_return(0.0) - pace * 0.05 * 2.0 / 40 * np.maximum(STEPS - 25, 0)
    run = judged_anew(made_up(free=(0.8, 0.8), value_path=(0.0, 0.0)), "value-path", curve)
    assert float(run.turn.sel(arm="value-path")[0]) == STEPS[-1]
    if falling:
        with pytest.raises(NotInRun, match="still falling"):
            settled_return(run, "value-path")
    else:
        assert (settled_return(run, "value-path") < 0.05).all()


def with_dip(run):
    """The run with probes at logarithmic steps before the first, which see entropy dip below its later minimum."""
    dip = xr.DataArray([0.0, 0.0, -1.8, 0.0], dims="step")
    early = run.entropy.isel(step=[0] * 4).assign_coords(step=[0, 1, 2, 4]) + dip
    late = run.entropy.assign_coords(step=8 * (1 + STEPS))
    entropy = xr.concat([early, late], "step").transpose("arm", "seed", "step", "layer", "head")
    measures = bounces(entropy)
    on_training_text = measures.rename({name: f"{TRAIN}{name}" for name in measures})
    return xr.Dataset({"entropy": entropy, f"{TRAIN}entropy": entropy}).merge(measures).merge(on_training_text)


@pytest.mark.parametrize("text", ["", TRAIN])
def test_a_late_recovery_leaves_out_the_dip_of_the_first_steps(text):
    recoveries = {"free": (0.8, 0.8), "value_path": (0.0, 0.0), "linear": (0.7, 0.7)}
    run = with_dip(made_up(noise=0.0, **recoveries))
    assert (recovery(run, "value-path", text) > 0.7).all()
    for name, sizes in recoveries.items():
        np.testing.assert_allclose(recovery(run, name.replace("_", "-"), text, late=True), sizes, atol=1e-12)
    np.testing.assert_allclose(less_than_half(run, "value-path"), [0.8 - 1.6 / 2] * 2, atol=1e-12)
    np.testing.assert_allclose(less_than_half(run, "value-path", late=True), [-0.4, -0.4], atol=1e-12)
    np.testing.assert_allclose(half_margin(run, "linear", late=True), [0.3, 0.3], atol=1e-12)


def test_probes_that_are_nowhere_evenly_spaced_show_no_late_recovery():
    run = made_up(free=(0.8, 0.8))
    uneven = run.assign_coords(step=STEPS**2)
    with pytest.raises(NotInRun, match="probes that are evenly spaced"):
        recovery(uneven, "free", late=True)
    cut_off = run.assign_coords(step=np.append(4 * STEPS[:-1], 4 * STEPS[-2] + 1))
    np.testing.assert_allclose(recovery(cut_off, "free", late=True), run.recovery.sel(arm="free"))


def with_best(run, end, fresh):
    best = np.stack([np.stack([np.full(2, 9.0), values], axis=-1) for values in (end, fresh)])
    coords = {"start": ["end", "fresh"], "attention_step": [0, 5]}
    return run.assign(best_entropy=(("start", "seed", "attention_step"), best)).assign_coords(coords)


def test_entropy_approaches_that_of_the_best_attention():
    run = made_up(noise=0.0, free=(0.8, 0.6))  # minima at 1, ends at 1.8 and 1.6
    run = with_best(run, np.array([1.8, 1.3]), np.array([2.5, 0.8]))
    np.testing.assert_allclose(best_entropy(run, "end"), [1.8, 1.3])
    np.testing.assert_allclose(approach(run, "end"), [0.8, 0.3 - 0.3], atol=1e-12)
    np.testing.assert_allclose(approach(run, "fresh"), [0.8 - 0.7, 0.2 - 0.8], atol=1e-12)
    np.testing.assert_allclose(start_difference(run), [0.7 - 0.8, 0.5 - 0.6], atol=1e-12)


@pytest.mark.parametrize("start", ["end", "fresh"])
def test_starts_that_disagree_show_no_best_attention(start):
    """As where attention is not trained at all: from the end it has the entropy of the end, from a fresh start not."""
    run = made_up(noise=0.0, free=(0.8, 0.6))
    run = with_best(run, np.array([1.8, 1.6]), np.array([1.8, 2.3]))
    with pytest.raises(NotInRun, match="both starts agree in every seed"):
        approach(run, start)


def test_attention_that_was_not_trained_alone_is_not_in_the_run():
    with pytest.raises(NotInRun, match="training of attention alone"):
        approach(made_up(free=(0.8, 0.6)), "end")


def test_the_excess_of_the_training_loss_is_above_its_floor():
    losses = xr.DataArray([[[3.0, 0.5], [3.0, 0.25]]], {"arm": ["memorised"]}, ("arm", "seed", "step"))
    np.testing.assert_allclose(excess_loss(xr.Dataset({"train_loss": losses, "floor": 0.125})), [0.375, 0.125])


def test_what_was_not_memorised_is_not_judged_as_memorised():
    run = made_up(noise=0.0, memorised=(0.0, 0.4))
    losses = xr.DataArray([[0.5, 0.25]], {"arm": ["memorised"]}, ("arm", "seed")).expand_dims(step=40, axis=2)
    run = run.assign(train_loss=losses, floor=0.45)
    expected = run.train_recovery.sel(arm="memorised") - run.train_chance.sel(arm="memorised")
    np.testing.assert_allclose(memorised_return(run), expected / 2)
    with pytest.raises(NotInRun, match="model that memorised its text"):
        memorised_return(run.assign(floor=0.3))


def test_entropy_by_position_is_taken_at_each_seeds_minimum():
    values = np.arange(2 * 3 * 2, dtype=float).reshape(1, 2, 3, 2)
    run = xr.Dataset(
        {
            "position_entropy": (("arm", "seed", "step", "position"), values),
            "turn": (("arm", "seed"), [[10.0, 25.0]]),
        },
        {"arm": ["free"], "step": [0, 10, 25], "seed": [0, 1]},
    )
    moments = final_position_entropy(run, "free")
    np.testing.assert_array_equal(moments["start"], values[0, :, 0])
    np.testing.assert_array_equal(moments["minimum"], [values[0, 0, 1], values[0, 1, 2]])
    np.testing.assert_array_equal(moments["end"], values[0, :, 2])
