"""The figure of `polarise`: what is drawn, and with which numbers."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.related.polarise import Config, run
from joma.studies.related.polarise_figures import draw_orbit
from joma.study import Context


@pytest.fixture(scope="module")
def trajectory():
    config = Config(tokens=(2, 3), records=12, loss_tokens=3, steps=60, until=50.0, targets=(1.0, 10.0))
    return run(config, Context((0, 1)))


def test_the_panels_show_orbit_law_targets_and_rates(trajectory):
    margins, law, targets, rates = draw_orbit(trajectory).axes
    assert legend(margins) == ["orbit", "−c·y", "logistic loss", "square loss", "logistic, SGD"]
    assert legend(law) == ["2 tokens", "3 tokens"]
    ratio = (trajectory.error / trajectory.law).sel(tokens=3).isel(time=slice(1, None)).mean("seed")
    np.testing.assert_allclose(series(law)["3 tokens"][:, 1], ratio)
    predicted = series(targets)["orbit, mean over seeds"][:, 1]
    np.testing.assert_allclose(predicted, trajectory.predicted_entropy.mean("seed"))
    first = trajectory.isel(seed=0, point=-1)
    for label, name in {"law, ln t": "fixed_law", "law, 2 ln ln t": "trained_law"}.items():
        line = series(rates)[label]
        assert len(line) > trajectory.sizes["point"]
        at_the_end = np.interp(float(first.log_time), *line.T)
        np.testing.assert_allclose(at_the_end, float(first[name]), rtol=1e-3)
    assert len(series(margins)["square loss"]) == trajectory.sizes["time"]
    assert legend(rates) == ["law, ln t", "fixed values", "law, 2 ln ln t", "trained values"]
    assert all(
        len(title(panel)) > 10 and panel.get_xlabel() and panel.get_ylabel() for panel in draw_orbit(trajectory).axes
    )
