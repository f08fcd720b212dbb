"""The figures of the study `markov-unigram`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import band, canvas, letters, marker, measured, series
from joma.studies.related.markov_unigram_measures import (
    departure,
    final_loss,
    is_stuck,
    of_group,
    starts,
    until_departure,
)
from joma.studies.related.markov_unigram_training import VARIANTS

PANELS = 3  # chains that are drawn


def draw_losses(run: xr.Dataset) -> Figure:
    """Draw the losses on the first chains, and the share of seeds that is stuck by the scale of the start."""
    figure, axes = canvas(2, 2, width=3.9, height=2.7)
    chains = list(dict.fromkeys(zip(run.p.values, run.q.values, strict=True)))[:PANELS]
    for panel, chain in zip(axes.flat, chains, strict=False):
        _draw_chain(panel, run, chain)
    for panel in axes.flat[len(chains) : PANELS]:
        panel.set(title="This run has no further chain")
    _draw_starts(axes[1, 1], run)
    letters(axes)
    return figure


def _draw_chain(panel: Axes, run: xr.Dataset, chain: tuple[float, float]) -> None:
    p, q = chain
    groups = ("sgd", "adam")
    arms = run.isel(arm=np.flatnonzero((run.p == p) & (run.q == q) & run.group.isin(groups)))
    for arm in arms.arm.values:
        chosen = arms.sel(arm=arm)
        is_tied, is_adam = bool(chosen.tied), str(chosen.group.item()) == "adam"
        label = f"{'Adam' if is_adam else 'SGD'}, {'tied' if is_tied else 'untied'}"
        band(panel, chosen.step, chosen.loss, 2 if is_adam else 0 if is_tied else 1, label)
    for level in (float(arms.unigram[0]), float(arms.kernel[0])):
        panel.axhline(level, color="0.4", linewidth=0.9, linestyle=":")
    panel.set(title=f"p = {p:g}, q = {q:g}: {_fate(arms)}", xlabel="step", ylabel="loss / nats")
    panel.legend(loc="best")


def _fate(arms: xr.Dataset) -> str:
    """Say in how many seeds SGD stays at the unigram with tied weights, or that every model gets through."""
    stuck = is_stuck(arms)
    tied = stuck.isel(arm=np.flatnonzero((arms.tied == 1) & (arms.group == "sgd")))
    if not bool(stuck.any()):
        return "all get through"
    return "SGD stays if tied" if bool(tied.all()) else f"SGD stays in {float(tied.mean()):.0%} if tied"


def _draw_starts(panel: Axes, run: xr.Dataset) -> None:
    arms = starts(run)
    stable = (arms.curvature.isel(record=0) > 0).mean("seed")
    panel.plot(arms.init, stable, label="predicted by the Hessian", **series(1))
    panel.plot(arms.init, is_stuck(arms).mean("seed"), label="SGD", **marker(0))
    adam = of_group(run, "adam").isel(arm=0)
    panel.plot([float(adam.init)], [float(is_stuck(adam).mean())], label="Adam", **marker(2))
    panel.set(
        title="Large starts leave the unigram",
        xlabel="standard deviation of the initial weights",
        ylabel="share of seeds stuck",
        ylim=(-0.05, 1.05),
    )
    panel.legend(loc="center left")


def draw_curvature(run: xr.Dataset) -> Figure:
    """Draw fates by the curvature at the start, the curvature along Adam, and where variants end."""
    figure, axes = canvas(1, 3, width=3.7, height=3.0)
    left, middle, right = axes[0]
    _draw_fates(left, run)
    _draw_adam(middle, run)
    _draw_variants(right, run)
    letters(axes)
    return figure


def remaining(run: xr.Dataset) -> xr.DataArray:
    """Return the final loss on a scale from the entropy rate, 0, to the unigram, 1."""
    return (final_loss(run) - run.kernel) / (run.unigram - run.kernel)


def _draw_fates(panel: Axes, run: xr.Dataset) -> None:
    chosen = run.isel(arm=np.flatnonzero((run.tied == 1) & run.group.isin(["sgd", "init"])))
    for index, init in enumerate(np.unique(chosen.init)):
        arms = chosen.isel(arm=np.flatnonzero(chosen.init == init))
        points = arms.curvature.isel(record=0).values.ravel(), remaining(arms).values.ravel()
        panel.plot(*points, label=f"init {init:g}", **marker(index))
    panel.axvline(0.0, color="0.4", linewidth=0.9, linestyle=":")
    panel.locator_params(axis="x", nbins=5)
    panel.set(
        title="Where SGD ends, by curvature at the start",
        xlabel="curvature at the unigram, at the start",
        ylabel="final loss: 1 unigram, 0 transitions",
    )
    panel.legend(loc="center left", fontsize=7)


def _draw_adam(panel: Axes, run: xr.Dataset) -> None:
    arms = of_group(run, "adam")
    for index, arm in enumerate(arms.arm.values):
        chosen = arms.sel(arm=arm)
        curvature, records = until_departure(chosen), departure(chosen)
        for seed in range(chosen.sizes["seed"]):
            label = f"p = {float(chosen.p):g}, q = {float(chosen.q):g}" if seed == 0 else None
            panel.plot(chosen.step, curvature.isel(seed=seed), label=label, linewidth=0.8, **series(index))
            if bool(records.isel(seed=seed).notnull()):
                record = int(records.isel(seed=seed))
                panel.plot(chosen.step[record], curvature.isel(seed=seed, record=record), **marker(index))
    panel.axhline(0.0, color="0.4", linewidth=0.9, linestyle=":")
    panel.margins(y=0.1)
    panel.set_yscale("symlog", linthresh=1.0)
    panel.set_yticks([1, 0, -1, -10], ["1", "0", "−1", "−10"])
    panel.set(title="Adam makes a saddle, then leaves", xlabel="step", ylabel="curvature at the unigram")
    panel.legend(loc="upper right", fontsize=7)


def _draw_variants(panel: Axes, run: xr.Dataset) -> None:
    names = ["adam", *(name for name in VARIANTS if name in run.group.values)]
    for row, name in enumerate(names):
        end = remaining(of_group(run, name).isel(arm=0))
        measured(panel, end.values, np.full(end.sizes["seed"], row), row % 7)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    for level in (0.0, 1.0):
        panel.axvline(level, color="0.4", linewidth=0.9, linestyle=":")
    panel.set(title="Where variants end", xlabel="final loss: 1 unigram, 0 transitions")
