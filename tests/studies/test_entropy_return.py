"""Fall, recovery and the share regained, against numbers by hand and against the probe of single curves."""

import numpy as np
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.probes.bounce import measure_bounce
from joma.studies.entropy_return import fall, recovery, share_regained


def test_fall_recovery_and_share_by_hand():
    entropy = xr.DataArray([[1.0, 0.4, 0.7], [1.0, 0.8, 0.8]], dims=("seed", "time"))
    np.testing.assert_allclose(fall(entropy, "time"), [0.6, 0.2])
    np.testing.assert_allclose(recovery(entropy, "time"), [0.3, 0.0])
    np.testing.assert_allclose(share_regained(entropy, "time"), [0.5, 0.0])
    np.testing.assert_allclose(share_regained(entropy, "time", visible=0.4), [0.5, 0.0])
    np.testing.assert_allclose(share_regained(entropy, "time", visible=0.7), [0.0, 0.0])


def test_what_diverged_has_no_return_even_if_it_fell_before():
    entropy = xr.DataArray([1.0, 0.4, np.nan], dims="time")
    for measure in (fall, recovery, share_regained):
        assert np.isnan(measure(entropy, "time"))


def test_the_label_of_a_step_is_no_label_of_what_is_measured():
    entropy = xr.DataArray([[1.0, 0.4, 0.7]], {"seed": [3], "step": [0, 5, 9]}, ("seed", "step"))
    for measure in (fall, recovery, share_regained):
        assert set(measure(entropy, "step").coords) == {"seed"}


@given(seed=st.integers(0, 2**31), steps=st.integers(5, 40))
def test_fall_and_recovery_are_those_of_the_probe_of_curves(seed, steps):
    curves = np.random.default_rng(seed).normal(size=(2, steps))
    measured = measure_bounce(np.arange(steps), curves, draws=1)
    entropy = xr.DataArray(curves, dims=("seed", "step"))
    np.testing.assert_array_equal(fall(entropy, "step"), measured.depth)
    np.testing.assert_array_equal(recovery(entropy, "step"), measured.recovery)
