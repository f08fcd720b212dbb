"""The figures of the study on in-context chains: what is drawn, and with which numbers."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.related.induction_figures import draw_phases, draw_worlds
from joma.studies.related.induction_measures import minimal_closed
from joma.studies.related.induction_phases import Config, run
from joma.study import Context

SMALL = Config(
    length=16, batch=8, probe=16, lags=4, steps=40, adam_steps=60, parents_steps=20, oracle_chains=50,
    gradient_length=40, gradient_samples=8, full_steps=6, full_length=12, full_width=4, full_batch=4,
    full_rates=(0.01,),
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_phases_show_loss_layers_gradient_and_lags(trajectory):
    loss, layers, gradient, lags = draw_phases(trajectory).axes
    chain = trajectory.sel(world="chain")
    assert legend(loss) == ["SGD", "Adam"]
    np.testing.assert_allclose(series(loss)["SGD"][:, 1], chain.minimal_loss.mean("seed"))
    assert [text.get_text() for text in loss.texts] == ["single symbols", "Bayes, pairs", "true law"]
    np.testing.assert_allclose(series(layers)["first layer: weight of lag 1"][:, 1], chain.minimal_weight.mean("seed"))
    heights = [bar.get_height() for bar in gradient.patches]
    np.testing.assert_allclose(heights, 1e4 * trajectory.gradient_predicted.mean("seed"))
    (points,) = (container.lines[0] for container in gradient.containers if container.get_label() == "autograd")
    np.testing.assert_allclose(points.get_ydata(), 1e4 * trajectory.gradient.mean("seed"))
    assert legend(lags) == ["chain", "chain of lag 2", "parents 1 and 2: 1", "parents 1 and 2: 2"]
    assert all(len(title(panel)) > 10 for panel in (loss, layers, gradient, lags))


def test_worlds_show_the_full_model_where_there_is_one(trajectory):
    minimal, loss, attention, full = draw_worlds(trajectory).axes
    closed = minimal_closed(trajectory).sel(world="doubly stochastic").mean("seed")
    np.testing.assert_allclose(series(minimal)["doubly stochastic"][:, 1], closed)
    assert legend(loss) == ["two layers", "one layer"]
    np.testing.assert_allclose(series(loss)["one layer"][:, 1], trajectory.full_loss.sel(arm="one layer").mean("seed"))
    assert len(legend(attention)) == 2
    assert legend(full) == ["chain", "doubly stochastic"]
    without = trajectory.drop_dims(["arm", "full_step"])
    assert len(draw_worlds(without).axes) == 1
