"""What the study `induction-phases` measures on its run."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.studies.related.induction_data import CHAIN, DOUBLY, LAG_2, WORLDS
from joma.studies.related.induction_full import NO_UNIGRAM, ONE_LAYER
from joma.study import NotInRun, select

PLATEAU = 0.02  # nats from the unigram's loss


def gap_closed(losses: xr.Dataset, name: str, prefix: str = "") -> xr.DataArray:
    """Return the share of the way from the best simple predictor to the Bayes predictor that a model has made.

    The simple predictors are the unigram and the uniform one. Where there is no unigram to learn, counts of single
    symbols are worse than no counts.

    >>> values = {"loss": 0.9, "uniform_loss": 1.1, "unigram_loss": 1.0, "bayes_loss": 0.8}
    >>> round(float(gap_closed(xr.Dataset(values), "loss")), 3)
    0.5
    """
    uniform, unigram, bayes = (losses[f"{prefix}{key}_loss"] for key in ("uniform", "unigram", "bayes"))
    simple = unigram.where(unigram < uniform, uniform)
    return (simple - losses[name]) / (simple - bayes)


def minimal_closed(run: xr.Dataset) -> xr.DataArray:
    """Return the share of the gap that the minimal model has closed, over world, seed and step."""
    return gap_closed(run, "minimal_loss")


def first_step(reached: xr.DataArray, dim: str) -> xr.DataArray:
    """Return the first recorded step at which a condition is met; NaN if it never is.

    >>> reached = xr.DataArray([False, True, True], {"step": [0, 10, 20]}, ("step",))
    >>> float(first_step(reached, "step"))
    10.0
    """
    return reached[dim].where(reached).min(dim)


def jump_width(closed: xr.DataArray, dim: str) -> xr.DataArray:
    """Return (t_80 − t_10)/t_10, t_n being the step at which n % of the gap is closed."""
    late, early = (first_step(closed >= share, dim) for share in (0.8, 0.1))
    return (late - early) / early


def unigram_distance(run: xr.Dataset) -> xr.DataArray:
    """Return the distance of the minimal model's loss from the unigram's before training, in the world of chains."""
    start = run.minimal_loss.isel(step=0) - run.unigram_loss
    return abs(start.sel(world=CHAIN, drop=True))


def gradient_correlation(run: xr.Dataset) -> float:
    """Return the correlation of autograd's −∂L/∂r with the oracle's over lags, of means over seeds."""
    return float(xr.corr(run.gradient.mean("seed"), run.gradient_predicted.mean("seed"), "lag"))


def gradient_error(run: xr.Dataset) -> float:
    """Return the relative error of the oracle's −∂L/∂r at lag 1, of means over seeds."""
    measured, predicted = (run[name].mean("seed").isel(lag=0) for name in ("gradient", "gradient_predicted"))
    return float(abs(measured / predicted - 1))


def finds_lag(run: xr.Dataset) -> xr.DataArray:
    """Return 1 if the first layer's largest weight is at the parent's lag, for lags 1 and 2, else 0, per seed."""
    weights = run.minimal_lag_weight.sel(world=[CHAIN, LAG_2])
    lags = xr.DataArray([WORLDS[name].parents[0] for name in (CHAIN, LAG_2)], dims="world")
    return _is_largest(weights, lags).min("world")


def finds_parents(run: xr.Dataset) -> xr.DataArray:
    """Return 1 if each head's largest weight is at its own parent's lag, else 0, per seed."""
    return _is_largest(run.parents_lag_weight, run.parent).min("parent")


def predicts_lag(run: xr.Dataset) -> xr.DataArray:
    """Return 1 if the oracle's c_δ is largest at the parent's lag in every world, for every head, else 0, per seed."""
    lags = xr.DataArray([WORLDS[name].parents[0] for name in run.world.values], dims="world")
    single = _is_largest(run.dependence, lags).min("world")
    return single * _is_largest(run.parents_dependence, run.parent).min("parent")


def _is_largest(values: xr.DataArray, lags: xr.DataArray) -> xr.DataArray:
    """Return 1.0 where the largest value over `lag` is at a given lag, else 0.0; 0.0 for a diverged seed."""
    return (values.fillna(-np.inf).idxmax("lag") == lags).astype(float).where(values.notnull().all("lag"), 0.0)


