"""The figures of the study `entropy-floor`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, MARKERS, band, canvas, evenly_spaced, letters, measured, theory
from joma.theory.entropy_floor import identity_entropy, mean_floor, row_floor


def draw_floor(run: xr.Dataset) -> Figure:
    """Draw the floor of a row, that of a matrix, and the rows of a trained model above theirs."""
    figure, axes = canvas(1, 3, width=3.6, height=3.0)
    _draw_rows(axes[0, 0], run)
    _draw_matrices(axes[0, 1], run)
    _draw_model_rows(axes[0, 2], run)
    letters(axes)
    return figure


def _draw_rows(panel: Axes, run: xr.Dataset) -> None:
    norms = np.linspace(0, float(run.norm.max()), 200)
    chosen = evenly_spaced(run.sizes["key_count"], 4)
    for index, count in enumerate(run.key_count.values[chosen]):
        theory(panel, norms, row_floor(norms, count), index, f"T = {count}")
        measured(panel, run.norm, run.row_lowest.sel(key_count=count), index)
    panel.set(xlabel="norm σ of a row's logits", ylabel="entropy / nats", title="Searches reach the floor of a row")
    panel.legend()


def _draw_matrices(panel: Axes, run: xr.Dataset) -> None:
    norms = np.linspace(1e-3, float(run.spectral_norm.max()), 300)
    chosen = evenly_spaced(run.sizes["matrix_size"], 3)
    lowest = (run.matrix_lowest.min("seed") - run.mean_floor).transpose("matrix_size", ...)
    for index, size in enumerate(run.matrix_size.values[chosen]):
        above = identity_entropy(norms, size) - mean_floor(norms, int(size))
        theory(panel, norms, 1e3 * above, index, f"σI, T = {size}")
        measured(panel, run.spectral_norm, 1e3 * lowest.sel(matrix_size=size), index)
    panel.set(xlabel="spectral norm σ", ylabel="above our bound / 0.001 nats")
    panel.set_title("No search finds a matrix below σI")
    panel.legend()


def _draw_model_rows(panel: Axes, run: xr.Dataset) -> None:
    keys = run.row_keys.values
    shown = keys >= keys.max() // 2
    largest = float(run.row_norm.sel(rate=run.rate.max()).isel(row_step=-1).max())
    norms = np.linspace(0, largest if np.isfinite(largest) else 50.0, 300)  # all rows are NaN if every seed diverged
    for index, count in enumerate((int(keys[shown].min()), int(keys.max()))):
        theory(panel, norms, row_floor(norms, count) / np.log(count), index, f"floor, T = {count}")
    for index, arm in enumerate(run.arm.values, start=2):
        rows = run.sel(arm=arm, rate=run.rate.max()).isel(row_step=-1)
        relative = rows.row_entropy.values[shown] / np.log(keys[shown])
        style = {"marker": MARKERS[index], "color": COLOURS[index], "alpha": 0.5, "markersize": 2.5}
        panel.plot(rows.row_norm.values[shown], relative, linestyle="none", label=arm, **style)
    panel.set(xlabel="norm of a row's logits", ylabel="entropy / ln T", title="No row of the model is below its floor")
    panel.legend()


def draw_training(run: xr.Dataset) -> Figure:
    """Draw entropy, its floor and the logits' norm over training, one column for each learning rate."""
    quantities = {"entropy": "entropy / nats", "floor": "floor / nats", "logit_norm": "norm of the logits"}
    figure, axes = canvas(len(quantities), run.sizes["rate"], width=3.6, height=2.1, sharex=True)
    for column, rate in enumerate(run.rate.values):
        for row, (name, label) in enumerate(quantities.items()):
            panel = axes[row, column]
            for index, arm in enumerate(run.arm.values):
                band(panel, run.step, run[name].sel(arm=arm, rate=rate).mean("layer"), index + 1, str(arm))
            panel.set_ylabel(label)
            panel.set_title(_title(run, name, rate))
        axes[-1, column].set_xlabel("step of Adam")
    axes[0, 0].legend()
    axes[-1, 0].set_xlim(0, float(run.step[-1]))
    letters(axes)
    return figure


def _title(run: xr.Dataset, name: str, rate: float) -> str:
    """Return what a panel shows, with the numbers of its extreme values."""
    means = run[name].sel(rate=rate).mean(("layer", "seed"))
    extreme = means.max("step") if name == "logit_norm" else means.min("step")
    plain, reparam = (float(value) for value in extreme)
    words = {"entropy": "entropy down to", "floor": "floor down to", "logit_norm": "logits up to"}[name]
    return f"Rate {rate:g}: {words} {plain:.2g} or {reparam:.2g}"
