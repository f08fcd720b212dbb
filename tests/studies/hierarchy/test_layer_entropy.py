"""The bounce of attention in `hierarchy-order`, on curves whose fall and recovery are known."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.studies.hierarchy import layer_entropy

STEPS = np.arange(0, 101, 4)


def test_each_layer_is_measured_by_itself():
    """The first layer comes back by half of its fall, the second only falls, and the third only rises."""
    step = xr.DataArray(STEPS, {"step": STEPS})
    first = xr.where(step <= 40, 2 - step / 40, 1 + (step - 40) / 120)
    curves = xr.concat([first, 2 - step / 100, 1 + step / 100], xr.Variable("layer", [1, 2, 3])).expand_dims(seed=[0])
    deep = curves.expand_dims(tree=["deep"])
    run = xr.Dataset({"entropy": xr.concat([deep, 0 * deep.assign_coords(tree=["shallow"])], "tree")})
    bounce = layer_entropy.layer_bounce(run, 3)
    assert bounce.dims == ("seed", "layer")
    np.testing.assert_allclose(bounce, [[0.25, 0, 0]], atol=1e-6)
    np.testing.assert_array_equal(layer_entropy.bounce_of_layer(run, 3, 1), bounce[:, 0])


def test_a_seed_that_diverged_is_nan_and_noise_is_no_bounce():
    generator = np.random.default_rng(0)
    noise = 2 - STEPS / 200 + 0.05 * generator.standard_normal((3, len(STEPS)))
    noise[2, -1] = np.nan
    run = xr.Dataset({"entropy_single": (("seed", "step"), noise)}, {"step": STEPS})
    np.testing.assert_array_equal(layer_entropy.layer_bounce(run, 1), [[0], [0], [np.nan]])
