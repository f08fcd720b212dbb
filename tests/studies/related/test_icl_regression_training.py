"""The trained part of `icl-regression`: starts, pairs and what is recorded."""

from dataclasses import replace

import numpy as np
import pytest

from joma.studies.related import icl_regression_training as training
from joma.study import Context
from joma.theory import in_context
from joma.theory.in_context_descent import descent_losses
from studies.related.icl_regression_run import SMALL, small_run


def test_the_model_of_given_steps_has_the_loss_of_gradient_descent():
    """On the probe, with sampled tasks and queries, against the mean over tasks and queries."""
    config = replace(SMALL, probe=20_000)
    task = training.Task(config, Context((0,)))
    x = task.probe.tokens[0, :, :-1, :-1].double().numpy()
    covariances = np.einsum("pni,pnj->pij", x, x) / config.length
    for layers in (1, 2):
        steps = np.stack([np.diag(in_context.preconditioner(config.spectrum, config.length))] * layers)
        exact = descent_losses(steps, covariances, config.spectrum).mean()
        assert task.descent_loss(steps)[0] == pytest.approx(exact, rel=0.05)


def test_the_best_single_step_is_paired_with_the_optimum():
    task = training.Task(replace(SMALL, probe=20_000), Context((0,)))
    assert task.one_step[0] == pytest.approx(in_context.least_loss(SMALL.spectrum, SMALL.length), rel=0.05)


def test_best_steps_include_those_that_gains_are_measured_from():
    best, covariances = training.best_steps(replace(SMALL, layers=(3,)))
    assert sorted(best) == [2, 3]
    assert len(covariances) == SMALL.covariances
    again, _ = training.best_steps(replace(SMALL, layers=(3,)))
    np.testing.assert_array_equal(best[3].steps, again[3].steps)


def test_blocks_start_alike_and_training_lowers_the_loss():
    run = small_run()
    start = run.whole_loss.isel(whole_step=0)
    assert float(abs(start.sel(whole_blocks="whole") - start.sel(whole_blocks="descent")).max()) < 0.2
    losses = run.layer_loss.sel(layer_blocks="descent")
    assert bool((losses.isel(layer_step=-1) < losses.isel(layer_step=0)).all())
    assert run.whole_loss.dims == ("seed", "whole_heads", "whole_blocks", "whole_step")
    assert run.softmax_loss.dims[0] == run.layer_loss.dims[0] == "seed"


def test_trained_steps_are_never_better_than_the_best_on_the_same_covariances():
    run = small_run()
    assert bool((run.descent_loss >= run.best_loss - 1e-9).all())
    assert bool((run.previous_loss > run.best_loss).all())


def test_sgd_from_the_theorys_blocks_reaches_the_optimum():
    config = replace(SMALL, whole_steps=400, whole_batch=128, whole_rate=0.05, probe=1000)
    context = Context((0, 1))
    whole = training._whole(config, context, training.Task(config, context))
    end = whole.whole_loss.sel(whole_blocks="descent").isel(whole_step=-1, whole_heads=0) - whole.one_step_loss
    assert float(end.max()) < 0.1 * sum(config.spectrum) / 2


def test_on_noisy_labels_the_best_single_step_is_that_for_the_noise():
    task = training.Task(replace(SMALL, probe=20_000), Context((0,)), label_noise=1.5)
    assert task.one_step[0] == pytest.approx(in_context.least_loss(SMALL.spectrum, SMALL.length, 1.5), rel=0.05)
    clean = np.diag(in_context.preconditioner(SMALL.spectrum, SMALL.length))
    risk = float(in_context.population_loss(clean, SMALL.spectrum, SMALL.length, 1.5))
    assert task.descent_loss(clean[None])[0] == pytest.approx(risk, rel=0.05)
    assert risk > 1.05 * task.one_step[0]


def test_training_on_noisy_labels_approaches_the_optimum_for_them():
    noisy = training._noisy(replace(SMALL, layer_steps=400, label_noise=1.5), Context((0, 1)))
    assert bool((noisy.noisy_loss >= noisy.noisy_least_loss).all())
    assert float((noisy.noisy_loss - noisy.noisy_least_loss).max()) < float(
        noisy.noisy_clean_loss - noisy.noisy_least_loss
    )


def test_a_diverged_training_has_no_loss():
    steps = np.full((1, 3, 3), np.nan)
    assert np.isnan(training._mean_loss(steps, np.eye(3)[None], SMALL.spectrum))
