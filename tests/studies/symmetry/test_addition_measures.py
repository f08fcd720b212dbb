from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray as xr

from addition_runs import SINGLE_LAYER, ideal_run
from joma.studies.symmetry import addition_measures as measures
from joma.study import NotInRun


def test_a_diverged_seed_has_accuracy_0():
    run = ideal_run()
    run.accuracy.loc[{"arm": "none causal", "seed": 1, "step": slice(500, None)}] = np.nan
    np.testing.assert_array_equal(measures.final_accuracy(run, "none causal"), [0.9999, 0.0, 0.9999, 0.9999, 0.9999])
    np.testing.assert_allclose(measures.accuracy(run, "none causal")[1, :3], [0.0, 0.9999 / 5, 0.0])


def test_the_ceiling_and_the_sampling_error_are_subtracted():
    run = ideal_run(accuracy={"none full": 0.5})
    np.testing.assert_allclose(measures.above_ceiling(run, "none full"), 0.5 - 0.053188 - 0.01)


def test_the_least_encoding_above_the_ceiling_is_judged_seed_by_seed():
    run = ideal_run(accuracy={"learned full": 0.9, "sinusoidal full": 0.8})
    run.accuracy.loc[{"arm": "rotary full", "seed": 2, "step": 3000}] = 0.3
    expected = np.array([0.8, 0.8, 0.3, 0.8, 0.8]) - 0.053188 - 0.01
    np.testing.assert_allclose(measures.least_above_ceiling(run), expected)
    with pytest.raises(NotInRun, match="rotary full"):
        measures.least_above_ceiling(run.drop_sel(arm="rotary full"))


def test_mean_accuracy_is_over_steps_not_over_records():
    curve = xr.DataArray([[[0.0, 0.0, 1.0]]], dims=("arm", "seed", "step"), coords={"step": [0, 8, 10], "arm": ["x"]})
    assert float(measures.mean_accuracy(xr.Dataset({"accuracy": curve}), "x")[0]) == pytest.approx(0.1)


def test_an_arm_that_was_not_trained_is_not_in_the_run(addition_run):
    with pytest.raises(NotInRun, match="rotary full"):
        measures.final_accuracy(addition_run, "rotary full")
    with pytest.raises(NotInRun, match="both all"):
        measures.own_share_drop(addition_run.sel(arm=["none causal"]), "cka")


def test_slowdowns_are_differences_of_mean_accuracy():
    run = ideal_run(accuracy={name: 0.5 if name.startswith("both") else 1.0 for name in SINGLE_LAYER})
    share = float(measures.mean_accuracy(ideal_run(accuracy={"none full": 1.0}), "none full")[0])  # of an arm at 1
    np.testing.assert_allclose(measures.slowdown_in_one_layer(run), share * (0.9999 - 2.5 / 3), rtol=1e-9)
    np.testing.assert_allclose(measures.slowdown(run, "mlp"), share * (0.9999 - 0.02), rtol=1e-9)


def test_steps_to_a_level_are_those_of_the_first_record_or_nan():
    steps = [0, 10, 20, 30]
    curves = xr.DataArray([[0, 0.99, 0.5, 1], [0, 0.1, 0.98, 0.9]], dims=("seed", "step"), coords={"step": steps})
    np.testing.assert_array_equal(measures.steps_to(curves, 0.99), [10, np.nan])


def test_four_in_five_seeds_reach_the_second_least_of_five():
    assert measures.reached_by_four_in_five(xr.DataArray([0.9, 1.0, 0.1, 0.8, 0.95])) == 0.8
    assert measures.reached_by_four_in_five(xr.DataArray([0.7, 0.6, 0.5])) == 0.5


def test_both_orders_of_a_pair_count_once_in_the_sampling_error():
    pairs = torch.tensor([[1, 2], [2, 1], [3, 3], [4, 5]])
    assert measures.sampling_error(0.25, pairs) == pytest.approx(math.sqrt(0.25 * 0.75 / 3))


def test_the_readout_gain_is_that_of_the_best_layer_at_the_end():
    run = ideal_run(gain={"learned full": 0.25})
    np.testing.assert_allclose(measures.readout_gain(run, "learned full"), 0.25)
    run.decodability.loc[{"arm": "learned full", "seed": 2, "step": 3000}] = np.nan  # diverged
    np.testing.assert_allclose(measures.readout_gain(run, "learned full"), [0.25, 0.25, np.nan, 0.25, 0.25])


def test_own_shares_are_over_pairs_of_different_levels():
    run = ideal_run()
    run.own[{"arm": 0}] = np.triu(np.full((7, 7), 0.75), 1) + np.tril(np.full((7, 7), 9.0))
    np.testing.assert_allclose(measures.own_share(run, "none causal", "cka"), 0.75)
    np.testing.assert_allclose(measures.own_share_drop(run, "cka"), 0.35)


def test_chance_is_one_location_in_all_of_them():
    run = ideal_run(own={"none causal": 0.5})
    np.testing.assert_allclose(measures.own_share_above_chance(run, "cka"), 0.5 - 1 / 11)


def test_the_drop_of_the_own_share_is_the_least_over_what_is_removed():
    run = ideal_run(own={"attention all": 0.2, "mlp all": 0.7, "both all": 0.5})
    np.testing.assert_allclose(measures.own_share_drop(run, "correlation"), 0.3)
    np.testing.assert_allclose(measures.own_share_drop(run.drop_sel(arm="mlp all"), "correlation"), 0.5)


def test_arms_without_residuals_are_those_that_were_trained(addition_run):
    assert measures.without_residuals(addition_run) == ["attention all", "both all"]


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_the_ceiling_is_that_of_the_digits_of_the_run(digits):
    run = ideal_run().isel(location=slice(3 * digits + 2))
    assert measures.digits_of(run) == digits
    assert float(measures.ceiling_at(run, digits)) == 0.053188
    with pytest.raises(NotInRun, match=f"{digits + 1} digits"):
        measures.ceiling_at(run, digits + 1)
