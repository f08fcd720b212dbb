"""The figures of `sparse-dense`: what each panel shows, drawn from the stored run alone."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.theorems.real_units import recovery
from joma.studies.theorems.sparse_dense import FIGURE_4, STUDY, Config, run
from joma.studies.theorems.sparse_dense_figures import (
    draw_bounce,
    draw_figure_4,
    draw_highlight,
    draw_linear_nonlinear,
    draw_real_units,
    draw_theorem_4,
)
from joma.study import Context

SMALL = Config(until=1.5, components=3, draws=10, classes=3, distinct=2, common=2, units_steps=20)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_every_panel_of_every_figure_has_a_title(trajectory):
    for drawing in STUDY.figures.values():
        for panel in drawing.draw(trajectory).axes:
            assert len((title(panel) or panel.get_title()).removeprefix("(a)").strip()) > 10


def test_the_highlight_is_one_small_panel_with_both_solutions(trajectory):
    figure = draw_highlight(trajectory)
    (panel,) = figure.axes
    assert figure.get_size_inches()[0] <= 3.2
    assert legend(panel) == ["closed form", "Euler's steps"]
    entropy = series(panel)["closed form"]
    assert entropy[entropy[:, 1].argmin(), 0] == pytest.approx(669 * 0.02, abs=0.2)


def test_theorems_2_and_4_are_drawn_side_by_side_with_real_units(trajectory):
    linear, nonlinear, entropies, units = draw_linear_nonlinear(trajectory).axes
    targets = sorted(trajectory.mu.isel(seed=0).values, reverse=True)
    assert legend(nonlinear) == [f"μ = {mu:.2f}" for mu in targets]
    lines = [line for line in linear.lines if line.get_marker() == "None"]
    assert len(lines) == len(targets) + 1  # one for each weight, and the blow-up time
    assert legend(entropies) == ["linear: ever sparser", "nonlinear: then dense again"]
    falling = series(entropies)["linear: ever sparser"][:, 1]
    assert (np.diff(falling) < 1e-12).all()
    points = [line for line in units.lines if line.get_linestyle() == "None"]
    drawn = np.sort(np.concatenate([line.get_ydata() for line in points]))
    np.testing.assert_allclose(drawn, np.sort(recovery(trajectory.units_entropy).values.ravel()))


def test_figure_4_is_drawn_at_five_times_and_bounces(trajectory):
    left, right = draw_figure_4(trajectory).axes
    assert legend(left) == ["t = 0", "t = 5", "t = 13.4", "t = 30", "t = 100", "target μ"]
    np.testing.assert_array_equal(series(left)["target μ"], np.stack([np.arange(1, 11), FIGURE_4], axis=-1))
    np.testing.assert_allclose(series(left)["t = 0"][:, 1], 0.05)
    assert legend(right) == ["limit", "closed form", "Euler's steps"]
    assert series(right)["closed form"][:, 1].min() == pytest.approx(0.94, abs=0.01)
    np.testing.assert_allclose(series(right)["limit"][:, 1], 1.6216, atol=1e-4)


def test_theorem_4_is_drawn_with_driven_blocks_and_ratio(trajectory):
    left, right = draw_theorem_4(trajectory).axes
    assert legend(left) == ["seed 0", "seed 1"]
    np.testing.assert_array_equal(series(left)["seed 1"][:, 1], trajectory.entropy_predicted.isel(seed=1))
    assert legend(right) == ["closed form", "integrated flow", "limit"]
    assert right.get_xscale() == "log"
    np.testing.assert_allclose(series(right)["limit"][:, 1], np.exp((1.5**2 - 1.0**2) / 2))


def test_real_units_are_drawn_for_each_attention(trajectory):
    softmax, exp = draw_real_units(trajectory).axes
    assert legend(exp) == ["linear", "ReLU", "GELU", "SiLU", "tanh"]
    expected = trajectory.units_entropy.sel(attention="softmax", units="relu").mean(("seed", "tokens"))
    np.testing.assert_allclose(series(softmax)["ReLU"][:, 1], expected)


def test_bounces_are_drawn_for_every_seed_and_draw(trajectory):
    (panel,) = draw_bounce(trajectory).axes
    assert legend(panel) == ["seed 0", "seed 1", "1 %", "mean 0.88"]
    points = series(panel)["seed 1"]
    expected = trajectory.sel(seed=1)
    np.testing.assert_array_equal(points, np.stack([expected.counted_mean, expected.counted_regained], axis=-1))
    assert panel.get_yscale() == "log"
