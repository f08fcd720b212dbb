"""The figures of the study `invariance`, drawn from its run."""

from __future__ import annotations

from itertools import product

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import canvas, letters, marker, measured, theory
from joma.studies.theorems.invariance_training import (
    ACTIVATIONS,
    ATTENTIONS,
    BREAKERS,
    CORRECTIONS,
    NAMES,
    TOKEN_KINDS,
)

SHOWN_BREAKERS = {**BREAKERS, "overlap": "embeddings overlap"}
FIGURE_2 = {"attention": "softmax", "activation": "linear"}
RELATIVE_ERROR = "relative error of the law"


def _thin(values: xr.DataArray, count: int = 12, dim: str = "step") -> xr.DataArray:
    """Return about `count` of the recorded steps, without step 0, where nothing has moved."""
    return values.isel({dim: slice(1, None, max(1, values.sizes[dim] // count))})


def _measured_steps(axes: Axes, values: xr.DataArray, index: int, label: str, *, rate: float = 1.0) -> None:
    """Draw a series over a few of its steps, at the times rate × step."""
    dim = "long_step" if "long_step" in values.dims else "step"
    thinned = _thin(values, dim=dim)
    measured(axes, rate * thinned[dim], thinned, index, label)


def _write_bound(axes: Axes, name: str, values: xr.DataArray) -> None:
    """Write values far below the panel's scale as a bound: drawn to scale they would flatten all the rest."""
    bound = 10.0 ** np.ceil(np.log10(np.maximum(float(values.max()), 1e-300)))
    axes.text(0.03, 0.03, f"{name}: below {float(bound):.0e}", transform=axes.transAxes, fontsize=8)


def draw_highlight(run: xr.Dataset) -> Figure:
    """Draw the correlation and the relative error of Figure 2's prediction over training in one panel."""
    figure, axes = canvas(1, 1, width=3.2, height=2.3)
    panel, figure_2 = axes[0, 0], run.sel(FIGURE_2).sel(kind="gaussian")
    _measured_steps(panel, figure_2.correlation, 1, "correlation")
    _measured_steps(panel, figure_2.error.sel(correction="none"), 2, "relative error")
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set(xlabel="step", yscale="log", title="Attention from weights: correlated, but off")
    panel.legend(loc="upper left")
    return figure


def draw_figure_2(run: xr.Dataset) -> Figure:
    """Draw correlation, relative error after each correction, and predicted against trained logits."""
    figure, axes = canvas(1, 3, width=3.4, height=3.0)
    left, middle, right = axes[0]
    figure_2 = run.sel(FIGURE_2)
    for index, kind in enumerate(TOKEN_KINDS):
        _measured_steps(left, figure_2.correlation.sel(kind=kind), index, f"{NAMES[kind]} tokens")
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set(xlabel="step", ylabel="correlation of ẑ and z", title="Correlation, as in Figure 2", ylim=(None, 1.02))
    left.legend(loc="lower left")
    error = figure_2.error.sel(kind="gaussian")
    for index, correction in enumerate(("none", "drift", "gap")):
        _measured_steps(middle, error.sel(correction=correction), index, CORRECTIONS[correction])
    _write_bound(middle, CORRECTIONS["step"], error.sel(correction="step"))
    middle.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    low, high = middle.get_ylim()
    middle.set(xlabel="step", ylabel="‖z − prediction‖ / ‖z − z(0)‖", yscale="log", title="The error of ẑ comes late")
    middle.set_ylim(max(low, 2e-4), 10 * high)
    middle.legend(loc="upper left")
    _scatter(right, figure_2.sel(kind="gaussian"))
    letters(axes)
    return figure


def _scatter(axes: Axes, run: xr.Dataset) -> None:
    """Draw predicted against trained logits of all seeds and tokens, with the line of agreement."""
    theory(axes, [run.law.min(), run.law.max()], [run.law.min(), run.law.max()], 0, "agreement")
    for index, correction in enumerate(("none", "step"), start=1):
        predicted = run.predicted.sel(correction=correction)
        axes.plot(run.law.values.ravel(), predicted.values.ravel(), label=CORRECTIONS[correction], **marker(index))
    axes.set(xlabel="trained logit z", ylabel="predicted logit", title="The ledger accounts for it")
    axes.legend(loc="upper left")


def draw_laws(run: xr.Dataset) -> Figure:
    """Draw the error of the prediction from the weights alone for every attention, activation and kind of tokens."""
    figure, axes = canvas(len(TOKEN_KINDS), len(ATTENTIONS), width=3.4, height=2.5, sharex=True, sharey=True)
    for (row, kind), (column, attention) in product(enumerate(TOKEN_KINDS), enumerate(ATTENTIONS)):
        panel, error = axes[row, column], run.error.sel(attention=attention, kind=kind)
        for index, activation in enumerate(ACTIVATIONS):
            _measured_steps(panel, error.sel(activation=activation, correction="none"), index, NAMES[activation])
        _write_bound(
            panel, "steps counted" if attention != "softmax" else "ledger counted", error.sel(correction="step")
        )
        panel.set(yscale="log", title=f"{attention} attention, {NAMES[kind]} tokens")
    axes[0, 0].set_ylim(bottom=2e-5)
    for panel in axes[:, 0]:
        panel.set_ylabel(RELATIVE_ERROR)
    for panel in axes[-1]:
        panel.set_xlabel("step")
    axes[0, 2].legend(loc="upper left", title="units")
    letters(axes)
    return figure


def draw_rates(run: xr.Dataset) -> Figure:
    """Draw the error of the law over time at two learning rates, at unequal rates, and with a residual connection."""
    figure, axes = canvas(1, 3, width=3.4, height=3.0)
    left, middle, right = axes[0]
    rate, small_rate = float(run.rate), float(run.small_rate)
    gaussian = run.sel(kind="gaussian")
    exp = gaussian.error.sel(attention="exp", activation="linear", correction="none")
    small = gaussian.long_error if "long_error" in run else gaussian.small.sel(unit="linear")
    _measured_steps(left, exp, 0, f"rate {rate:g}", rate=rate)
    _measured_steps(left, small, 1, f"rate {small_rate:g}", rate=small_rate)
    left.set(title="A smaller rate, a smaller error")
    unequal = gaussian.unequal
    for index, attention in enumerate(ATTENTIONS):
        error = unequal.sel(attention=attention, correction="none")
        _measured_steps(middle, error, index, f"{attention} attention", rate=float(run.rate_z))
    _write_bound(middle, "ledger and steps counted", unequal.sel(correction="step"))
    middle.set(title="Unequal rates: the law with κ")
    residual = gaussian.broken.sel(breaker="skip")
    _measured_steps(right, residual, 0, f"rate {rate:g}", rate=rate)
    _measured_steps(right, gaussian.residual_small, 1, f"rate {small_rate:g}", rate=small_rate)
    right.set(title="A residual around the MLP breaks it", ylim=(0.0, None))
    for panel in (left, middle):
        panel.set_yscale("log")
    for panel in (left, right):
        panel.set_xscale("log")
    for panel in axes[0]:
        panel.set_xlabel("learning rate × step")
    left.legend()
    middle.legend(loc="center right")
    right.legend(loc="lower left")
    left.set_ylabel(RELATIVE_ERROR)
    letters(axes)
    return figure


def draw_breakers(run: xr.Dataset) -> Figure:
    """Draw the error of the finite-step law with each breaker switched on."""
    figure, axes = canvas(1, len(TOKEN_KINDS), width=3.6, height=3.0, sharey=True)
    for panel, kind in zip(axes[0], TOKEN_KINDS, strict=True):
        broken = run.broken.sel(kind=kind)
        for index, (breaker, label) in enumerate(SHOWN_BREAKERS.items()):
            _measured_steps(panel, broken.sel(breaker=breaker), index, label)
        _write_bound(panel, "none of them", broken.sel(breaker="none"))
        panel.set(xlabel="step", yscale="log", title=f"Broken laws, {NAMES[kind]} tokens")
    axes[0, 0].set_ylabel(RELATIVE_ERROR)
    axes[0, 0].set_ylim(bottom=2e-3)
    axes[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    letters(axes)
    return figure
