"""The figures of the trained ladder, drawn from a run alone."""

import numpy as np
import pytest
import xarray as xr

from drawn import legend, series, title
from joma.studies.theorems.ladder_arms import ARMS
from joma.studies.theorems.ladder_training_figures import COLUMNS, draw_arms, draw_speed

STEPS = np.array([0, 10, 100, 1000])


def a_run(arms, seeds=3):
    """Return a run whose entropy falls to a half and comes back to 0.75, shifted a little for each seed and arm."""
    curve = np.array([1.0, 0.8, 0.5, 0.75])
    shift = 0.01 * np.arange(seeds)[:, None, None, None] + 0.001 * np.arange(len(arms))[:, None, None]
    entropy, loss = curve - shift * (curve < 1), np.tile([1, 0.5, 0.0, 0.0], (seeds, len(arms), 1, 1))
    dims = ("seed", "arm", "rate", "trained_step")
    coords = {"arm": list(arms), "rate": [1.0], "trained_step": STEPS, "seed": range(seeds)}
    return xr.Dataset({"trained_entropy": (dims, entropy), "trained_loss": (dims, loss)}, coords)


@pytest.mark.parametrize("arms", [("base", "product"), tuple(ARMS)])
def test_every_arm_has_a_panel_with_its_seeds_and_its_verdict(arms):
    run = a_run(arms)
    shown = [panel for panel in draw_arms(run).axes if panel.get_visible()]
    assert len(shown) == len(arms)
    for panel, arm in zip(shown, arms, strict=True):
        assert ARMS[arm].about in panel.get_title()
        for line, curve in zip(panel.lines, run.trained_entropy.sel(arm=arm, rate=1.0).values, strict=True):
            np.testing.assert_allclose(line.get_xydata(), np.stack([STEPS[1:], curve[1:]], axis=-1))
        (note,) = panel.texts
        assert note.get_text().startswith("3 of 3 come back\nregains ")
    assert [bool(panel.get_xlabel()) for panel in shown] == [
        number >= len(arms) - min(COLUMNS, len(arms)) for number in range(len(arms))
    ]


def test_arms_that_diverge_and_that_still_fall_are_named():
    run = a_run(("base", "product"))
    run.trained_loss.loc[{"arm": "base", "seed": 1}] = np.nan
    run.trained_entropy.loc[{"arm": "product", "seed": 2, "trained_step": 1000}] = 0.1
    diverged, product = (panel.texts[0].get_text() for panel in draw_arms(run).axes)
    assert diverged == "diverged"
    assert product.startswith("2 of 3 come back, 1 still falling")


def test_speed_is_drawn_beside_the_optimum():
    run = a_run(("all-free", "all-free-fast", "all-product", "all-product-slow", "all-frozen"))
    optimum = (("seed", "logits"), [[0.6, 0.7], [0.6, 0.72], [0.66, 0.74]])
    panels = draw_speed(run.assign(trained_optimum_entropy=optimum).assign_coords(logits=["free", "product"])).axes
    assert [title(panel)[:3] for panel in panels] == ["(a)", "(b)", "(c)"]
    assert legend(panels[0]) == ["same rate for all", "logits 10× faster", "optimum"]
    np.testing.assert_allclose(series(panels[0])["optimum"][:, 1], 0.62)
    np.testing.assert_allclose(series(panels[1])["optimum"][:, 1], 0.72)
    mean = run.trained_entropy.sel(arm="all-product", rate=1.0).mean("seed")[1:]
    np.testing.assert_allclose(series(panels[1])["same rate for all"][:, 1], mean)


def test_without_those_arms_the_figure_of_speed_is_empty():
    assert all(not panel.lines for panel in draw_speed(a_run(("base",))).axes)
