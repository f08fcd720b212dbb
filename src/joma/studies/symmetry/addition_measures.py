"""Measures of addition that its claims judge, computed from the stored trajectory."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from joma.studies.symmetry.addition_arms import ALL_LAYERS, BASELINE, ENCODED, REMOVED
from joma.study import NotInRun, select


def accuracy(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the exact match of an arm [seed, step]; a diverged seed counts as 0."""
    return select(run.accuracy.fillna(0.0), arm=arm)


def final_accuracy(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the exact match of an arm at the end [seed], on all test pairs."""
    return accuracy(run, arm).isel(step=-1)


def above_ceiling(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the final exact match less the ceiling without order and less the sampling error of the test pairs.

    NaN for a diverged seed: that it gets nothing right is no evidence that it could not have.
    """
    return select(run.accuracy, arm=arm).isel(step=-1) - run.ceiling - run.error


def least_above_ceiling(run: xr.Dataset) -> xr.DataArray:
    """Return `above_ceiling` of the positional encoding with the lowest one under a full mask."""
    return xr.concat([above_ceiling(run, f"{positions} full") for positions in ENCODED], "arm").min("arm", skipna=False)


def mean_accuracy(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the exact match of an arm, mean over the steps of training: near 1 if all is learnt at once.

    NaN for a diverged seed.
    """
    return select(run.accuracy, arm=arm).integrate("step") / (run.step[-1] - run.step[0])


def slowdown(run: xr.Dataset, part: str) -> xr.DataArray:
    """Return how far the mean accuracy falls when the residuals around a part are removed in all layers.

    NaN for a seed that diverged in either arm.
    """
    return mean_accuracy(run, BASELINE) - mean_accuracy(run, f"{part} {ALL_LAYERS}")


def slowdown_in_one_layer(run: xr.Dataset) -> xr.DataArray:
    """Return how far the mean accuracy falls when residuals are removed in one layer, mean over all such arms."""
    names = [f"{part} {layer}" for part in REMOVED for layer in range(run.sizes["level"] - 1)]
    without = xr.concat([mean_accuracy(run, name) for name in names], "arm").mean("arm", skipna=False)
    return mean_accuracy(run, BASELINE) - without


def steps_to(accuracy: xr.DataArray, level: float) -> xr.DataArray:
    """Return the first recorded step at which the accuracy reaches the level, or NaN if it never does."""
    return accuracy.step.where(accuracy >= level).min("step")


def reached_by_four_in_five(values: xr.DataArray) -> float:
    """Return the greatest number that at least four of five seeds reach."""
    return float(np.sort(values)[len(values) // 5])


def sampling_error(share: float, pairs: Int[Tensor, "pair 2"]) -> float:
    """Return the standard error of a share of these pairs; a + b and b + a count as one.

    A model may treat the two alike.
    """
    unordered = len(pairs.sort(dim=1).values.unique(dim=0))
    return float(np.sqrt(share * (1 - share) / unordered))


def readout_gain(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return how much better positions are decoded from the best layer than from the embeddings, at the end."""
    decodability = select(run.decodability, arm=arm).isel(step=-1)
    return decodability.isel(level=slice(1, None)).max("level", skipna=False) - decodability.isel(level=0)


def own_share(run: xr.Dataset, arm: str, kind: str) -> xr.DataArray:
    """Return the share of locations most similar to themselves [seed, step], mean over pairs of levels a < b."""
    upper = xr.DataArray(np.triu(np.ones((run.sizes["level"],) * 2, bool), 1), dims=("level", "higher"))
    return select(run.own, arm=arm).sel(kind=kind).where(upper).mean(("level", "higher"))


def own_share_above_chance(run: xr.Dataset, kind: str) -> xr.DataArray:
    """Return the final share of `own_share` with all residual connections, less that of random similarities [seed]."""
    return own_share(run, BASELINE, kind).isel(step=-1) - 1 / run.sizes["location"]


def without_residuals(run: xr.Dataset) -> list[str]:
    """Return the names of the run's arms in which residual connections are removed in all layers."""
    return [name for name in (f"{part} {ALL_LAYERS}" for part in REMOVED) if name in run.arm.values]


def own_share_drop(run: xr.Dataset, kind: str) -> xr.DataArray:
    """Return how far the final share of `own_share` falls without residuals, the least over `without_residuals`.

    NaN for a diverged seed. Raises `NotInRun` if no such arm was trained.
    """
    names = without_residuals(run) or [f"both {ALL_LAYERS}"]
    greatest = xr.concat([own_share(run, name, kind) for name in names], "arm").max("arm", skipna=False)
    return (own_share(run, BASELINE, kind) - greatest).isel(step=-1)


def digits_of(run: xr.Dataset) -> int:
    """Return the number of digits of each summand, d, from the number of locations, 3 d + 2.

    The locations are the digits of both summands, + and =, and the digits of the sum except the last.
    """
    return (run.sizes["location"] - 2) // 3


def ceiling_at(run: xr.Dataset, digits: int) -> xr.DataArray:
    """Return the ceiling without order; raises `NotInRun` if the summands have another number of digits."""
    if digits_of(run) != digits:
        raise NotInRun(f"sums of {digits} digits")
    return run.ceiling
