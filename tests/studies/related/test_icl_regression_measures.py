"""The measures of `icl-regression` on runs whose answers are known."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.related import icl_regression_measures as measures
from joma.study import NotInRun
from studies.related.icl_regression_run import small_run


def test_a_plateau_is_seen_if_the_loss_is_near_and_flat():
    run = xr.Dataset(
        {
            "plateau_loss": ("plateau", [1.0, 0.6, 0.3, 0.1]),
            "visit_distance": (("seed", "form", "inner_plateau"), [[[0.01, 0.05]], [[0.01, 0.01]]]),
            "visit_slope": (("seed", "form", "inner_plateau"), [[[0.01, 0.01]], [[0.01, 0.9]]]),
        },
        {"form": ["rank one"]},
    )
    np.testing.assert_array_equal(measures.seen(run, "rank one"), [0.5, 0.5])
    with pytest.raises(NotInRun, match="full rank"):
        measures.seen(run, "full rank")


def test_the_order_counts_only_if_every_direction_is_learnt_in_both_forms():
    times = [[[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [2.0, 1.0]], [[1.0, np.inf], [1.0, 2.0]]]
    run = xr.Dataset({"learnt_time": (("seed", "form", "direction"), times)}, {"form": ["rank one", "full rank"]})
    np.testing.assert_array_equal(measures.in_order(run), [1.0, 0.0, 0.0])


def test_the_slope_of_a_law_is_one():
    scales = np.array([1e-1, 1e-3, 1e-5])
    times = -np.log(scales)[:, None] / 2.0 + np.array([0.0, 0.2, 1.0])
    run = xr.Dataset(
        {"drop_time": (("drop_scale", "share"), times), "growth_rate": 2.0},
        {"drop_scale": scales, "share": [0.1, 0.5, 0.9]},
    )
    assert measures.drop_slope(run) == pytest.approx(1.0)
    widths = 1.0 / (-np.log([1e-3, 1e-5]) / 2 + 0.2)
    assert measures.abruptness(run) == pytest.approx(widths[1] - widths[0])
    with pytest.raises(NotInRun, match="drop_scale"):
        measures.abruptness(run.isel(drop_scale=[0, 1]))


def whole_run(final):
    loss = np.stack([np.full(len(final), 0.5), final], axis=-1)[:, None, None]
    return xr.Dataset(
        {
            "plateau_loss": ("plateau", [2.0, 1.5, 0.5]),
            "whole_loss": (("seed", "whole_heads", "whole_blocks", "whole_step"), loss),
            "one_step_loss": ("seed", np.full(len(final), 0.5)),
            "rank_one_share": (("seed", "whole_heads"), np.linspace(0, 1, len(final))[:, None]),
        },
        {"whole_blocks": ["whole"]},
    )


def test_seeds_are_stuck_if_they_are_nearer_to_the_first_plateau():
    run = whole_run(np.array([0.5, 0.9, 1.4]))
    np.testing.assert_allclose(measures.whole_excess(run, "whole"), [0.0, 0.4, 0.9])
    np.testing.assert_array_equal(measures.is_behind(run), [False, False, True])
    np.testing.assert_array_equal(measures.rank_one_share(run, measures.is_behind(run)), [1.0])
    early = whole_run(np.array([0.5, 0.6]))
    with pytest.raises(NotInRun, match="such seed"):
        measures.rank_one_share(early, measures.is_behind(early))


def test_seeds_that_have_left_the_first_plateau_do_not_wait_there():
    run = whole_run(np.array([0.5, 1.2, 1.45, 1.9, np.nan]))
    run["plateau_loss"] = ("plateau", [2.0, 1.5, 1.3, 0.5])
    np.testing.assert_array_equal(measures.is_behind(run), [False, True, True, True, False])
    np.testing.assert_array_equal(measures.is_waiting(run), [False, False, True, False, False])


def test_layers_are_measured_by_what_their_last_step_gains():
    run = xr.Dataset(
        {
            "descent_loss": (("seed", "layers"), [[0.5, 0.25], [0.6, 0.2]]),
            "best_loss": ("layers", [0.5, 0.2]),
            "previous_loss": ("layers", [1.5, 0.5]),
            "best_probe_loss": (("seed", "layers"), [[0.5, 0.2], [0.5, 0.4]]),
            "layer_loss": (("seed", "layers", "layer_blocks", "layer_step"), [[[[0.5]], [[0.1]]], [[[0.4]], [[0.5]]]]),
        },
        {"layers": [1, 2], "layer_blocks": ["transform"]},
    )
    np.testing.assert_allclose(measures.layer_excess(run), [0.05 / 0.3, 0.1])
    np.testing.assert_allclose(measures.transform_gain(run), [0.5, -0.25])
    with pytest.raises(NotInRun, match="several layers"):
        measures.transform_gain(run.isel(layers=[0]))
    deeper = run.isel(layers=[0, 1, 1]).assign_coords(layers=[1, 2, 3])
    deeper["descent_loss"][0, 2] = np.nan
    deeper["layer_loss"][1, 2] = np.nan
    np.testing.assert_array_equal(np.isnan(measures.layer_excess(deeper)), [True, False])
    np.testing.assert_array_equal(np.isnan(measures.transform_gain(deeper)), [False, True])


def test_noisy_labels_are_measured_by_what_the_optimum_for_clean_ones_loses():
    run = xr.Dataset({"noisy_loss": ("seed", [1.0, 1.5]), "noisy_least_loss": 1.0, "noisy_clean_loss": 3.0})
    np.testing.assert_allclose(measures.noisy_excess(run), [0.0, 0.25])
    with pytest.raises(NotInRun, match="noisy labels"):
        measures.noisy_excess(run.drop_vars("noisy_loss"))


def test_softmax_is_compared_with_linear_attention_on_the_same_prompts():
    run = small_run()
    excess = measures.softmax_excess(run, 1)
    np.testing.assert_allclose(excess, run.softmax_loss.sel(softmax_heads=1)[:, -1] - run.one_step_loss)
    shorter = float(run.one_less_loss - run.plateau_loss[-1])
    np.testing.assert_allclose(measures.two_heads_excess(run), measures.softmax_excess(run, 2) - shorter)
    assert shorter > 0
    with pytest.raises(NotInRun, match="softmax_heads 5"):
        measures.softmax_excess(run, 5)


def test_a_missing_half_time_is_an_error_of_nan():
    run = small_run().copy()
    run["half_time"] = run.half_time.where(run.half_time < run.half_time.max())
    assert np.isnan(measures.half_time_error(run))
