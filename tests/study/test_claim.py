"""Claims as data: intervals, seeds, and what a run lacks."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.study import Claim, NotInRun, at_least, at_most, between, near, select


def test_what_a_run_lacks_is_not_tested():
    def missing(_):
        raise NotInRun

    judged = Claim("x", "x", missing, at_least(0.0)).judge(xr.Dataset({"x": ("seed", [1.0])}), "quick")
    assert (judged["verdict"], judged["measured"]["values"]) == ("not tested at this preset", [None])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.floats(-5, 5), st.booleans())
def test_every_and_mean(values, threshold, every):
    trajectory = xr.Dataset({"x": ("seed", values)})
    claim = Claim("x", "x", lambda run: run.x, at_most(threshold), across="every" if every else "mean")
    expected = max(values) <= threshold if every else np.mean(values) <= threshold
    assert (claim.judge(trajectory, "quick")["verdict"] == "holds") == expected


def test_a_measure_must_be_a_number_or_one_value_for_each_seed():
    claim = Claim("x", "x", lambda run: run.x, at_most(1))
    with pytest.raises(TypeError, match="one value for each seed"):
        claim.judge(xr.Dataset({"x": (("a", "b"), np.zeros((2, 2)))}), "quick")


@given(st.floats(-10, 10), st.floats(0, 3), st.floats(-20, 20))
def test_expected_intervals(value, tolerance, x):
    assert (x in near(value, tolerance)) == (value - tolerance <= x <= value + tolerance)
    assert (x in between(value, value + tolerance)) == (value <= x <= value + tolerance)
    assert (x in at_least(value)) == (x >= value)


def test_selecting_a_label_that_the_run_lacks_is_not_an_error_of_the_claim():
    values = xr.DataArray([1.0, 2.0], {"depth": [1, 5]}, ("depth",))
    assert select(values, depth=5).item() == 2.0
    with pytest.raises(NotInRun, match="depth 2"):
        select(values, depth=2)
