"""The figures of `bounce-cause`."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from joma.drawing import COLOURS, band, canvas, letters, marker
from joma.studies.text.bounce_cause_arms import ARMS, UNCHANGED
from joma.studies.text.bounce_cause_measures import final_position_entropy
from joma.studies.text.bounce_cause_training import STARTS
from joma.studies.text.entropy_bounce import mark_minimum

MAIN = (
    UNCHANGED,
    "linear",
    "mlp",
    "value-path",
    "dropout-none",
    "no-positions",
    "memorised",
)  # at most as many as colours
BY_POSITION = (UNCHANGED, "linear", "value-path", "memorised")
MOMENTS = {"start": "start", "minimum": "minimum of entropy", "end": "end"}
START_LABELS = dict(zip(STARTS, ("from its final W_Q and W_K", "from fresh W_Q and W_K"), strict=True))


def _present(run: xr.Dataset, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in run.arm.values]


def draw_recovery(run: xr.Dataset) -> Figure:
    """Draw for every arm the recovery of entropy of each seed, and what noise alone makes of it."""
    arms = [str(arm) for arm in run.arm.values]
    figure, axes = canvas(1, 1, width=6.4, height=1.1 + 0.24 * len(arms))
    panel: Axes = axes[0, 0]
    for row, arm in enumerate(arms):
        curves = run.sel(arm=arm)
        low, high = float(curves.chance.min()), float(curves.chance.max())
        panel.plot([low, high], [row, row], color="0.75", linewidth=6, solid_capstyle="butt", zorder=1)
        panel.plot([low, low], [row - 0.3, row + 0.3], color="0.45", linewidth=1, zorder=1)
        panel.plot([high, high], [row - 0.3, row + 0.3], color="0.45", linewidth=1, zorder=1)
        panel.plot(curves.recovery, [row] * run.sizes["seed"], **marker(0 if arm == UNCHANGED else 1))
    reference = float(run.recovery.sel(arm=UNCHANGED).mean())
    panel.axvline(reference, color="0.3", linewidth=0.8)
    panel.axvline(reference / 2, color="0.3", linewidth=0.8, linestyle=":")
    labels = [ARMS[arm].label if arm in ARMS else arm for arm in arms]
    panel.set_yticks(range(len(arms)), [label[:1].upper() + label[1:] for label in labels])
    panel.set(ylim=(len(arms) - 0.4, -0.6), xlim=(min(0.0, panel.get_xlim()[0]), None))
    panel.set(xlabel="recovery of entropy (nats)", title="How far entropy recovers after its minimum")
    return figure


def draw_curves(run: xr.Dataset) -> Figure:
    """Draw entropy, attended distance and both losses of the main arms along training."""
    figure, axes = canvas(2, 2, width=3.6, height=2.6)
    for arm in _present(run, MAIN):
        index, curves = MAIN.index(arm), run.sel(arm=arm)
        entropy = curves.entropy.mean(("layer", "head"))
        measures = (entropy, curves.distance.mean("layer"), curves.valid_loss, curves.train_loss)
        for panel, values in zip(axes.flat, measures, strict=True):
            band(panel, run.step + 1, values, index, ARMS[arm].label)
        mark_minimum(axes[0, 0], entropy, index)
    titles = (
        "Does entropy come back?",
        "How far back attention looks",
        "Validation loss",
        "Training loss, without dropout",
    )
    labels = ("entropy (nats)", "distance (tokens)", "loss (nats)", "loss (nats)")
    for panel, title, label in zip(axes.flat, titles, labels, strict=True):
        panel.set(xlabel="step + 1", ylabel=label, title=title)
    for panel in axes[1]:  # the first steps decide the loss, the last ones what returns
        panel.set_xscale("log")
    _limit_loss(axes[1, 0], run)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    letters(axes)
    return figure


def _limit_loss(panel: Axes, run: xr.Dataset) -> None:
    """Cut off the validation loss of a memorised text, which grows far beyond the others."""
    others = [arm for arm in _present(run, MAIN) if arm != "memorised"]
    highest = float(run.valid_loss.sel(arm=others).max())
    if np.isfinite(highest):
        panel.set_ylim(top=highest + 0.3)


def draw_positions(run: xr.Dataset) -> Figure:
    """Draw entropy by position in the window, at the start, at each seed's minimum and at the end."""
    arms = _present(run, BY_POSITION)
    figure, axes = canvas(1, len(arms), width=2.7, height=2.7, sharey=True)
    positions = run.position + 1
    for panel, arm in zip(axes[0], arms, strict=True):
        for index, (moment, values) in enumerate(final_position_entropy(run, arm).items()):
            band(panel, positions, values, index, MOMENTS[moment])
        panel.plot(positions, np.log(positions), color="0.8", linewidth=5, zorder=0, label="equal weights")
        panel.set(title=_wrapped(ARMS[arm].label), xlabel="position in the window")
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0, 0].set_ylabel("entropy (nats)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    letters(axes)
    return figure


def _wrapped(label: str) -> str:
    """Return a label in lines that fit above a narrow panel."""
    lines = [""]
    for word in (label[:1].upper() + label[1:]).split():
        if len(lines[-1]) + len(word) > 22:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def draw_best(run: xr.Dataset) -> Figure:
    """Draw the entropy of attention that is trained alone, less that of the unchanged model at its end."""
    figure, axes = canvas(1, 1, width=4.8, height=3.2)
    panel: Axes = axes[0, 0]
    free = run.sel(arm=UNCHANGED)
    if "best_entropy" in run:
        end = free.least + free.recovery
        for index, start in enumerate(STARTS):
            curve = run.best_entropy.sel(start=start) - end
            band(panel, run.attention_step, curve, index + 1, START_LABELS[start])
    lowest, highest = -float(free.recovery.max()), -float(free.recovery.min())
    panel.axhspan(lowest, highest, color="0.85", zorder=0, label="minimum of the unchanged model")
    panel.axhline(0.0, color=COLOURS[0], linewidth=1.0, label="end of the unchanged model")
    panel.set(xlabel="step of attention alone", ylabel="entropy − that at the end (nats)")
    panel.set_title("Trained alone, attention ends at which entropy?")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
