"""What the study of Theorem 2 measures: on flows and weights that are known."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.theorems import winner_measures as measures
from joma.theory import growth

DELTA = np.array([0.9, 0.7, 0.5, -0.3, 0.1])
TIMES = np.array([0.0, 0.5, 0.99])  # over the blow-up time


@pytest.fixture(scope="module")
def flow():
    """The closed form of Theorem 2 for one example, as if it were the integrated flow of two seeds."""
    v = growth.linear(DELTA, TIMES * growth.blow_up_time(DELTA).min())
    over = ("seed", "time", "token")
    return xr.Dataset(
        {
            "integrated": (over, np.stack([v, v[:, ::-1]])),
            "trained": (over, np.stack([v + 0.1 * (DELTA < 0.9), v[:, ::-1]])),
            "salience": (("seed", "token"), np.stack([DELTA, DELTA[::-1]])),
        },
        {"time": TIMES},
    )


def test_the_ratio_identity_holds_with_the_root_of_two_only(flow):
    """The weights at 0.99 of the blow-up time come from a derivation that shares no code with this package."""
    assert float(measures.ratio_spread(flow, np.sqrt(2)).max()) < 1e-12
    last = np.array([2.57583, 1.20036, 0.75542, -0.42615, 0.13830])
    np.testing.assert_allclose(flow.integrated[0, -1], last, atol=5e-6)
    printed = measures.ratio_spread(flow, 2.0).isel(time=-1)
    np.testing.assert_allclose(printed, 0.93151 / 0.9 / (0.07790 / 0.1) - 1, atol=1e-3)  # erf(1.287915), erf(0.06915)


def test_the_printed_ratio_is_right_for_small_weights(flow):
    small = flow.assign(integrated=1e-4 * flow.salience.expand_dims(time=flow.time, axis=1))
    assert float(measures.ratio_spread(small, 2.0).max()) < 1e-8


def test_winner_and_others_are_measured_apart(flow):
    np.testing.assert_array_equal(measures.is_winner(flow)[0], [True, False, False, False, False])
    np.testing.assert_allclose(measures.of_others(flow, "trained"), [0.1, 0.0])  # at time 0, where v is zero
    assert measures.of_winner(flow, "trained") == 0
    assert measures.of_winner(flow.assign(trained=flow.trained + 0.2), "trained") == pytest.approx(0.2)


def test_a_wrong_winner_is_seen(flow):
    np.testing.assert_array_equal(measures.takes_all(flow), 1)
    np.testing.assert_array_equal(measures.takes_all(flow.assign(salience=flow.salience.roll(token=1))), 0)


def figure_3(weights, steps):
    """Return a run whose weights [step, word] are those of one hidden unit of one seed."""
    v = xr.DataArray(np.asarray(weights)[None, :, :, None], dims=("seed", "step", "word", "hidden"))
    return xr.Dataset({"figure_3": v}, {"step": steps})


def test_late_speed_tells_growth_from_saturation():
    steps = np.arange(0, 2001, 40)
    steady, saturating, growing = steps / 2000.0, np.minimum(steps, 400) / 400.0, -((steps / 2000.0) ** 2)
    speed = measures.late_speed(figure_3(np.stack([steady, saturating, growing], axis=1), steps))
    np.testing.assert_allclose(speed.values.ravel(), [1.0, 0.0, 1.9], atol=1e-12)


def test_a_weight_on_its_way_back_does_not_grow():
    """It is as fast at the end as on average, but towards its start (or, from a far start, towards zero)."""
    steps = np.arange(0, 2001, 40)
    there_and_back = 2.0 - np.abs(steps / 500.0 - 2.0) * 0.9
    to_zero = 1.0 - steps / 2000.0 * 0.9
    away = 0.1 + steps / 2000.0
    run = figure_3(np.stack([there_and_back, to_zero, away, -away], axis=1), steps)
    assert (measures.late_speed(run).values.ravel() >= 1 - 1e-9).all()
    np.testing.assert_array_equal(measures.growing(run).values.ravel(), [False, False, True, True])
    np.testing.assert_array_equal(measures.growing_units(run), [1.0])
    np.testing.assert_array_equal(measures.growing_units(run.isel(word=[0, 1])), [0.0])


def test_a_diverged_weight_leaves_its_seed_without_growing_units():
    steps = np.arange(0, 2001, 40)
    run = figure_3(np.stack([steps / 2000.0, np.where(steps > 1000, np.nan, 1.0)], axis=1), steps)
    assert np.isnan(measures.growing_units(run)).all()


def test_the_distance_of_a_diverged_seed_is_unknown(flow):
    trained = flow.trained.copy()
    trained[0, -1, 0], trained[0, -1, 2] = np.nan, np.nan
    diverged = flow.assign(trained=trained)
    np.testing.assert_allclose(measures.of_others(diverged, "trained"), [np.nan, 0.0])
    assert np.isnan(measures.of_winner(diverged, "trained"))


def test_salience_of_common_tokens_is_relative_to_that_of_distinct_ones():
    delta = np.concatenate([np.full((10, 3), 2.0), np.full((10, 3), -0.5)])[None]
    run = xr.Dataset({"figure_3_salience": (("seed", "word", "hidden"), delta)})
    np.testing.assert_allclose(measures.salience_of_common(run), [0.25])


def test_figure_3_winners_are_counted_by_hidden_unit():
    salience = np.array([[[3.0, 1.0], [1.0, -2.0]]])
    weights = np.array([[[[-9.0, 5.0], [1.0, 0.5]]]])
    run = xr.Dataset(
        {
            "figure_3": (("seed", "step", "word", "hidden"), weights),
            "figure_3_salience": (("seed", "word", "hidden"), salience),
        }
    )
    np.testing.assert_array_equal(measures.figure_3_winners(run), [0.5])


def test_losers_are_compared_with_their_limits_and_the_winner_is_not():
    run = xr.Dataset({"late": (("seed", "token"), [[9.0, 1.1]]), "limit": (("seed", "token"), [[np.inf, 1.0]])})
    np.testing.assert_allclose(measures.losers(run), [0.1])


def test_a_diverged_seed_has_no_winner_and_leaves_the_others_theirs(flow):
    trained = flow.trained.copy()
    trained[0, -1] = np.nan
    np.testing.assert_array_equal(measures.takes_all(flow.assign(trained=trained)), [np.nan, 1.0])
    weights = np.array([[[[6.0, 3.0], [2.0, 1.0]]], [[[3.0, np.nan], [1.0, np.nan]]]])
    run = xr.Dataset(
        {
            "figure_3": (("seed", "step", "word", "hidden"), weights),
            "figure_3_salience": (("seed", "word", "hidden"), np.full((2, 2, 2), [[2.0], [1.0]])),
        }
    )
    np.testing.assert_array_equal(measures.figure_3_winners(run), [1.0, np.nan])
