"""The arms of `markov-unigram`: sampled chains, the schedule, and what is recorded."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.studies.related.markov_unigram_training import (
    VARIANTS,
    Task,
    TrainingConfig,
    arms,
    chain_symbols,
    cosine_schedule,
    train,
)
from joma.study import Context

SMALL = TrainingConfig(
    chains=((0.5, 0.8), (0.2, 0.3)), length=5, width=4, batch=4, steps=6, inits=(0.05, 0.4), variants=("norm",),
    probe=8, records=3,
)  # fmt: skip


def test_chains_follow_the_transitions_symbol_by_symbol():
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, 50, 40, generator=generator)
    p, q = torch.tensor([0.5, 0.2]), torch.tensor([0.8, 0.3])
    symbols = chain_symbols(uniform, p, q)
    for model, sample in itertools.product(range(2), range(50)):
        u, state = uniform[model, sample], 0.0
        for n in range(40):
            probability_of_one = p[model] / (p[model] + q[model]) if n == 0 else 1 - q[model] if state else p[model]
            state = float(u[n] < probability_of_one)
            assert symbols[model, sample, n] == state


def test_the_schedule_is_that_of_one_cycle_in_pytorch():
    """The authors use `OneCycleLR` with these numbers; it counts to the last step, of which there are `total − 1`."""
    steps = 200
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    options = {"pct_start": 0.02, "anneal_strategy": "cos", "div_factor": 1e2, "final_div_factor": 0.05}
    reference = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1.0, steps + 1, cycle_momentum=False, **options)
    factors = []
    for _ in range(steps):
        factors.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        reference.step()
    ours = [float(cosine_schedule(steps)(torch.tensor(step))) for step in range(steps)]
    np.testing.assert_allclose(ours[4:], factors[4:], atol=2e-2)
    assert ours[0] == pytest.approx(factors[0])


def test_arms_of_one_setting_are_one_group_and_variants_change_what_they_say():
    config = replace(SMALL, variants=tuple(VARIANTS))
    members = {arm.name: arm for arm in arms(config)}
    assert len({arm.setting for arm in members.values() if arm.group in ("sgd", "init")}) == 1
    adam = members["adam, 0.5/0.8"].setting
    assert members["long"].setting == replace(adam, model=replace(adam.model, length=config.long_length))
    assert members["wide"].setting == replace(adam, model=replace(adam.model, width=config.wide_width))
    assert members["deep-sgd"].setting.optimiser == "sgd"
    assert members["authors"].setting.model.norm
    assert members["authors"].setting.steps == 400
    assert not members["authors-simple"].setting.model.norm


def test_the_measured_loss_is_the_mean_over_fresh_chains():
    """With the true transitions in place of the next symbol: the same mean as of the training loss, with less noise."""
    config = replace(SMALL, batch=4000, probe=4000)
    context = Context((0, 1))
    from joma.studies.related.markov_unigram_model import ChainTransformer

    group = [arm for arm in arms(config) if arm.group == "sgd"]
    options = {"tied": context.per_model([arm.tied for arm in group]), "scale": [0.5] * 2 * len(group)}
    generators = [torch.Generator().manual_seed(seed) for seed in range(2 * len(group))]
    model = ChainTransformer(group[0].setting.model, generators=generators, **options)
    task = Task(config, context, group[0].setting, group)
    sampled = task.loss(model, torch.tensor(5)).detach()
    torch.testing.assert_close(task.measure(model, 0)["probe_loss"], sampled, rtol=0, atol=0.02)


def test_the_record_names_arms_steps_and_common_axes():
    run = train(SMALL, Context((3, 4)))
    names = ["sgd, tied, 0.5/0.8", "sgd, untied, 0.5/0.8", "sgd, tied, 0.2/0.3", "sgd, untied, 0.2/0.3"]
    assert run.arm.values.tolist() == [*names, "sgd, init 0.4", "adam, 0.5/0.8", "norm"]
    assert run.loss.dims == ("seed", "arm", "record")
    assert run.step.values[0].tolist() == [0, 2, 4, 6]
    assert run.axes_entropy.dims == ("seed", "axes_step")
    assert run.axes_step.values.tolist() == [0, 2, 4, 6]
    assert np.isnan(run.curvature.sel(arm="sgd, untied, 0.5/0.8")).all()
    assert np.isfinite(run.curvature.sel(arm="sgd, tied, 0.5/0.8")).all()
    np.testing.assert_allclose(run.curvature.sel(arm="sgd, tied, 0.5/0.8").isel(record=0), 1, atol=0.1)


def test_a_seed_does_not_depend_on_its_neighbours():
    together, alone = train(SMALL, Context((0, 1))), train(SMALL, Context((1,)))
    np.testing.assert_allclose(alone.loss[0], together.loss.sel(seed=1), atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"chains": ((0.5, 0.5),)}, {"chains": ((0.2, 0.3), (0.5, 0.8))}, {"inits": (0.1,)}, {"inits": (0.1, -0.2)},
        {"variants": ("nrom",)}, {"length": 0}, {"batch": 0}, {"records": 0}, {"steps": 2}, {"rate": -1.0},
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        arms(replace(SMALL, **change))
