"""The full model's arms and measures, each against a loop."""

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.studies.related.induction_data import CHAIN, DOUBLY
from joma.studies.related.induction_full import ONE_LAYER, FullTask, full_arms, train_full
from joma.studies.related.induction_models import AttentionOnly
from joma.studies.related.induction_training import InductionConfig
from joma.study import Context

SMALL = InductionConfig(probe=5, full_steps=6, full_length=10, full_width=4, full_batch=3, full_rates=(0.01, 0.02))


def test_arms_are_rates_a_world_without_a_unigram_and_one_layer():
    arms = full_arms((0.01, 0.02))
    assert [(arm.world, arm.layers, arm.rate) for arm in arms] == [
        (CHAIN, 2, 0.01), (CHAIN, 2, 0.02), (DOUBLY, 2, 0.01), (CHAIN, 1, 0.01),
    ]  # fmt: skip
    with pytest.raises(InputError, match="`full_rates` must"):
        full_arms((0.01, 0.01))


def test_measures_are_those_of_loops_over_rows():
    task = FullTask(SMALL, Context((0,)), full_arms((0.01,))[:1])
    model = AttentionOnly(3, 2, 4, 10, generators=[torch.Generator().manual_seed(1)])
    measures = task.measure(model, 0)
    tokens = task.probe[0].tokens[0]
    prediction = model(task.probe[0].tokens[..., :-1], 5)
    first, second = prediction.first[0].detach(), prediction.attention[0].detach()
    previous = np.mean([float(first[row, t, t - 1]) for row in range(5) for t in range(1, 10)])
    matched = [
        sum(float(second[row, t - 5, s]) for s in range(1, t + 1) if tokens[row, s - 1] == tokens[row, t])
        for row in range(5)
        for t in range(5, 10)
    ]
    assert float(measures["previous"]) == pytest.approx(previous, rel=1e-5)
    assert float(measures["match"]) == pytest.approx(np.mean(matched), rel=1e-5)
    log_p = prediction.log_probability[0].detach().double()
    for name, reference in {"from_unigram": task.unigram, "from_bayes": task.bayes}.items():
        p = reference[0].double()
        divergence = torch.where(p > 0, p * (p.clamp_min(1e-30).log() - log_p), 0.0).sum(-1).mean()
        assert float(measures[name]) == pytest.approx(float(divergence), rel=1e-4)


def test_the_run_has_all_arms_and_the_axes_of_the_first():
    run = train_full(SMALL, Context((0, 1)))
    assert run.arm.values.tolist() == ["two layers, 0.01", "two layers, 0.02", "doubly stochastic", ONE_LAYER]
    assert run.full_loss.dims == ("arm", "seed", "full_step")
    assert run.axes_entropy.dims == ("seed", "axes_step")
    losses = run.full_loss.isel(full_step=0)
    np.testing.assert_array_equal(losses[0], losses[1])  # the same start and probe at every rate
    assert not np.array_equal(run.full_loss[0, :, -1], run.full_loss[1, :, -1])
    np.testing.assert_array_equal(run.full_unigram_loss[0], run.full_unigram_loss[3])
    assert (run.previous.sel(arm=ONE_LAYER) == 0).all()
