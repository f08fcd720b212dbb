"""A run of `hierarchy-order` with known results, built without training, and a small run of `scan-snap`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr

from joma.studies.hierarchy import scan_snap
from joma.studies.hierarchy.hidden_tokens import COUSINS, ROOT, SIBLINGS, predictions, trees
from joma.studies.hierarchy.hierarchy_order import LAYERS
from joma.study import Context

STEPS = np.arange(0, 101, 5)
SMALL_PHASES = scan_snap.Config(
    classes=2, distinct=3, common=3, outputs=12, steps=1000, records=50, sweep=(10.0, 100.0, 1000.0), shares=(0.5, 0.1)
)


@pytest.fixture(scope="session")
def phases() -> xr.Dataset:
    """A small run of `scan-snap` with three seeds."""
    return scan_snap.run(SMALL_PHASES, Context((0, 1, 2)))


@pytest.fixture(scope="session")
def ideal() -> xr.Dataset:
    """A run in which every claim holds: pairs double at step 10, 30 and 50 by height, and those of the root never.

    Siblings gain in layer 1, others in layer 3; in the shallow trees cousins gain as siblings do in the deep one. The
    entropy of every layer falls from 2 to 1 at step 50, and comes back to 2.
    """
    tree_by_name = trees(0.85)
    predicted = xr.concat(
        [predictions(tree) for tree in tree_by_name.values()], dim=xr.Variable("tree", list(tree_by_name))
    )
    deep = predicted.height.sel(tree="deep", drop=True)
    gains_as = xr.where((deep == COUSINS) & (predicted.tree != "deep"), SIBLINGS, deep)
    layer = xr.DataArray(np.arange(1, LAYERS + 1), dims="layer", coords={"layer": np.arange(1, LAYERS + 1)})
    gain = _rise(gains_as) * (layer == xr.where(gains_as == SIBLINGS, 1, LAYERS)) * LAYERS
    full = xr.concat([gain, gain], dim=xr.Variable("seed", [0, 1])).transpose("tree", "seed", "step", "layer", "pair")
    single = _rise(deep).expand_dims(seed=[0, 1]).transpose("seed", "step", "pair")
    bounce = 1 + abs(xr.DataArray(STEPS, coords={"step": STEPS}) - 50) / 50
    entropy = (bounce + 0 * full.isel(pair=0)).transpose("tree", "seed", "step", "layer")
    return predicted.assign(
        gain=full.mean("layer"),
        last_gain=full.isel(step=-1, drop=True),
        gain_single=single,
        entropy=entropy,
        entropy_single=entropy.isel(tree=0, layer=0, drop=True),
    )


def _rise(height: xr.DataArray) -> xr.DataArray:
    """A straight line through ln 2 at step 20 height − 10; for the root's pairs one that falls."""
    step = xr.DataArray(STEPS, coords={"step": STEPS})
    return step * xr.where(height == ROOT, -0.01, math.log(2) / (20 * height - 10) * (1 + 1e-9))
