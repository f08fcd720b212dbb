"""The figures of `scan-snap` on a small run."""

from __future__ import annotations

import numpy as np

from joma.studies.hierarchy import growth_phases
from joma.studies.hierarchy.phase_figures import LABELS, draw_premises, draw_scan, draw_snap
from joma.studies.hierarchy.scan_snap import ARMS


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def points(bars) -> np.ndarray:
    """The positions [2, point] of points with error bars."""
    return np.asarray(bars.lines[0].get_data())


def titles(panels) -> list[str]:
    return [axes.get_title(loc="left") for axes in panels]


def test_every_arm_has_a_label():
    assert list(LABELS) == list(ARMS)


def test_every_panel_says_what_to_see(phases):
    for draw in (draw_premises, draw_scan, draw_snap):
        assert all(len(title) > len("(a)  ") for title in titles(draw(phases).axes))


def test_the_premises_are_drawn_as_errors_and_as_distances_from_the_closed_form(phases):
    gain, scan, slowing = draw_premises(phases).axes
    ratio, error = points(gain.containers[0])
    np.testing.assert_array_equal(ratio, [10, 100, 1000])
    np.testing.assert_allclose(error, phases.ratio_gain_error.mean("seed"))
    for panel, name in ((scan, "scan"), (slowing, "slowing")):
        share, values = points(panel.containers[0])
        np.testing.assert_array_equal(share, [0.5, 0.1])
        np.testing.assert_allclose(values, phases[f"share_{name}"].mean("seed"))
        closed_form = next(line for line in panel.lines if line.get_label() == "closed form")
        np.testing.assert_allclose(closed_form.get_ydata(), float(phases[f"clock_{name}"]))


def test_the_scan_is_drawn_as_flow_and_training(phases):
    common, logits, order = draw_scan(phases).axes
    shown = [arm for arm in ARMS if arm != "premises"]
    assert [axes.get_xscale() for axes in (common, logits, order)] == ["log", "log", "linear"]
    assert common.get_ylabel() == "attention to common tokens"
    assert labels(common) == [LABELS[arm] for arm in shown]
    for arm, bars in zip(shown, common.containers, strict=True):
        step, share = points(bars)
        expected = phases.common.sel(arm=arm, step=step).mean(("seed", "label"))
        np.testing.assert_allclose(share, expected, rtol=1e-12)
    assert labels(logits) == [f"P = {value:.3f}" for value in phases.cooccurrence[0, 0].values]
    flows = [line for line in logits.lines if line.get_marker() == "None"]
    for rank, line in enumerate(flows):
        expected = phases.logit_flow.sel(arm="faster").isel(seed=0, label=0, rank=rank, step=slice(1, None))
        np.testing.assert_array_equal(line.get_ydata(), expected)
    assert len(flows) == phases.sizes["rank"]
    assert labels(order) == ["$(P_l/P_1)^2$", "premises met"]
    square, *arms = order.lines
    np.testing.assert_array_equal(square.get_ydata(), square.get_xdata() ** 2)
    assert [len(line.get_xdata()) for line in arms] == [3 * 4 * (3 - 1)] * 4


def test_the_snap_is_drawn_as_growth_exponents_and_times(phases):
    growth, exponents, times = draw_snap(phases).axes
    assert (growth.get_xscale(), growth.get_yscale()) == ("log", "log")
    assert labels(growth) == list(LABELS.values())
    winners = growth_phases.winning_logits(phases)
    relative = winners / winners.isel(step=-1)
    for arm, bars in zip(ARMS, growth.containers, strict=True):
        step, logit = points(bars)
        np.testing.assert_allclose(logit, relative.sel(arm=arm, step=step).mean("seed"), rtol=1e-12)
    assert len(exponents.containers) == len(ARMS)
    assert labels(exponents) == ["closed form"]
    (clock,) = (line for line in exponents.lines if line.get_label() == "closed form")
    assert (np.diff(clock.get_xdata()) >= 0).all()
    assert np.nanmax(clock.get_ydata()) <= 2
    assert labels(times) == ["closed form", "flow", *LABELS.values()]
    flow = next(line for line in times.lines if line.get_label() == "flow")
    np.testing.assert_allclose(flow.get_ydata(), phases.ratio_slowing.mean("seed"))
    assert [float(points(bars)[0][0]) for bars in times.containers] == [arm.ratio for arm in ARMS.values()]


def test_a_run_whose_seeds_all_diverged_is_drawn_up_to_that_step(phases):
    diverged = phases.assign({name: phases[name].where(phases.step < 50) for name in ("logit", "common")})
    common, *_ = draw_scan(diverged).axes
    step, share = points(common.containers[0])
    np.testing.assert_array_equal(np.isnan(share), step >= 50)
    *_, times = draw_snap(diverged).axes
    assert np.isnan(points(times.containers[0])[1]).all()
