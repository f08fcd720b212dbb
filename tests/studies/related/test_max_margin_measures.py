"""What the study `max-margin` measures, on a Dataset written down by hand."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.related import max_margin_measures as measures
from joma.studies.related.max_margin import STUDY
from joma.study import NotInRun


@pytest.fixture
def run():
    """Two seeds; K Qᵀ of seed 0 is nearly of rank one, and σ_2 ∝ σ_1^1.5 there."""
    first = np.array([[10.0, 100.0], [10.0, 100.0]])
    second = np.array([[1e-4 * 10**1.5, 1e-4 * 100**1.5], [5.0, 60.0]])
    arms = ("scores", "start", "seed")
    variables = {
        "half_slope_error": (arms, [[[0.1, 0.2], [0.3, 0.1]], [[0.01, 9.0], [0.02, 0.01]]]),
        "locally_best": (arms, [[[1.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]]),
        "selects_best": (arms, [[[1.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]),
        "slope_error": ((*arms, "length"), np.tile([9.0, 9.0, 0.01], (2, 2, 2, 1))),
        "alignment": (("seed", "factor_path"), [[0.99, 0.99], [0.99, 0.99]]),
        "norm": ((*arms, "length"), np.full((2, 2, 2, 3), 6.0)),
        "log_time": ((*arms, "length"), np.tile([0.0, 2.0, 4.0], (2, 2, 2, 1))),
        "cosine_gap": ((*arms, "length"), np.tile([np.nan, 0.5, 0.25], (2, 2, 2, 1))),
        "across": ((*arms, "length"), np.zeros((2, 2, 2, 3))),
        "last_switch": (arms, [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [7.0, 2.0]]]),
        "trained_gap": (("start", "seed", "trained_length"), np.tile([0.5, 0.1], (2, 2, 1))),
        "svm_norm": (arms, np.full((2, 2, 2), 3.0)),
        "coarse_distance": (arms, np.full((2, 2, 2), 0.4)),
        "descent_distance": (arms, np.full((2, 2, 2), 0.2)),
        "margin_share": (("seed", "parameters", "norm_kind"), [[[0.99, 0.8], [0.7, 0.95]], [[0.99, 0.9], [0.7, 0.85]]]),
        "matrix_cosine": (("seed", "parameters", "norm_kind"), np.arange(8.0).reshape(2, 2, 2)),
        "nuclear_shares": (("seed", "factor_path"), [[0.95, 0.97], [0.85, 0.95]]),
        "nuclear_norm": ("seed", [2.0, 4.0]),
        "nuclear_bound": ("seed", [1.0, 4.0]),
        "singular": (("seed", "factor_path", "order"), np.stack([first, second], axis=-1)),
        "exponent": (("seed", "factor_path"), [[0.4, 0.5], [3.0, 3.0]]),
    }
    coords = {
        "scores": ["equal", "free"], "start": ["zero", "random"], "parameters": ["W", "K Q"],
        "norm_kind": ["frobenius", "nuclear"], "length": [0.0, 5.0, 10.0], "trained_length": [5.0, 10.0],
        "seed": [0, 1],
    }  # fmt: skip
    return xr.Dataset(variables, coords)


def test_the_larger_of_both_starts_counts(run):
    np.testing.assert_array_equal(measures.direction_error(run), [0.3, 0.2])
    assert measures.locally_best(run) == pytest.approx(2 / 3)
    np.testing.assert_array_equal(measures.late_convergence(run), [0.0, 0.5])
    np.testing.assert_array_equal(measures.late_direction_error(run), [0.01, 0.01])
    np.testing.assert_array_equal(measures.global_share(run), [0.5, 0.0])
    np.testing.assert_array_equal(measures.descent_ratio(run, "equal"), [2.0, 2.0])
    assert measures.log_time_range(run, 1) == (2.0, 2.0)


def test_a_start_without_an_answer_is_not_left_out(run):
    run["half_slope_error"][0, 1, 0] = np.nan
    run["slope_error"][0, 0, 1, -1] = np.nan
    run["trained_gap"][1, 1, -1] = np.nan
    run["descent_distance"][1, 1, 0] = np.nan
    (trained,) = (claim.measure(run) for claim in STUDY.claims if claim.name == "trained")
    np.testing.assert_array_equal(np.isnan(measures.direction_error(run)), [True, False])
    np.testing.assert_array_equal(np.isnan(measures.late_direction_error(run)), [False, True])
    np.testing.assert_array_equal(np.isnan(measures.trained_cosine(run)), [False, True])
    np.testing.assert_array_equal(np.isnan(trained), [True, False])
    run["coarse_distance"].loc[{"scores": "equal", "seed": 1, "start": run.start[0]}] = np.nan
    assert np.isnan(measures.descent_ratio(run, "equal"))[1]


def test_training_is_compared_where_no_sequence_is_lost(run):
    np.testing.assert_allclose(measures.trained_cosine(run), [0.9, 0.9])
    partly = run.assign(selects_best=run.selects_best.where((run.seed == 0) | (run.start == "zero"), 0.0))
    np.testing.assert_allclose(measures.trained_cosine(partly), [0.9])
    with pytest.raises(NotInRun):
        measures.trained_cosine(run.assign(selects_best=0 * run.selects_best))


def test_shares_of_margins(run):
    np.testing.assert_array_equal(measures.frobenius_cosine(run), [0.0, 4.0])
    np.testing.assert_array_equal(measures.nuclear_share(run), [0.95, 0.85])
    np.testing.assert_allclose(measures.nuclear_lead(run), [0.15, -0.05])
    np.testing.assert_allclose(measures.nuclear_rise(run), [0.02, 0.1])
    np.testing.assert_allclose(measures.late_nuclear_lead(run), [0.17, 0.05])
    np.testing.assert_array_equal(measures.certificate_gap(run), [0.5, 0.0])


def test_the_power_is_judged_where_the_product_is_nearly_of_rank_one(run):
    measured, predicted = measures.exponents(run)
    assert float(measured[0]) == pytest.approx(0.5)
    np.testing.assert_allclose(predicted, [0.45, 3.0])
    assert measures.exponent_error(run) == pytest.approx(0.05)
    with pytest.raises(NotInRun):
        measures.exponent_error(run.isel(seed=[1]))
    with pytest.raises(NotInRun):
        measures.exponent_error(run.assign(alignment=0.9 * run.alignment))
    with pytest.raises(NotInRun):
        measures.locally_best(run.assign(half_slope_error=1 + run.half_slope_error))


def test_curves_for_the_figures(run):
    np.testing.assert_array_equal(measures.cosine_gaps(run).length, [5.0, 10.0])
    growth = measures.relative_growth(run).isel(start=0, seed=0)
    np.testing.assert_array_equal(growth, [np.nan, 1.0, 0.5])
    slowest = measures.slowest_path(run)
    assert float(slowest.last_switch) == 7.0
    np.testing.assert_array_equal(measures.along(slowest), [0.0, 3.0, 4.5])
