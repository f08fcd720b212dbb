"""What the study `icl-autoregression` measures on its run. A seed of which a layer diverged is NaN."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.study import select


def of_process(run: xr.Dataset, process: str) -> xr.Dataset:
    """Return the arms of a process: unitary, fixed, plain, rotations or haar."""
    return run.isel(arm=np.flatnonzero(run.process.values == process))


def from_formula(run: xr.Dataset, process: str) -> xr.DataArray:
    """Return the largest distance of a final loss from (d − 1)/(T + d − 2), per seed."""
    arms = of_process(run, process)
    return abs(arms.loss.isel(record=-1) - arms.formula).max("arm", skipna=False)


def below_formula(run: xr.Dataset, process: str) -> xr.DataArray:
    """Return by how much the final loss is below (d − 1)/(T + d − 2), the least over arms, per seed."""
    arms = of_process(run, process)
    return (arms.formula - arms.loss.isel(record=-1)).min("arm", skipna=False)


def diagonal_error(run: xr.Dataset, process: str) -> xr.DataArray:
    """Return the largest entry off the diagonal over the largest on it, of A and of B, per seed."""
    arms = of_process(run, process)
    on_diagonal = xr.DataArray(np.eye(run.sizes["row"], dtype=bool), dims=("row", "column"))
    first, second = (
        size.where(~on_diagonal).max(("row", "column")) / size.where(on_diagonal).max(("row", "column"))
        for size in (arms.A_size, arms.B_size)
    )
    return np.maximum(first, second).max("arm", skipna=False)


def step_error(run: xr.Dataset, process: str) -> xr.DataArray:
    """Return the largest |a_i b_i (T + d − 2) − 1| over coordinates and arms, per seed."""
    arms = of_process(run, process)
    relative = arms.product * (arms.length + run.sizes["row"] - 2)
    error = np.hypot(relative.isel(part=0) - 1, relative.isel(part=1))
    return error.max(("row", "arm"), skipna=False)


def beside_best_scalar(run: xr.Dataset) -> xr.DataArray:
    """Return the distance of the final loss from that of the best multiples of the identity, haar, per seed."""
    arm = of_process(run, "haar").isel(arm=0)
    return abs(arm.loss.isel(record=-1) - arm.best_scalar_loss)


def from_searched_formula(run: xr.Dataset, process: str) -> xr.DataArray:
    """Return the distance of the least loss that was found from (d − 1)/(T + d − 2), per seed."""
    return abs(select(run.searched_loss, searched=process) - run.searched_formula)
