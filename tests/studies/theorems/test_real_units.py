"""Blocks with real units: the mixed block is its parts, the training is that of single blocks, measures by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.data.tokens import token_classes
from joma.models.block import Block, BlockConfig
from joma.probes.entropy import shannon_entropy
from joma.studies.theorems import real_units
from joma.studies.theorems.real_units import KINDS_OF_ATTENTION, TOKENS, UNITS, UnitsBlock, UnitsConfig, train
from joma.study import Context
from joma.train import Optimiser, Record

SMALL = UnitsConfig(classes=4, distinct=3, common=2, units_steps=40, units_rate=0.5)


@pytest.fixture(scope="module")
def trajectory():
    return train(SMALL, Context((0, 1)))


def test_the_mixed_block_is_its_parts():
    arms = len(KINDS_OF_ATTENTION) * len(UNITS)
    generators = [torch.Generator().manual_seed(seed) for seed in range(arms)]
    config = BlockConfig(tokens=3, hidden=2, attention="exp", scale=1.0)
    mixed = UnitsBlock(config, temperature=0.7, generators=generators)
    x = torch.rand(arms, 5, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    h = mixed(x)
    for arm, (attention, unit) in enumerate((a, u) for a in KINDS_OF_ATTENTION for u in UNITS):
        temperature = 0.7 if attention == "softmax" else 1.0
        alone_config = replace(config, attention=attention, activation=unit, temperature=temperature)
        alone = Block(alone_config, generators=[torch.Generator().manual_seed(arm)])
        torch.testing.assert_close(h[arm], alone(x[arm])[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("attention", "unit", "kind"), [("softmax", "gelu", "random"), ("exp", "relu", "gaussian")])
def test_each_arm_trains_as_it_would_alone(trajectory, attention, unit, kind):
    context = Context((0, 1))
    generators = context.generators("real units, data")
    x = token_classes(kind, generators=generators, classes=4, distinct=3, common=2).frequency
    temperature = SMALL.units_temperature if attention == "softmax" else 1.0
    config = BlockConfig(tokens=5, hidden=4, attention=attention, activation=unit, temperature=temperature)
    label = torch.arange(4).expand(2, -1)
    alone = context.fit(
        Block(config, generators=context.generators("real units, weights")),
        lambda model, _: torch.nn.functional.cross_entropy(model(x).mT, label, reduction="none").mean(-1),
        optimiser=Optimiser("sgd", SMALL.units_rate),
        steps=SMALL.units_steps,
        record=Record(lambda model, _: {"entropy": shannon_entropy((model.z[:, 0] / temperature).softmax(-1))}),
        label="alone",
    )
    arm = trajectory.sel(attention=attention, units=unit, tokens=kind)
    assert float(abs(alone.entropy.diff("step")).max()) > 1e-6  # it moves
    np.testing.assert_allclose(arm.units_entropy, alone.entropy.sel(step=arm.unit_step.values), atol=1e-12)
    np.testing.assert_allclose(arm.units_loss[:, -1], alone.loss[:, -1], atol=1e-12)


def test_a_seed_does_not_depend_on_its_neighbours(trajectory):
    alone = train(SMALL, Context((1,)))
    np.testing.assert_allclose(alone.units_entropy[0], trajectory.units_entropy.sel(seed=1), atol=1e-13)


def runs_that_recover(gained):
    """Return a run in which entropy falls from 2 to 1 and then recovers by `gained` [attention, unit] in all blocks."""
    rise = xr.DataArray(gained, {"attention": list(KINDS_OF_ATTENTION), "units": list(UNITS)})
    rise = rise.expand_dims(seed=3, tokens=list(TOKENS))
    curve = xr.concat([0 * rise + 2.0, 0 * rise + 1.0, 1.0 + rise], "unit_step")
    return xr.Dataset({"units_entropy": curve.assign_coords(seed=[0, 1, 2])})


def judge(run):
    return {claim.name: claim.judge(run, "paper")["verdict"] for claim in real_units.CLAIMS}


def test_recovery_and_bounce_by_hand():
    run = runs_that_recover([[0.1, 0.2, 0.1, 0.3, 0.05], [0.0, 0.005, 0.02, 0.0, 0.0]])
    expected = [[False, True, False, True, False][1:], [False, False, True, False, False][1:]]
    flags = real_units.bounced(run.units_entropy)
    np.testing.assert_array_equal(flags.isel(seed=0, tokens=0).transpose("attention", "units"), expected)
    np.testing.assert_allclose(real_units.null_recovery(run.units_entropy), [0.1, 0.0])
    np.testing.assert_allclose(real_units.share_bounced("softmax")(run), 0.5)
    np.testing.assert_allclose(real_units.linear_return(run), 0.1)
    assert real_units.outcome(run) == (
        "In blocks trained without that drive attention turns dense again in 30 of 48 with nonlinear units, and in 6 "
        "of 12 with linear ones: it regains over 1 % of its fall. It does so by more than in any linear block with the "
        "same attention in 18."
    )


def test_one_linear_block_sets_the_bar_for_all_seeds_and_tokens():
    run = runs_that_recover([[0.0, 0.2, 0.2, 0.2, 0.2], [0.0, 0.2, 0.2, 0.2, 0.2]])
    run.units_entropy.loc[{"seed": 2, "tokens": "random", "units": "linear", "attention": "exp", "unit_step": 2}] = 1.4
    flags = real_units.bounced(run.units_entropy)
    assert bool(flags.sel(attention="softmax").all())
    assert not bool(flags.sel(attention="exp").any())


def test_claims_hold_and_fail_on_made_up_runs():
    nonlinear = judge(runs_that_recover([[0.0, 0.3, 0.3, 0.3, 0.3]] * 2))
    assert nonlinear == dict.fromkeys(nonlinear, "holds")
    assert set(nonlinear) == {"units-softmax", "units-exp", "units-nonlinear", "units-linear"}
    linear = judge(runs_that_recover([[0.3, 0.0, 0.0, 0.0, 0.0]] * 2))
    assert linear == dict.fromkeys(linear, "does not hold")


def test_a_diverged_block_is_no_bounce():
    run = runs_that_recover([[0.0, 0.3, 0.3, 0.3, 0.3]] * 2)
    run.units_entropy.loc[{"units": "relu", "unit_step": 2}] = np.nan
    assert not bool(real_units.bounced(run.units_entropy).sel(units="relu").any())


@pytest.mark.parametrize(
    "change", [{"units_steps": 0}, {"units_rate": 0.0}, {"units_temperature": -1.0}, {"classes": 0}]
)
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        train(replace(SMALL, **change), Context((0,)))
