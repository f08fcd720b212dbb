"""The figures of `ladder`: what each panel shows, drawn from the stored run alone."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.theorems.ladder import STUDY, Config, run
from joma.studies.theorems.ladder_figures import draw_gradients, draw_optima, draw_predictions
from joma.study import Context

SMALL = Config(
    trained_arms=("base",), trained_steps=20, trained_probe=8, trained_batch=8,
    tokens=4, length=3, long_length=3, until=1000.0, constant_until=20.0, records=30, shares=(0.0, 0.5),
    planted=(1.0, 0.6), draws=2, searches=1, gelu_worlds=("overlap", "separable"),
    sgd_worlds=("overlap",), sgd_steps=50,
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_every_panel_of_every_figure_has_a_title(trajectory):
    for drawing in STUDY.figures.values():
        for panel in drawing.draw(trajectory).axes:
            assert len((title(panel) or panel.get_title()).removeprefix("(a)").strip()) > 5


def test_minima_are_marked_for_both_units_and_every_seed(trajectory):
    panel = draw_gradients(trajectory).axes[0]
    assert legend(panel) == ["linear units", "GELU units"]
    curves = [np.asarray(line.get_ydata()) for line in panel.lines]
    marked = [curve[0] for curve in curves if len(curve) == 1]
    overlap = trajectory.entropy.sel(world="overlap").transpose("activation", "seed", "time")
    expected = overlap.min("time").values.ravel()
    np.testing.assert_allclose(marked, expected)


def test_the_optimum_is_dashed_and_trained_blocks_are_points(trajectory):
    first, second, _ = draw_optima(trajectory).axes
    dashed = [np.asarray(line.get_ydata())[0] for line in second.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(dashed, trajectory.optimum_entropy.sel(world="lengths", activation="linear"))
    assert any(line.get_marker() not in ("", "None", None) for line in first.lines)
    assert all(line.get_marker() in ("", "None", None) for line in second.lines)


def test_predictions_show_every_world_and_the_mixtures(trajectory):
    ends, _, shares = draw_predictions(trajectory).axes
    shown = series(ends)
    assert legend(ends) == ["share of short contexts", "planted optimum", "random world", "not arrived"]
    assert sum(len(points) for points in shown.values()) >= trajectory.sizes["seed"] * trajectory.sizes["case"]
    np.testing.assert_allclose(series(shares)["optimum"][:, 0], [0.0, 0.5])
