"""What the study `winner` measures on its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from scipy.special import erf

from joma.studies.theorems import single_unit

DISTINCT, COMMON = slice(0, 10), slice(10, 20)  # Figure 3's tokens


def is_winner(run: xr.Dataset) -> xr.DataArray:
    """Return whether a token has the largest |Δ| of its seed."""
    return abs(run.salience) == abs(run.salience).max("token")


def distance(run: xr.Dataset, name: str) -> xr.DataArray:
    """Return the largest |v − flow| / (1 + |flow|) over times, per seed and token; NaN if the seed diverged."""
    return single_unit.distance(run[name], run.integrated).max("time", skipna=False)


def of_others(run: xr.Dataset, name: str) -> xr.DataArray:
    """Return the largest distance of a token that does not win, per seed."""
    return distance(run, name).where(~is_winner(run), 0.0).max("token", skipna=False)


def of_winner(run: xr.Dataset, name: str) -> float:
    """Return the largest distance of a winner: one number, as the winners of all seeds have the same salience."""
    return float(distance(run, name).where(is_winner(run), 0.0).max(skipna=False))


def ratio_spread(run: xr.Dataset, divisor: float) -> xr.DataArray:
    """Return by how much erf(v/divisor)/Δ differs between tokens, largest over smallest less 1, per seed and time."""
    ratio = erf(run.integrated.isel(time=slice(1, None)) / divisor) / run.salience
    return ratio.max("token") / ratio.min("token") - 1


def takes_all(run: xr.Dataset) -> xr.DataArray:
    """Return 1 where the trained block's largest |v| is at the largest |Δ|, else 0, per seed; NaN if it diverged."""
    return _is_at_largest(run.trained.isel(time=-1), run.salience, "token")


def losers(run: xr.Dataset) -> xr.DataArray:
    """Return the largest distance of a losing component from its closed-form limit before the blow-up, per seed."""
    return abs(run.late - run.limit).where(np.isfinite(run.limit)).max("token")


def figure_3_winners(run: xr.Dataset) -> xr.DataArray:
    """Return the share of Figure 3's hidden units whose largest final |v| is on their most salient token, per seed."""
    return _is_at_largest(run.figure_3.isel(step=-1), run.figure_3_salience, "word").mean("hidden", skipna=False)


def _is_at_largest(weight: xr.DataArray, salience: xr.DataArray, dim: str) -> xr.DataArray:
    """Return 1 where the largest |weight| along an axis is at the largest |salience|, else 0; NaN for NaN weights."""
    same = abs(weight).fillna(-1.0).argmax(dim) == abs(salience).argmax(dim)
    return same.astype(float).where(weight.notnull().all(dim))


def salience_of_common(run: xr.Dataset) -> xr.DataArray:
    """Return how salient Figure 3's common tokens are beside its distinct ones, root mean squares, per seed."""
    square = run.figure_3_salience**2
    common, distinct = (square.isel(word=words).mean(("word", "hidden")) for words in (COMMON, DISTINCT))
    return np.sqrt(common / distinct)


def late_speed(run: xr.Dataset) -> xr.DataArray:
    """Return each weight's speed in the last tenth of Figure 3's training over its mean speed; 1 at constant speed."""
    return abs(_late_velocity(run))


def growing(run: xr.Dataset) -> xr.DataArray:
    """Return whether each weight of Figure 3 ends at its mean speed or faster, in its own direction and away from 0."""
    v = run.figure_3
    return (_late_velocity(run) >= 1) & (v.isel(step=-1) * (v.isel(step=-1) - v.isel(step=0)) > 0)


def growing_units(run: xr.Dataset) -> xr.DataArray:
    """Return the share of Figure 3's hidden units with a growing weight, per seed; NaN if the seed diverged."""
    finite = run.figure_3.isel(step=-1).notnull().all(("word", "hidden"))
    return growing(run).any("word").mean("hidden").where(finite)


def _late_velocity(run: xr.Dataset) -> xr.DataArray:
    """Return each weight's late velocity (last tenth of training) over its mean one; negative on its way back."""
    v, records = run.figure_3, run.sizes["step"] - 1
    last = max(1, records // 10)
    late = (v.isel(step=-1) - v.isel(step=-1 - last)) / (run.step[-1] - run.step[-1 - last])
    return late / ((v.isel(step=-1) - v.isel(step=0)) / (run.step[-1] - run.step[0]))
