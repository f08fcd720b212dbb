"""The figures of `icl-regression`: what is drawn, and with which numbers."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.related.icl_regression_figures import draw_flows, draw_trained
from joma.studies.related.icl_regression_measures import is_behind
from studies.related.icl_regression_run import SMALL, small_run


def test_flows_are_drawn_with_plateaus_closed_forms_and_risks():
    run = small_run()
    losses, learnt, aligned, risk = draw_flows(run).axes
    assert legend(losses) == ["merged", "heads of rank one", "one head, full rank", "one head, low rank"]
    levels = {line.get_ydata()[0] for line in losses.lines if len(line.get_ydata()) == 2}
    assert set(run.plateau_loss.values) <= levels
    np.testing.assert_allclose(series(losses)["heads of rank one"][:, 1], run.separate_loss[0, 0, 1:])
    assert legend(learnt) == legend(aligned) == [f"λ = {value:.2g}" for value in SMALL.spectrum]
    np.testing.assert_allclose(series(aligned)["λ = 1.6"][:, 0], run.aligned_time[:, 0])
    np.testing.assert_allclose(series(risk)["trained on N examples"][:, 1], run.risk)
    assert series(risk)["sampled, all seeds"][0, 1] == pytest.approx(float(run.shift_sampled.mean()))
    for panel in (losses, learnt, aligned, risk):
        assert len(title(panel)) > 10
        assert panel.get_xscale() == "log"


def test_nine_directions_look_different_and_their_legend_covers_no_curve():
    panel = draw_flows(small_run().isel(direction=[0, 1, 2] * 3)).axes[1]
    styles = [(line.get_color(), line.get_linestyle()) for line in panel.lines if "λ" in str(line.get_label())]
    assert len(set(styles)) == 9
    legend_box = panel.get_legend()
    assert legend_box is not None
    panel.figure.canvas.draw()
    box = legend_box.get_window_extent().transformed(panel.transData.inverted())
    curves = [line for line in panel.lines if len(line.get_xdata()) > 2]
    risen = [np.asarray(line.get_xdata())[np.asarray(line.get_ydata()) > box.y0] for line in curves]
    assert box.x1 < min(times.min() for times in risen if times.size)


def test_trained_models_are_drawn_with_stuck_seeds_best_steps_and_softmax():
    run = small_run()
    whole, layers, softmax = draw_trained(run).axes
    assert f"{int(is_behind(run).sum())} of 3 end nearer to plateau 1" in title(whole)
    assert legend(whole) == ["all blocks random", "other blocks zero"]
    drawn = series(layers)
    np.testing.assert_allclose(drawn["best steps of descent"][:, 1], run.best_loss)
    np.testing.assert_allclose(drawn["trained as descent"][:, 1], run.descent_loss.mean("seed"))
    assert legend(softmax) == ["1 head", "2 heads", "best linear step", "… with N − 1 examples"]
