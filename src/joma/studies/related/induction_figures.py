"""The figures of the study `induction-phases`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import band, canvas, letters, measured
from joma.studies.related.induction_data import CHAIN, DOUBLY, LAG_2
from joma.studies.related.induction_full import NO_UNIGRAM, ONE_LAYER
from joma.studies.related.induction_measures import first_step, full_arm, full_closed, gap_closed, minimal_closed

PREDICTORS = {"unigram_loss": "single symbols", "bayes_loss": "Bayes, pairs", "kernel_loss": "true law"}


def draw_phases(run: xr.Dataset) -> Figure:
    """Draw the minimal model: its loss, its two layers, the gradient beside the law, and the lags that it finds."""
    figure, axes = canvas(2, 2, width=3.9, height=2.8)
    (loss, layers), (gradient, lags) = axes
    chain = run.sel(world=CHAIN)
    band(loss, run.step, chain.minimal_loss, 1, "SGD")
    band(loss, run.adam_step, run.adam_loss, 2, "Adam")
    _draw_predictors(loss, chain)
    loss.set(xlabel="step", ylabel="loss / nats", title="A plateau at single symbols, then a jump")
    loss.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9))
    _draw_layers(layers, chain)
    _draw_gradient(gradient, run)
    _draw_lags(lags, run)
    letters(axes)
    return figure


def _draw_predictors(panel: Axes, losses: xr.Dataset, prefix: str = "") -> None:
    """Draw the losses of predictors that are not trained, with their names on the lines."""
    for name, label in PREDICTORS.items():
        level = float(losses[f"{prefix}{name}"].mean("seed"))
        panel.axhline(level, color="0.45", linewidth=0.8, linestyle=":")
        place = {"xycoords": ("axes fraction", "data"), "va": "bottom", "ha": "right"}
        panel.annotate(label, (0.99, level), fontsize=7, color="0.3", **place)


def _draw_layers(panel: Axes, chain: xr.Dataset) -> None:
    diagonal = chain.minimal_diagonal / chain.minimal_diagonal.isel(step=-1)
    band(panel, chain.step, chain.minimal_weight, 1, "first layer: weight of lag 1")
    band(panel, chain.step, diagonal, 2, "second layer: A / final")
    jump = first_step(minimal_closed(chain) >= 0.5, "step").mean("seed")
    if np.isfinite(jump):
        panel.axvline(float(jump), color="0.45", linewidth=0.8, linestyle=":", label="half of the gap closed")
    panel.set(xlabel="step of SGD", ylabel="share", title="The second layer moves first")
    panel.legend(loc="upper left", fontsize=7)


def _draw_gradient(panel: Axes, run: xr.Dataset) -> None:
    panel.bar(run.lag, 1e4 * run.gradient_predicted.mean("seed"), color="0.8", label="law for long contexts")
    measured(panel, run.lag, 1e4 * run.gradient, 2, "autograd")
    panel.axhline(0.0, color="black", linewidth=0.6)
    panel.set(xlabel="lag", ylabel="$-∂L/∂r$ / $10^{-4}$", title="The gradient points to the parent's lag")
    panel.legend(loc="upper right")


def _draw_lags(panel: Axes, run: xr.Dataset) -> None:
    parents = " and ".join(str(lag) for lag in run.parent.values)
    weights = {
        "chain": run.minimal_lag_weight.sel(world=CHAIN),
        "chain of lag 2": run.minimal_lag_weight.sel(world=LAG_2),
        **{f"parents {parents}: {lag}": run.parents_lag_weight.sel(parent=lag) for lag in run.parent.values},
    }
    for index, (label, values) in enumerate(weights.items()):
        measured(panel, run.lag + 0.14 * (index - 1.5), values, index, label)
    panel.set(xlabel="lag", ylabel="weight after training", ylim=(-0.03, 1.03))
    panel.set_title("Each head finds its causal parent")
    panel.legend(loc="upper right")


def draw_worlds(run: xr.Dataset) -> Figure:
    """Draw what other worlds change in the minimal model and, if the run has one, the full model."""
    full = "full_loss" in run
    figure, axes = canvas(2, 2, width=3.9, height=2.8) if full else canvas(1, 1, width=4.6, height=2.9)
    _draw_minimal_worlds(axes[0, 0], run)
    if full:
        _draw_full_loss(axes[0, 1], run)
        _draw_attention(axes[1, 0], run)
        _draw_full_worlds(axes[1, 1], run)
    letters(axes)
    return figure


def _draw_minimal_worlds(panel: Axes, run: xr.Dataset) -> None:
    closed = minimal_closed(run)
    for index, name in enumerate((CHAIN, DOUBLY, LAG_2), start=1):
        band(panel, run.step, closed.sel(world=name), index, {LAG_2: "chain of lag 2"}.get(name, name))
    parents = gap_closed(run, "parents_loss", "parents_")
    band(panel, run.parents_step, parents, 4, f"{run.sizes['parent']} parents")
    panel.axhline(0.0, color="0.45", linewidth=0.8, linestyle=":")
    panel.set(xlabel="step of SGD", ylabel="share of the gap closed", title="Minimal model: two parents jump later")
    panel.legend(loc="lower right")


def _draw_full_loss(panel: Axes, run: xr.Dataset) -> None:
    arm = full_arm(run)
    band(panel, run.full_step, arm.full_loss, 1, "two layers")
    band(panel, run.full_step, full_arm(run, ONE_LAYER).full_loss, 2, "one layer")
    _draw_predictors(panel, arm, "full_")
    levels = [float(arm[f"full_{name}"].mean("seed")) for name in PREDICTORS]
    panel.set(xlabel="step of Adam", ylabel="loss / nats", title="Transformer: one layer or two")
    panel.set_ylim(min(levels) - 0.02, max(levels) + 0.12)
    panel.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9))


def _draw_attention(panel: Axes, run: xr.Dataset) -> None:
    arm = full_arm(run)
    band(panel, run.full_step, arm.previous, 1, "layer 1, to the previous symbol")
    band(panel, run.full_step, arm.match, 2, "layer 2, to what followed the symbol")
    panel.set(xlabel="step of Adam", ylabel="attention", title="Transformer: both layers turn at the jump", ylim=(0, 1))
    panel.legend(loc="lower right")


def _draw_full_worlds(panel: Axes, run: xr.Dataset) -> None:
    for index, name in enumerate((str(run.arm[0].values), NO_UNIGRAM), start=1):
        label = {NO_UNIGRAM: DOUBLY}.get(name, CHAIN)
        band(panel, run.full_step, full_closed(full_arm(run, name)), index, label)
    panel.axhline(0.0, color="0.45", linewidth=0.8, linestyle=":")
    panel.set(xlabel="step of Adam", ylabel="share of the gap closed", title="Transformer, with and without a unigram")
    panel.set_ylim(-0.5, 1.05)
    panel.legend(loc="lower right")
