"""The figures of the study `ladder`: the bounce by world and gradient, the optima, and the predictions."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, canvas, letters, marker, measured, series
from joma.studies.theorems.ladder_measures import UNITS, arrived

TITLES = {"overlap": "Every token in every class", "separable": "Tokens separate the classes"}
OPTIMA = {
    "overlap": "One length: back to uniform",
    "lengths": "Two lengths: down to the optimum",
    "noise": "Noise: back to the optimum",
}
FAMILIES = {"shares": "share of short contexts", "planted": "planted optimum", "random": "random world"}
SHOWN_SEEDS = 5  # of the optima
SHOWN_CURVES = 8  # seeds of each activation
SHIFT = 0.012  # of points that would cover others
SGD_POINTS = 4  # every so many recorded steps


def draw_gradients(run: xr.Dataset) -> Figure:
    """Draw entropy over time by world and gradient, for linear and GELU units."""
    figure, axes = canvas(2, 2, width=4.0, height=2.6, sharey=True)
    for row, (world, title) in enumerate(TITLES.items()):
        _draw_units(axes[row, 0], run.entropy.sel(world=world), "time")
        _draw_units(axes[row, 1], run.constant_entropy.sel(world=world), "constant_time")
        axes[row, 0].set_title(f"{title}, cross entropy")
        axes[row, 1].set_title(f"{title}, constant gradient")
        axes[row, 0].set_ylabel("attention entropy / ln M")
    axes[0, 0].legend(loc="lower left")
    letters(axes)
    return figure


def _draw_units(panel: Axes, entropy: xr.DataArray, time: str) -> None:
    times = entropy[time].values[1:]
    for index, (unit, label) in zip((1, 2), UNITS.items(), strict=True):
        for number, curve in enumerate(entropy.sel(activation=unit).values[:SHOWN_CURVES]):
            panel.plot(times, curve[1:], label=None if number else label, linewidth=0.8, **series(index))
            lowest = int(curve[1:].argmin())
            panel.plot(times[lowest], curve[1:][lowest], **{**marker(index), "markersize": 3.5})
    panel.axhline(1.0, color="0.4", linestyle="--", linewidth=0.8)
    panel.set(xscale="log", xlabel="time", ylim=(-0.03, 1.06))


def draw_optima(run: xr.Dataset) -> Figure:
    """Draw entropy over time with linear units, beside the optimum's and that of trained blocks."""
    figure, axes = canvas(1, 3, width=3.3, height=2.8, sharey=True)
    for panel, (world, title) in zip(axes[0], OPTIMA.items(), strict=True):
        for index, seed in enumerate(run.seed.values[:SHOWN_SEEDS]):
            _draw_optimum(panel, run.sel(seed=seed), world, index)
        panel.set(xscale="log", xlabel="time", title=title)
    axes[0, 0].set_ylabel("attention entropy / ln M")
    letters(axes)
    return figure


def _draw_optimum(panel: Axes, run: xr.Dataset, world: str, index: int) -> None:
    colour = COLOURS[index % len(COLOURS)]
    panel.plot(run.time[1:], run.entropy.sel(world=world, activation="linear")[1:], color=colour, linewidth=1.0)
    panel.axhline(
        float(run.optimum_entropy.sel(world=world, activation="linear")), color=colour, linestyle="--", linewidth=0.8
    )
    if world in run.sgd_world.values:
        points = run.sgd_entropy.sel(sgd_world=world)[1::SGD_POINTS]
        measured(panel, points.sgd_time, points, index, markersize=3)


def draw_predictions(run: xr.Dataset) -> Figure:
    """Draw predicted against reached entropies, predicted against measured returns, and the mixtures of lengths."""
    figure, axes = canvas(1, 3, width=3.4, height=3.0)
    _draw_ends(axes[0, 0], run)
    _draw_returns(axes[0, 1], run)
    _draw_shares(axes[0, 2], run)
    letters(axes)
    return figure


def _draw_points(panel: Axes, run: xr.Dataset, predicted: xr.DataArray, reached: xr.DataArray) -> None:
    settled = arrived(run)
    for index, (family, label) in enumerate(FAMILIES.items(), start=1):
        counted = settled & (run.family == family)
        panel.plot(
            predicted.values[counted.values],
            reached.values[counted.values],
            label=label,
            **{**marker(index), "markersize": 3},
        )
    left = ~settled.values
    panel.plot(predicted.values[left], reached.values[left], "x", color="0.6", markersize=3, label="not arrived")


def _draw_ends(panel: Axes, run: xr.Dataset) -> None:
    _draw_points(panel, run, run.case_optimum, run.case_end)
    panel.axline((1, 1), slope=1, color="0.4", linestyle="--", linewidth=0.8)
    panel.set(xlabel="entropy at the optimum / ln M", ylabel="entropy at the end / ln M")
    panel.set_title("Entropy ends at the optimum's")
    panel.legend(loc="upper left")


def _draw_returns(panel: Axes, run: xr.Dataset) -> None:
    predicted = np.maximum(run.case_optimum - run.case_early, 0.0)
    _draw_points(panel, run, predicted, run.case_end - run.case_least)
    panel.axline((0, 0), slope=1, color="0.4", linestyle="--", linewidth=0.8)
    panel.set(xlabel="optimum's less the least so far", ylabel="end's less the least of all")
    panel.set_title("How far attention comes back")


def _draw_shares(panel: Axes, run: xr.Dataset) -> None:
    mixtures = run.isel(case=run.family == "shares")
    panel.plot(mixtures.setting, mixtures.case_optimum.mean("seed"), label="optimum", **series(0))
    measured(panel, mixtures.setting, mixtures.case_end, 1, "end of the flow")
    measured(panel, mixtures.setting + SHIFT, mixtures.case_least, 2, "least on the way")
    panel.set(xlabel="share of contexts of one token", ylabel="attention entropy / ln M")
    panel.set_title("Short contexts: a sparse optimum")
    panel.legend(loc="best")
