"""The figures of `icl-autoregression`: what each panel shows, drawn from the run alone."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.related.icl_autoregression import STUDY, Config, run
from joma.studies.related.icl_autoregression_figures import draw_losses, draw_matrices
from joma.study import Context
from joma.theory.in_context_autoregression import best_loss

SMALL = Config(dim=2, lengths=(3, 4), length=4, steps=20, batch=4, records=4, probe=50, searches=1, search_dim=2)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_every_panel_has_a_title(trajectory):
    assert all(len(title(panel)) > 8 for panel in draw_losses(trajectory).axes)
    titles = [panel.get_title() for panel in draw_matrices(trajectory).axes]
    assert [text.split("\n")[0] for text in titles[:2]] == ["|A|: independent", "|A|: rotations"]
    size = trajectory.A_size.sel(arm="unitary, 4").isel(seed=0).values
    share = 100 * max(size[0, 1], size[1, 0]) / max(size[0, 0], size[1, 1])
    assert titles[0].endswith(f"≤ {share:.2g} % off the diagonal")
    assert set(STUDY.figures) == {"losses", "matrices"}
    assert "do not commute" in STUDY.figures["losses"].caption  # what their line is: no search covers them


def test_the_line_is_the_formula_and_points_are_the_ends(trajectory):
    shown = series(draw_losses(trajectory).axes[0])
    lengths, losses = shown["(d − 1)/(T + d − 2)"].T
    np.testing.assert_allclose(losses, best_loss(lengths, 2))
    ends = trajectory.loss.isel(record=-1, arm=slice(0, 2)).mean("seed")
    np.testing.assert_allclose(shown["trained"], np.stack([[3, 4], ends], axis=-1))


def test_training_shows_every_process_once(trajectory):
    labels = ["independent", "rotations", "fixed start", "not commuting", "plain tokens"]
    panel = draw_losses(trajectory).axes[1]
    assert legend(panel) == labels
    assert panel.get_ylim()[1] >= 2.4  # the legend is above the losses of the later steps


def test_a_run_without_that_length_is_drawn(trajectory):
    shorter = trajectory.isel(arm=[0, *range(2, trajectory.sizes["arm"])])
    assert "independent" not in legend(draw_losses(shorter).axes[1])
