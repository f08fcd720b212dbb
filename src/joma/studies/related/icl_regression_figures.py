"""The figures of the study `icl-regression`, drawn from its run."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, LINES, canvas, letters, measured, theory
from joma.studies.related.icl_regression_measures import is_behind

MANY_SEEDS = 8  # lines of single seeds that a panel shows
FORM_LABELS = {"rank one": "heads of rank one", "full rank": "one head, full rank", "low rank": "one head, low rank"}


def draw_flows(run: xr.Dataset) -> Figure:
    """Draw the loss along merged and separate flows, what heads of rank one learn, and the risk over test lengths."""
    figure, axes = canvas(2, 2, width=4.0, height=2.9)
    _draw_losses(axes[0, 0], run)
    _draw_learnt(axes[0, 1], run)
    _draw_aligned(axes[1, 0], run)
    _draw_risk(axes[1, 1], run)
    letters(axes)
    return figure


def _seed_lines(
    panel: Axes, x: xr.DataArray, values: xr.DataArray, index: int, label: str, *, style: Any = "-"
) -> None:
    """Draw up to eight seeds as thin lines of one colour."""
    for row in range(min(MANY_SEEDS, values.sizes["seed"])):
        name = label if row == 0 else None
        colour = COLOURS[index % len(COLOURS)]
        panel.plot(x, values.isel(seed=row), color=colour, linestyle=style, linewidth=0.9, label=name)


def _plateau_lines(panel: Axes, losses: np.ndarray) -> None:
    for loss in losses:
        panel.axhline(loss, color="0.5", linewidth=0.7, linestyle=":")


def _draw_losses(panel: Axes, run: xr.Dataset) -> None:
    _plateau_lines(panel, run.plateau_loss.values)
    _seed_lines(
        panel, run.merged_time[1:], run.merged_loss.isel(merged_heads=0, merged_time=slice(1, None)), 2, "merged"
    )
    for index, (form, label) in zip((1, 3, 4), FORM_LABELS.items(), strict=True):
        losses = run.separate_loss.sel(form=form).isel(separate_time=slice(1, None))
        _seed_lines(panel, run.separate_time[1:], losses, index, label, style="-" if form == "rank one" else "--")
    panel.set(xscale="log", xlabel="time", ylabel="loss", title="Merged: one fall. Rank one: a staircase")
    panel.set_ylim(top=1.4 * float(run.plateau_loss[0]))  # room for the legend
    panel.legend(loc="upper right", fontsize=7, ncols=2)


def _draw_learnt(panel: Axes, run: xr.Dataset) -> None:
    for direction in range(run.sizes["direction"]):
        shares = run.learnt.isel(direction=direction, separate_time=slice(1, None))
        label = f"λ = {float(run.spectrum[direction]):.2g}"
        style = LINES[direction // len(COLOURS)]  # colours repeat after seven directions
        _seed_lines(panel, run.separate_time[1:], shares, direction, label, style=style)
    panel.axhline(1.0, color="0.5", linewidth=0.7, linestyle=":")
    panel.set(xscale="log", xlabel="time", ylabel=r"$G_{ii} / \gamma_i$", title="Large variance is learnt first")
    panel.legend(loc="upper left", fontsize=7)  # one column: nothing is learnt at early times


def _draw_aligned(panel: Axes, run: xr.Dataset) -> None:
    for direction in range(run.sizes["direction"]):
        times = run.aligned_time.isel(direction=direction)
        theory(panel, times, run.aligned_share, direction, f"λ = {float(run.spectrum[direction]):.2g}")
        measured(panel, run.half_time[direction : direction + 1], [0.5], direction)
    title = "Aligned heads follow the closed form"
    panel.set(xscale="log", xlabel="time", ylabel=r"$G_{ii} / \gamma_i$", title=title)
    panel.set_xlim(right=10 * float(run.aligned_time.max()))  # room for the legend
    if run.sizes["direction"] <= 5:  # more would cover the curves, whose colours are those of the panel before
        panel.legend(loc="lower right", fontsize=7)


def _draw_risk(panel: Axes, run: xr.Dataset) -> None:
    theory(panel, run.test_length, run.risk, 0, "trained on N examples")
    theory(panel, run.test_length, run.least_risk, 1, "optimum of each length")
    panel.axhline(float(run.endless_risk), color="0.5", linewidth=0.7, linestyle=":", label="endless prompts")
    trained_at = int(run.length)
    measured(panel, [trained_at], [float(run.plateau_loss[-1])], 2, "length of training")
    measured(panel, [2 * trained_at], run.shift_sampled.expand_dims("point", axis=-1), 3, "sampled, all seeds")
    title = "Longer prompts leave an error"
    panel.set(xscale="log", yscale="log", xlabel="examples in a test prompt", ylabel="risk", title=title)
    panel.legend(fontsize=7)


def draw_trained(run: xr.Dataset) -> Figure:
    """Draw what is trained on sampled prompts: whole matrices, several layers, and softmax attention."""
    figure, axes = canvas(1, 3, width=3.6, height=2.9)
    _draw_whole(axes[0, 0], run)
    _draw_layers(axes[0, 1], run)
    _draw_softmax(axes[0, 2], run)
    letters(axes)
    return figure


def _draw_whole(panel: Axes, run: xr.Dataset) -> None:
    excess = run.plateau_loss.values - run.plateau_loss.values[-1]
    _plateau_lines(panel, excess)
    loss = run.whole_loss.isel(whole_heads=0) - run.one_step_loss
    for index, (blocks, label) in enumerate({"whole": "all blocks random", "descent": "other blocks zero"}.items(), 1):
        _seed_lines(
            panel, run.whole_step, loss.sel(whole_blocks=blocks), index, label, style="-" if index == 1 else "--"
        )
    behind = int(is_behind(run).sum())
    title = f"SGD: {behind} of {run.sizes['seed']} end nearer to plateau 1"
    panel.set(xlabel="step", ylabel="loss above the best step", title=title)
    panel.legend(loc="upper right", fontsize=7)


def _draw_layers(panel: Axes, run: xr.Dataset) -> None:
    theory(panel, run.layers, run.best_loss, 0, "best steps of descent")
    measured(panel, run.layers, run.descent_loss, 1, "trained as descent")
    # On the probe, paired with the best steps there, and shifted by their loss in the population.
    transformed = run.layer_loss.sel(layer_blocks="transform").isel(layer_step=-1) - run.best_probe_loss + run.best_loss
    measured(panel, run.layers, transformed, 2, "transforming x as well")
    panel.set_xticks(run.layers.values)
    panel.set(xlabel="layers L", ylabel="loss", ylim=(0, None), title="Layers beside the best steps of descent")
    panel.legend(fontsize=7)


def _draw_softmax(panel: Axes, run: xr.Dataset) -> None:
    loss = run.softmax_loss - run.one_step_loss
    for index, heads in enumerate(run.softmax_heads.values.tolist(), 1):
        label = f"{heads} head{'s' * (heads > 1)}"
        _seed_lines(panel, run.softmax_step, loss.sel(softmax_heads=heads), index, label)
    panel.axhline(0.0, color="black", linewidth=0.8, label="best linear step")
    shorter = float(run.one_less_loss - run.plateau_loss[-1])
    panel.axhline(shorter, color="0.4", linewidth=0.8, linestyle="--", label="… with N − 1 examples")
    top = float(run.plateau_loss[0] - run.plateau_loss[-1])
    panel.set(xlabel="step", ylabel="loss above the best step", title="Softmax needs two heads", ylim=(-0.1, 1.2 * top))
    panel.legend(loc="upper right", fontsize=7)
