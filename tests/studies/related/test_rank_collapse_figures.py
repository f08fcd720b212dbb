"""The figure of `rank-collapse` shows the numbers of its run."""

import numpy as np

from joma.studies.related.rank_collapse import Config, run
from joma.studies.related.rank_collapse_figures import draw_depth
from joma.study import Context


def test_panels_show_the_run():
    trajectory = run(Config(tokens=8, dim=8, score_tokens=8, draws=3), Context((0, 1)))
    left, right, error, scores = draw_depth(trajectory).axes
    assert [panel.get_title(loc="left")[:3] for panel in (left, right, error, scores)] == ["(a)", "(b)", "(c)", "(d)"]
    median = -trajectory.log10_relative.sel(arm="attention").isel(layer=slice(1, None)).median("seed")
    drawn = next(line for line in left.lines if line.get_marker() == "o")
    np.testing.assert_allclose(np.asarray(drawn.get_ydata(), dtype=float), median.values)
    cubic = next(line for line in right.lines if line.get_label() == "cubic law through the smallest")
    smallest = 10 ** float(trajectory.log10_output.sortby("size").isel(size=0).mean("seed"))
    np.testing.assert_allclose(np.asarray(cubic.get_ydata(), dtype=float)[0], smallest)
    assert len(scores.lines) == trajectory.sizes["score_scale"] + 1


def test_tokens_that_are_equal_to_rounding_have_no_point():
    trajectory = run(Config(tokens=8, dim=8, score_tokens=8, draws=3), Context((0, 1)))
    trajectory.log10_relative[0, 3, 5:] = -np.inf
    (left, *_) = draw_depth(trajectory).axes
    assert np.isfinite(left.get_ylim()).all()
