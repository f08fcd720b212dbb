"""The measures of `hierarchy-order` on curves of known order and time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr

from joma.studies.hierarchy import association
from joma.studies.hierarchy.ranks import rank_correlation


def curves(*values: list[float], steps: list[int]) -> xr.DataArray:
    return xr.DataArray(list(values), dims=("pair", "step"), coords={"step": steps})


def test_a_doubling_time_is_the_first_step_at_ln_2_and_the_last_step_if_there_is_none():
    low, high = 0.69, 0.70
    gain = curves([0, low, high, 2], [0, high, low, 0], [0, -1, -2, -3], steps=[0, 3, 10, 50])
    np.testing.assert_array_equal(association.doubling_time(gain), [10, 3, 50])


def test_a_doubling_time_is_nan_where_a_gain_is_nan_at_any_step():
    gain = curves([0, 1, math.nan], [0, 1, 1], steps=[0, 3, 10])
    np.testing.assert_array_equal(association.doubling_time(gain), [math.nan, 3])


def test_the_average_gain_is_the_area_under_the_curve():
    gain = curves([0, 1, 1], [0, 2, 0], steps=[0, 10, 40])
    np.testing.assert_allclose(association.average_gain(gain), [35 / 40, 1.0], rtol=1e-12)


def test_the_mean_layer_is_weighted_by_gains_that_are_positive():
    gain = xr.DataArray(
        [[0, 0, 2.0], [1, 1, 1.0], [3, -9, 1.0], [-1, 0, -1.0]], dims=("pair", "layer"), coords={"layer": [1, 2, 3]}
    )
    np.testing.assert_allclose(association.mean_layer(gain), [3, 2, 1.5, np.nan], rtol=1e-12)


def test_ties_allow_a_rank_correlation_of_at_most_91_hundredths(ideal):
    height = ideal.height.sel(tree="deep")
    perfect = -(height + xr.DataArray(np.linspace(0, 0.5, height.size), dims="pair"))
    correlation = float(rank_correlation(ideal.cooccurrence.sel(tree="deep"), perfect, "pair"))
    assert correlation == pytest.approx(0.909, abs=5e-4)


def test_means_by_height_follow_the_pairs_of_that_height():
    values = xr.DataArray([[1.0, 2.0, 6.0], [1.0, np.nan, 6.0]], dims=("seed", "pair"))
    means = association.mean_by_height(values, xr.DataArray([3, 1, 1], dims="pair"))
    assert means.level.values.tolist() == [1, 3]
    np.testing.assert_array_equal(means.transpose("seed", "level"), [[4, 1], [np.nan, 1]])


def test_known_orders_and_times_are_measured(ideal):
    times = association.doubling_time(association.deep_gain(ideal, 1))
    by_height = association.mean_by_height(times, ideal.height.sel(tree="deep"))
    np.testing.assert_array_equal(by_height.sel(seed=0), [10, 30, 50, 100])
    for layers in (1, 3):
        np.testing.assert_allclose(association.order_of_times(ideal, layers), 1, rtol=1e-12)
        np.testing.assert_allclose(association.order_of_gains(ideal, layers), 1, rtol=1e-12)
        # Cousins double at 30, siblings at 10, and the other pairs, at 50 and 100, later than 50 in the mean.
        np.testing.assert_allclose(association.least_delay(ideal, layers), 20)
        np.testing.assert_allclose(association.final_high_gain(ideal, layers), 100 * math.log(2) / 50, rtol=1e-6)
        # A straight rise has half its end as its average: 5 ln 2 and 5/3 ln 2, ln 2, and −0.5 for the root.
        np.testing.assert_allclose(association.least_fall(ideal, layers), 2 / 3 * math.log(2), rtol=1e-6)


def test_known_delays_and_layers_of_cousins_are_measured(ideal):
    for tree in ("shallow", "matched"):
        np.testing.assert_array_equal(association.delay_of_cousins(ideal, tree), 20)
        np.testing.assert_allclose(association.lift_of_cousins(ideal, tree), 2, rtol=1e-12)
    np.testing.assert_allclose(association.lift_above_siblings(ideal), 2, rtol=1e-12)
    # The pairs of the root lose in layer 3 alone: beyond them the siblings gain 30 ln 2 in layer 1 and 3 in layer 3.
    siblings = (30 * math.log(2) + 3 * 3) / (30 * math.log(2) + 3)
    lift = association.lift_of_cousins(ideal, "shallow", association.gain_layer_beyond_root)
    np.testing.assert_allclose(lift, 3 - siblings, rtol=1e-6)


def test_the_marginal_difference_is_the_largest_over_tokens_and_trees(ideal):
    assert association.marginal_difference(ideal) <= 1e-12
    shifted = ideal.assign(marginal=ideal.marginal + 0.25 * ((ideal.tree == "deep") & (ideal["token"] == 3)))
    assert association.marginal_difference(shifted) == pytest.approx(0.25, abs=1e-12)
