"""The figures of the study `sparse-dense`: Figure 4, Theorems 2 and 4 side by side, and blocks with real units."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, canvas, evenly_spaced, letters, marker, measured, series, theory
from joma.studies.theorems.real_units import KINDS_OF_ATTENTION, NULL, UNITS, VISIBLE, null_recovery, recovery

VISIBLE_ABOVE = 0.88  # mean of μ above which bounces are visible
MAX_LABELS = 6  # of a legend that covers no curve
SHOWN_WEIGHT = 4.0  # at which the weight that runs away leaves the panel
SHOWN_TIME = 2.5
SHOWN_DRAWS = 200  # of a seed


def draw_highlight(run: xr.Dataset) -> Figure:
    """Draw the entropy of Figure 4 alone: closed form and Euler's steps."""
    figure, axes = canvas(1, 1, width=3.2, height=2.3)
    panel = axes[0, 0]
    _draw_figure_4_entropy(panel, run)
    panel.set(title="Sparse, then dense again", xlabel="time", ylabel="entropy / nats")
    return figure


def _draw_figure_4_entropy(panel: Axes, run: xr.Dataset) -> None:
    theory(panel, run.figure_4_time, run.figure_4_entropy, 0, "closed form")
    thinned = run.isel(figure_4_step=slice(None, None, max(1, run.sizes["figure_4_step"] // 20)))
    step = float(run.figure_4_time[-1]) / int(run.figure_4_step[-1])
    measured(panel, step * thinned.figure_4_step, thinned.figure_4_entropy_euler, 1, "Euler's steps")
    panel.set_ylim(0, None)
    panel.legend(loc="lower right")


def draw_linear_nonlinear(run: xr.Dataset) -> Figure:
    """Draw Theorem 2 beside Theorem 4, weights and entropy, and how far entropy comes back with real units."""
    figure, axes = canvas(2, 2, width=4.0, height=2.7)
    (left, right), (below_left, below_right) = axes
    _draw_linear(left, run.isel(seed=0))
    _draw_nonlinear(right, run.isel(seed=0))
    _draw_both_entropies(below_left, run.isel(seed=0))
    _draw_recoveries(below_right, run)
    letters(axes)
    return figure


def _by_target(run: xr.Dataset) -> np.ndarray:
    """Return the tokens of one seed, the largest target first."""
    return np.argsort(run.mu.values)[::-1]


def _draw_linear(panel: Axes, run: xr.Dataset) -> None:
    thinned = run.isel(time=slice(None, None, 16))
    for index, token in enumerate(_by_target(run)):
        theory(panel, run.blow_up * run.share, run.linear_line.isel(token=token), index)
        measured(panel, thinned.linear_time, thinned.linear_trained.isel(token=token), index)
    panel.axvline(float(run.blow_up), color="0.5", linestyle=":", linewidth=0.8)
    panel.set(ylim=(0, SHOWN_WEIGHT), xlabel="time", ylabel="weight $v$")
    panel.set_title("Linear (Theorem 2): one weight runs away")


def _draw_nonlinear(panel: Axes, run: xr.Dataset) -> None:
    shown = run.where(run.time <= SHOWN_TIME, drop=True)
    thinned = shown.isel(time=slice(None, None, 5))
    tokens = _by_target(run)
    labelled = {*evenly_spaced(len(tokens), MAX_LABELS)}
    for index, token in enumerate(tokens):
        label = f"μ = {float(run.mu[token]):.2f}" if index in labelled else None
        theory(panel, shown.time, shown.predicted.isel(token=token), index, label)
        measured(panel, thinned.time, thinned.trained.isel(token=token), index)
    panel.set(ylim=(0, SHOWN_WEIGHT), xlabel="time", ylabel="weight $v$")
    panel.set_title("Nonlinear (Theorem 4): all arrive")
    panel.legend(ncols=3, loc="upper center", columnspacing=1.0)


def _draw_both_entropies(panel: Axes, run: xr.Dataset) -> None:
    shown = run.where(run.time <= SHOWN_TIME, drop=True)
    thinned, late = shown.isel(time=slice(None, None, 3)), run.isel(time=slice(None, None, 16))
    theory(panel, run.blow_up * run.share, run.linear_line_entropy, 0, "linear: ever sparser")
    measured(panel, late.linear_time, late.linear_entropy, 0)
    theory(panel, shown.time, shown.entropy_predicted, 2, "nonlinear: then dense again")
    measured(panel, thinned.time, thinned.entropy, 2)
    panel.set(ylim=(0, None), xlabel="time", ylabel="attention entropy / nats")
    panel.set_title("Entropy along the two flows")
    panel.legend(loc="lower right")


def _draw_recoveries(panel: Axes, run: xr.Dataset) -> None:
    """Draw one point for each trained block; a line marks the largest recovery with linear units."""
    gained, largest = recovery(run.units_entropy), null_recovery(run.units_entropy)
    for row, attention in enumerate(KINDS_OF_ATTENTION):
        shift = 0.36 * (row - 0.5)
        for column, unit in enumerate(UNITS):
            values = gained.sel(attention=attention, units=unit).values.ravel()
            spread = np.linspace(-0.12, 0.12, values.size)
            label = f"{attention} attention" if unit == NULL else None
            panel.plot(column + shift + spread, values, label=label, **{**marker(row + 1), "markersize": 3})
        bound = float(largest.sel(attention=attention))
        panel.axhline(bound, color=COLOURS[row + 1], linestyle=":", linewidth=1)
    panel.set_xticks(range(len(UNITS)), list(UNITS.values()))
    panel.set(ylabel="entropy regained / nats", ylim=(-0.02, max(0.05, 1.5 * float(gained.max()))))
    panel.set_title("Real units: how far entropy comes back")
    panel.legend(loc="upper center", ncols=2)


def draw_figure_4(run: xr.Dataset) -> Figure:
    """Draw Figure 4: the weights at five times, and the entropy over time."""
    figure, axes = canvas(1, 2, width=4.2, height=3.0)
    left, right = axes[0]
    component = np.arange(1, run.sizes["component"] + 1)
    for index, time in enumerate((0.0, 5.0, 13.4, 30.0, 100.0)):
        snapshot = run.sel(figure_4_time=time, method="nearest")
        theory(left, component, snapshot.figure_4_v, index, f"t = {time:g}")
        measured(left, component, snapshot.figure_4_euler, index)
    left.plot(component, run.figure_4_mu, color="0.5", linestyle=":", linewidth=2.5, label="target μ")
    left.set(xlabel="component, sorted by μ", ylabel="weight $v$", title="The largest targets are reached first")
    left.legend(ncols=2)
    right.axhline(float(run.figure_4_limit), color="0.5", linestyle=":", label="limit")
    _draw_figure_4_entropy(right, run)
    right.set(xlabel="time", ylabel="entropy / nats", title="Sparse, then dense again")
    letters(axes)
    return figure


def draw_theorem_4(run: xr.Dataset) -> Figure:
    """Draw the entropy of the block with Theorem 4's drive for several seeds, and the convergence ratio."""
    figure, axes = canvas(1, 2, width=4.2, height=2.9)
    left, right = axes[0]
    thinned = run.isel(time=slice(None, None, 8))
    for index in range(min(4, run.sizes["seed"])):
        theory(left, run.time, run.entropy_predicted.isel(seed=index), index, f"seed {int(run.seed[index])}")
        measured(left, thinned.time, thinned.entropy.isel(seed=index), index)
    left.set(xlabel="time", ylabel="entropy / nats", title="SGD with the drive μ − v follows Theorem 4")
    left.legend()
    theory(right, run.pair_time, run.pair_ratio, 0, "closed form")
    measured(right, run.pair_time[::3], run.pair_ratio_flow[::3], 1, "integrated flow")
    right.axhline(float(run.pair_limit), color="0.5", linestyle=":", label="limit")
    right.set(xlabel="time", xscale="log", ylabel=r"$\ln(1/\delta_j)\,/\,\ln(1/\delta_k)$")
    right.set_title("The larger target is reached sooner")
    right.legend(loc="lower right")
    letters(axes)
    return figure


def draw_real_units(run: xr.Dataset) -> Figure:
    """Draw the entropy of trained blocks with real units over training, for each attention."""
    figure, axes = canvas(1, len(KINDS_OF_ATTENTION), width=4.2, height=2.9, sharey=True)
    for panel, attention in zip(axes[0], KINDS_OF_ATTENTION, strict=True):
        for index, (unit, label) in enumerate(UNITS.items()):
            entropy = run.units_entropy.sel(attention=attention, units=unit).stack(block=("seed", "tokens"))
            panel.plot(run.unit_step, entropy.mean("block"), label=label, **series(index))
            low, high = entropy.min("block"), entropy.max("block")
            panel.fill_between(run.unit_step, low, high, color=COLOURS[index], alpha=0.08, linewidth=0)
        panel.set(xlabel="step", title=f"{attention} attention, trained on classes", ylim=(0, None))
    axes[0, 0].set_ylabel("attention entropy / nats")
    axes[0, 1].legend(title="units", loc="lower right", ncols=2)
    letters(axes)
    return figure


def draw_bounce(run: xr.Dataset) -> Figure:
    """Draw the share of its fall that the entropy regains, against the mean of each random target."""
    figure, axes = canvas(1, 1, width=4.6, height=3.0)
    panel = axes[0, 0]
    for index, seed in enumerate(run.seed.values[:4]):
        draws = run.sel(seed=seed).isel(draw=slice(SHOWN_DRAWS))
        measured(panel, draws.counted_mean, draws.counted_regained, index, f"seed {seed}", markersize=3)
    panel.axhline(VISIBLE, color="0.4", linestyle=":", label="1 %")
    panel.axvline(VISIBLE_ABOVE, color="0.4", linestyle="--", label="mean 0.88")
    panel.set(xlabel="mean of μ", ylabel="share of its fall regained", yscale="log", ylim=(1e-15, 2))
    panel.set_title("Small targets bounce too little to be seen")
    panel.legend(ncols=2, loc="lower right")
    return figure
