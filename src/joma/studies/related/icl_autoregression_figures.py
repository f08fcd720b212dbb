"""The figures of the study `icl-autoregression`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from joma.drawing import band, canvas, letters, measured, theory
from joma.studies.related.icl_autoregression_measures import of_process
from joma.theory.in_context_autoregression import best_loss

HIGHEST = 2.4  # loss that is shown; losses of the first steps are above it, and the legend has its place there
SMALLEST = 1e-3  # share of the largest entry that is still shown
LABELS = {
    "unitary": "independent",
    "rotations": "rotations",
    "fixed": "fixed start",
    "haar": "not commuting",
    "plain": "plain tokens",
}


def draw_losses(run: xr.Dataset) -> Figure:
    """Draw losses by length and over training, and where the arms of one length end."""
    figure, axes = canvas(1, 3, width=3.5, height=2.8)
    left, middle, right = axes[0]
    unitary, dim = of_process(run, "unitary").sortby("length"), run.sizes["row"]
    lengths = np.linspace(float(unitary.length.min()), float(unitary.length.max()), 100)
    theory(left, lengths, best_loss(lengths, dim), 0, "(d − 1)/(T + d − 2)")
    measured(left, unitary.length, unitary.loss.isel(record=-1), 2, "trained")
    left.set(title="The formula holds at all lengths", xlabel="length T of the context", ylabel="loss")
    left.legend()
    _draw_training(middle, run)
    _draw_ends(right, run)
    letters(axes)
    return figure


def _of_length(run: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return one arm of each process, all of the length that the controls have, those in the run."""
    length = int(of_process(run, "fixed").length[0])
    arms = {process: of_process(run, process) for process in LABELS}
    chosen = {process: arm.isel(arm=np.flatnonzero(arm.length == length)) for process, arm in arms.items()}
    return {process: arm.isel(arm=0) for process, arm in chosen.items() if arm.sizes["arm"]}


def _draw_training(panel: Axes, run: xr.Dataset) -> None:
    arms = _of_length(run)
    for index, (process, arm) in enumerate(arms.items()):
        band(panel, 1 + arm.step, arm.loss, index, LABELS[process])
    panel.axhline(float(next(iter(arms.values())).formula), color="0.4", linewidth=0.9, linestyle=":")
    panel.set(title="Plain tokens learn nothing", xlabel="step + 1", xscale="log", ylabel="loss", ylim=(0, HIGHEST))
    panel.legend(fontsize=7, loc="upper right")


def _draw_ends(panel: Axes, run: xr.Dataset) -> None:
    arms = {process: arm for process, arm in _of_length(run).items() if process != "plain"}
    formula = float(next(iter(arms.values())).formula)
    same_size = np.isclose(float(run.searched_formula), formula)
    for row, (process, arm) in enumerate(arms.items()):
        measured(panel, arm.loss.isel(record=-1).values, np.full(run.sizes["seed"], row), row)
        searched = process in run.searched.values and same_size
        if searched or process == "haar":
            level = run.searched_loss.sel(searched=process).min() if searched else arm.best_scalar_loss.mean()
            panel.plot([float(level)] * 2, [row - 0.3, row + 0.3], color="black", linewidth=1.2)
    panel.axvline(formula, color="0.4", linewidth=0.9, linestyle=":")
    panel.set_yticks(range(len(arms)), [LABELS[process] for process in arms])
    panel.set_ylim(len(arms) - 0.5, -0.5)
    panel.locator_params(axis="x", nbins=4)
    panel.set(title="A fixed start differs", xlabel="loss at the end")


def draw_matrices(run: xr.Dataset) -> Figure:
    """Draw the sizes of the entries of A and B of the first seed, one column for each process."""
    arms = {process: arm for process, arm in _of_length(run).items() if process != "plain"}
    figure, axes = canvas(2, len(arms), width=2.1, height=2.0)
    image = None
    for column, (process, arm) in enumerate(arms.items()):
        for panel, name in zip(axes[:, column], ("A", "B"), strict=True):
            size = arm[f"{name}_size"].isel(seed=0)
            image = panel.imshow(np.maximum(size / size.max(), SMALLEST), cmap="Purples", norm=LogNorm(SMALLEST, 1.0))
            panel.grid(visible=False)
            panel.set_xticks([])
            panel.set_yticks([])
            diagonal = np.eye(len(size), dtype=bool)
            share = 100 * float(size.values[~diagonal].max(initial=0.0) / size.values[diagonal].max())
            panel.set(title=f"|{name}|: {LABELS[process]}\n≤ {share:.2g} % off the diagonal")
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.6, label="size over the largest")
    return figure
