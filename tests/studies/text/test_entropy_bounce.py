"""Bounces of curves whose shape is known."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from joma.drawing import COLOURS, MARKERS
from joma.studies.text.entropy_bounce import (
    MIN_BOUNCE,
    SIGNIFICANCE,
    bounce_p_value,
    bounces,
    is_complete,
    mark_minimum,
)

STEPS = np.arange(40)


def entropy_of(*layers, noise=0.0, seeds=2):
    """Entropy [seed, step, layer, head] whose layers have these curves."""
    rng = np.random.default_rng(7)
    values = np.stack(layers, axis=-1)[None, :, :, None] + noise * rng.standard_normal((seeds, 40, len(layers), 1))
    return xr.DataArray(values, dims=("seed", "step", "layer", "head"), coords={"step": STEPS})


TURNING = np.where(STEPS < 20, 2 - STEPS / 20, 1 + 0.3 * (STEPS - 20) / 19)  # from 2 down to 1 and back to 1.3
FALLING = 2 - STEPS / 39
RISING = 1 + STEPS / 39
ROUND = 1 + abs(STEPS / 19.5 - 1)  # from 2 down to 1 and back to 2


def test_a_fall_counts_no_more_than_its_recovery():
    """The bounce is the smaller of the two, here the recovery less that of noise alone."""
    measured = bounces(entropy_of(TURNING))
    assert measured.turn.values.tolist() == [20, 20]
    np.testing.assert_allclose(measured.least, 1.0)
    np.testing.assert_allclose(measured.fall, 1.0)
    np.testing.assert_allclose(measured.recovery, 0.3)
    np.testing.assert_allclose(measured.bounce, (measured.recovery - measured.chance) / 2)
    assert (measured.p_value <= SIGNIFICANCE).all()


@pytest.mark.parametrize("curve", [FALLING, RISING, np.full(40, 2.0)])
def test_a_curve_that_never_turns_is_no_bounce(curve):
    measured = bounces(entropy_of(curve, noise=0.01))
    assert measured.bounce.values.tolist() == [0, 0]


def test_a_layer_bounces_by_itself():
    measured = bounces(entropy_of(FALLING, ROUND, noise=0.005), each_layer=True)
    assert measured.bounce.dims == ("seed", "layer")
    assert measured.bounce.isel(layer=0).values.tolist() == [0, 0]
    np.testing.assert_allclose(measured.bounce.isel(layer=1), 0.5, atol=0.03)


def test_the_p_value_of_a_bounce_is_one_unless_it_falls_and_recovers():
    small_fall = RISING - 0.5 * MIN_BOUNCE * (STEPS == 1)
    curves = {"round": ROUND, "falling": FALLING, "rising": RISING, "small fall": small_fall}
    p_values = {name: float(bounce_p_value(entropy_of(curve)).max()) for name, curve in curves.items()}
    assert p_values.pop("round") <= SIGNIFICANCE
    assert set(p_values.values()) == {1.0}


def test_a_seed_that_diverged_has_no_p_value_even_if_it_bounced_before():
    entropy = entropy_of(ROUND, ROUND, noise=0.005)
    entropy[1, -2:] = np.nan
    entropy = entropy.pad(layer=(0, 1))  # a layer that this model lacks
    np.testing.assert_array_equal(np.isnan(bounce_p_value(entropy)), [False, True])
    np.testing.assert_array_equal(is_complete(entropy), [True, False])


def test_the_minimum_is_marked_where_the_curve_falls_far_enough():
    panel = Figure().subplots()
    shallow = 2 - 0.9 * MIN_BOUNCE * 2 * (STEPS == 5)
    mark_minimum(panel, entropy_of(shallow).mean(("layer", "head")), 0)
    assert not panel.lines
    mark_minimum(panel, entropy_of(TURNING).mean(("layer", "head")), 9)
    (line,) = panel.lines
    np.testing.assert_allclose(line.get_xydata(), [[21, 1]])  # drawn against step + 1
    assert (line.get_color(), line.get_marker()) == (COLOURS[2], MARKERS[2])
