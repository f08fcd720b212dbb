from __future__ import annotations

import numpy as np
import pytest

from joma.studies.symmetry.addition import STUDY
from joma.studies.symmetry.addition_figures import draw_accuracy, draw_own, draw_positions, draw_slices
from joma.studies.symmetry.addition_measures import mean_accuracy, own_share


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def curves(axes):
    """The y-values of every line, by its label."""
    return {line.get_label(): np.asarray(line.get_ydata()) for line in axes.lines}


def test_accuracy_has_a_panel_for_each_mask_and_for_residuals(addition_run):
    figure = draw_accuracy(addition_run)
    masks = ["(a)  Causal mask: is order learnt?", "(b)  Full mask: is order learnt?"]
    residuals = ["(c)  Without residuals in all layers", "(d)  Without residuals in one layer"]
    assert titles(figure) == [*masks, *residuals]
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    ceiling = f"ceiling, {float(addition_run.ceiling):.3g}"
    assert sorted(labels[0]) == sorted(["none", ceiling])
    assert sorted(labels[1]) == sorted(["none", "learned", ceiling])
    assert sorted(labels[2]) == sorted(["none", "attention", "both", ceiling])
    assert sorted(labels[3]) == ["MLP", "none"]
    assert figure.axes[0].get_ylim() == (-0.03, 1.03)
    for axes, name, arm in ((0, "none", "none causal"), (1, "learned", "learned full"), (2, "both", "both all")):
        expected = addition_run.accuracy.sel(arm=arm).mean("seed")
        np.testing.assert_allclose(curves(figure.axes[axes])[name], expected)
    assert list(curves(figure.axes[1])[ceiling]) == [float(addition_run.ceiling)] * 2


def test_one_layer_without_residuals_is_drawn_beside_the_baseline(addition_run):
    panel = draw_accuracy(addition_run).axes[3]
    points = panel.containers[0].lines[0]
    np.testing.assert_allclose(points.get_xdata(), [1])  # of "mlp 1"
    np.testing.assert_allclose(points.get_ydata(), [float(mean_accuracy(addition_run, "mlp 1").mean())])
    np.testing.assert_allclose(curves(panel)["none"], float(mean_accuracy(addition_run, "none causal").mean()))
    without = addition_run.drop_sel(arm="mlp 1")
    assert len(draw_accuracy(without).axes) == 3


def test_slices_have_a_row_for_each_arm_and_a_column_for_each_kind_and_step(addition_run):
    figure = draw_slices(addition_run)
    panels = np.array(figure.axes[:-1]).reshape(4, 6)
    rows = ["no encoding,\ncausal mask", "no residuals:\nattention", "no residuals:\nboth", "no encoding,\nfull mask"]
    assert [panel.get_ylabel() for panel in panels[:, 0]] == rows
    steps = [0, int(addition_run.step[2]), 6]
    columns = [f"{kind},\nstep {step}" for kind in ("correlation", "CKA") for step in steps]
    assert [panel.get_title() for panel in panels[0]] == columns
    assert [label.get_text() for label in panels[0, 0].get_xticklabels()] == list("a+b=c")
    expected = addition_run.similarity.sel(arm="both all", kind="cka", step=6).mean("seed")
    np.testing.assert_allclose(np.ma.filled(panels[2, 5].images[0].get_array(), np.nan), expected)
    assert figure.axes[-1].get_ylabel() == "similarity, mean over pairs of levels"


def test_positions_are_drawn_by_level_for_up_to_four_arms(addition_run):
    figure = draw_positions(addition_run)
    arms = ["no encoding, causal mask", "no encoding, full mask", "no residuals: attention", "no residuals: both"]
    assert titles(figure) == [f"({letter})  {arm}" for letter, arm in zip("abcd", arms, strict=True)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["embeddings", "layer 0", "layer 1", "chance"]
    assert figure.axes[0].get_ylim() == (0, 1.03)
    lines = curves(figure.axes[1])
    expected = addition_run.decodability.sel(arm="none full").isel(level=2).mean("seed")
    np.testing.assert_allclose(lines["layer 1"], expected)
    assert list(lines["chance"]) == [1 / 5] * 2


def test_own_locations_are_drawn_by_both_kinds(addition_run):
    figure = draw_own(addition_run)
    assert titles(figure) == ["(a)  Most similar to itself, by correlation", "(b)  Most similar to itself, by CKA"]
    for panel, kind in zip(figure.axes, ("correlation", "cka"), strict=True):
        lines = curves(panel)
        assert list(lines) == ["all residuals", "no residuals: attention", "no residuals: both", "chance"]
        np.testing.assert_allclose(lines["all residuals"], own_share(addition_run, "none causal", kind).mean("seed"))
        assert list(lines["chance"]) == [1 / 5] * 2


@pytest.mark.parametrize(
    ("arm", "row", "panel"),
    [
        ("mlp 1", "no residuals:\nMLP 1", "no residuals: MLP 1"),
        ("learned full", "learned,\nfull mask", "learned, full mask"),
    ],
)
def test_a_run_of_any_one_arm_can_be_drawn(addition_run, arm, row, panel):
    """The arm need not be among those that the figures are made for."""
    figures = {name: drawing.draw(addition_run.sel(arm=[arm])) for name, drawing in STUDY.figures.items()}
    assert figures["slices"].axes[0].get_ylabel() == row
    assert titles(figures["positions"]) == [f"(a)  {panel}"]
    assert panel in curves(figures["own"].axes[0])
    single = arm == "mlp 1"
    assert len(figures["accuracy"].axes) == 3 + single
    assert len(figures["accuracy"].axes[1].lines) == 2 - single  # the ceiling, and the arm with a full mask
