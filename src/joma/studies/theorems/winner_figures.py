"""The figures of the study `winner`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import canvas, letters, measured, theory
from joma.studies.theorems import single_unit
from joma.studies.theorems.winner_measures import DISTINCT, growing, is_winner, ratio_spread


def draw_highlight(run: xr.Dataset) -> Figure:
    """Draw the weights of one hidden unit of Figure 3's block in one panel."""
    figure, axes = canvas(1, 1, width=3.2, height=2.3)
    count = _draw_weights(axes[0, 0], run)
    axes[0, 0].set(title=f"{count} of {run.sizes['word']} weights grow, the rest saturate")
    return figure


def _draw_weights(panel: Axes, run: xr.Dataset) -> int:
    """Draw all weights of the first hidden unit over training, and return how many of them keep growing."""
    v, grows = run.figure_3.isel(seed=0, hidden=0), growing(run).isel(seed=0, hidden=0)
    for word in np.flatnonzero(~grows):
        panel.plot(run.step, v.isel(word=word), color="0.6", linewidth=0.9)
    for index, word in enumerate(np.flatnonzero(grows), start=1):
        theory(panel, run.step, v.isel(word=word), index, f"token {word}")
    panel.plot([], [], color="0.6", linewidth=0.9, label="other tokens")
    panel.set(xlabel="step", ylabel="weight $v$")
    panel.legend(loc="upper left")
    return int(grows.sum())


def draw_growth(run: xr.Dataset) -> Figure:
    """Draw the weights of one seed, SGD's distance from the flow, the slides' ratio, and the entropy."""
    figure, axes = canvas(2, 2, width=3.9, height=2.7)
    (left, right), (lower_left, lower_right) = axes
    _draw_components(left, run)
    _draw_distance(right, run)
    spread = ratio_spread(run, 2.0).isel(time=slice(None, None, 4))
    measured(lower_left, spread.time, spread, 1, "erf(v/2)/Δ, as printed")
    lower_left.axhline(0.0, color="black", linewidth=0.8, label="erf(v/√2)/Δ")
    lower_left.set(ylabel="largest / smallest − 1", title="The printed ratio differs between tokens")
    lower_left.legend(loc="upper left")
    thinned = run.isel(time=slice(1, None, 4))
    theory(lower_right, run.time, run.entropy_predicted.mean("seed"), 0, "theory, mean over seeds")
    measured(lower_right, thinned.time, thinned.entropy, 1, "trained, all seeds")
    lower_right.set(ylabel="entropy / nats", title="Attention only gets sparser")
    lower_right.legend(loc="lower left")
    for panel in axes.flat:
        panel.set_xlabel("time / blow-up time")
    letters(axes)
    return figure


def _draw_components(panel: Axes, run: xr.Dataset) -> None:
    """Draw the five most salient tokens of the first seed: closed form and trained."""
    first = run.isel(seed=0)
    for index, token in enumerate(abs(first.salience).argsort().values[::-1][:5]):
        theory(
            panel,
            run.time,
            first.predicted.isel(token=token),
            index,
            f"Δ = {float(first.salience[token]):.2f}".replace("-", "−"),
        )
        thinned = first.isel(time=slice(None, None, 4), token=token)
        measured(panel, thinned.time, thinned.trained, index)
    panel.set(ylabel="weight $v$", title="The winner takes off, the others stop")
    panel.legend()


def _draw_distance(panel: Axes, run: xr.Dataset) -> None:
    """Draw SGD's distance from the flow with all steps and with half of them, winners and other tokens apart."""
    thinned = run.isel(time=slice(1, None, 4))
    wins = is_winner(run)
    for index, (name, label) in enumerate({"coarse": "half the steps", "trained": "all steps"}.items()):
        gap = single_unit.distance(thinned[name], thinned.integrated)
        theory(panel, thinned.time, gap.where(wins).max(("token", "seed")), index, f"winner, {label}")
        measured(panel, thinned.time, gap.where(~wins).max("token"), index, f"others, {label}")
    panel.set(ylabel="distance / (1 + |v|)", yscale="log", title="Smaller steps bring SGD to the flow")
    panel.legend(loc="upper left", ncols=2, fontsize=7)
    low, high = panel.get_ylim()
    panel.set_ylim(low, 30 * high)


def draw_figure_3(run: xr.Dataset) -> Figure:
    """Draw Figure 3: salience at the start, weights after training, and how one hidden unit's weights grew."""
    figure, axes = canvas(1, 3, width=3.3, height=2.9)
    images = {"Salience Δ at the start": run.figure_3_salience, "Weights v at the end": run.figure_3.isel(step=-1)}
    for panel, (title, values) in zip(axes[0], images.items(), strict=False):
        first = values.isel(seed=0)
        limit = float(abs(first).max())
        image = panel.imshow(first, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        panel.axhline(DISTINCT.stop - 0.5, color="black", linewidth=0.8)
        panel.grid(visible=False)
        panel.set_yticks(range(0, first.sizes["word"], 5))
        panel.set(xlabel="hidden unit (class)", ylabel="token: distinct, then common", title=title)
        figure.colorbar(image, ax=panel)
    count = _draw_weights(axes[0, 2], run)
    axes[0, 2].set(title=f"Unit 0: {count} weights keep growing")
    letters(axes)
    return figure
