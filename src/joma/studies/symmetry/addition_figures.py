"""The figures of addition: exact match, similarity of vertical slices, and what hidden states know of positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import band, canvas, letters, measured
from joma.models.transformer import CHOICES
from joma.studies.symmetry.addition_arms import ALL_LAYERS, BASELINE, REMOVED
from joma.studies.symmetry.addition_measures import accuracy, digits_of, mean_accuracy, own_share, without_residuals
from joma.studies.symmetry.levels import draw_levels
from joma.study import select

KIND_TITLES = {"correlation": "correlation", "cka": "CKA"}  # in the order of the panels


def draw_accuracy(run: xr.Dataset) -> Figure:
    """Draw exact match over training by encoding and mask, and by which residual connections are removed."""
    single = [name for name in run.arm.values if name.split()[1].isdigit()]
    figure, axes = canvas(1, 4 if single else 3, width=3.0, height=3.4, sharey=True)
    titles = ("Causal mask: is order learnt?", "Full mask: is order learnt?", "Without residuals in all layers")
    by_mask = [[f"{positions} {mask}" for positions in CHOICES["positions"]] for mask in ("causal", "full")]
    panels = zip(axes[0], titles, [*by_mask, [BASELINE, *without_residuals(run)]], strict=False)
    for panel, title, names in panels:
        for index, name in enumerate(names):
            if name in run.arm.values:  # an arm keeps its colour if others are missing
                band(panel, run.step, accuracy(run, name), index, _first_word(name))
        ceiling = float(run.ceiling)
        panel.axhline(ceiling, color="grey", linewidth=0.9, label=f"ceiling, {ceiling:.3g}")
        panel.set(xlabel="step", title=title)
        _legend(panel, "encoding" if panel is not axes[0, 2] else "residuals removed from")
    axes[0, 0].set(ylabel="exact match on unseen pairs", ylim=(-0.03, 1.03))
    if single:
        _draw_single(axes[0, 3], run, single)
    letters(axes)
    return figure


def _draw_single(panel: Axes, run: xr.Dataset, names: Sequence[str]) -> None:
    """Draw exact match, mean over training, against the one layer whose residuals are removed."""
    for index, part in enumerate(REMOVED, start=1):
        layers = sorted(int(name.split()[1]) for name in names if name.startswith(part))
        if layers:
            means = xr.concat([mean_accuracy(run, f"{part} {layer}") for layer in layers], "layer")
            x = np.array(layers) + 0.12 * (index - 2)  # side by side, so that error bars do not overlap
            measured(panel, x, means.transpose("layer", "seed"), index, _first_word(part), linestyle="-")
    if BASELINE in run.arm.values:
        panel.axhline(float(mean_accuracy(run, BASELINE).mean()), color="black", label="none")
    panel.set(xlabel="layer", title="Without residuals in one layer")
    panel.set_ylabel("mean over training")
    _legend(panel, "residuals removed from")


def _legend(panel: Axes, title: str) -> None:
    """Put the legend below the panel, where no curve is."""
    panel.legend(title=title, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _available(run: xr.Dataset, *names: str) -> list[str]:
    """Return those of the arms that the run has or, if it has none of them, its first four."""
    return [name for name in names if name in run.arm.values] or [str(name) for name in run.arm.values[:4]]


def _first_word(name: str) -> str:
    """Return the first word of an arm's name: the encoding, or what has no residual connections."""
    first = name.partition(" ")[0]
    return {"mlp": "MLP"}.get(first, first)


def _arm_title(name: str, gap: str) -> str:
    """Return an arm's encoding and mask, or what has no residuals, in two parts with `gap` between them."""
    first, _, second = name.partition(" ")
    where = "" if second == ALL_LAYERS else f" {second}"
    if second in CHOICES["mask"]:
        return f"{'no encoding' if first == 'none' else first},{gap}{second} mask"
    return f"no residuals:{gap}{_first_word(first)}{where}"


def draw_slices(run: xr.Dataset) -> Figure:
    """Draw the similarity of locations at different levels: a row for each arm, a column for each kind and step."""
    arms = _available(run, BASELINE, *without_residuals(run), "none full")
    steps = run.step.values[np.unique([0, run.sizes["step"] // 2, run.sizes["step"] - 1])]
    columns = [(kind, step) for kind in KIND_TITLES for step in steps]
    figure, axes = canvas(len(arms), len(columns), width=1.5, height=1.5)
    image = None
    for row, name in zip(axes, arms, strict=True):
        for panel, (kind, step) in zip(row, columns, strict=True):
            similarity = select(run.similarity, arm=name).sel(kind=kind, step=step).mean("seed")
            image = panel.imshow(similarity, cmap="cividis", vmin=0, vmax=1)
            _label_locations(panel, digits_of(run))
        row[0].set_ylabel(_arm_title(name, "\n"))
    for panel, (kind, step) in zip(axes[0], columns, strict=True):
        panel.set_title(f"{KIND_TITLES[kind]},\nstep {step}")
    figure.suptitle("A bright diagonal: a location is most similar to itself at higher levels", fontsize=10)
    figure.colorbar(image, ax=axes, label="similarity, mean over pairs of levels", shrink=0.8, pad=0.01)
    return figure


def _label_locations(panel: Axes, digits: int) -> None:
    """Label locations by their tokens: digits a and b of the summands, c of the sum except for the last one read.

    The same labels serve both orders of the sum's digits: the last one read is predicted and never an input.
    """
    labels = [*"a" * digits, "+", *"b" * digits, "=", *"c" * digits]
    panel.set_xticks(range(len(labels)), labels, fontsize=5.5)
    panel.set_yticks(range(len(labels)), labels, fontsize=5.5)
    panel.tick_params(length=0, pad=1)
    panel.grid(visible=False)


def draw_positions(run: xr.Dataset) -> Figure:
    """Draw how well positions are decoded from each level over training."""
    arms = _available(run, BASELINE, "none full", "learned causal", *without_residuals(run))[:4]
    figure, axes = canvas(1, len(arms), width=2.7, height=2.7, sharey=True)
    for panel, name in zip(axes[0], arms, strict=True):
        draw_levels(panel, select(run.decodability, arm=name))
        panel.axhline(float(run.chance), color="grey", linewidth=0.9, label="chance")
        panel.set_title(_arm_title(name, " "))
    figure.suptitle("How well a readout finds the position of a hidden state", fontsize=10)
    axes[0, 0].set(ylabel="accuracy of the readout", ylim=(0, 1.03))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=run.sizes["level"] + 1)
    letters(axes)
    return figure


def draw_own(run: xr.Dataset) -> Figure:
    """Draw the share of locations that are most similar to themselves over training."""
    figure, axes = canvas(1, 2, width=3.3, height=2.7, sharey=True)
    for panel, (kind, title) in zip(axes[0], KIND_TITLES.items(), strict=True):
        for index, name in enumerate(_available(run, BASELINE, *without_residuals(run))):
            label = "all residuals" if name == BASELINE else _arm_title(name, " ")
            band(panel, run.step + 1, own_share(run, name, kind), index, label)
        panel.axhline(1 / run.sizes["location"], color="grey", linewidth=0.9, label="chance")
        panel.set(xscale="log", xlabel="step + 1", title=f"Most similar to itself, by {title}")
    axes[0, 0].set(ylabel="share of locations", ylim=(0, 1.03))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    letters(axes)
    return figure
