"""The figures of a probe: what each panel shows, in colours of its data's range, with ticks and legends that fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg

from joma.report.probe_figures import Quantity, attention_panels, describe, draw, figures, is_logarithmic
from probed import STEPS, series_data, single_data

ENTROPY = Quantity("attention entropy", "nats")
QUANTITIES = {"entropy": ENTROPY, "sink_mass": Quantity("attention to the first token", "")}
PYTHIA = [0, *(2**k for k in range(10)), *range(1000, 144_000, 1000)]


def drawn(data: xr.Dataset) -> dict:
    """Return the axes of each figure without the colour bars, by the figure's name."""
    return {name: [axes for axes in draw(panels).axes if axes.get_xlabel() or axes.get_title("left")]
            for name, panels in figures(data, QUANTITIES)}  # fmt: skip


def colour_bars(axes):
    return [image.colorbar for image in axes.images]


def test_a_series_has_a_figure_for_each_measure():
    data = series_data()
    by_name = drawn(data)
    assert list(by_name) == ["entropy", "sink_mass", "stable_rank", "cosines"]
    curves, every, last = by_name["entropy"]
    titles = ["(a)  Mean over heads", "(b)  Every head", "(c)  Each head, step 100"]
    assert [axes.get_title("left") for axes in (curves, every, last)] == titles
    assert [line.get_label() for line in curves.lines] == ["layer 0", "layer 1"]
    np.testing.assert_allclose(curves.lines[1].get_ydata(), data.entropy.mean("head").isel(layer=1))
    np.testing.assert_allclose(every.images[0].get_array(), data.entropy.values.reshape(4, 4).T)
    np.testing.assert_allclose(last.images[0].get_array(), data.entropy.isel(step=-1))
    ranks = by_name["stable_rank"][0]
    np.testing.assert_allclose(ranks.lines[0].get_ydata(), [10.0, 6.0, 4.0, 5.0])
    legend = [text.get_text() for text in by_name["cosines"][0].get_legend().get_texts()]
    assert legend == ["embeddings", "hidden, depth 0", "hidden, depth 1", "hidden, depth 2", "random directions"]


def test_colours_span_the_range_of_the_data_and_their_bar_is_labelled():
    _, every, last = drawn(series_data())["entropy"]
    for axes, values in ((every, series_data().entropy), (last, series_data().entropy.isel(step=-1))):
        (bar,) = colour_bars(axes)
        assert axes.images[0].get_clim() == pytest.approx((float(values.min()), float(values.max())))
        assert bar.ax.get_ylabel() == "attention entropy / nats"


def test_one_model_is_drawn_over_its_layers():
    by_name = drawn(single_data())
    by_layer, heads = by_name["entropy"]
    np.testing.assert_allclose(by_layer.lines[-1].get_ydata(), [1.0, 1.1])
    np.testing.assert_allclose(heads.images[0].get_array(), single_data().entropy.isel(step=0))
    (ranks,) = by_name["stable_rank"]
    assert ranks.lines[0].get_ydata().tolist() == [4.0, 5.0]
    (cosine,) = by_name["cosines"]
    np.testing.assert_allclose(cosine.lines[0].get_ydata(), [0.6, 0.61, 0.62])
    assert cosine.lines[1].get_ydata() == [0.2, 0.2]


def test_embeddings_alone_are_one_labelled_point():
    (axes,) = draw(next(figures(single_data()[["embedding_cosine", "embedding_random"]], {}))[1]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["token embeddings"]
    assert axes.lines[0].get_ydata().tolist() == [0.25]


def test_a_checkpoint_that_was_not_measured_is_a_gap_in_the_curve_and_grey_in_the_map():
    data = series_data()
    data.entropy[3] = np.nan
    curves, every, last = drawn(data)["entropy"]
    assert last.get_title("left") == "(c)  Each head, step 8"
    assert len(curves.lines[0].get_xdata()) == 3
    assert np.ma.getmaskarray(np.ma.masked_invalid(every.images[0].get_array()))[:, 3].all()


def test_steps_are_logarithmic_where_the_first_ones_are_close_together():
    assert is_logarithmic(np.array(PYTHIA))
    assert not is_logarithmic(np.array(STEPS[:3]))
    assert not is_logarithmic(np.arange(500, 12_000, 500))
    assert not is_logarithmic(np.array([0, 143_000]))
    curves = drawn(series_data())["entropy"][0]
    assert (curves.get_xscale(), curves.get_xlabel()) == ("log", "step + 1")
    assert curves.lines[0].get_xdata().tolist() == [1, 2, 9, 101]


def test_epochs_are_called_epochs():
    data = series_data().isel(step=slice(3)).assign_attrs(unit="epoch")
    curves, every, _ = drawn(data)["entropy"]
    assert curves.get_xlabel() == "epoch"
    assert every.get_xlabel() == "epoch (columns are checkpoints)"


def overlapping(axes) -> bool:
    """Return whether two labels of the horizontal axis touch each other, or the legend covers the panel."""
    renderer = axes.figure.canvas.get_renderer()
    low, high = sorted(axes.get_xlim())
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    labels = [label for tick, label in ticks if low <= tick <= high and label.get_text()]
    boxes = [label.get_window_extent(renderer) for label in labels]
    legend = axes.get_legend()
    covered = legend is not None and legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))
    return covered or any(a.x1 >= b.x0 for a, b in pairwise(boxes))


@pytest.mark.parametrize("steps", [[0], [0, 1000], [1, 2, 3], list(range(500, 10_500, 500)), PYTHIA])
@pytest.mark.parametrize(("layers", "heads"), [(2, 1), (12, 12), (48, 64)])
def test_labels_and_legends_have_room_in_series_of_any_size(steps, layers, heads):
    values = np.random.default_rng(0).random((len(steps), layers, heads))
    variable = xr.DataArray(values, dims=("step", "layer", "head"), coords={"step": steps})
    figure = draw(attention_panels(variable, ENTROPY))
    FigureCanvasAgg(figure).draw()
    panels = [axes for axes in figure.axes if axes.get_xlabel()]
    assert len(panels) == (1 if len(steps) == 1 else 2) + (heads > 1)
    assert not [axes.get_title("left") for axes in panels if overlapping(axes)]


def test_a_caption_names_what_each_panel_shows():
    panels = attention_panels(series_data(layer_count=24).entropy, ENTROPY)
    text = "(a) over the training, mean over heads, 6 of 24 layers; (b) every head over the training, layer by layer; "
    assert describe(panels) == f"{text}(c) each head at the end (step 100)."
    assert describe(panels[1:2]) == "Every head over the training, layer by layer."
