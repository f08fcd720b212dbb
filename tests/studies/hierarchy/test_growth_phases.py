"""The measures of `scan-snap` on curves whose growth is known."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.studies.hierarchy import growth_phases
from joma.study import NotInRun

TIMES = np.unique(np.rint(np.geomspace(1, 1e4, 100)))


def curve(values, times=TIMES):
    return xr.DataArray(values, {"step": times}, "step")


@given(power=st.floats(0.1, 3), scale=st.floats(1e-3, 1e3))
def test_the_exponent_of_a_power_is_that_power(power, scale):
    line = curve(scale * TIMES**power)
    np.testing.assert_allclose(growth_phases.local_exponent(line), power, rtol=1e-9)
    np.testing.assert_allclose(growth_phases.mean_exponent(line, 100, 1000), power, rtol=1e-9)


@given(time=st.floats(20, 2000))
def test_growth_slows_where_its_power_falls_to_one(time):
    """z = t²/(1 + (t/b)²) has the power 2/(1 + (t/b)²), which is 1 at t = b."""
    times = np.geomspace(1, 1e4, 400)
    slowing = growth_phases.slowing_time(curve(times**2 / (1 + (times / time) ** 2), times))
    np.testing.assert_allclose(slowing, time, rtol=1e-3)


def test_growth_that_does_not_slow_has_no_slowing_time():
    assert np.isnan(growth_phases.slowing_time(curve(TIMES**2.0)))


def test_straightness_separates_a_logarithm_from_a_line():
    """For a curve that is neither, it agrees with NumPy's least squares."""
    assert growth_phases.straightness(curve(3 + 2 * np.log(TIMES))) < 1e-9
    assert growth_phases.straightness(curve(1 + 0.1 * TIMES)) > 1e9
    late = TIMES >= 1000
    logarithm, line = (
        np.sqrt(np.polyfit(abscissa[late], np.sqrt(TIMES)[late], 1, full=True)[1][0])
        for abscissa in (np.log(TIMES), TIMES)
    )
    np.testing.assert_allclose(growth_phases.straightness(curve(np.sqrt(TIMES))), logarithm / line, rtol=1e-6)


def test_a_logarithm_grows_evenly():
    """Over the last decade, z = √t gains √10 times as much at the end as at the start, but for the records' spacing."""
    times = np.geomspace(1, 1e4, 401)
    np.testing.assert_allclose(growth_phases.unevenness(curve(5 * np.log(times), times)), 1, rtol=1e-8)
    np.testing.assert_allclose(growth_phases.unevenness(curve(np.sqrt(times), times)), 10 ** (99 / 200), rtol=1e-8)


@pytest.mark.parametrize("phase", [(0.01, 0.1), (1e4, 1e6)])
def test_a_phase_without_two_records_is_not_in_the_run(phase):
    with pytest.raises(NotInRun, match="records from"):
        growth_phases.mean_exponent(curve(TIMES**2), *phase)


def test_slowing_times_of_the_arms_are_compared():
    """Growth slows at step 50, 500 and 1000: ten times later, and then twice."""
    times, slowing = np.geomspace(1, 1e4, 400), xr.DataArray([50, 500, 1000], {"arm": ["faster", "equal", "slower"]})
    t = xr.DataArray(times, {"step": times}, "step")
    logit = (t**2 / (1 + (t / slowing) ** 2)).expand_dims(seed=[0], label=[0], rank=[0])
    run = xr.Dataset({"logit": logit, "transition": slowing / 2})
    np.testing.assert_allclose(growth_phases.equal_over_faster(run), [10], rtol=1e-2)
    np.testing.assert_allclose(growth_phases.least_slower_over_faster(run), [2], rtol=1e-2)
    np.testing.assert_allclose(growth_phases.slowing_over_transition(run, "faster"), [2], rtol=1e-2)
    np.testing.assert_allclose(growth_phases.scan_exponent(run, "faster"), [2], rtol=2e-2)


def test_the_rate_exponent_is_fitted_to_the_fast_ratios_alone():
    ratio = np.array([0.1, 1.0, 100.0, 300.0, 1000.0])
    slowing = np.where(ratio < 100, 7.0, ratio**0.25)  # in units of the transition's time, which goes as 1/ratio
    run = xr.Dataset({"ratio_slowing": (("seed", "ratio"), [0 * ratio + 3, slowing])}, {"ratio": ratio})
    np.testing.assert_allclose(growth_phases.rate_exponent(run), [-1, -0.75], rtol=1e-9)


def test_the_distance_from_the_flow_is_relative_to_the_largest_logit_of_the_arm():
    flow = xr.DataArray([[[[1.0, 4.0]]], [[[1e-8, 2e-8]]]], dims=("arm", "label", "rank", "step")).expand_dims("seed")
    run = xr.Dataset({"logit_flow": flow, "logit": flow + xr.DataArray([0.4, 4e-9], dims="arm")})
    np.testing.assert_allclose(growth_phases.flow_distance(run), [0.2], rtol=1e-9)
