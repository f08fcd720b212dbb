"""The flows of `ladder`: two implementations of one flow, SGD's order, cases by hand, and that seeds do not mix."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.special import softmax

from joma.arguments import InputError
from joma.models.block import Block, BlockConfig
from joma.studies.theorems.ladder_flows import (
    FAMILIES,
    SOLVER,
    FlowConfig,
    _block_entropy,
    check,
    generator,
    population_loss,
    set_start,
    solve_cases,
    solve_named,
    start,
    steps,
    train,
)
from joma.studies.theorems.ladder_worlds import KINDS, named_worlds
from joma.study import Context
from joma.theory.block_flow import Architecture, Training, block
from joma.theory.losses import constant, soft_cross_entropy
from joma.theory.optimum import loss_gradient

SMALL = FlowConfig(
    tokens=4, length=3, long_length=3, until=300.0, constant_until=20.0, records=20, shares=(0.0, 0.5),
    planted=(1.0, 0.6), draws=2, searches=2, sgd_steps=40,
)  # fmt: skip
SEED = 1


@pytest.fixture(scope="module")
def named():
    return solve_named(SMALL, SEED)


@pytest.fixture(scope="module")
def cases():
    return solve_cases(SMALL, SEED)


@pytest.mark.parametrize("world", ["overlap", "separable", "lengths", "noise"])
def test_linear_units_follow_the_flow_of_the_block(named, world):
    worlds, _ = named_worlds(SMALL, generator(SEED, "worlds"))
    contexts = worlds[world]
    options = {"activation": "linear", "gradient": soft_cross_entropy(contexts.posterior), "at": named.time.values}
    entropy = _block_entropy(SMALL, SEED, contexts, **options)
    np.testing.assert_allclose(named.entropy.sel(world=world, activation="linear"), entropy, atol=1e-5)
    assert float(abs(named.entropy.sel(world=world, activation="gelu") - entropy).max()) > 1e-3


def test_gelu_units_are_solved_in_the_worlds_that_are_named():
    few = solve_named(replace(SMALL, gelu_worlds=("separable",)), SEED).sel(activation="gelu")
    for entropy in (few.entropy, few.constant_entropy):
        solved = entropy.notnull().all(entropy.dims[-1])
        assert few.world.values[solved].tolist() == ["separable"]
    assert few.world.values[few.optimum_loss.notnull()].tolist() == ["separable"]


@pytest.mark.parametrize("name", ["overlap", "separable", "lengths", "noise"])
def test_the_constant_gradient_ends_on_one_token_or_on_one_of_each_class(name):
    config = replace(SMALL, constant_until=2000.0, gelu_worlds=())
    worlds, p = named_worlds(config, generator(SEED, "worlds"))
    world, times = worlds[name], np.array([0.0, config.constant_until])
    v, z = start(config, SEED, config.tokens, config.classes)
    w, push = np.concatenate([v, np.zeros((1, config.classes))]), constant(world.posterior - 1 / config.classes)
    flow = block(
        "softmax", "linear", push, world.x, weight=world.weight,
        training=Training(rate_z=config.rate_z), architecture=Architecture(residual=False),
    )  # fmt: skip
    attention = softmax(flow.solve(times, w, z[None], solver=SOLVER).z[-1, 0])
    second, first = np.argsort(attention)[-2:]
    assert attention[[first, second]].sum() > 0.999
    if attention[second] > 0.01:
        assert (p[0] > p[1])[first] != (p[0] > p[1])[second]
    entropy = solve_named(config, SEED).constant_entropy.sel(activation="linear", world=name)
    assert float(entropy[0]) > 0.99
    assert float(entropy[-1]) == pytest.approx(-(attention * np.log(attention)).sum() / np.log(4), abs=1e-4)
    assert name != "separable" or float(entropy[-1]) < 0.02


def test_the_optimum_of_overlap_is_naive_bayes(named):
    row = named.sel(world="overlap")
    assert float(row.naive_bayes_loss) == pytest.approx(float(row.bayes_risk), abs=1e-12)
    assert float(row.optimum_loss.sel(activation="linear")) == pytest.approx(float(row.bayes_risk), abs=1e-9)
    assert float(row.optimum_entropy.sel(activation="linear")) == pytest.approx(1, abs=1e-6)


def test_recorded_steps_are_those_of_sgd_and_reach_the_end():
    recorded = steps(SMALL)
    assert SMALL.sgd_steps in recorded
    assert (recorded[0], recorded[-1]) == (0, 600)


def test_cases_list_every_world_of_every_family(cases):
    assert cases.family.values.tolist() == ["shares"] * 2 + ["planted"] * 2 + ["random"] * 2
    assert cases.setting.values.tolist() == [0.0, 0.5, 1.0, 0.6, 0.0, 1.0]
    assert set(FAMILIES) == set(cases.family.values)
    assert (cases.case_kind.values[2:4] == KINDS.index("planted")).all()


def test_the_optimum_of_a_planted_case_is_what_was_planted(cases):
    planted = cases.isel(case=cases.family == "planted")
    np.testing.assert_allclose(planted.case_optimum, planted.setting, atol=1e-9)
    assert (planted.case_slope == 0).all()
    assert (planted.case_excess > 0).all()


def test_entropies_of_a_case_are_ordered(cases):
    assert (cases.case_least <= cases.case_early).all()
    assert (cases.case_early <= cases.case_start).all()
    assert (cases.case_least <= cases.case_end).all()
    assert (cases.case_excess < cases.case_fall).all()


def test_sgd_approaches_the_flow_as_its_rate_goes_to_zero():
    distances = []
    for rate, count in ((0.5, 40), (0.25, 80)):
        config = replace(SMALL, rate=rate, sgd_steps=count)
        trained = train(config, Context((SEED,)))
        times = trained.sgd_time.values
        flow = solve_named(config, SEED).entropy.sel(activation="linear", time=times, world=list(SMALL.sgd_worlds))
        distances.append(np.abs(trained.sgd_entropy[0].values - flow.values).max())
    assert distances[0] < 0.01
    assert distances[0] / distances[1] == pytest.approx(2, rel=0.2)


def test_the_result_of_a_seed_does_not_depend_on_the_seeds_beside_it():
    both, alone = train(SMALL, Context((0, SEED))), train(SMALL, Context((SEED,)))
    xr.testing.assert_allclose(both.sel(seed=[SEED]), alone, rtol=1e-12)
    assert not np.allclose(both.sgd_entropy[0], both.sgd_entropy[1], rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"rate": 0.0}, {"rate_z": 0.0}, {"until": -1.0}, {"constant_until": 0.0}, {"start_v": -0.1}, {"records": 3},
        {"searches": 0}, {"sgd_steps": 601}, {"gelu_worlds": ("overlap", "overlap")}, {"sgd_worlds": ("other",)},
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        check(replace(SMALL, **change))


def test_the_loss_of_blocks_at_the_start_of_the_flows_is_that_of_the_theory():
    world = named_worlds(SMALL, generator(SEED, "worlds"))[0]["overlap"]
    config = BlockConfig(SMALL.tokens, SMALL.classes, residual=False, scale=0.0)
    model = Block(config, generators=Context((SEED,)).generators("test")).double()
    set_start(model, SMALL, [SEED])
    loss = population_loss(torch.from_numpy(world.x), torch.from_numpy(world.joint)[None])
    expected = loss_gradient(world, *start(SMALL, SEED, SMALL.tokens, SMALL.classes)).loss
    np.testing.assert_allclose(loss(model, torch.tensor(0)).detach(), [expected], rtol=1e-6)
