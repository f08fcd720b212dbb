"""Rank correlation over one dimension of a trajectory."""

from __future__ import annotations

import numpy as np
import xarray as xr
from scipy.stats import rankdata


def rank_correlation(x: xr.DataArray, y: xr.DataArray, dim: str) -> xr.DataArray:
    """Return Spearman's rank correlation of `x` and `y` over `dim`; ties share their mean rank.

        ρ = Σ_i (r_i − r̄)(s_i − s̄) / √(Σ_i (r_i − r̄)² Σ_i (s_i − s̄)²),    r, s: ranks of x, y

    0 where `x` or `y` is constant, and NaN where one of them has a NaN. `scipy.stats.spearmanr` returns
    0.9999999999999999 for five values in the same order; here that is exactly 1, which claims can ask for.

    >>> x, y = xr.DataArray([1.0, 2.0, 3.0], dims="pair"), xr.DataArray([[9.0, 5.0, 4.0]], dims=("seed", "pair"))
    >>> rank_correlation(x, y, "pair").values
    array([-1.])
    """
    first, second = (_centred_ranks(values, dim) for values in (x, y))
    product, *squares = (term.sum(dim, skipna=False) for term in (first * second, first**2, second**2))
    norm = xr.apply_ufunc(np.sqrt, squares[0] * squares[1])
    return product / norm.where(norm != 0, np.inf)


def _centred_ranks(values: xr.DataArray, dim: str) -> xr.DataArray:
    ranks = xr.apply_ufunc(rankdata, values, input_core_dims=[[dim]], output_core_dims=[[dim]], kwargs={"axis": -1})
    return ranks - ranks.mean(dim)
