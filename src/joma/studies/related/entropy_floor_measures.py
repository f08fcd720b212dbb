"""What the study `entropy-floor` measures on its run. A seed of which a model diverged is NaN, at whichever step."""

from __future__ import annotations

import numpy as np
import xarray as xr
from scipy.stats import rankdata

PLAIN, REPARAM = "plain", "σReparam"


def row_difference(run: xr.Dataset) -> float:
    """Return the largest relative difference of the least entropy that all searches reach from the floor of a row."""
    return float(abs(run.row_lowest.min("seed") / run.row_floor - 1).max())


def lower_peaks(run: xr.Dataset) -> float:
    """Return by how much the least entropy of all k-peak rows exceeds the floor, relative, least over σ and T."""
    return float((run.peak_lowest / run.row_floor - 1).min())


def below_mean_floor(run: xr.Dataset) -> xr.DataArray:
    """Return the least mean entropy of a matrix less its bound, least over σ and T, per seed."""
    return (run.matrix_lowest - run.mean_floor).min(("matrix_size", "spectral_norm"))


def below_identity(run: xr.Dataset) -> xr.DataArray:
    """Return the least mean entropy of a matrix less that of σI, least over σ and T, per seed."""
    return (run.matrix_lowest - run.identity).min(("matrix_size", "spectral_norm"))


def converged(run: xr.Dataset) -> xr.DataArray:
    """Return the largest projected gradient of a best search, per seed."""
    return run.matrix_gradient.max(("matrix_size", "spectral_norm"))


def below_floor(run: xr.Dataset) -> xr.DataArray:
    """Return the least entropy of a row less its floor, over rows, layers, steps, rates and arms, per seed."""
    return run.slack.min(("arm", "rate", "step", "layer"), skipna=False)


def below_bound(run: xr.Dataset) -> xr.DataArray:
    """Return the least bound by weights and inputs less the norm of a row's logits, per seed."""
    return run.bound_slack.min(("arm", "rate", "step", "layer"), skipna=False)


def least_entropy(run: xr.Dataset) -> xr.DataArray:
    """Return the least entropy over training of the mean over layers, [arm, rate, seed]."""
    return run.entropy.mean("layer", skipna=False).min("step", skipna=False)


def collapse(run: xr.Dataset) -> xr.DataArray:
    """Return the plain model's least entropy at the smallest rate less that at the largest, per seed."""
    least = least_entropy(run).sel(arm=PLAIN, drop=True).sortby("rate")
    return least.isel(rate=0, drop=True) - least.isel(rate=-1, drop=True)


def loss_gain(run: xr.Dataset) -> xr.DataArray:
    """Return the training loss without σReparam less that with it, largest rate, second half of steps, per seed."""
    late = run.loss.sel(step=run.step >= run.step[-1] / 2).mean("step", skipna=False)
    late = late.sel(rate=run.rate.max(), drop=True)
    return late.sel(arm=PLAIN, drop=True) - late.sel(arm=REPARAM, drop=True)


def entropy_gain(run: xr.Dataset, rate: xr.DataArray) -> xr.DataArray:
    """Return the least entropy with σReparam less that without at a learning rate, per seed."""
    least = least_entropy(run).sel(rate=rate, drop=True)
    return least.sel(arm=REPARAM, drop=True) - least.sel(arm=PLAIN, drop=True)


def norm_excess(run: xr.Dataset) -> xr.DataArray:
    """Return the largest norm of the logits without σReparam over that with it, at the largest rate, per seed."""
    norm = run.logit_norm.sel(rate=run.rate.max(), drop=True)
    largest = norm.mean("layer", skipna=False).max("step", skipna=False)
    return largest.sel(arm=PLAIN, drop=True) / largest.sel(arm=REPARAM, drop=True)


def floor_correlation(run: xr.Dataset) -> xr.DataArray:
    """Return the rank correlation over steps of entropy and floor, mean over layers, rates and arms, per seed."""
    return _rank_correlation(run.entropy, run.floor).mean(("arm", "rate", "layer"), skipna=False)


def weight_correlation(run: xr.Dataset) -> xr.DataArray:
    """Return the rank correlation over steps of entropy and minus ‖W_Q W_Kᵀ‖, mean over all else, per seed."""
    return _rank_correlation(run.entropy, -run.weight_norm).mean(("arm", "rate", "layer"), skipna=False)


def _rank_correlation(first: xr.DataArray, second: xr.DataArray) -> xr.DataArray:
    """Return Spearman's rank correlation along `step`."""
    ranks = [
        xr.apply_ufunc(_centred_ranks, values, input_core_dims=[["step"]], output_core_dims=[["step"]])
        for values in (first, second)
    ]
    norms = [np.sqrt((rank**2).sum("step", skipna=False)) for rank in ranks]
    return (ranks[0] * ranks[1]).sum("step", skipna=False) / (norms[0] * norms[1])


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    ranks = np.asarray(rankdata(values, axis=-1))
    return ranks - ranks.mean(axis=-1, keepdims=True)
