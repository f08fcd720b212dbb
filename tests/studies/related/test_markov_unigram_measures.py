"""What `markov-unigram` measures, on runs made by hand."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.related import markov_unigram_measures as measures
from joma.study import NotInRun


@pytest.fixture
def run():
    """Two seeds, five arms, three records; H(π) is 1 and the entropy rate 0."""
    loss = np.full((2, 5, 3), 1.0)
    loss[:, 1] = [1.0, 0.5, 0.002]  # untied: through
    loss[0, 2, 1:] = 0.0  # the large start: one seed leaves at once, one in the end
    loss[1, 2, 2] = 0.1
    loss[:, 3] = [1.0, 0.9, 0.1]  # Adam leaves at the last record
    curvature = np.full((2, 5, 3), 1.0)
    curvature[:, 1] = np.nan
    curvature[:, 2] = -0.5
    curvature[0, 3] = [1.0, -0.2, 0.3]
    curvature[1, 3] = [1.0, 0.4, 0.1]
    dims = ("seed", "arm", "record")
    names = ["sgd, tied, 0.5/0.8", "sgd, untied, 0.5/0.8", "sgd, init 0.4", "adam, 0.5/0.8", "deep-sgd"]
    return xr.Dataset(
        {
            "loss": (dims, loss),
            "curvature": (dims, curvature),
            "group": ("arm", ["sgd", "sgd", "init", "adam", "deep-sgd"]),
            "p": ("arm", [0.5] * 5),
            "q": ("arm", [0.8] * 5),
            "tied": ("arm", [1, 0, 1, 1, 1]),
            "init": ("arm", [0.05, 0.05, 0.4, 0.02, 0.05]),
            "unigram": ("arm", [1.0] * 5),
            "kernel": ("arm", [0.0] * 5),
            "reduced_rate": (("chain", "tying"), [[1.01, 2.0]]),
            "reduced_rate_predicted": (("chain", "tying"), [[1.0, 2.0]]),
            "reduced_loss": (("seed", "chain", "tying"), [[[0.5, 0.1]], [[0.5, 0.3]]]),
            "reduced_loss_predicted": (("chain", "tying"), [[0.5, 0.1]]),
        },
        {"seed": [0, 1], "arm": names},
    )


def test_ends_are_compared_with_both_losses(run):
    np.testing.assert_allclose(measures.from_unigram(run), [0, 0])
    np.testing.assert_allclose(measures.above_kernel(run), [0.002, 0.002])


def test_a_model_is_stuck_above_a_quarter_of_the_fall(run):
    stuck = measures.is_stuck(run)
    assert stuck.sel(arm="sgd, tied, 0.5/0.8").values.tolist() == [1, 1]
    assert stuck.sel(arm="sgd, init 0.4").values.tolist() == [0, 0]
    assert measures.stuck_share(run, "deep-sgd").values.tolist() == [1, 1]
    assert measures.basin(run).values.tolist() == [1, 1]
    with pytest.raises(NotInRun, match="arm wide"):
        measures.stuck_share(run, "wide")


def test_a_diverged_model_is_neither_stuck_nor_through(run):
    run["loss"][0, 0, -1] = np.nan
    assert np.isnan(measures.is_stuck(run)[0, 0])


def test_a_diverged_arm_is_not_left_out_of_the_largest_distance(run):
    both = xr.concat([run, run], dim="arm", data_vars="minimal").assign_coords(arm=[str(i) for i in range(10)])
    both["loss"][0, 0, -1] = np.nan  # tied
    both["loss"][1, 1, -1] = np.nan  # untied
    np.testing.assert_array_equal(np.isnan(measures.from_unigram(both)), [True, False])
    np.testing.assert_array_equal(np.isnan(measures.above_kernel(both)), [False, True])
    run["reduced_rate"][0, 0] = np.nan
    run["reduced_loss"][1, 0, 0] = np.nan
    assert np.isnan(measures.rate_error(run))
    np.testing.assert_array_equal(np.isnan(measures.reduced_error(run)), [False, True])


def test_a_seed_that_diverged_says_nothing_of_its_fate_or_of_saddles(run):
    run["loss"][0, 0, -1] = np.nan  # stays
    run["loss"][1, 3, -2:] = np.nan  # Adam
    np.testing.assert_array_equal(np.isnan(measures.fate_is_predicted(run)), [True, False])
    np.testing.assert_array_equal(np.isnan(measures.least_curvature_before_departure(run)), [False, True])


def test_fates_are_compared_with_the_sign_of_the_curvature(run):
    assert measures.fate_is_predicted(run).values.tolist() == [1, 1]
    run["curvature"][1, 0, 0] = -1.0
    np.testing.assert_allclose(measures.fate_is_predicted(run), [1, 2 / 3])


def test_the_curvature_before_departure_ends_with_it(run):
    assert measures.departure(run).sel(arm="adam, 0.5/0.8").values.tolist() == [2, 2]
    assert measures.departure(run).sel(arm="sgd, init 0.4").values.tolist() == [1, 2]
    assert np.isnan(measures.departure(run).sel(arm="deep-sgd")).all()
    np.testing.assert_allclose(measures.least_curvature_before_departure(run), [-0.2, 0.1])
    until = measures.until_departure(run).sel(arm="sgd, init 0.4", seed=0)
    assert np.isnan(until[2])
    run["loss"][:, 3] = 1.0
    with pytest.raises(NotInRun, match="by Adam"):
        measures.least_curvature_before_departure(run)


def test_errors_of_the_reduced_model_are_the_largest(run):
    assert measures.rate_error(run) == pytest.approx(0.01)
    np.testing.assert_allclose(measures.reduced_error(run), [0, 0.2])
