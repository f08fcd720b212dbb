"""The figures of the trained ladder: one small panel for each arm, and what the speed of the logits does."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, band, canvas, letters
from joma.studies.theorems.ladder_arms import ARMS
from joma.studies.theorems.ladder_training import (
    at_own_rate,
    bounced,
    judged_trajectory,
    optimal_entropy,
    share_regained,
    still_falling,
)
from joma.study import NotInRun, mean_interval

COLUMNS = 5
RUNG_COLOURS = {"base": 0, "one-in": 1, "two-in": 5, "top": 2, "one-out": 3, "question": 4}
RUNG_NAMES = {"one-in": "block: ", "two-in": "block: ", "one-out": "model: ", "question": ""}
PAIRS = {
    "Free logits at two speeds": ("all-free", "all-free-fast"),
    "Product logits at two speeds": ("all-product", "all-product-slow"),
    "Attention on weights frozen early": ("all-free-fast", "all-frozen"),
}
LABELS = {
    "all-free": "same rate for all",
    "all-free-fast": "logits 10× faster",
    "all-product": "same rate for all",
    "all-product-slow": "logits 10× slower",
    "all-frozen": "10× faster, w frozen early",
}


def draw_arms(run: xr.Dataset) -> Figure:
    """Draw the entropy of every arm over the steps, one panel for each arm and one thin line for each seed."""
    arms = run.arm.values.tolist()
    columns = min(COLUMNS, len(arms))
    figure, axes = canvas(math.ceil(len(arms) / columns), columns, width=2.3, height=1.9, sharex=True, sharey=True)
    for panel, arm in zip(axes.flat, arms, strict=False):
        _draw_arm(panel, run, arm)
    for panel in axes.flat[len(arms) :]:
        panel.set_visible(False)
    for panel in axes.flat[max(0, len(arms) - columns) : len(arms)]:
        panel.set_xlabel("step of training")
        panel.tick_params(labelbottom=True)
    for panel in axes[:, 0]:
        panel.set_ylabel("entropy / ln n")
    return figure


def _draw_arm(panel: Axes, run: xr.Dataset, arm: str) -> None:
    rung = ARMS[arm].rung
    panel.set_title(f"{RUNG_NAMES.get(rung, '')}{ARMS[arm].about}")
    panel.set(xscale="log", ylim=(0, 1.05))
    try:
        trajectory = judged_trajectory(run, arm)
    except NotInRun:
        panel.text(0.05, 0.08, "diverged", transform=panel.transAxes, fontsize=8)
        return
    entropy = trajectory.trained_entropy.isel(trained_step=slice(1, None))
    for seed in range(run.sizes["seed"]):
        colour = COLOURS[RUNG_COLOURS[rung]]
        panel.plot(entropy.trained_step, entropy.isel(seed=seed), color=colour, linewidth=0.7, alpha=0.8)
    panel.text(0.05, 0.06, _verdict(trajectory), transform=panel.transAxes, fontsize=7.5, linespacing=1.3)


def _verdict(trajectory: xr.Dataset) -> str:
    """Return how many seeds bounce or still fall, and the mean share regained with Student's 95 % interval."""
    seeds, share = trajectory.sizes["seed"], share_regained(trajectory.trained_entropy)
    count, falling = int(bounced(trajectory).sum()), int(still_falling(trajectory).sum())
    low, high = mean_interval(share.values)
    interval = f" ± {50 * (high - low):.0f}" if seeds > 1 else ""
    verdict = f"{count} of {seeds} come back" + (f", {falling} still falling" if falling else "")
    return f"{verdict}\nregains {100 * float(share.mean()):.0f}{interval} %"


def draw_speed(run: xr.Dataset) -> Figure:
    """Draw what the speed of the logits does at all positions, beside the entropy of the optimum."""
    figure, axes = canvas(1, len(PAIRS), width=3.6, height=2.8, sharey=True)
    for panel, (title, arms) in zip(axes[0], PAIRS.items(), strict=True):
        for index, arm in enumerate(arms, start=1):
            try:
                entropy = at_own_rate(run, arm).trained_entropy.isel(trained_step=slice(1, None))
            except NotInRun:
                continue
            band(panel, entropy.trained_step, entropy, index, LABELS[arm])
        with suppress(NotInRun):  # an optimum that some seed has not reached is not drawn
            optimum = optimal_entropy(run, ARMS[arms[0]].switches.get("logits", "free"))
            low, high = np.asarray(optimum.min("seed")), np.asarray(optimum.max("seed"))
            panel.axhline(float(optimum.mean("seed")), color="0.4", linestyle=":", label="optimum")
            panel.axhspan(float(low), float(high), color="0.4", alpha=0.12, linewidth=0)
        panel.set(xscale="log", ylim=(0, 1.05), xlabel="step of training", title=title)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="lower left")
        else:
            panel.text(0.5, 0.5, "not in this run", transform=panel.transAxes, ha="center", color="0.4")
    axes[0, 0].set_ylabel("entropy / ln n")
    letters(axes)
    return figure
