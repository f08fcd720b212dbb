"""The measures of `ladder` by hand, on cases that are written down."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.theorems.ladder_measures import (
    CLAIMS,
    arrived,
    arrived_cases,
    came_back,
    end_distance,
    gelu_density,
    optimum_distance,
    predicted_return,
    variance_explained,
    verdicts_gained,
    weight_error,
)
from joma.study import NotInRun

# start, early, least, end, optimum, fall, excess, slope: of four worlds.
BACK = (1.0, 0.5, 0.5, 0.9, 0.91, 0.2, 1e-6, 0.0)  # falls and comes back, as predicted
DOWN = (1.0, 0.6, 0.4, 0.4, 0.41, 0.2, 1e-6, 0.0)  # falls on, as predicted
MISSED = (1.0, 0.5, 0.3, 0.3, 0.7, 0.2, 1e-6, 0.0)  # should have come back
SLOW = (1.0, 0.5, 0.3, 0.3, 0.7, 0.2, 1e-3, 0.0)  # has not arrived
NAMES = ("start", "early", "least", "end", "optimum", "fall", "excess", "slope")


def cases(*seeds, family="random"):
    values = np.array(seeds)  # seed, case, name
    variables = {f"case_{name}": (("seed", "case"), values[..., index]) for index, name in enumerate(NAMES)}
    return xr.Dataset(variables).assign_coords(family=("case", [family] * values.shape[1]))


def test_a_number_added_to_all_classes_of_a_token_is_no_error():
    target = xr.DataArray([[[1.0, -1.0], [2.0, 0.0]]], dims=("seed", "token", "label"))
    weight = (target + xr.DataArray([3.0, -4.0], dims="token")).expand_dims(world=["overlap"])
    run = xr.Dataset({"weight": weight, "naive_bayes": target})
    assert float(weight_error(run)[0]) == pytest.approx(0, abs=1e-12)
    assert float(weight_error(run.assign(weight=1.1 * run.weight))[0]) == pytest.approx(0.1)


def test_verdicts_and_predictions_by_hand():
    run = cases([BACK, DOWN, MISSED, SLOW])
    assert arrived(run).values.tolist() == [[True, True, True, False]]
    assert came_back(run).values.tolist() == [[True, False, False, False]]
    assert predicted_return(run).values.tolist() == [[True, False, True, True]]


def test_an_optimum_that_the_search_did_not_reach_is_not_judged():
    steep = (*BACK[:-1], 1e-3)
    assert arrived(cases([BACK, steep])).values.tolist() == [[True, False]]


def test_only_worlds_that_have_arrived_are_judged():
    run = cases([BACK, DOWN, SLOW], [BACK, MISSED, SLOW])
    np.testing.assert_allclose(end_distance("random")(run), [0.01, (0.01 + 0.4) / 2])
    # Over both seeds one half of the worlds comes back, so that a constant verdict is right in one half.
    np.testing.assert_allclose(verdicts_gained("random")(run), [1 - 0.5, 0.5 - 0.5])
    ends, errors = np.array([0.9, 0.4, 0.9, 0.3]), np.array([0.01, 0.01, 0.01, 0.4])
    expected = 1 - (errors**2).sum() / ((ends - ends.mean()) ** 2).sum()
    assert float(variance_explained("random")(run)) == pytest.approx(expected)


def test_a_constant_verdict_gains_nothing():
    run = cases([BACK, BACK], [BACK, BACK])
    np.testing.assert_allclose(verdicts_gained("random")(run), [0.0, 0.0])


def test_the_constant_verdict_is_compared_with_the_worlds_of_the_same_seed():
    # 4 of 6 worlds come back: to say so of all is right in all worlds of the first seed and in one of the second.
    run = cases([BACK, BACK, BACK], [BACK, DOWN, MISSED])
    np.testing.assert_allclose(verdicts_gained("random")(run), [1 - 1, 2 / 3 - 1 / 3])


def test_a_seed_without_a_world_that_has_arrived_is_not_in_the_run():
    with pytest.raises(NotInRun, match="planted"):
        arrived_cases(cases([BACK, SLOW], [SLOW, SLOW], family="planted"), "planted")


def test_gelu_units_are_compared_with_linear_ones_only_where_they_are_solved():
    entropy = xr.DataArray([[[0.5, 0.75]]], dims=("seed", "world", "activation")).assign_coords(
        world=["lengths"], activation=["linear", "gelu"]
    )
    assert float(gelu_density(xr.Dataset({"optimum_entropy": entropy}))[0]) == 0.25
    with pytest.raises(NotInRun, match="GELU"):
        gelu_density(xr.Dataset({"optimum_entropy": entropy.where(entropy.activation == "linear")}))


def test_the_distance_from_the_optimum_is_the_largest_over_worlds():
    optimum = xr.DataArray([[[0.5, 0.7], [0.9, np.nan]]], dims=("seed", "world", "activation")).assign_coords(
        world=["lengths", "noise"], activation=["linear", "gelu"]
    )
    error = optimum.copy(data=[[[0.01, 0.04], [-0.03, 0.0]]])
    entropy = xr.concat([xr.ones_like(optimum), optimum + error], dim="time")
    run = xr.Dataset({"entropy": entropy, "optimum_entropy": optimum})
    np.testing.assert_allclose(optimum_distance(("lengths", "noise"))(run), [0.03])
    np.testing.assert_allclose(optimum_distance(("lengths",), "gelu")(run), [0.04])
    with pytest.raises(NotInRun, match="world noise with GELU units"):
        optimum_distance(("noise",), "gelu")(run)


def test_kinds_say_what_is_proved_what_is_read_and_what_is_ours():
    kinds = {claim.name: claim.kind for claim in CLAIMS}
    assert {name for name, kind in kinds.items() if kind == "theorem"} == {"optimum", "uniform"}
    assert {name for name, kind in kinds.items() if kind == "reading"} == {"nonlinearity-needed"}
    assert {name for name, kind in kinds.items() if kind == "check"} == {"sgd-flow"}
