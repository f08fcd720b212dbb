"""Figures of `scan-snap`: how its laws come true as the premises are met, and the phases of growth in every arm."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import canvas, letters, measured, theory
from joma.studies.hierarchy.growth_phases import local_exponent, slowing_time, winning_logits

LABELS = {  # of the arms
    "premises": "premises met",
    "faster": "decoder 10 × faster",
    "equal": "equal rates",
    "slower": "decoder 10 × slower",
}


def draw_premises(run: xr.Dataset) -> Figure:
    """Draw the errors of the laws over the ratio of rates and over the share of common tokens."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    error = run.ratio_gain_error
    theory(axes[0, 0], run.ratio, error.mean("seed")[-1] * run.ratio[-1] / run.ratio, 1, "falls as 1/ratio")
    measured(axes[0, 0], run.ratio, error.transpose("seed", "ratio"), 0, "integrated flow")
    axes[0, 0].set(xscale="log", yscale="log", ylabel="relative error at the end", ylim=(None, 3.0))
    axes[0, 0].set(xlabel=r"ratio of rates $\eta_w / \eta_z$", title="Relative gain: its error")
    axes[0, 0].legend(loc="lower left")
    for panel, name, label in (
        (axes[0, 1], "scan", "power of $t$ in the scan phase"),
        (axes[0, 2], "slowing", r"time of power 1, over $2 K \ln M / \eta_w$"),
    ):
        panel.axhline(float(run[f"clock_{name}"]), color="0.5", linestyle="--", label="closed form")
        measured(panel, run.share, run[f"share_{name}"].transpose("seed", "share"), 0, "flow, decoder 1,000 × faster")
        panel.set(xscale="log", xlabel="share of common tokens", ylabel=label)
        panel.legend(loc="upper left")
    axes[0, 1].set(title="Scan: does $t^2$ come out?")
    axes[0, 2].set(title="Snap: is it on time?")
    letters(axes)
    return figure


def draw_scan(run: xr.Dataset) -> Figure:
    """Draw attention to the common tokens, the logits of one class's distinct tokens, and their order at the end."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    thinned = run.isel(step=slice(1, None, 6))
    for index, (arm, label) in enumerate(LABELS.items()):
        if arm != "premises":  # with rare common tokens attention hardly moves
            share = run.common_flow.sel(arm=arm).mean(("label", "seed"))
            theory(axes[0, 0], run.step[1:], share[1:], index)
            measured(axes[0, 0], thinned.step, thinned.common.sel(arm=arm).mean("label"), index, label)
    axes[0, 0].set(xlabel="step", xscale="log", ylabel="attention to common tokens", title="Common tokens lose")
    axes[0, 0].legend(loc="lower left")
    flow, points = (records.sel(arm="faster").isel(seed=0, label=0) for records in (run, thinned))
    for rank in range(min(5, run.sizes["rank"])):
        theory(axes[0, 1], run.step[1:], flow.logit_flow.isel(rank=rank)[1:], rank)
        label = f"P = {float(flow.cooccurrence[rank]):.3f}"
        measured(axes[0, 1], points.step, points.logit.isel(rank=rank), rank, label)
    axes[0, 1].set(xlabel="step", xscale="log", ylabel="logit $z$", title="Distinct ones gain, by co-occurrence")
    axes[0, 1].legend(loc="upper left")
    _draw_order(axes[0, 2], run.isel(step=-1))
    letters(axes)
    return figure


def _draw_order(panel: Axes, end: xr.Dataset) -> None:
    grid = np.linspace(0, 1, 101)
    theory(panel, grid, grid**2, 0, "$(P_l/P_1)^2$")
    for index, arm in enumerate(LABELS):
        ratios = (values / values.isel(rank=0) for values in (end.cooccurrence, end.logit.sel(arm=arm)))
        x, y = (np.ravel(ratio.isel(rank=slice(1, None)).transpose("seed", "label", "rank")) for ratio in ratios)
        label = LABELS[arm] if arm == "premises" else None  # the others have the marks of panel (a)
        measured(panel, x, y, index, label, markersize=2.5, markeredgewidth=0.7)
    panel.set(xlabel="co-occurrence $P_l / P_1$", ylabel="logit $z_l / z_1$", ylim=(None, 1.25))
    panel.set_title("The law of a fast decoder, by $P^2$")
    panel.legend(loc="upper left")


def draw_snap(run: xr.Dataset) -> Figure:
    """Draw the growth of the winning logits, its local power of t, and when that falls to 1."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    thinned = run.isel(step=slice(20, None, 5))
    for index, arm in enumerate(LABELS):
        line = winning_logits(run, "logit_flow").sel(arm=arm).mean("seed").isel(step=slice(12, None))
        theory(axes[0, 0], line.step, line / line[-1], index)
        logits = winning_logits(run).sel(arm=arm)
        measured(axes[0, 0], thinned.step, (logits / logits.isel(step=-1)).sel(step=thinned.step), index, LABELS[arm])
        power = local_exponent(winning_logits(run).sel(arm=arm)).isel(step=slice(15, None, 4))
        scale = float(run.unit.sel(arm=arm)[-1] / run.step[-1])
        measured(axes[0, 1], power.step * scale, power, index)
    axes[0, 0].set(xlabel="step", xscale="log", yscale="log", title="Growth slows in every arm")
    axes[0, 0].set_ylabel("winning logits, over their end")
    axes[0, 0].legend(loc="lower right")
    clock = run.clock.where(run.unit > 0.01)
    order = np.argsort(run.unit.values, axis=None)
    theory(axes[0, 1], run.unit.values.ravel()[order], clock.values.ravel()[order], 0, "closed form", color="0.5")
    axes[0, 1].axhline(1.0, color="0.6", linewidth=0.8)
    axes[0, 1].set(xlabel="decoder's time $\\eta_w t / K$", xscale="log", ylabel="local power of $t$")
    axes[0, 1].set_title("From scan, $t^2$, to snap")
    axes[0, 1].legend(loc="lower left")
    _draw_times(axes[0, 2], run)
    letters(axes)
    return figure


def _draw_times(panel: Axes, run: xr.Dataset) -> None:
    panel.axhline(float(run.clock_slowing), color="0.5", linestyle="--", label="closed form")
    theory(panel, run.ratio, run.ratio_slowing.mean("seed"), 1, "flow")
    for index, (arm, label) in enumerate(LABELS.items()):
        time = (slowing_time(winning_logits(run)) / run.transition).sel(arm=[arm]).transpose("seed", "arm")
        measured(panel, run.arm_ratio.sel(arm=[arm]), time, index, label)
    panel.set(xlabel=r"ratio of rates $\eta_w / \eta_z$", xscale="log", title="When growth slows down", ylim=(0, 2.2))
    panel.set_ylabel(r"time of power 1, over $2 K \ln M / \eta_w$")
    panel.legend(loc="upper left", ncols=2, fontsize=7, columnspacing=0.8)  # above the curves
