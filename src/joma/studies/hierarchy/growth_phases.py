"""Measures of `scan-snap`: how fast logits grow, when their growth slows down, and in which order tokens gain."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.studies.hierarchy.ranks import rank_correlation
from joma.study import NotInRun

DECADE = 10.0  # the late phase is the last decade of the training
SCAN = (0.1, 0.25)  # the early phase, in units of the time of the transition
FAST = 100.0  # from this ratio of the rates on, the decoder counts as much faster than attention


def winning_logits(run: xr.Dataset, name: str = "logit") -> xr.DataArray:
    """Return the logit of each class's most frequent distinct token, averaged over classes: [seed, arm, step].

    A seed that diverged is NaN at all times.
    """
    curve = run[name].isel(rank=0).mean("label", skipna=False)
    return curve.where(curve.notnull().all("step"))


def local_exponent(curve: xr.DataArray) -> xr.DataArray:
    """Return the local power of t, d ln z/d ln t, between neighbouring records; NaN where z has not moved yet.

    >>> t = xr.DataArray([1.0, 10.0, 100.0], dims="step", coords={"step": [1, 10, 100]})
    >>> local_exponent(t**2).values.round(9)
    array([2., 2.])
    """
    curve = curve.sel(step=curve.step > 0)
    log_time = np.log(curve.step.values)
    growth = xr.apply_ufunc(np.log, curve.where(curve > 0)).diff("step")
    exponent = growth / xr.DataArray(np.diff(log_time), dims="step")
    return exponent.assign_coords(step=np.exp((log_time[1:] + log_time[:-1]) / 2))


def mean_exponent(curve: xr.DataArray, low: float, high: float) -> xr.DataArray:
    """Return the power of t that joins the first and last record in [low, high].

    `NotInRun` if fewer than two records lie there.
    """
    part = curve.sel(step=slice(low, high))
    if part.sizes["step"] < 2:
        raise NotInRun(f"records from {low:g} to {high:g}")
    first, last = part.isel(step=0), part.isel(step=-1)
    return np.log(last / first) / np.log(part.step.values[-1] / part.step.values[0])


def slowing_time(curve: xr.DataArray) -> xr.DataArray:
    """Return the time at which the local power of t first falls to 1, interpolated in ln t; NaN if it never does."""
    exponent = local_exponent(curve)
    log_time = np.log(exponent.step.values)

    def first_crossing(row: np.ndarray) -> float:
        crossings = np.flatnonzero((row[1:] <= 1) & (row[:-1] > 1))
        if not crossings.size:
            return np.nan
        before = crossings[0]
        around = [before + 1, before]  # `np.interp` needs rising abscissae, and the power falls
        return float(np.exp(np.interp(1.0, row[around], log_time[around])))

    return xr.apply_ufunc(first_crossing, exponent, input_core_dims=[["step"]], vectorize=True)


def straightness(curve: xr.DataArray) -> xr.DataArray:
    """Return the residual of the best z = a + b ln t over that of z = a + b t, last decade: below 1 for a logarithm."""
    late = _last_decade(curve)
    time = late.step.values.astype(float)
    return _residual(np.log(time), late) / _residual(time, late)


def unevenness(curve: xr.DataArray) -> xr.DataArray:
    """Return the greatest over the least growth per e-fold of time, dz/d ln t, last decade: 1 for a logarithm."""
    late = _last_decade(curve)
    rate = late.diff("step") / xr.DataArray(np.diff(np.log(late.step.values)), dims="step")
    return rate.max("step") / rate.min("step")


def _last_decade(curve: xr.DataArray) -> xr.DataArray:
    return curve.sel(step=curve.step >= curve.step[-1] / DECADE)


def _residual(abscissa: np.ndarray, curve: xr.DataArray) -> xr.DataArray:
    """Return the norm of the residual of a curve from its best straight line over `abscissa`."""
    basis, _ = np.linalg.qr(np.stack([np.ones_like(abscissa), abscissa], axis=1))

    def remainder(row: np.ndarray) -> np.ndarray:
        return np.asarray(np.linalg.norm(row - (row @ basis) @ basis.T, axis=-1))

    return xr.apply_ufunc(remainder, curve, input_core_dims=[["step"]])


def late_exponent(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the power of t over the last decade of training, per seed."""
    end = float(run.step[-1])
    return mean_exponent(winning_logits(run).sel(arm=arm), end / DECADE, end)


