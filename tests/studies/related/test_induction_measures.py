"""The measures of the study on runs whose answers are known."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.related.induction_data import CHAIN, DOUBLY, LAG_2
from joma.studies.related.induction_full import NO_UNIGRAM, ONE_LAYER
from joma.studies.related.induction_measures import (
    finds_lag,
    finds_parents,
    first_step,
    full_arm,
    full_delay,
    gap_closed,
    gradient_correlation,
    gradient_error,
    half_step,
    jump_width,
    minimal_closed,
    minimal_delay,
    one_layer_closed,
    passed_share,
    plateau_steps,
    predicts_lag,
    previous_attention,
    second_layer_lead,
    unigram_distance,
)
from joma.study import NotInRun

STEPS = np.arange(0, 110, 10)
WORLDS = [CHAIN, LAG_2, DOUBLY]


def minimal_run():
    """Losses fall from 1.0 to 0.8 on a straight line from step 20 to 60, and 10 steps later without a unigram."""
    fall = np.stack([np.clip((STEPS - start) / 40, 0, 1) for start in (20, 20, 30)])[:, None]
    weights = np.full((3, 2, 4), 0.1)
    weights[[0, 1, 2], :, [0, 1, 0]] = 0.7
    parents = np.array([[[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1]], [[0.7, 0.1, 0.1, 0.1], [0.4, 0.1, 0.3, 0.2]]])
    level = (("world", "seed"), np.ones((3, 2)))
    return xr.Dataset(
        {
            "minimal_loss": (("world", "seed", "step"), np.repeat(1.0 - 0.2 * fall, 2, axis=1)),
            "minimal_weight": (("world", "seed", "step"), np.repeat(0.1 + 0.8 * fall, 2, axis=1)),
            "minimal_diagonal": (("world", "seed", "step"), np.tile(STEPS / 100, (3, 2, 1))),
            "minimal_lag_weight": (("world", "seed", "lag"), weights),
            "parents_lag_weight": (("seed", "parent", "lag"), parents),
            "dependence": (("world", "seed", "lag"), weights),
            "parents_dependence": (("seed", "parent", "lag"), parents),
            "unigram_loss": level,
            "uniform_loss": 1.1 * xr.DataArray(level[1], dims=level[0]),
            "bayes_loss": 0.8 * xr.DataArray(level[1], dims=level[0]),
            "gradient": (("seed", "lag"), np.array([[3.0, -1.0, 0.0, 0.0], [5.0, -1.0, 0.0, 0.0]])),
            "gradient_predicted": (("seed", "lag"), np.array([[5.0, -1.0, 0.0, 0.0], [5.0, -1.0, 0.0, 0.0]])),
        },
        {"world": WORLDS, "seed": [0, 1], "step": STEPS, "lag": [1, 2, 3, 4], "parent": [1, 3]},
    )


def full_run():
    """Seed 0 rests at the unigram to step 400 and then counts pairs, seed 1 never does; without a unigram both do."""
    steps = np.arange(0, 1100, 100)
    resting, falling = np.full(11, 1.0), np.where(steps <= 400, 1.0, 0.8)
    start = np.array([1.3] + [0.0] * 10)
    early = np.where(steps <= 200, 1.0, 0.8)
    losses = np.stack([[falling + start, resting], [early, early], [resting, resting]])
    arms = ["two layers, 0.005", NO_UNIGRAM, ONE_LAYER]
    level = np.ones((3, 2))
    return xr.Dataset(
        {
            "full_loss": (("arm", "seed", "full_step"), losses),
            "previous": (("arm", "seed", "full_step"), np.tile([[0.6], [0.1]], (3, 1, 11))),
            "full_unigram_loss": (("arm", "seed"), level),
            "full_uniform_loss": (("arm", "seed"), 1.1 * level),
            "full_bayes_loss": (("arm", "seed"), 0.8 * level),
        },
        {"arm": arms, "seed": [0, 1], "full_step": steps},
    )


def test_the_gap_begins_at_the_better_simple_predictor():
    run = xr.Dataset({"loss": 1.0, "uniform_loss": 1.1, "unigram_loss": 1.2, "bayes_loss": 0.9})
    assert float(gap_closed(run, "loss")) == pytest.approx(0.5)


def test_steps_of_the_minimal_model():
    run = minimal_run()
    closed = minimal_closed(run).sel(world=CHAIN)
    np.testing.assert_allclose(closed.isel(seed=0)[[0, 4, 10]], [0.0, 0.5, 1.0])
    assert first_step(closed >= 0.5, "step").values.tolist() == [40.0, 40.0]
    np.testing.assert_allclose(jump_width(closed, "step"), (60 - 30) / 30)
    assert np.isnan(first_step(closed >= 2.0, "step")).all()
    np.testing.assert_allclose(minimal_delay(run), 40 / 50)
    np.testing.assert_allclose(unigram_distance(run), 0.0)
    assert second_layer_lead(run, 0.1).values.tolist() == [20.0, 20.0]  # steps 10 and 30
    assert second_layer_lead(run, 0.5).values.tolist() == [-10.0, -10.0]  # steps 50 and 40


def test_lags_that_were_found():
    run = minimal_run()
    assert finds_lag(run).values.tolist() == [1.0, 1.0]
    assert finds_parents(run).values.tolist() == [1.0, 0.0]
    assert predicts_lag(run).values.tolist() == [1.0, 0.0]
    run["minimal_lag_weight"] = run.minimal_lag_weight.where(run.seed == 0)  # seed 1 diverged
    assert finds_lag(run).values.tolist() == [1.0, 0.0]


def test_the_gradient_is_compared_in_the_mean_over_seeds():
    run = minimal_run()
    assert gradient_error(run) == pytest.approx(0.2)
    assert gradient_correlation(run) == pytest.approx(np.corrcoef([4, -1, 0, 0], [5, -1, 0, 0])[0, 1])


def test_measures_of_the_full_model():
    run = full_run()
    assert half_step(full_arm(run)).fillna(-1).values.tolist() == [500.0, -1.0]
    assert passed_share(full_arm(run)) == 0.5
    assert plateau_steps(run).values.tolist() == [300.0, 1000.0]  # seed 0: from step 100 to 400
    assert previous_attention(run).values.tolist() == [0.6]
    np.testing.assert_allclose(one_layer_closed(run), 0.0)
    np.testing.assert_allclose(full_delay(run), np.log([500 / 300, 1000 / 300]))
    run["full_loss"][2, 1, -1] = np.nan  # one layer, diverged
    np.testing.assert_array_equal(np.isnan(one_layer_closed(run)), [False, True])


@pytest.mark.parametrize("arm", [0, 1])
def test_a_full_model_that_diverged_is_neither_slow_nor_fast(arm):
    """Also if it had closed half of the gap, or had rested long enough, before it diverged."""
    run = full_run()
    run["full_loss"][arm, 0, -2:] = np.nan
    np.testing.assert_array_equal(np.isnan(full_delay(run)), [True, False])
    if arm == 0:
        assert passed_share(full_arm(run)) == 0.0
        np.testing.assert_array_equal(np.isnan(plateau_steps(run)), [True, False])


def test_a_run_without_a_full_model_or_a_transition_says_so():
    with pytest.raises(NotInRun, match="full model"):
        full_arm(minimal_run())
    run = full_run()
    run["full_loss"] = run.full_loss * 0 + 1.0
    for measure in (previous_attention, full_delay):
        with pytest.raises(NotInRun, match="seed that closes half"):
            measure(run)
