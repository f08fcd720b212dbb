"""Made-up logits and squares, for the tests of what compares them."""

from __future__ import annotations

import xarray as xr


def unrelated(rng, tokens=40, seeds=2, steps=4, queries=3):
    """A run whose logits and squares have nothing to do with each other, and counts of its tokens."""
    dims = ("seed", "step", "token")
    squares = xr.DataArray(rng.gamma(2.0, size=(seeds, steps, tokens)), dims=dims)
    z = xr.DataArray(rng.normal(size=(seeds, steps, queries, tokens)), dims=("seed", "step", "query", "token"))
    rest = xr.DataArray(rng.gamma(2.0, size=(seeds, steps)), dims=dims[:2])
    trajectory = xr.Dataset({"squares": squares, "z": z, "z_all": z.sum("query"), "rest": rest})
    return trajectory.assign_coords(seed=range(seeds), step=range(steps)), rng.integers(1, 90, tokens + 1)
