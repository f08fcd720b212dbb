"""Claims as data: intervals, seeds, and what a run lacks."""

import json

import numpy as np
import pytest
import xarray as xr
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from joma.study import Claim, NotInRun, above, at_least, at_most, between, near, select


def test_what_a_run_lacks_is_not_tested():
    def missing(_):
        raise NotInRun

    judged = Claim("x", "x", missing, at_least(0.0), "check").judge(xr.Dataset({"x": ("seed", [1.0])}), "quick")
    assert (judged["verdict"], judged["measured"]["values"]) == ("not tested", [None])
    assert judged["reason"] == "not in this run"


def test_a_claim_that_is_not_tested_has_its_reason():
    run = xr.Dataset({"x": ("seed", [1.0])})
    reasons = {
        "decided at preset paper only": Claim("x", "x", lambda run: run.x, at_least(0.0), "check", presets=("paper",)),
        "needs 3 seeds, this run has 1": Claim("x", "x", lambda run: run.x, at_least(0.0), "check", seeds=3),
        "needs 2 seeds, this run has 1": Claim("x", "x", lambda run: run.x, at_least(0.0), "check", across="interval"),
        "this run has no depth 5": Claim("x", "x", lambda run: select(run.x, seed=5), at_least(0.0), "check"),
    }
    for reason, claim in reasons.items():
        judged = claim.judge(run.assign_coords(seed=[0]), "quick")
        assert (judged["verdict"], judged["reason"]) == ("not tested", reason.replace("depth", "seed"))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(-2, 2))
def test_an_interval_over_seeds_is_judged_whole(values, bound):
    claim = Claim("x", "x", lambda run: run.x, above(bound), "check", across="interval")
    judged = claim.judge(xr.Dataset({"x": ("seed", values)}), "quick")
    assume(np.ptp(values) > 1e-6)
    low, high = stats.t(len(values) - 1, np.mean(values), stats.sem(values)).interval(0.95)
    assume(abs(low - bound) > 1e-9 and abs(high - bound) > 1e-9)
    expected = "holds" if low > bound else "does not hold" if high < bound else "not tested"
    assert judged["verdict"] == expected
    assert ("undecided" in judged["reason"]) == (expected == "not tested")


def test_an_undecided_claim_names_its_bound():
    claim = Claim("x", "x", lambda run: run.x, above(0), "check", across="interval")
    reason = claim.judge(xr.Dataset({"x": ("seed", [-1.0, 2.0])}), "quick")["reason"]
    assert reason.endswith("contains 0")


def test_an_interval_over_seeds_of_one_number_is_not_tested_and_says_why():
    claim = Claim("x", "x", lambda run: run.x.mean(), above(0), "check", across="interval")
    record = claim.judge(xr.Dataset({"x": ("seed", [1.0, 2.0])}), "quick")
    assert record["verdict"] == "not tested"
    assert record["reason"] == "the measure is one number for all seeds, which has no interval over seeds"
    assert record["measured"]["values"] == [1.5]


def test_diverged_seeds_do_not_pass_an_interval():
    claim = Claim("x", "x", lambda run: run.x, above(0), "check", across="interval")
    assert claim.judge(xr.Dataset({"x": ("seed", [1.0, np.nan])}), "quick")["verdict"] == "does not hold"


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.floats(-5, 5), st.booleans())
def test_every_and_mean(values, threshold, every):
    trajectory = xr.Dataset({"x": ("seed", values)})
    claim = Claim("x", "x", lambda run: run.x, at_most(threshold), "check", across="every" if every else "mean")
    expected = max(values) <= threshold if every else np.mean(values) <= threshold
    assert (claim.judge(trajectory, "quick")["verdict"] == "holds") == expected


def test_a_measure_must_be_a_number_or_one_value_for_each_seed():
    claim = Claim("x", "x", lambda run: run.x, at_most(1), "check")
    with pytest.raises(TypeError, match="one value for each seed"):
        claim.judge(xr.Dataset({"x": (("a", "b"), np.zeros((2, 2)))}), "quick")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("values", [[1e200, 2e200], [-1e308, 1.7e308]])
def test_numbers_whose_squares_overflow_stay_valid_json(values):
    record = Claim("x", "x", lambda run: run.x, at_most(1.0), "check").judge(
        xr.Dataset({"x": ("seed", values)}), "quick"
    )
    assert record["measured"]["interval"] is None
    assert json.loads(json.dumps(record, allow_nan=False)) == record


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
