"""The figures of `bounce-cause` show the numbers of the run."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from joma.studies.text.bounce_cause_arms import ARMS
from joma.studies.text.bounce_cause_figures import draw_best, draw_curves, draw_positions, draw_recovery
from studies.text.test_bounce_cause_measures import made_up, with_best


@pytest.fixture(scope="module")
def drawn():
    run = made_up(noise=0.02, free=(0.8, 0.6), linear=(0.7, 0.6), value_path=(0.0, 0.1), memorised=(0.0, 0.0))
    random = np.random.default_rng(1)
    sizes = {name: run.sizes[name] for name in ("arm", "seed", "step")}

    def draw(**extra):
        shape = {**sizes, **extra}
        return xr.DataArray(random.random(tuple(shape.values())), dims=tuple(shape))

    run = run.assign(valid_loss=draw(), train_loss=draw(), distance=draw(layer=1), position_entropy=draw(position=5))
    return with_best(run.assign_coords(position=range(5)), np.array([1.7, 1.5]), np.array([1.6, 1.4]))


def test_every_seed_of_every_arm_is_a_point_beside_what_noise_makes(drawn):
    (panel,) = draw_recovery(drawn).axes
    points = [line for line in panel.lines if line.get_linestyle() == "None"]
    np.testing.assert_allclose([line.get_xdata() for line in points], drawn.recovery.transpose("arm", "seed"))
    brackets = [line.get_xdata() for line in panel.lines if line.get_linewidth() == 6]
    chance = drawn.chance.transpose("arm", "seed")
    np.testing.assert_allclose(brackets, np.stack([chance.min("seed"), chance.max("seed")], axis=-1))
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels == ["Nothing changed", "A linear MLP", "W_V and W_O frozen at their start",
                      "A text so small that it is memorised"]  # fmt: skip


def test_the_curves_are_means_over_seeds(drawn):
    figure = draw_curves(drawn)
    entropy, distance, valid, train = figure.axes
    arms = drawn.arm.values.tolist()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [ARMS[arm].label for arm in arms]
    means = {
        entropy: drawn.entropy.mean(("layer", "head")),
        distance: drawn.distance.mean("layer"),
        valid: drawn.valid_loss,
        train: drawn.train_loss,
    }
    for panel, values in means.items():
        lines = [line.get_ydata() for line in panel.lines if len(line.get_xdata()) > 1]
        np.testing.assert_allclose(lines, values.mean("seed").transpose("arm", "step"))
        assert panel.get_title(loc="left")


def test_the_loss_of_a_memorised_text_does_not_set_the_scale(drawn):
    far = drawn.copy(deep=True)
    far.valid_loss.loc[{"arm": "memorised"}] = 100.0
    others = far.valid_loss.sel(arm=["free", "linear", "value-path"])
    assert draw_curves(far).axes[2].get_ylim()[1] == pytest.approx(float(others.max()) + 0.3)


def test_entropy_by_position_is_drawn_at_three_moments(drawn):
    figure = draw_positions(drawn)
    assert len(figure.axes) == 4
    for panel, arm in zip(figure.axes, ("free", "linear", "value-path", "memorised"), strict=True):
        curve = drawn.position_entropy.sel(arm=arm)
        np.testing.assert_allclose(panel.lines[0].get_ydata(), curve.isel(step=0).mean("seed"))
        np.testing.assert_allclose(panel.lines[2].get_ydata(), curve.isel(step=-1).mean("seed"))
        np.testing.assert_allclose(panel.lines[3].get_ydata(), np.log(np.arange(1, 6)))


def test_attention_alone_is_drawn_beside_the_end_and_the_minimum(drawn):
    figure = draw_best(drawn)
    (panel,), (legend,) = figure.axes, figure.legends
    end = (drawn.least + drawn.recovery).sel(arm="free")
    expected = (drawn.best_entropy - end).mean("seed").transpose("start", "attention_step")
    np.testing.assert_allclose([line.get_ydata() for line in panel.lines[:2]], expected)
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["from its final W_Q and W_K", "from fresh W_Q and W_K", "minimum of the unchanged model",
                      "end of the unchanged model"]  # fmt: skip
    (without,) = draw_best(drawn.drop_vars("best_entropy")).axes
    assert len(without.lines) == 1


def test_a_run_of_the_unchanged_model_alone_is_drawn(drawn):
    alone = drawn.sel(arm=["free"])
    for draw in (draw_recovery, draw_curves, draw_positions, draw_best):
        assert draw(alone).axes


def test_it_is_drawn_where_every_seed_diverged(drawn):
    diverged = drawn.map(lambda values: values * np.nan)
    for draw in (draw_recovery, draw_curves, draw_positions, draw_best):
        assert draw(diverged).axes
