"""Curves of many models in one Dataset: each has its own steps and its own number of seeds.

A curve is a Dataset with `axes_entropy`, `axes_sink` and `axes_rank` over `seed` and `axes_step`, as the studies record
it. Curves are stacked over their sources and padded with NaN to the longest.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr

from joma.studies.common_axes import NAMES, STEP

STEPS = "steps"  # the variable that holds the steps of each source
Curves = Mapping[str, xr.Dataset]


def stack(curves: Curves, prefix: str, *, member: str) -> xr.Dataset:
    """Return curves as one Dataset over `{prefix}_source`, `member` and `{prefix}_record`, padded with NaN.

    Args:
        curves: by the name of their source.
        prefix: of all names in the Dataset.
        member: the name of the axis of the seeds. If it is "seed" all curves have the same ones, which label it;
            otherwise members are numbered.

    >>> curve = xr.Dataset({name: (("seed", "axes_step"), [[1.0, 0.5]]) for name in NAMES}, {"axes_step": [0, 9]})
    >>> stacked = stack({"a": curve, "b": curve.isel(axes_step=[0])}, "stored", member="member")
    >>> stacked.stored_entropy.values
    array([[[1. , 0.5]],
           [[1. , nan]]])
    """
    members, records = (max(curve.sizes[dim] for curve in curves.values()) for dim in ("seed", STEP))
    source, record = f"{prefix}_source", f"{prefix}_record"
    steps = np.stack([_padded(curve[STEP].values, (records,)) for curve in curves.values()])
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {f"{prefix}_{STEPS}": ((source, record), steps)}
    for name in NAMES:
        rows = [_padded(curve[name].transpose("seed", STEP).values, (members, records)) for curve in curves.values()]
        variables[_variable(prefix, name)] = ((source, member, record), np.stack(rows))
    coords: dict[str, list] = {source: list(curves)}
    if member == "seed":
        coords["seed"] = next(iter(curves.values())).seed.values.tolist()
    return xr.Dataset(variables, coords)


def split(run: xr.Dataset, prefix: str, *, member: str) -> dict[str, xr.Dataset]:
    """Return the curves that `stack` has put together; seeds whose entropy is not finite throughout are left out.

    A source without any finite seed is left out too.
    """
    curves = {}
    for name in run[f"{prefix}_source"].values.tolist() if f"{prefix}_source" in run else ():
        part = run.sel({f"{prefix}_source": name})
        steps = part[f"{prefix}_{STEPS}"].values
        present = np.isfinite(steps)
        values = {axis: part[_variable(prefix, axis)].transpose(member, ...).values[:, present] for axis in NAMES}
        finite = np.isfinite(values[NAMES[0]]).all(axis=1)
        if finite.any():
            variables = {axis: (("seed", STEP), array[finite].astype(np.float64)) for axis, array in values.items()}
            curves[name] = xr.Dataset(variables, {STEP: steps[present]})
    return curves


def _variable(prefix: str, name: str) -> str:
    return f"{prefix}_{name.removeprefix('axes_')}"


def _padded(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array enlarged to a shape, NaN where there was nothing."""
    enlarged = np.full(shape, np.nan)
    enlarged[tuple(slice(size) for size in values.shape)] = values
    return enlarged
