"""The figures of `markov-unigram`: what each panel shows, drawn from the run alone."""

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.related.markov_unigram import STUDY, Config, run
from joma.studies.related.markov_unigram_figures import draw_curvature, draw_losses, remaining
from joma.studies.related.markov_unigram_measures import starts
from joma.study import Context

SMALL = Config(steps=40, length=6, records=4, probe=8, variants=("deep-sgd", "norm"), adam_rate=3e-2)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_every_panel_has_a_title(trajectory):
    for drawing in STUDY.figures.values():
        for panel in drawing.draw(trajectory).axes:
            assert len(title(panel)) > 8


def test_losses_have_both_levels_and_all_arms_of_a_chain(trajectory):
    first, _, third, shares = draw_losses(trajectory).axes
    assert legend(first) == ["SGD, tied", "SGD, untied", "Adam, tied"]
    assert legend(third) == ["SGD, tied", "SGD, untied"]
    dotted = sorted(np.asarray(line.get_ydata())[0] for line in first.lines if line.get_linestyle() == ":")
    np.testing.assert_allclose(dotted, [0.61903, 0.66628], atol=1e-4)
    np.testing.assert_allclose(series(shares)["SGD"][:, 0], starts(trajectory).init)


def test_the_title_of_a_chain_says_what_the_models_did(trajectory):
    def titles(loss):
        return [title(panel).split(": ")[1] for panel in draw_losses(trajectory.assign(loss=loss)).axes[:3]]

    through = trajectory.loss * 0 + trajectory.kernel
    assert titles(through) == ["all get through"] * 3
    tied_sgd = (trajectory.tied == 1) & (trajectory.group == "sgd")
    assert titles(through.where(~tied_sgd, trajectory.unigram)) == ["SGD stays if tied"] * 3
    half = titles(through.where(~tied_sgd | (trajectory.seed == 0), trajectory.unigram))
    assert half == ["SGD stays in 50% if tied"] * 3


def test_variants_are_named_at_their_ends(trajectory):
    fates, _, variants = draw_curvature(trajectory).axes
    assert [label.get_text() for label in variants.get_yticklabels()] == ["adam", "norm", "deep-sgd"]
    shown = np.concatenate([np.asarray(line.get_xdata()) for line in variants.lines if line.get_marker() == "^"])
    np.testing.assert_allclose(shown, remaining(trajectory).sel(arm="deep-sgd"))
    assert legend(fates) == ["init 0.05", "init 0.2", "init 0.4"]


def test_a_run_of_one_chain_is_drawn(trajectory):
    chain = trajectory.isel(arm=np.flatnonzero(trajectory.p == 0.5))
    assert "no further chain" in title(draw_losses(chain).axes[1])
