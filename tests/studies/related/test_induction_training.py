"""The task of the minimal model: baselines against loops over symbols, and a training that finds pairs."""

import numpy as np
import pytest
import torch

from joma.studies.common_axes import NAMES, attention_axes
from joma.studies.related.induction_data import CHAIN, LAG_2, WORLDS, World
from joma.studies.related.induction_training import InductionConfig, MinimalTask, mean_axes, train_minimal
from joma.study import Arms, Context
from joma.train import Optimiser

SMALL = InductionConfig(length=16, batch=8, probe=6, lags=4)
PARENTS = World("parents", (1, 3))


def test_baselines_are_means_over_the_symbols_of_the_second_half():
    task = MinimalTask(SMALL, Context((0, 1)), [PARENTS])
    losses, (sequences,) = task.baselines(0.1), task.probe
    for seed in range(2):
        surprisals = {"uniform_loss": [], "unigram_loss": [], "bayes_loss": [], "kernel_loss": []}
        for tokens, kernel in zip(sequences.tokens[seed].tolist(), sequences.kernel[seed].double(), strict=True):
            for t in range(9, 17):
                state, before = (tokens[t - 1], tokens[t - 3]), tokens[:t]
                followed = [tokens[s] for s in range(3, t) if (tokens[s - 1], tokens[s - 3]) == state]
                p = {
                    "uniform_loss": 1 / 3,
                    "unigram_loss": 0.9 * before.count(tokens[t]) / t + 0.1 / 3,
                    "bayes_loss": (followed.count(tokens[t]) + 1) / (len(followed) + 3),
                    "kernel_loss": float(kernel[state][tokens[t]]),
                }
                for name, chance in p.items():
                    surprisals[name].append(-np.log(chance))
        for name, values in surprisals.items():
            assert float(losses[name][0, seed]) == pytest.approx(np.mean(values)), name


def test_models_of_a_seed_start_alike_in_all_worlds_and_see_their_own():
    context = Context((0, 1))
    task = MinimalTask(SMALL, context, [WORLDS[CHAIN], WORLDS[LAG_2]])
    model = task.model(context, Arms("world", [CHAIN, LAG_2]))
    torch.testing.assert_close(model.r[:2], model.r[2:])
    assert task.queries[:, 0].tolist() == [1, 1, 2, 2]
    measures = task.measure(model, 0)
    np.testing.assert_allclose(measures["weight"][2:, 0].detach(), model.lag_weights[2:, 0, 1].detach())
    alone = MinimalTask(SMALL, Context((1,)), [WORLDS[LAG_2]])
    single = alone.model(Context((1,)), Arms("world", [LAG_2]))
    torch.testing.assert_close(alone.measure(single, 0)["probe_loss"], measures["probe_loss"][3:])


def test_common_axes_are_means_over_samples():
    generator = torch.Generator().manual_seed(0)
    attention, weight = (
        torch.rand(2, 3, 4, 5, generator=generator).softmax(-1),
        torch.rand(2, 3, 3, generator=generator),
    )
    visible = torch.ones(4, 5, dtype=torch.bool)
    axes = mean_axes(attention, weight, visible)
    for name in NAMES:
        expected = torch.stack([attention_axes(attention[1, row], weight[1])[name] for row in range(3)]).mean()
        torch.testing.assert_close(axes[name][1], expected)


def test_adam_finds_the_lag_in_a_short_training():
    config = InductionConfig(length=24, batch=32, probe=32, lags=4)
    run, losses = train_minimal(config, Context((0, 1)), [WORLDS[LAG_2]], Optimiser("adam", 0.05), 60)
    assert run.probe_loss.dims == ("world", "seed", "step")
    assert (run.lag_weight.isel(step=-1, head=0).argmax("lag") == 1).all()
    np.testing.assert_allclose(run.probe_loss.isel(step=0), losses.unigram_loss, atol=3e-3)
    assert (run.probe_loss.isel(step=-1) < losses.unigram_loss - 0.02).all()
