"""Measures of `rank-collapse` on made-up runs whose answers are known."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.related import rank_collapse_measures as measures
from joma.study import NotInRun


@pytest.fixture
def made_up():
    """A stack that cubes 0.1 exactly, a layer with output 5 ε³ and error 3 ε², and stacks of which half survive."""
    layer, size = np.arange(7), np.array([1e-2, 1e-4, 1e-3])
    cubed = -(3.0 ** np.arange(7))[None, None]
    return xr.Dataset(
        {
            "log10_rms": (("seed", "arm", "layer"), cubed),
            "log10_relative": (("seed", "arm", "layer"), cubed / 2),
            "bound_ratio": (("seed", "arm", "depth"), np.array([[[0.1, 0.7]]])),
            "log10_output": (("seed", "size"), np.log10(5 * size[None] ** 3)),
            "error": (("seed", "size"), 3 * size[None] ** 2),
            "paper_ratio": (("seed", "size"), np.array([[0.1, 0.3, 0.2]])),
            "log10_scored": (("seed", "score_scale", "draw"), np.array([[[-9.0, -50.0], [-0.5, -3.0]]])),
        },
        {"seed": [0], "arm": ["attention"], "layer": layer, "size": size, "score_scale": [1.0, 16.0]},
    )


def test_numbers(made_up):
    assert measures.decade_slope(made_up).item() == pytest.approx(3.0)
    assert measures.leading_error(made_up).item() == pytest.approx(3e-6)
    assert measures.error_slope(made_up).item() == pytest.approx(2.0)
    assert measures.order(made_up, "attention", 4).item() == pytest.approx(3.0)
    assert measures.median_order(made_up, "attention") == pytest.approx(3.0)
    assert measures.residual_ratio(made_up, "attention", "rms", 1).item() == pytest.approx(1e-2)
    assert measures.residual_ratio(made_up, "attention", "relative", 1).item() == pytest.approx(0.1)
    assert measures.bound_ratio(made_up).item() == 0.7
    assert measures.paper_ratio(made_up).item() == 0.3
    assert measures.survivors(made_up, 1.0).item() == 0.0
    assert measures.survivors(made_up, 16.0).item() == 0.5


def test_what_a_run_lacks(made_up):
    for measure in (
        lambda: measures.survivors(made_up, 3.0),
        lambda: measures.order(made_up, "attention", 9),
        lambda: measures.leading_error(made_up.isel(size=[0, 1])),
    ):
        with pytest.raises(NotInRun):
            measure()
