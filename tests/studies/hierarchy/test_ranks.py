"""Rank correlation against SciPy's, and where SciPy's is not defined."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import spearmanr

from joma.studies.hierarchy.ranks import rank_correlation


def correlate(x, y) -> float:
    return float(rank_correlation(xr.DataArray(x, dims="pair"), xr.DataArray(y, dims="pair"), "pair"))


@given(hnp.arrays(np.float64, (2, 12), elements=st.integers(-4, 4).map(float)))
def test_rank_correlation_is_spearmans_with_ties(values):
    if np.ptp(values, axis=1).min() == 0:
        assert correlate(*values) == 0
    else:
        assert correlate(*values) == pytest.approx(spearmanr(*values)[0], abs=1e-12)


@pytest.mark.parametrize("count", range(2, 60))
def test_the_same_order_correlates_to_exactly_one(count):
    values = np.random.default_rng(count).permutation(count)
    assert correlate(values, np.exp(values / count)) == 1
    assert correlate(values, -values) == -1


def test_it_is_taken_over_one_dimension_and_nan_stays_in_its_row():
    x = xr.DataArray([1.0, 2.0, 3.0], dims="rank")
    y = xr.DataArray([[2.0, 5.0, 9.0], [2.0, np.nan, 9.0], [9.0, 5.0, 2.0]], dims=("seed", "rank"))
    np.testing.assert_array_equal(rank_correlation(x, y, "rank"), [1, np.nan, -1])
    np.testing.assert_array_equal(rank_correlation(y.transpose("rank", "seed"), x, "rank"), [1, np.nan, -1])
