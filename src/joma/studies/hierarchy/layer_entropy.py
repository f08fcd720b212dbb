"""Whether the attention of `hierarchy-order` bounces: whether its entropy falls and comes back, layer by layer."""

from __future__ import annotations

import xarray as xr

from joma.studies.text.entropy_bounce import bounces


def deep_entropy(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return the entropy of the queries' attention [seed, step, layer] in the deep tree, for one layer or several."""
    if layers == 1:
        return run.entropy_single.expand_dims(layer=[1])
    return run.entropy.sel(tree="deep", drop=True)


def layer_bounce(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Return by how much of its start each layer's entropy falls and comes back, [seed, layer].

    It is the smaller of fall and recovery, the latter beyond that of noise, and 0 where noise alone explains it; see
    `joma.studies.text.entropy_bounce.bounces`. A seed that diverged is NaN.
    """
    entropy = deep_entropy(run, layers)
    bounce = bounces(entropy.expand_dims(head=[0]), each_layer=True).bounce
    return bounce.where(entropy.notnull().all("step")).transpose("seed", "layer")


def bounce_of_layer(run: xr.Dataset, layers: int, layer: int) -> xr.DataArray:
    """Return the `layer_bounce` of one layer, counted from 1, per seed."""
    return layer_bounce(run, layers).sel(layer=layer)


def has_bounced(run: xr.Dataset, layers: int, layer: int) -> xr.DataArray:
    """Return 1 for a seed in which a layer, counted from 1, bounces, else 0; NaN for a seed that diverged."""
    bounce = bounce_of_layer(run, layers, layer)
    return (bounce > 0).astype(float).where(bounce.notnull())
