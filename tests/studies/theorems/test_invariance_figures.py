"""The figures of the study of Theorem 1: what is drawn, and with which numbers."""

from __future__ import annotations

import numpy as np
import pytest

from drawn import legend, series, title
from joma.studies.theorems.invariance import STUDY, Config, run
from joma.studies.theorems.invariance_figures import SHOWN_BREAKERS
from joma.studies.theorems.invariance_training import ACTIVATIONS, ATTENTIONS, CORRECTIONS, NAMES, TOKEN_KINDS
from joma.study import Context

SMALL = Config(classes=4, distinct=3, common=2, dim=8, steps=40)


@pytest.fixture(scope="module")
def small():
    return run(SMALL, Context((0, 1)))


def test_figure_2_is_drawn_with_its_corrections_and_its_scatter(small):
    left, middle, right = STUDY.figures["figure-2"].draw(small).axes
    assert legend(left) == ["Gaussian tokens", "random tokens"]
    assert legend(middle) == [CORRECTIONS[name] for name in ("none", "drift", "gap")]
    assert middle.get_yscale() == "log"
    assert middle.texts[0].get_text().startswith(CORRECTIONS["step"])
    softmax = small.sel(attention="softmax", activation="linear", kind="gaussian")
    step, error = series(middle)["ẑ"][-1]
    assert error == pytest.approx(float(softmax.error.sel(correction="none", step=step).mean("seed")))
    agreement, uncorrected, corrected = right.lines
    np.testing.assert_array_equal(agreement.get_xdata(), agreement.get_ydata())
    assert len(uncorrected.get_xdata()) == softmax.sizes["token"] * softmax.sizes["seed"]
    np.testing.assert_allclose(corrected.get_ydata(), corrected.get_xdata(), atol=1e-12)


def test_laws_are_drawn_for_every_attention_activation_and_kind_of_tokens(small):
    panels = STUDY.figures["laws"].draw(small).axes
    pairs = [(kind, attention) for kind in TOKEN_KINDS for attention in ATTENTIONS]
    for panel, (kind, attention) in zip(panels, pairs, strict=True):
        assert title(panel).endswith(f"{attention} attention, {NAMES[kind]} tokens")
        means = series(panel)
        assert list(means) == [NAMES[activation] for activation in ACTIVATIONS]
        step, error = means["GELU"][0]
        expected = small.error.sel(attention=attention, activation="gelu", kind=kind, correction="none", step=step)
        assert error == pytest.approx(float(expected.mean("seed")))
    assert [panel.get_xlabel() for panel in panels] == [""] * 3 + ["step"] * 3
    assert legend(panels[2]) == [NAMES[activation] for activation in ACTIVATIONS]


def test_breakers_are_drawn_one_series_each(small):
    panels = STUDY.figures["breakers"].draw(small).axes
    assert [title(panel) for panel in panels] == [
        "(a)  Broken laws, Gaussian tokens",
        "(b)  Broken laws, random tokens",
    ]
    assert legend(panels[1]) == list(SHOWN_BREAKERS.values())
    for panel, kind in zip(panels, TOKEN_KINDS, strict=True):
        assert (panel.get_xlabel(), panel.get_yscale()) == ("step", "log")
        step, error = series(panel)["Adam"][-1]
        assert error == pytest.approx(float(small.broken.sel(breaker="adam", kind=kind, step=step).mean("seed")))


def test_the_highlight_shows_correlation_and_error_of_figure_2(small):
    (panel,) = STUDY.highlight.draw(small).axes
    assert legend(panel) == ["correlation", "relative error"]
    figure_2 = small.sel(attention="softmax", activation="linear", kind="gaussian")
    step, error = series(panel)["relative error"][-1]
    assert error == pytest.approx(float(figure_2.error.sel(correction="none", step=step).mean("seed")))
    step, correlation = series(panel)["correlation"][-1]
    assert correlation == pytest.approx(float(figure_2.correlation.sel(step=step).mean("seed")))


def test_rates_are_drawn_over_time_not_steps(small):
    left, middle, right = STUDY.figures["rates"].draw(small).axes
    assert legend(left) == legend(right) == ["rate 0.1", "rate 0.01"]
    assert legend(middle) == [f"{attention} attention" for attention in ATTENTIONS]
    time, error = series(left)["rate 0.01"][-1]
    expected = small.small.sel(unit="linear", kind="gaussian", step=round(time / 0.01))
    assert error == pytest.approx(float(expected.mean("seed")))
    time, error = series(right)["rate 0.1"][-1]
    expected = small.broken.sel(breaker="skip", kind="gaussian", step=round(time / 0.1))
    assert error == pytest.approx(float(expected.mean("seed")))


def test_the_long_training_replaces_the_short_one_at_the_small_rate(small):
    long = small.small.sel(unit="linear", drop=True).rename(step="long_step") + 1
    left = STUDY.figures["rates"].draw(small.assign(long_error=long)).axes[0]
    time, error = series(left)["rate 0.01"][-1]
    expected = long.sel(kind="gaussian", long_step=round(time / 0.01))
    assert error == pytest.approx(float(expected.mean("seed")))
