"""The figures of `panorama`: what they show of a run."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.common_axes import NAMES, STEP
from joma.studies.related.panorama_curves import stack
from joma.studies.related.panorama_figures import draw_axes, draw_returns, time_unit
from joma.studies.related.panorama_sources import SOURCES

STEPS = [0, 1, 2, 10, 30]


def curve(entropy, sink=0.3):
    values = np.array([entropy, entropy])
    parts = zip(NAMES, (values, np.full_like(values, sink), 4 * values), strict=True)
    return xr.Dataset({name: (("seed", STEP), part) for name, part in parts}, {STEP: STEPS})


@pytest.fixture
def run():
    curves = {
        "polarise": curve([1.0, 0.9, 0.5, 0.4, 0.3]),
        "sparse-dense": curve([1.0, 0.9, 0.5, 0.6, 0.9]),
        "wikitext": curve([1.0, 1.0, 1.0, 0.99, 0.99], np.nan),
    }
    return stack(curves, "stored", member="member")


def test_time_is_divided_by_the_onset_or_else_by_the_last_step():
    assert time_unit(curve([1.0, 0.99, 0.5, 0.4, 0.3])) == 2
    assert time_unit(curve([1.0] * 5)) == 30


def test_every_source_has_a_line_in_the_column_of_its_minimum(run):
    figure = draw_axes(run)
    panels = np.array(figure.axes).reshape(3, 3)
    for column, name in enumerate(("polarise", "sparse-dense", "wikitext")):
        (line,) = panels[0, column].lines
        assert line.get_xdata().min() > 0
        texts = [text.get_text() for text in panels[-1, column].get_legend().get_texts()]
        assert texts == [SOURCES[name].title]
    assert panels[1, 2].get_title() == "not recorded"
    assert panels[1, 0].get_title() == "weight on one key: 0.30 to 0.30"
    assert panels[2, 0].get_title() == "stable rank: 0.30 of its start"


def test_the_returns_name_every_source_and_count_those_that_are_judged(run):
    (panel,) = draw_returns(run).axes
    assert panel.get_title() == "Attention comes back in 1 of 2 models that are judged"
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels == [SOURCES[name].title for name in ("polarise", "sparse-dense", "wikitext")]
    assert [text.get_text() for text in panel.texts] == ["predicted: stays", "predicted: comes back"]
