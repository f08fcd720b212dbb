"""The figures of the study `max-margin`: every panel has a title and draws every seed."""

from dataclasses import replace

import numpy as np
import pytest

from joma.studies.related.max_margin import STUDY, Config, run
from joma.study import Context

SMALL = Config(sequences=2, tokens=3, dim=5, steps=64, descent_steps=200, late_length=200.0, late_factor_length=40.0)


@pytest.fixture(scope="module")
def trajectory():
    return run(replace(SMALL, matrix_sequences=2, matrix_tokens=3, matrix_dim=4), Context((0, 1)))


@pytest.mark.parametrize("name", STUDY.figures)
def test_every_panel_has_a_title_labels_and_a_legend(trajectory, name):
    figure = STUDY.figures[name].draw(trajectory)
    assert len(figure.axes) == 3
    for panel in figure.axes:
        assert panel.get_title(loc="left")
        assert panel.get_ylabel()
        assert panel.get_legend() is not None


def test_every_seed_and_start_is_drawn(trajectory):
    planes, growth, slopes = STUDY.figures["paths"].draw(trajectory).axes
    assert len([line for line in planes.lines if np.size(line.get_xdata()) > 2]) == 2
    assert len([line for line in growth.lines if np.size(line.get_xdata()) == trajectory.sizes["length"] - 1]) == 4
    assert len(slopes.lines) == 8
    gains = STUDY.figures["margins"].draw(trajectory).axes[2]
    assert len(gains.lines) == trajectory.sizes["seed"]
