"""What the study `rank-collapse` measures on its run."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.study import NotInRun, select

SURVIVED = -1.0  # log₁₀ of a root mean square residual that has not collapsed; inputs have 0


def decade_slope(run: xr.Dataset) -> xr.DataArray:
    """Return the slope of the residual out over the residual in, logarithms, between the two smallest inputs."""
    first, second = np.sort(run["size"].values)[:2]
    ratio = run.log10_output.sel(size=second, drop=True) - run.log10_output.sel(size=first, drop=True)
    return ratio / np.log10(second / first)


def leading_error(run: xr.Dataset) -> xr.DataArray:
    """Return the relative error of the leading term at size 0.001, per seed."""
    return select(run.error, size=1e-3)


def error_slope(run: xr.Dataset) -> xr.DataArray:
    """Return the slope of the leading term's error over the size of the input, logarithms, from 0.01 to 0.001."""
    return np.log10(select(run.error, size=1e-2) / select(run.error, size=1e-3))


def order(run: xr.Dataset, arm: str, layer: int) -> xr.DataArray:
    """Return ln r_l / ln r_{l−1} of the root mean square residual of an arm, per seed."""
    logs = run.log10_rms.sel(arm=arm, drop=True)
    return select(logs, layer=layer) / select(logs, layer=layer - 1)


def median_order(run: xr.Dataset, arm: str) -> float:
    """Return the median over seeds of the order at the last layer."""
    return float(order(run, arm, int(run.layer[-1])).median())


def residual_ratio(run: xr.Dataset, arm: str, kind: str, layer: int) -> xr.DataArray:
    """Return an arm's residual after a layer over that of the input, `rms` or `relative` to the tokens, per seed."""
    logs = run[f"log10_{kind}"].sel(arm=arm, drop=True)
    return 10 ** (select(logs, layer=layer) - select(logs, layer=0))


def bound_ratio(run: xr.Dataset) -> xr.DataArray:
    """Return the largest ratio of a diameter to its bound, over layers and arms, per seed."""
    return run.bound_ratio.max(("arm", "depth"))


def paper_ratio(run: xr.Dataset) -> xr.DataArray:
    """Return the largest ratio of one layer's residual to the paper's bound, over sizes, per seed."""
    return run.paper_ratio.max("size")


def survivors(run: xr.Dataset, scale: float) -> xr.DataArray:
    """Return the share of stacks with these scores that have not collapsed, per seed."""
    if scale not in run.score_scale.values:
        raise NotInRun(f"score scale {scale:g}")
    return (run.log10_scored.sel(score_scale=scale, drop=True) > SURVIVED).mean("draw")
