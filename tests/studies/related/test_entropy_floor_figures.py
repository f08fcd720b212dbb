"""The figures of `entropy-floor` show the numbers of their run."""

import numpy as np
import pytest

from joma.studies.related.entropy_floor import Config, run
from joma.studies.related.entropy_floor_figures import draw_floor, draw_training
from joma.study import Context


@pytest.fixture(scope="module")
def trajectory():
    config = Config(
        keys=(2, 4), norms=(1.0, 4.0), row_starts=2, sizes=(3,), spectral_norms=(0.5, 4.0), matrix_starts=8, width=8,
        hidden=8, layers=1, length=8, batch=4, steps=4, every=2, windows=2,
    )  # fmt: skip
    return run(config, Context((0, 1)))


def test_the_floor_and_what_lies_above_it(trajectory):
    rows, matrices, model = draw_floor(trajectory).axes
    lines = [line for line in rows.lines if line.get_marker() in (None, "None", "")]
    assert len(lines) >= trajectory.sizes["key_count"]
    assert "σI, T = 3" in [line.get_label() for line in matrices.lines]
    assert "No search finds a matrix below σI" in matrices.get_title(loc="left")  # some end above it
    points = [line for line in matrices.lines if line.get_marker() == "o"]
    expected = 1e3 * (trajectory.matrix_lowest.min("seed") - trajectory.mean_floor).sel(matrix_size=3)
    np.testing.assert_allclose(np.asarray(points[0].get_ydata(), dtype=float), expected.values)
    assert {"plain", "σReparam"} <= {line.get_label() for line in model.lines}


def test_training_has_a_column_for_each_rate(trajectory):
    axes = draw_training(trajectory).axes
    assert len(axes) == 3 * trajectory.sizes["rate"]
    assert all("Rate" in panel.get_title(loc="left") for panel in axes)
