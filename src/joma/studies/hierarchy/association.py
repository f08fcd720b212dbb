"""Measures of `hierarchy-order`: when, in which order and in which layer the tokens of a pair are associated.

The gain of a pair is its mutual attention less that before training. A pair is associated once its odds of attention
have doubled, that is once its gain is at least ln 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import xarray as xr

from joma.studies.hierarchy.hidden_tokens import COUSINS, ROOT, SIBLINGS
from joma.studies.hierarchy.ranks import rank_correlation

DOUBLED = math.log(2)


def doubling_time(gain: xr.DataArray) -> xr.DataArray:
    """Return the first recorded step at which the odds have doubled, that is at which the gain is at least ln 2.

    Where they never do it is the last step: a lower bound, so that a difference of two times is understated. NaN for a
    seed that diverged, at whichever step.
    """
    step = gain.step.broadcast_like(gain)
    time = step.where(gain >= DOUBLED, step.max()).min("step").where(gain.notnull().all("step"))
    return time.transpose(*(dim for dim in gain.dims if dim != "step"))


def average_gain(gain: xr.DataArray) -> xr.DataArray:
    """Return the average of the gain over training, the area under its curve: the sooner a pair gains, the larger.

    Unlike `doubling_time` it needs no threshold.
    """
    return gain.integrate("step") / float(gain.step[-1] - gain.step[0])


def mean_by_height(values: xr.DataArray, height: xr.DataArray) -> xr.DataArray:
    """Average over the pairs of each height, along a new dimension `level`."""
    levels = np.unique(height)
    means = [values.isel(pair=(height == level).values).mean("pair", skipna=False) for level in levels]
    return xr.concat(means, dim=xr.Variable("level", levels))


def mean_layer(gain: xr.DataArray) -> xr.DataArray:
    """Return the mean layer of a gain: Σ_ℓ ℓ max(gain_ℓ, 0) / Σ_ℓ max(gain_ℓ, 0); NaN where no layer gains."""
    positive = gain.clip(min=0)
    return (gain.layer * positive).sum("layer") / positive.sum("layer").where(lambda total: total > 0)


def deep_gain(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return the gain of each pair in the deep tree, for one layer or as the mean over several."""
    return run.gain_single if layers == 1 else run.gain.sel(tree="deep")


def order_of_times(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return the rank correlation of Theorem 5's co-occurrence with how early a pair's odds double, per seed."""
    return -rank_correlation(run.cooccurrence.sel(tree="deep"), doubling_time(deep_gain(run, layers)), "pair")


def order_of_gains(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return the rank correlation of Theorem 5's co-occurrence with the gain's average over training, per seed."""
    return rank_correlation(run.cooccurrence.sel(tree="deep"), average_gain(deep_gain(run, layers)), "pair")


def least_delay(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return the smaller of two delays of doubling, per seed: cousins after siblings, all others after cousins.

    Pairs of height 3 and of the root are averaged as one kind: if neither doubles by the end, they cannot be ordered.
    """
    times = doubling_time(deep_gain(run, layers))
    kind = run.height.sel(tree="deep").clip(max=COUSINS + 1)
    return mean_by_height(times, kind).diff("level").min("level", skipna=False)


def least_fall(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return the least fall of the average gain from one height to the next, the root included, per seed."""
    mean = mean_by_height(average_gain(deep_gain(run, layers)), run.height.sel(tree="deep"))
    return -mean.diff("level").max("level", skipna=False)


def final_high_gain(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return the last gain of the pairs that are joined by the highest latents below the root, per seed."""
    return mean_by_height(deep_gain(run, layers).isel(step=-1), run.height.sel(tree="deep")).sel(level=ROOT - 1)


def mean_of_deep_pairs(values: xr.DataArray, run: xr.Dataset, height: int) -> xr.DataArray:
    """Average, in every tree, over the pairs that have this height in the deep tree."""
    return mean_by_height(values, run.height.sel(tree="deep")).sel(level=height, drop=True)


def delay_of_cousins(run: xr.Dataset, tree: str) -> xr.DataArray:
    """Return the steps by which cousins double later in the deep tree than the same tokens do in another, per seed."""
    times = mean_of_deep_pairs(doubling_time(run.gain), run, COUSINS)
    return times.sel(tree="deep") - times.sel(tree=tree)


def gain_layer(run: xr.Dataset, height: int) -> xr.DataArray:
    """Return the mean layer of the last gain of the pairs that have this height in the deep tree, by tree and seed."""
    return mean_layer(mean_of_deep_pairs(run.last_gain, run, height))


def gain_layer_beyond_root(run: xr.Dataset, height: int) -> xr.DataArray:
    """Return the mean layer of what these pairs gain beyond the pairs that only the root joins, by tree and seed."""
    gain, root_gain = (mean_of_deep_pairs(run.last_gain, run, level) for level in (height, ROOT))
    return mean_layer(gain - root_gain)


def lift_of_cousins(
    run: xr.Dataset, tree: str, layer: Callable[[xr.Dataset, int], xr.DataArray] = gain_layer
) -> xr.DataArray:
    """Return by how many layers the cousins' gain is higher in the deep tree than in another, per seed."""
    layers = layer(run, COUSINS)
    return layers.sel(tree="deep") - layers.sel(tree=tree)


def lift_above_siblings(run: xr.Dataset) -> xr.DataArray:
    """Return by how many layers the cousins' gain is higher than the siblings', in the deep tree, per seed."""
    return (gain_layer(run, COUSINS) - gain_layer(run, SIBLINGS)).sel(tree="deep")


def marginal_difference(run: xr.Dataset) -> float:
    """Return the largest difference between the trees in how often a token occurs."""
    return float((run.marginal.max("tree") - run.marginal.min("tree")).max())
