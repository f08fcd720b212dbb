"""What the study `markov-unigram` measures on its run."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.study import NotInRun

LEFT = 0.25  # a model has left the unigram once its loss has fallen by this share of H(π) − R


def of_group(run: xr.Dataset, group: str) -> xr.Dataset:
    """Return the arms of a group; raise `NotInRun` if there are none."""
    selected = run.isel(arm=np.flatnonzero(run.group.values == group))
    if not selected.sizes["arm"]:
        raise NotInRun(f"arm {group}")
    return selected


def is_attracting(run: xr.Dataset) -> xr.DataArray:
    """Return for each arm whether the paper says that it stops at the unigram: tied weights and p + q > 1."""
    return (run.tied == 1) & (run.p + run.q > 1)


def final_loss(run: xr.Dataset) -> xr.DataArray:
    """Return the loss at the end of training."""
    return run.loss.isel(record=-1)


def is_stuck(run: xr.Dataset) -> xr.DataArray:
    """Return 1 where the final loss is above H(π) less a quarter of what can be gained, else 0; NaN if it diverged."""
    loss = final_loss(run)
    return (loss > run.unigram - LEFT * (run.unigram - run.kernel)).astype(float).where(loss.notnull())


def from_unigram(run: xr.Dataset) -> xr.DataArray:
    """Return the largest distance of a final loss from H(π), tied SGD arms with p + q > 1, per seed.

    It is NaN if one of these arms diverged.
    """
    arms = of_group(run, "sgd")
    arms = arms.isel(arm=np.flatnonzero(is_attracting(arms)))
    return abs(final_loss(arms) - arms.unigram).max("arm", skipna=False)


def above_kernel(run: xr.Dataset) -> xr.DataArray:
    """Return the largest excess of a final loss over the entropy rate, the other SGD arms, per seed.

    It is NaN if one of these arms diverged.
    """
    arms = of_group(run, "sgd")
    arms = arms.isel(arm=np.flatnonzero(~is_attracting(arms)))
    return (final_loss(arms) - arms.kernel).max("arm", skipna=False)


def starts(run: xr.Dataset) -> xr.Dataset:
    """Return the tied SGD arms on the first chain, in the order of their initial scale."""
    first = run.arm.values[0]
    chosen = [first, *run.arm.values[run.group.values == "init"]]
    return run.sel(arm=chosen).sortby("init")


def basin(run: xr.Dataset) -> xr.DataArray:
    """Return whether a seed is stuck from the smallest start, less whether it is from the largest."""
    stuck = is_stuck(starts(run))
    return stuck.isel(arm=0, drop=True) - stuck.isel(arm=-1, drop=True)


def fate_is_predicted(run: xr.Dataset) -> xr.DataArray:
    """Return the share of tied SGD arms that stay if the curvature at the start is positive, and leave if it is not.

    A seed of which an arm diverged is NaN.
    """
    arms = run.isel(arm=np.flatnonzero((run.tied == 1) & run.group.isin(["sgd", "init", "deep-sgd"])))
    stays = arms.curvature.isel(record=0) > 0
    stuck = is_stuck(arms)
    return (stuck == stays).where(stuck.notnull()).mean("arm", skipna=False)


def stuck_share(run: xr.Dataset, group: str) -> xr.DataArray:
    """Return the share of a group's arms that are stuck, per seed."""
    return is_stuck(of_group(run, group)).mean("arm", skipna=False)


def departure(run: xr.Dataset) -> xr.DataArray:
    """Return the first record at which a model has left the unigram for good, NaN where it never does."""
    left = run.loss <= run.unigram - LEFT * (run.unigram - run.kernel)
    return left.argmax("record").where(left.any("record"))


def until_departure(run: xr.Dataset) -> xr.DataArray:
    """Return the curvature up to the record at which a model has left the unigram, NaN after it."""
    records = xr.DataArray(np.arange(run.sizes["record"]), dims="record")
    return run.curvature.where(records <= departure(run).fillna(run.sizes["record"]))


def least_curvature_before_departure(run: xr.Dataset) -> xr.DataArray:
    """Return the least curvature up to the record at which an Adam arm has left the unigram, largest over arms.

    An arm that never leaves does not count; a seed of which an arm diverged is NaN.
    """
    arms = of_group(run, "adam")
    left = departure(arms).notnull()
    if not bool(left.any()):
        raise NotInRun("run by Adam that leaves the unigram")
    least = until_departure(arms).min("record").where(left, -np.inf)
    return least.where(final_loss(arms).notnull()).max("arm", skipna=False)


def rate_error(run: xr.Dataset) -> float:
    """Return the largest relative error of a growth rate of the reduced model: the same start serves all seeds."""
    return float(abs(run.reduced_rate / run.reduced_rate_predicted - 1).max(skipna=False))


def reduced_error(run: xr.Dataset) -> xr.DataArray:
    """Return the largest distance of the reduced model's final loss from where the theory says it ends, per seed."""
    return abs(run.reduced_loss - run.reduced_loss_predicted).max(("chain", "tying"), skipna=False)
