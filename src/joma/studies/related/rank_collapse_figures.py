"""The figure of the study `rank-collapse`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, canvas, letters, marker, measured, theory


def draw_depth(run: xr.Dataset) -> Figure:
    """Draw the collapse over depth, one layer beside its cubic term and the term's error, and large scores."""
    figure, axes = canvas(2, 2, width=3.9, height=2.8)
    (left, right), (lower_left, lower_right) = axes
    _draw_stacks(left, run)
    _draw_layer(right, run)
    _draw_error(lower_left, run)
    _draw_scores(lower_right, run)
    letters(axes)
    return figure


def _draw_stacks(panel: Axes, run: xr.Dataset) -> None:
    digits = -run.log10_relative.isel(layer=slice(1, None))
    digits = digits.where(np.isfinite(digits))
    for index, arm in enumerate(run.arm.values):
        values = digits.sel(arm=arm)
        median = values.median("seed")
        spread = np.abs(np.stack([median - values.min("seed"), values.max("seed") - median]))
        panel.errorbar(digits.layer, median, yerr=spread, capsize=2, elinewidth=0.9, label=arm, **marker(index))
    start = float(digits.sel(arm="attention", layer=2).median())
    line = start * 3.0 ** (digits.layer.values[1:] - 2)
    panel.plot(digits.layer[1:], line, ":", color="0.4", label="threefold each layer")
    panel.set(yscale="log", xlabel="layer", ylabel="$-\\log_{10}$ of relative residual")
    panel.set_title("Each layer triples the digits lost, MLP or not")
    panel.set_ylim(top=1e5 * float(digits.max()))
    panel.legend(ncols=2, loc="upper left", fontsize=7)


def _draw_layer(panel: Axes, run: xr.Dataset) -> None:
    sizes = np.sort(run["size"].values)
    output = run.log10_output.sortby("size")
    cubic = output.isel(size=0).mean("seed").item() + 3 * np.log10(sizes / sizes[0])
    theory(panel, sizes, 10**cubic, 0, "cubic law through the smallest")
    measured(panel, sizes, 10**output, 1, "exact layer")
    panel.set(xscale="log", yscale="log", xlabel="size ε of the residuals", ylabel="residual after one layer")
    panel.set_title("One layer cubes the residuals")
    panel.legend(loc="upper left")


def _draw_error(panel: Axes, run: xr.Dataset) -> None:
    error = run.error.sortby("size")
    measured(panel, error["size"], error, 2, "$\\|R\\,W\\,C\\,V - R'\\| / \\|R'\\|$")
    panel.plot(error["size"], error["size"] ** 2, ":", color="0.4", label="$\\varepsilon^2$")
    panel.set(xscale="log", yscale="log", xlabel="size ε of the residuals", ylabel="relative error")
    panel.set_title("The cubic term's error is of second order")
    panel.legend(loc="upper left")


def _draw_scores(panel: Axes, run: xr.Dataset) -> None:
    scales = run.score_scale.values
    values = run.log10_scored.stack(stack=("seed", "draw"))
    shift = np.linspace(0.88, 1.14, values.sizes["stack"])
    for scale in scales:
        digits = np.sort(values.sel(score_scale=scale).values)
        panel.plot(scale * shift, digits, ".", color=COLOURS[1], markersize=1.5, alpha=0.6)
    panel.plot(scales, values.median("stack"), color=COLOURS[2], label="median")
    panel.set_xscale("log", base=2)
    panel.set_yscale("symlog", linthresh=1.0)
    panel.set_xticks(scales, [f"{scale:g}" for scale in scales])
    panel.set(xlabel="factor of the scores", ylabel="$\\log_{10}$ residual at the end")
    panel.set_title("Large scores: some stacks survive")
    panel.set_ylim(top=3.0)
    panel.legend(loc="upper left")
