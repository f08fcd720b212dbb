"""The flow of `scan-snap` against its closed form, as the premises of that form are met."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.data.tokens import sequence_classes
from joma.studies.hierarchy import premises
from joma.studies.hierarchy.premises import Rates, flow_measures
from joma.study import Context


def measures(share: float, ratio: float, seeds=(0, 1), rate: float = 0.1) -> xr.Dataset:
    data = sequence_classes(
        generators=Context(seeds).generators("data"), queries=2, classes=2, distinct=3, common=3, share=share
    )
    return flow_measures(data, Rates(ratio * rate, rate, 12))


def test_flow_and_closed_form_agree_where_both_premises_are_met():
    flow, closed_form = measures(share=0.01, ratio=1e3), premises.clock_values(12)
    np.testing.assert_allclose(flow.scan, closed_form["clock_scan"], atol=2e-3)
    np.testing.assert_allclose(flow.slowing, closed_form["clock_slowing"], rtol=5e-3)
    assert float(flow.clock_distance.max()) < 5e-3
    assert float(flow.gain_error.max()) < 1e-2


def test_the_error_of_the_relative_gain_falls_as_one_over_the_ratio():
    slow, fast = (measures(share=0.5, ratio=ratio).gain_error for ratio in (1e3, 1e4))
    np.testing.assert_allclose(slow / fast, 10, rtol=0.05)


def test_the_distance_from_the_closed_form_falls_as_the_square_of_the_share():
    many, few = (measures(share=share, ratio=1e4).clock_distance for share in (0.06, 0.03))
    np.testing.assert_allclose(many / few, 4, rtol=0.15)


def test_without_a_faster_decoder_or_with_many_common_tokens_they_disagree():
    assert float(measures(share=0.01, ratio=1.0).gain_error.min()) > 0.2
    assert float(measures(share=0.5, ratio=1e3).clock_distance.min()) > 0.2


@pytest.mark.parametrize("rate", [1e-3, 10.0])
def test_only_the_ratio_of_the_rates_matters(rate):
    """Times are in units of the transition's, so that one rate is arbitrary."""
    reference, scaled = (measures(0.5, 100.0, (0,), rate) for rate in (0.1, rate))
    xr.testing.assert_allclose(reference, scaled, rtol=1e-4)


def test_the_closed_form_begins_as_a_square_and_slows_down():
    curve = premises.clock(64)
    early = curve.sel(step=slice(None, 2e-3))
    power = np.log(early[-1] / early[0]) / np.log(early.step[-1] / early.step[0])
    assert float(power) == pytest.approx(2, abs=5e-3)
    assert 0.5 < premises.clock_values(64)["clock_slowing"] < 2


@given(errors=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6))
def test_an_error_that_falls_at_every_step_has_steps_below_one(errors):
    step = float(premises.largest_step(xr.DataArray(errors, dims="ratio"), "ratio"))
    assert step == pytest.approx(max(after / before for before, after in itertools.pairwise(errors)))


def test_an_undefined_error_is_not_passed_over():
    assert np.isnan(premises.largest_step(xr.DataArray([1.0, np.nan, 0.1], dims="ratio"), "ratio"))