def scan_exponent(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the power of t in the scan phase, per seed."""
    transition = float(run.transition.sel(arm=arm))
    return mean_exponent(winning_logits(run).sel(arm=arm), SCAN[0] * transition, SCAN[1] * transition)


def late_straightness(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the `straightness` of the winning logits, per seed."""
    return straightness(winning_logits(run).sel(arm=arm))


def late_unevenness(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the `unevenness` of the winning logits, per seed."""
    return unevenness(winning_logits(run).sel(arm=arm))


def final_order(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the final rank correlation of logit and co-occurrence over distinct tokens, least class, per seed."""
    logit = run.logit.sel(arm=arm).isel(step=-1)
    return rank_correlation(logit, run.cooccurrence, "rank").min("label", skipna=False)


def gain_error(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the `relative_error` of the relative gain at the end, per seed."""
    return relative_error(run.logit.sel(arm=arm).isel(step=-1), run.gain.sel(arm=arm))


def relative_error(logit: xr.DataArray, predicted: xr.DataArray) -> xr.DataArray:
    """Return ‖z − predicted‖/‖z‖ over the distinct tokens that are predicted, all but the most frequent, per seed."""
    logit, predicted = (values.isel(rank=slice(1, None)) for values in (logit, predicted))
    error, size = ((values**2).sum(("label", "rank"), skipna=False) for values in (logit - predicted, logit))
    return (error / size) ** 0.5


def flow_distance(run: xr.Dataset) -> xr.DataArray:
    """Return the largest |z − flow| over the arm's largest |flow|, over arms, times and distinct tokens, per seed."""
    others = ("step", "label", "rank")
    distance = abs(run.logit - run.logit_flow).max(others, skipna=False) / abs(run.logit_flow).max(others)
    return distance.max("arm", skipna=False)


def common_rise(run: xr.Dataset) -> xr.DataArray:
    """Return the largest rise of a class's attention to common tokens between records, faster decoder, per seed."""
    return run.common.sel(arm="faster").diff("step").max(("step", "label"), skipna=False)


def common_left(run: xr.Dataset) -> xr.DataArray:
    """Return the final over the initial attention to common tokens, largest over classes and arms, per seed.

    The arm with rare common tokens is left out: attention hardly moves there.
    """
    common = run.common.sel(arm=["faster", "equal", "slower"])
    return (common.isel(step=-1) / common.isel(step=0)).max(("label", "arm"), skipna=False)


def distinct_growth(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the least growth of any distinct logit between two records, per seed."""
    return run.logit.sel(arm=arm).diff("step").min(("step", "label", "rank"), skipna=False)


def slowing_over_transition(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the time at which growth slows down over the paper's transition time, per seed."""
    return (slowing_time(winning_logits(run)) / run.transition).sel(arm=arm)


def equal_over_faster(run: xr.Dataset) -> xr.DataArray:
    """Return how many times later growth slows down with the equal decoder than with the faster one, per seed."""
    time = slowing_time(winning_logits(run))
    return time.sel(arm="equal") / time.sel(arm="faster")


def least_slower_over_faster(run: xr.Dataset) -> xr.DataArray:
    """Return how many times later growth slows down with the next slower decoder, least over the arms, per seed."""
    time = slowing_time(winning_logits(run))
    ratios = [time.sel(arm="equal") / time.sel(arm="faster"), time.sel(arm="slower") / time.sel(arm="equal")]
    return xr.concat(ratios, "pair").min("pair", skipna=False)


def rate_exponent(run: xr.Dataset) -> xr.DataArray:
    """Return the power of the decoder's rate by which the flow's slowing time scales, from `FAST` on, per seed."""
    fast = run.ratio_slowing.sel(ratio=slice(FAST, None))  # in units of the transition's time, which goes as 1/η
    log_ratio = np.log(fast.ratio.values)
    power = xr.apply_ufunc(
        lambda row: np.polyfit(log_ratio, np.log(row), 1)[0], fast, input_core_dims=[["ratio"]], vectorize=True
    )
    return power - 1
