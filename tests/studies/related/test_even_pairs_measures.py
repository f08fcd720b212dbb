"""What `even-pairs` measures: on made runs whose answers are known."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.related.even_pairs_measures import (
    attention_growth,
    boundary,
    boundary_loss,
    boundary_spread,
    distance_from_flow,
    fastest,
    log_growth,
    loss_power,
    of_task,
    polarised_change,
    square_growth,
)

STEPS = np.array([0, *np.unique(np.geomspace(1, 10_000, 60).round().astype(int))])


@pytest.fixture
def written_run():
    """Return a run with ‖u‖ = 3 ln t, ‖W‖ = ½ ln t, loss 1/(1 + t) and the boundary at time 20 or 21."""
    rates = np.array([0.1, 0.5, 0.5, 0.5])
    times = np.maximum(rates[:, None] * STEPS, 1e-3)
    fields = {
        "u_norm": 3 * np.log(times), "w_norm": 0.5 * np.log(times), "loss": 1 / (1 + rates[:, None] * STEPS),
        "least_margin": rates[:, None] * STEPS - np.array([20.0, 20.0, 21.0, 5.0])[:, None],
    }  # fmt: skip
    time = np.append(0.0, np.geomspace(0.1, 1e4, 101))
    flow = {"flow_u_norm": np.sqrt(1 + time), "flow_positive_error": 1 / (1 + time) * (1 + 0.1 * (time < 150))}
    return xr.Dataset(
        {
            **{name: (("arm", "seed", "step"), values[:, None]) for name, values in fields.items()},
            **{name: (("max_length", "time"), values[None]) for name, values in flow.items()},
            "svm_norm": (("arm", "seed"), np.full((4, 1), 3.0)),
            "trained_length": 4,
        },
        {
            "arm": list("abcd"), "seed": [0], "step": STEPS, "time": time, "max_length": [4],
            "task": ("arm", ["pairs", "pairs", "pairs", "parity"]), "rate": ("arm", rates),
            "start": ("arm", ["zero", "zero", "random", "random"]),
        },
    )  # fmt: skip


def test_slopes_are_those_of_the_made_run(written_run):
    np.testing.assert_allclose(log_growth(written_run), 1.0)
    np.testing.assert_allclose(attention_growth(written_run), 0.5)
    np.testing.assert_allclose(loss_power(written_run), -1.0, atol=0.01)


def test_arms_are_chosen_by_task_and_start(written_run):
    assert of_task(written_run, "pairs").arm.values.tolist() == ["a", "b", "c"]
    assert of_task(written_run, "pairs", "zero").arm.values.tolist() == ["a", "b"]
    assert fastest(written_run).arm.item() == "c"
    assert fastest(written_run, "parity").arm.item() == "d"


def test_the_boundary_is_interpolated_in_time(written_run):
    np.testing.assert_allclose(boundary(written_run).isel(seed=0), [20.0, 20.0, 21.0])
    np.testing.assert_allclose(boundary_spread(written_run), 0.05)
    np.testing.assert_allclose(boundary_loss(written_run), 1 / 22, rtol=0.02)


def test_a_boundary_that_is_not_reached_gives_no_loss(written_run):
    never = written_run.assign(least_margin=written_run.least_margin * 0 - 1)
    assert np.isinf(boundary(never)).all()
    assert np.isnan(boundary_loss(never)).all()


def test_a_layer_that_diverged_has_no_boundary(written_run):
    written_run["least_margin"][1, 0, -1] = np.nan  # long after its boundary
    np.testing.assert_array_equal(np.isnan(boundary(written_run).isel(seed=0)), [False, True, False])
    assert np.isnan(boundary_spread(written_run)).all()
    assert np.isnan(boundary_loss(written_run)).all()


def test_the_flow_is_compared_at_the_trained_length(written_run):
    same = written_run.assign(u_norm=written_run.u_norm * 0 + np.sqrt(1 + written_run.rate * written_run.step))
    assert distance_from_flow(same) < 0.01
    assert np.isnan(distance_from_flow(written_run.assign(trained_length=9)))


def test_products_are_compared_over_two_decades(written_run):
    assert polarised_change(written_run) == pytest.approx(0.1)
    assert square_growth(written_run) == pytest.approx((1 + 1e4) / (1 + 100), rel=1e-6)
