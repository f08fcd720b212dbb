"""Measures of a series of checkpoints that the claims of `pretrained` judge, computed from the stored trajectory."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.study import NotInRun

TINY_MODEL = "tiny GPT-NeoX"


def public_models(run: xr.Dataset) -> xr.Dataset:
    """Return the run; raise `NotInRun` if its model is the toy, of which claims about pretrained models say nothing."""
    if TINY_MODEL in run.model.values:
        raise NotInRun(f"pretrained model, only a {TINY_MODEL} trained here")
    return run


def toy_models(run: xr.Dataset) -> xr.Dataset:
    """Return the run; raise `NotInRun` if its models are not the toy."""
    if TINY_MODEL not in run.model.values:
        raise NotInRun(f"{TINY_MODEL}")
    return run


def mean_over_models(values: xr.DataArray) -> xr.DataArray:
    """Return the mean over the models that have a value, for each seed."""
    if not bool(values.notnull().any()):
        raise NotInRun("series with enough checkpoints")
    return values.mean("model")


def entropy_fall(run: xr.Dataset) -> xr.DataArray:
    """Return how far the lowest layer's entropy falls from its start to its minimum, mean over models, in nats."""
    return mean_over_models(run.bounce_depth.isel(layer=0))


def entropy_recovery(run: xr.Dataset) -> xr.DataArray:
    """Return how far the lowest layer's entropy rises from its minimum to the end, mean over models, in nats."""
    return mean_over_models(run.bounce_recovery.isel(layer=0))


def least_certain_recovery(run: xr.Dataset) -> xr.DataArray:
    """Return the largest p-value over models: how often noise around a curve that never rises rises as clearly."""
    p_values = run.bounce_p_value.isel(layer=0)
    mean_over_models(p_values)  # raises if there is no series
    return p_values.max("model")


def rank_left(run: xr.Dataset) -> xr.DataArray:
    """Return the minimum of the stable rank relative to its start, the mean over matrices, for each seed."""
    start = run.stable_rank.isel(step=0)
    several = run.stable_rank.notnull().sum("step") > 1
    return mean_over_models((run.stable_rank.min("step") / start).where(several).mean("matrix"))


def embedding_excess(run: xr.Dataset) -> xr.DataArray:
    """Return the last root mean square cosine of the embeddings relative to random directions, for each seed."""
    return mean_over_models(last_value(run.embedding_cosine) / run.embedding_random.max("step"))


def last_value(values: xr.DataArray) -> xr.DataArray:
    """Return the value at the last step that each series has."""
    number = xr.DataArray(np.arange(1, values.sizes["step"] + 1), dims="step")
    return values.isel(step=(values.notnull() * number).argmax("step"))
