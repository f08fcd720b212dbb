"""The figure of `even-pairs`: what is drawn, and with which numbers."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.related.even_pairs import Config, run
from joma.studies.related.even_pairs_figures import draw_phases
from joma.study import Context


@pytest.fixture(scope="module")
def trajectory():
    config = Config(lengths=(2, 3), until=100.0, records=30, trained_length=2, rates=(0.5,), steps=100)
    return run(config, Context((0, 1)))


def test_the_panels_show_training_flows_errors_and_parity(trajectory):
    training, flows, errors, parity = draw_phases(trajectory).axes
    assert legend(training) == ["‖u‖", "‖W‖", "10 × loss / start"]
    late = trajectory.isel(time=slice(1, None)).sel(max_length=3)
    np.testing.assert_array_equal(series(flows)["length 3"][:, 1], late.flow_u_norm)
    np.testing.assert_array_equal(flows.lines[-1].get_ydata(), late.flow_w_norm)
    expected = late.flow_positive_error * late.flow_u_norm**2
    np.testing.assert_allclose(series(errors)["length 3"][:, 1], expected)
    assert len(parity.containers) == 4
    assert all(len(title(panel)) > 10 and panel.get_ylabel() for panel in (training, flows, errors, parity))