def second_layer_lead(run: xr.Dataset, share: float) -> xr.DataArray:
    """Return by how many steps A has made a share of its way before the weight of lag 1 has, on chains, per seed."""
    chain = run.sel(world=CHAIN, drop=True)
    steps = []
    for values in (chain.minimal_diagonal, chain.minimal_weight):
        start, end = values.isel(step=0), values.isel(step=-1)
        steps.append(first_step((values - start) >= share * (end - start), "step"))
    return steps[1] - steps[0]


def minimal_delay(run: xr.Dataset) -> xr.DataArray:
    """Return the step at which half of the gap is closed in the world of chains over that without a unigram."""
    half = first_step(minimal_closed(run) >= 0.5, "step")
    return half.sel(world=CHAIN, drop=True) / half.sel(world=DOUBLY, drop=True)


def full_arm(run: xr.Dataset, name: str | None = None) -> xr.Dataset:
    """Return an arm of the full model, or the arm that is judged; raise `NotInRun` if the run has none."""
    if "full_loss" not in run:
        raise NotInRun("full model; give `full_steps` a number")
    return run.isel(arm=0, drop=True) if name is None else select(run, arm=name)


def full_closed(arm: xr.Dataset) -> xr.DataArray:
    """Return the share of the gap that a full model has closed."""
    return gap_closed(arm, "full_loss", "full_")


def half_step(arm: xr.Dataset) -> xr.DataArray:
    """Return the first recorded step at which a full model has closed half of the gap.

    It is NaN if the model never does, or diverged.
    """
    return first_step(full_closed(arm) >= 0.5, "full_step").where(_has_ended(arm))


def _has_ended(arm: xr.Dataset) -> xr.DataArray:
    """Return which seeds of a full model were trained to the end; the others diverged."""
    return arm.full_loss.isel(full_step=-1, drop=True).notnull()


def passed_share(arm: xr.Dataset) -> float:
    """Return the share of seeds that close half of the gap."""
    return float(half_step(arm).notnull().mean())


def plateau_steps(run: xr.Dataset) -> xr.DataArray:
    """Return for how many steps the full model's loss stays within 0.02 of the unigram's, per seed.

    The steps between two records count if both records are on the plateau. It is NaN if the seed diverged.
    """
    arm = full_arm(run)
    near = abs(arm.full_loss - arm.full_unigram_loss) <= PLATEAU
    lengths = arm.full_step.diff("full_step", label="lower")
    both = near.isel(full_step=slice(None, -1)) & near.shift(full_step=-1, fill_value=False).isel(
        full_step=slice(None, -1)
    )
    return lengths.where(both, 0).sum("full_step").where(_has_ended(arm))


def previous_attention(run: xr.Dataset) -> xr.DataArray:
    """Return the first layer's final attention to the position before, of the seeds that close half of the gap."""
    arm = full_arm(run)
    passed = half_step(arm).notnull()
    if not bool(passed.any()):
        raise NotInRun("seed that closes half of the gap")
    return arm.previous.isel(full_step=-1)[passed.values]


def one_layer_closed(run: xr.Dataset) -> xr.DataArray:
    """Return the largest share of the gap that one layer ever closes, per seed; NaN if it diverged."""
    return full_closed(full_arm(run, ONE_LAYER)).max("full_step", skipna=False)


def full_delay(run: xr.Dataset) -> xr.DataArray:
    """Return ln of the step at which half of the gap is closed, chains less a world without a unigram, per seed.

    A seed that does not get there in one world counts there with the last step; in both, it is left out. A seed that
    diverged in one world is NaN.
    """
    arms = full_arm(run), full_arm(run, NO_UNIGRAM)
    steps, ended = [half_step(arm) for arm in arms], [_has_ended(arm) for arm in arms]
    reached = steps[0].notnull() | steps[1].notnull()
    if not bool(reached.any()):
        raise NotInRun("seed that closes half of the gap")
    counted, last = (reached | ~ended[0] | ~ended[1]).values, float(run.full_step[-1])
    chain, doubly = (
        step.fillna(last).clip(min=1.0).where(end)[counted] for step, end in zip(steps, ended, strict=True)
    )
    return xr.ufuncs.log(chain / doubly)
