"""The figures of the study of attention on text: ours beside the authors' published curves."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, LINES, band, canvas, letters
from joma.studies.text.published_curves import on_wikitext, published

THOUSAND = 1_000


def draw_paper(run: xr.Dataset) -> Figure:
    """Draw entropy by layer and the validation loss on the paper's axes; on WikiText-2 below the authors' curves."""
    depths = [int(depth) for depth in run.depth]
    compared = on_wikitext(run)
    authors = published().reindex(depth=depths, layer=range(max(depths))) if compared else None
    figure, axes = canvas(3 if compared else 2, len(depths), width=2.9, height=2.2, sharex=True, sharey="row")
    ours = _comparable_entropy(run)
    for panels, depth in zip(axes.T, depths, strict=True):
        layers = "1 layer" if depth == 1 else f"{depth} layers"
        if authors is not None:
            _draw_layers(panels[0], authors.entropy.sel(depth=depth), depth)
            panels[0].set_title(f"Published entropy, {layers}")
            mean = authors.valid_loss.sel(depth=depth).mean("seed")
            label = f"published, least {_least_loss(authors.valid_loss.sel(depth=depth))}"
            panels[-1].plot(mean.step / THOUSAND, mean, ".", color=COLOURS[2], markersize=3, label=label)
        _draw_layers(panels[-2], ours.sel(depth=depth).mean("head"), depth)
        panels[-2].set_title(f"{'Our entropy' if compared else 'Entropy'}, {layers}")
        panels[-2].legend()
        loss = run.valid_loss.sel(depth=depth)
        band(panels[-1], run.step / THOUSAND, loss, 0, f"ours, least {_least_loss(loss)}")
        panels[-1].set_title(f"Validation loss, {layers}")
        panels[-1].legend()
        panels[-1].set_xlabel("minibatches (thousands)")
    _label_rows(axes, run, compared)
    letters(axes)
    return figure


def _comparable_entropy(run: xr.Dataset) -> xr.DataArray:
    """Return the entropy in the authors' window on WikiText-2, and otherwise that over the validation text."""
    return run.window_entropy if on_wikitext(run) and "window_entropy" in run else run.entropy


def _label_rows(axes: np.ndarray, run: xr.Dataset, compared: bool) -> None:
    """Label the rows of `draw_paper`, match the scales of both entropies, and cut off the loss of the first steps."""
    for panel in axes[:-1, 0]:
        panel.set_ylabel("entropy (nats)")
    axes[-1, 0].set_ylabel("loss (nats)")
    if compared:
        limits = [panel.get_ylim() for panel in axes[:-1, 0]]
        for panel in axes[:-1, 0]:
            panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    late = run.valid_loss.where(run.step >= 0.02 * run.step[-1])
    low, high = float(late.min()), float(late.max())
    if np.isfinite(high):  # NaN where every seed diverged
        axes[-1, 0].set_ylim(low - 0.05 * (high - low), high)


def _least_loss(loss: xr.DataArray) -> str:
    return f"{float(loss.min('step').mean()):.3f}"


def _look(layer: int, depth: int) -> dict[str, Any]:
    return {"color": colormaps["viridis"](0.9 * layer / max(1, depth - 1)), "linestyle": LINES[layer % len(LINES)]}


def _draw_layers(panel: Axes, entropy: xr.DataArray, depth: int) -> None:
    """Draw mean and range over seeds of each layer's entropy against the step in thousands."""
    steps = entropy.step / THOUSAND
    for layer in range(depth):
        curve, look = entropy.sel(layer=layer), _look(layer, depth)
        label = f"layer {layer}" if layer in (0, depth // 2, depth - 1) else None
        panel.plot(steps, curve.mean("seed"), **look, label=label, linewidth=1.2)
        panel.fill_between(steps, curve.min("seed"), curve.max("seed"), color=look["color"], alpha=0.15, linewidth=0)


def draw_entropy(run: xr.Dataset) -> Figure:
    """Draw the entropy of every layer against the step, a panel a depth; on WikiText-2 with the authors' curves."""
    depths = [int(depth) for depth in run.depth]
    figure, axes = canvas(1, len(depths), width=2.9, sharey=True)
    authors = published().reindex(depth=depths, layer=range(max(depths))) if on_wikitext(run) else None
    for panel, depth in zip(axes[0], depths, strict=True):
        for layer in range(depth):
            look = _look(layer, depth)
            label = f"layer {layer}" if layer in (0, depth // 2, depth - 1) else None
            entropy = run.entropy.sel(depth=depth).mean("head").sel(layer=layer)
            steps, low, high = entropy.step + 1, entropy.min("seed"), entropy.max("seed")
            panel.plot(steps, entropy.mean("seed"), **look, label=label)
            panel.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
            if authors is not None:
                _draw_published(panel, authors.entropy.sel(depth=depth, layer=layer), look["color"])
        panel.set(xscale="log", xlabel="step + 1", title=f"Entropy by layer, {depth} layer{'s' * (depth > 1)}")
        panel.legend()
    axes[0, 0].set_ylabel("attention entropy (nats)")
    letters(axes)
    return figure


def _draw_published(panel: Axes, entropy: xr.DataArray, colour: tuple[float, ...]) -> None:
    """Draw the mean over the authors' seeds as dots and their range as thin lines."""
    steps = entropy.step + 1
    panel.plot(steps, entropy.mean("seed"), ".", color=colour, markersize=2.5, alpha=0.6)
    panel.vlines(steps, entropy.min("seed"), entropy.max("seed"), color=colour, linewidth=0.5, alpha=0.3)


def draw_learning(run: xr.Dataset) -> Figure:
    """Draw the validation loss, and the stable rank of the lowest MLP's lower weights, against the step."""
    figure, axes = canvas(1, 2)
    for index, depth in enumerate(int(depth) for depth in run.depth):
        trajectory = run.sel(depth=depth)
        label = f"{depth} layer{'s' * (depth > 1)}"
        band(axes[0, 0], trajectory.step + 1, trajectory.valid_loss, index, label)
        band(axes[0, 1], trajectory.step + 1, trajectory.stable_rank.isel(layer=0), index, label)
        best = float(trajectory.valid_loss.min("step").mean())
        axes[0, 0].axhline(best, color=COLOURS[index % len(COLOURS)], linewidth=0.6, alpha=0.5)
    axes[0, 0].set(xscale="log", xlabel="step + 1", ylabel="validation loss (nats)", title="Loss by depth")
    axes[0, 1].set(xscale="log", xlabel="step + 1", ylabel="stable rank", title="Rank of the first MLP's lower weights")
    axes[0, 0].legend()
    letters(axes)
    return figure


def draw_highlight(run: xr.Dataset) -> Figure:
    """Draw the entropy of the shallowest model's first layer, on WikiText-2 with the authors' mean as dots."""
    depth = int(run.depth.min())
    figure, axes = canvas(width=3.2, height=2.3)
    panel = axes[0, 0]
    entropy = _comparable_entropy(run).sel(depth=depth).isel(layer=0).mean("head")
    band(panel, run.step / THOUSAND, entropy, 0, "ours")
    if on_wikitext(run) and depth in published().depth:
        curve = published().entropy.sel(depth=depth).isel(layer=0).mean("seed")
        panel.plot(curve.step / THOUSAND, curve, ".", color=COLOURS[2], markersize=4, label="published")
        panel.legend(loc="lower right")
    other = "" if on_wikitext(run) else "another text, "
    panel.set(title=f"Attention along training, {other}{depth} layer{'s' * (depth > 1)}")
    panel.set(xlabel="minibatches (thousands)", ylabel="entropy (nats)")
    return figure
