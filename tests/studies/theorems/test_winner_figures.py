"""The figures of the study of Theorem 2: what is drawn, and with which numbers."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.theorems.winner import STUDY, Config, run
from joma.studies.theorems.winner_figures import draw_figure_3, draw_growth, draw_highlight
from joma.studies.theorems.winner_measures import growing, ratio_spread
from joma.study import Context


@pytest.fixture(scope="module")
def trajectory():
    return run(Config(tokens=5, samples=12, steps=400, figure_3_steps=100), Context((0, 1, 2)))


def test_growth_is_drawn_with_theory_training_distance_ratio_and_entropy(trajectory):
    components, distance, ratio, entropy = draw_growth(trajectory).axes
    first = trajectory.isel(seed=0)
    saliences = sorted(first.salience.values, key=abs, reverse=True)
    assert legend(components) == [f"Δ = {salience:.2f}" for salience in saliences]
    winner = int(abs(first.salience).argmax("token"))
    np.testing.assert_array_equal(series(components)[legend(components)[0]][:, 1], first.predicted[:, winner])
    assert distance.get_yscale() == "log"
    distances = series(distance)
    for tokens in ("winner", "others"):
        assert (distances[f"{tokens}, half the steps"][:, 1] > distances[f"{tokens}, all steps"][:, 1]).all()
    time, spread = series(ratio)["erf(v/2)/Δ, as printed"][-1]
    assert spread == pytest.approx(float(ratio_spread(trajectory, 2.0).sel(time=time).mean()))
    assert legend(entropy) == ["theory, mean over seeds", "trained, all seeds"]
    for panel in (components, distance, ratio, entropy):
        assert panel.get_xlabel() == "time / blow-up time"
        assert len(title(panel)) > 10


def test_figure_3_is_drawn_as_two_images_and_the_weights_of_one_unit(trajectory):
    salience, weights, growth = draw_figure_3(trajectory).axes[:3]
    assert [title(panel)[5:] for panel in (salience, weights)] == ["Salience Δ at the start", "Weights v at the end"]
    np.testing.assert_array_equal(salience.images[0].get_array(), trajectory.figure_3_salience.isel(seed=0))
    np.testing.assert_array_equal(weights.images[0].get_array(), trajectory.figure_3.isel(seed=0, step=-1))
    low, high = weights.images[0].get_clim()
    assert low == -high == -float(abs(trajectory.figure_3.isel(seed=0, step=-1)).max())
    assert title(growth)[5:].startswith("Unit 0: ")


def test_the_highlight_colours_the_weights_that_keep_growing(trajectory):
    (panel,) = draw_highlight(trajectory).axes
    words = np.flatnonzero(growing(trajectory).isel(seed=0, hidden=0))
    assert 0 < len(words) < 20
    assert legend(panel) == [*(f"token {word}" for word in words), "other tokens"]
    assert panel.get_title() == f"{len(words)} of 20 weights grow, the rest saturate"
    drawn = series(panel)[f"token {words[0]}"]
    np.testing.assert_array_equal(drawn[:, 1], trajectory.figure_3.isel(seed=0, hidden=0, word=words[0]))


def test_the_study_has_its_figure_as_a_highlight():
    assert STUDY.highlight.label == "Figure 3"
    assert STUDY.highlight.draw is draw_highlight
