"""The authors' own runs on WikiText-2, and how far runs like theirs may lie from them.

Three runs of each depth were published. What is asked of other runs comes from how far these three lie from each other:
a distance is compared with that of each of them from the mean of the other two, and a mean over three seeds with the
prediction interval for the mean of three further runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import xarray as xr
from jaxtyping import Float

from joma.studies.entropy_return import fall
from joma.study import Expected, NotInRun, mean_interval, near

WIKITEXT2 = {"types": 28_782, "tokens": 2_049_990}  # of the training text, by torchtext's rules
# Its number of tokens by torchtext's rules, which remove some: 103,227,021 words and line ends are in the raw text.
WIKITEXT103_TOKENS = (98_000_000, 104_000_000)
PUBLISHED_CURVES = Path(__file__).with_name("wikitext2.csv")  # 3 seeds, every 1,000 steps (arXiv 2310.00535)
PUBLISHED_LOSS = {1: 5.356, 2: 5.255, 5: 5.167, 10: 5.109}  # least validation loss by layers, mean of 3 seeds
PUBLISHED_LOSS_103 = {1: 5.047, 2: 4.912, 5: 4.762, 10: 4.679}  # on WikiText-103; its seeds were not published
FALL_STEPS = 4_000  # within which the attention of the one-layer model falls


def on_wikitext(run: xr.Dataset) -> bool:
    """Return whether the text is WikiText-2, tokenised into words, by the numbers of its types and of its tokens."""
    return has_attributes(run, WIKITEXT2)


def on_wikitext103(run: xr.Dataset) -> bool:
    """Return whether the training text is as long as WikiText-103; its exact numbers were not counted here."""
    low, high = WIKITEXT103_TOKENS
    return low <= int(run.attrs.get("tokens", 0)) <= high


def has_attributes(run: xr.Dataset, numbers: Mapping[str, int]) -> bool:
    """Return whether the attributes of a run have these values; an attribute that is missing counts as 0."""
    return all(int(run.attrs.get(name, 0)) == number for name, number in numbers.items())


@cache
def published() -> xr.Dataset:
    """Return the authors' curves: `entropy` and `valid_loss` over depth, layer, seed and step.

    >>> round(float(published().valid_loss.sel(depth=1).min("step").mean()), 3)
    5.356
    """
    table = np.genfromtxt(PUBLISHED_CURVES, delimiter=",", names=True)
    columns = {"depth": "layers", "layer": "layer", "seed": "seed", "step": "step"}
    labels = {axis: table[column].astype(int) for axis, column in columns.items()}
    coords = {axis: np.unique(values) for axis, values in labels.items()}
    row_indices = tuple(np.searchsorted(coords[axis], values) for axis, values in labels.items())
    curves = {}
    for name in ("entropy", "valid_loss"):
        values = np.full([coordinate.size for coordinate in coords.values()], np.nan)
        values[row_indices] = table[name]
        curves[name] = (tuple(coords), values)
    return xr.Dataset(curves, coords).assign(valid_loss=lambda dataset: dataset.valid_loss.isel(layer=0))


def published_entropy(depth: int) -> xr.DataArray:
    """Return the authors' entropy with `depth` layers [layer, seed, step]."""
    return published().entropy.sel(depth=depth, layer=range(depth), drop=True)


def early_fall(curve: xr.DataArray) -> xr.DataArray:
    """Return how far entropy falls from its start within `FALL_STEPS`, over the axes other than `step`."""
    return fall(curve.sel(step=slice(0, FALL_STEPS)), "step")


def distances(entropy: xr.DataArray, depth: int) -> xr.DataArray:
    """Return the distance of each seed from the authors' curves, in nats: as that of one of their runs from the others.

    It is the mean over steps and layers of |entropy − mean of two of the authors' runs|, averaged over the three pairs
    of their runs.
    """
    ours, theirs = _at_published_steps(entropy, depth)
    pairs = [theirs.drop_sel(seed=seed).mean("seed") for seed in theirs.seed.values]
    by_pair = [abs(ours - pair).mean(("step", "layer"), skipna=False) for pair in pairs]
    return xr.concat(by_pair, "pair").mean("pair", skipna=False)


def distance_of_means(entropy: xr.DataArray, depth: int) -> float:
    """Return the distance of the mean over seeds from the mean of the authors' runs, in nats, over steps and layers."""
    ours, theirs = _at_published_steps(entropy, depth)
    return float(abs(ours.mean("seed", skipna=False) - theirs.mean("seed")).mean(skipna=False))


def _at_published_steps(entropy: xr.DataArray, depth: int) -> tuple[xr.DataArray, xr.DataArray]:
    """Return entropy, mean over heads, at the steps and layers of the authors' curves, and these curves."""
    theirs = published_entropy(depth)
    missing = theirs.step.values[~np.isin(theirs.step, entropy.step)]
    if missing.size:
        raise NotInRun(f"step {missing[0]}")
    return entropy.sel(step=theirs.step, layer=theirs.layer).mean("head", skipna=False), theirs


def leave_one_out(depth: int) -> Float[np.ndarray, " seed"]:
    """Return the distance of each of the authors' runs from the mean of the other two, in nats.

    >>> leave_one_out(1).round(3)
    array([0.03 , 0.017, 0.026])
    """
    theirs = published_entropy(depth)
    others = [theirs.drop_sel(seed=seed).mean("seed") for seed in theirs.seed.values]
    pairs = zip(theirs.seed.values, others, strict=True)
    return np.array([float(abs(theirs.sel(seed=seed) - mean).mean()) for seed, mean in pairs])


def prediction_half_width(values: np.ndarray) -> float:
    """Return half of the 95 % prediction interval for the mean of as many further values as there are.

    >>> round(prediction_half_width(np.array([1.0, 2.0, 3.0])), 3)  # 4.303 √(2/3)
    3.513
    """
    low, high = mean_interval(values)  # two means differ by √2 times what one of them scatters
    return (high - low) / math.sqrt(2)


def loss_tolerance() -> float:
    """Return the largest `prediction_half_width` of the least validation losses on WikiText-2, over depths.

    It stands for the scatter on WikiText-103, of which no single runs were published.

    >>> round(loss_tolerance(), 4)
    0.0183
    """
    losses = published().valid_loss.min("step")
    return max(prediction_half_width(losses.sel(depth=depth).values) for depth in PUBLISHED_LOSS)


def like_published(values: xr.DataArray) -> Expected:
    """Return the interval in which the mean of three further runs of the authors would lie with a probability of 95 %.

    >>> like_published(published().valid_loss.sel(depth=1).min("step")).text
    '5.3561 ± 0.0073'
    """
    return near(round(float(values.mean()), 4), round(prediction_half_width(np.asarray(values)), 4))
