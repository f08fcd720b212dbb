"""What the study `even-pairs` measures on its run."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.studies.related.even_pairs_training import RANDOM, ZERO
from joma.theory.even_pairs import phase_boundary

LATE = 10**1.5  # slopes over ln t are taken over the last factor of this size, 1.5 decades
POLARISED = 100.0  # over which ε‖u‖² is compared


def of_task(run: xr.Dataset, task: str, start: str | None = None) -> xr.Dataset:
    """Return the arms of a task, from one kind of start or from all."""
    chosen = run.task == task
    return run.isel(arm=np.flatnonzero(chosen if start is None else chosen & (run.start == start)))


def fastest(run: xr.Dataset, task: str = "pairs") -> xr.Dataset:
    """Return the arm of a task with a random start and the last learning rate, which reaches the latest times."""
    return of_task(run, task, RANDOM).isel(arm=-1)


def late_slope(y: xr.DataArray, dim: str) -> xr.DataArray:
    """Return dy/d ln t by least squares over the records of the last 1.5 decades of time or steps."""
    late = y.isel({dim: np.flatnonzero(y[dim].values >= y[dim].values[-1] / LATE)})
    log_time = xr.DataArray(np.log(late[dim].values), dims=dim)
    centred = log_time - log_time.mean(dim)
    return (centred * late).sum(dim, skipna=False) / (centred**2).sum(dim)


def log_growth(run: xr.Dataset) -> xr.DataArray:
    """Return d‖u‖/d ln t over ‖û‖, per seed."""
    arm = fastest(run)
    return late_slope(arm.u_norm, "step") / arm.svm_norm


def loss_power(run: xr.Dataset) -> xr.DataArray:
    """Return d ln loss/d ln t, per seed."""
    return late_slope(np.log(fastest(run).loss), "step")


def attention_growth(run: xr.Dataset) -> xr.DataArray:
    """Return d‖W‖/d ln t, per seed."""
    return late_slope(fastest(run).w_norm, "step")


def boundary(run: xr.Dataset) -> xr.DataArray:
    """Return the time rate × step at which all margins of even pairs first are positive, [arm, seed].

    It is infinite where they never are, and NaN for a layer that diverged, at whichever step.
    """
    pairs = of_task(run, "pairs")
    times = [
        [_boundary(float(arm.rate) * run.step.values, margin) for margin in arm.least_margin.transpose("seed", "step")]
        for arm in (pairs.isel(arm=index) for index in range(pairs.sizes["arm"]))
    ]
    return xr.DataArray(np.array(times), {"arm": pairs.arm, "seed": run.seed}, ("arm", "seed"))


def _boundary(times: np.ndarray, margin: xr.DataArray) -> float:
    """Return the time at which the least margin of one layer first is positive; NaN if it diverged."""
    return phase_boundary(times, margin.values) if bool(margin.notnull().all()) else np.nan


def boundary_loss(run: xr.Dataset) -> xr.DataArray:
    """Return the loss at the boundary over that at the start, the least over arms, per seed; NaN if not reached."""
    pairs, times = of_task(run, "pairs"), boundary(run)
    shares = np.full(times.shape, np.nan)
    for (arm, seed), time in np.ndenumerate(times.values):
        if np.isfinite(time):
            loss = pairs.loss.isel(arm=arm, seed=seed).values
            shares[arm, seed] = np.interp(time, float(pairs.rate[arm]) * run.step.values, loss) / loss[0]
    return times.copy(data=shares).min("arm", skipna=False)


def boundary_spread(run: xr.Dataset) -> xr.DataArray:
    """Return the latest boundary over the earliest one, less 1, over rates and starts, per seed.

    It is NaN if a layer diverged.
    """
    times = boundary(run)
    return times.max("arm", skipna=False) / times.min("arm", skipna=False) - 1


def distance_from_flow(run: xr.Dataset) -> float:
    """Return the largest |‖u‖ − flow's|/flow's from zero at the smallest rate, over steps from time 1 on.

    The layers of all seeds are the same; NaN if the flow was not solved at the trained length.
    """
    if int(run.trained_length) not in run.max_length.values:
        return np.nan
    arm = of_task(run, "pairs", ZERO)
    arm = arm.isel(arm=int(np.argmin(arm.rate.values)), seed=0)
    times = float(arm.rate) * run.step.values
    flow = np.interp(times, run.time.values, run.flow_u_norm.sel(max_length=int(run.trained_length)).values)
    late = times >= 1.0
    return float(abs(arm.u_norm.values / np.where(late, flow, 1.0) - 1)[late].max())


def polarised_change(run: xr.Dataset) -> float:
    """Return by how much ε‖u‖² of even pairs changes over the last two decades of the flow; largest over worlds."""
    product = run.flow_positive_error * run.flow_u_norm**2
    last = product.isel(time=np.flatnonzero(run.time >= run.time[-1] / POLARISED))
    return float((last.max("time") / last.min("time") - 1).max())


def square_growth(run: xr.Dataset) -> float:
    """Return by which factor ‖u‖² grows over the last two decades of the flow; least over worlds."""
    late = run.time.values >= run.time.values[-1] / POLARISED
    before = int(np.argmax(late))
    square = run.flow_u_norm**2
    return float((square.isel(time=-1) / square.isel(time=before)).min())
