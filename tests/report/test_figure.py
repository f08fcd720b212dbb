from __future__ import annotations

import numpy as np
import xarray as xr

from joma.report.figure import canvas, measured


def test_seeds_that_agree_are_drawn_though_their_mean_rounds_past_them():
    values = xr.DataArray(np.full((3, 2), 0.1), dims=("seed", "step"))
    assert float(values.mean("seed")[0]) > 0.1
    _, axes = canvas(1, 1)
    measured(axes[0, 0], [0, 1], values)
    bars = axes[0, 0].containers[0].lines[2][0].get_segments()[0]
    np.testing.assert_allclose(bars[:, 1], 0.1, rtol=1e-12)
