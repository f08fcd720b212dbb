"""Breaking Symmetry as a table: which parts of a Transformer let a prediction depend on the order of the tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from joma.arguments import InputError, whole
from joma.drawing import canvas, letters, measured
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.permutation import permutation_gap
from joma.study import Claim, Context, Drawing, Highlight, Preset, Study, at_least, at_most

TABLE: dict[str, tuple[Any, ...]] = {
    "positions": ("none", "sinusoidal", "learned", "rotary"),
    "mask": ("full", "causal"),
    "layers": (1, 2, 4),
    "residual": ("on", "off"),
    "norm": ("pre", "post", "none"),
}
ROWS, COLUMNS = ("positions", "mask"), ("layers", "residual", "norm")
MAX_INVARIANT, MIN_BROKEN = 1e-10, 1e-2  # of a gap: rounding in float64, and a change that counts
MIDDLE = (MAX_INVARIANT * MIN_BROKEN) ** 0.5  # what is drawn as invariant lies below, what is drawn as broken above
FLOOR = 1e-17  # drawn instead of smaller gaps: a gap of 0 has no logarithm
GROUPS: dict[str, dict[str, Any]] = {
    "none, full": {"positions": ["none"], "mask": ["full"]},
    "none, causal, 1 layer": {"positions": ["none"], "mask": ["causal"], "layers": [1]},
    "none, causal, 2 or 4": {"positions": ["none"], "mask": ["causal"], "layers": [2, 4]},
    "any encoding": {"positions": ["sinusoidal", "learned", "rotary"]},
}


@dataclass(frozen=True)
class Config:
    """Random decoders in float64, and sequences of distinct tokens to permute."""

    width: int = 16
    heads: int = 2
    vocabulary: int = 12
    length: int = 6
    """Positions; up to 7, every permutation of all but the last is tried, beyond that 100 random ones."""
    sequences: int = 2
    inputs: int = 32
    """Random sequences for each of `sequences`; changes are divided by the spread of the logits over these."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Measure the permutation gap of every cell of the table, all seeds of a cell at once."""
    tokens, gaps = _distinct_tokens(config), []
    decoder_configs = [_decoder_config(config, *cell) for cell in itertools.product(*TABLE.values())]
    with context.progress.task("permutation", total=len(decoder_configs)) as task:
        for decoder_config in decoder_configs:
            model = Decoder(decoder_config, generators=context.seed_generators(), dtype=torch.float64)
            gaps.append(permutation_gap(model.to(context.device), tokens, inputs=config.inputs))
            task.advance()
    shape, dims = [len(context.seeds), *map(len, TABLE.values())], ("seed", *TABLE)
    variables = {
        name: (dims, torch.stack([getattr(gap, name) for gap in gaps], dim=-1).cpu().numpy().reshape(shape))
        for name in ("largest", "mean", "spread")
    }
    coordinates = {"seed": list(context.seeds), **{name: list(values) for name, values in TABLE.items()}}
    return xr.Dataset(variables, coords=coordinates)


def _distinct_tokens(config: Config) -> Int[Tensor, "sequence position"]:
    """Return sequences of distinct tokens. Which ones does not matter: all embeddings have the same distribution."""
    length, vocabulary = whole("length", config.length, low=3), whole("vocabulary", config.vocabulary)
    if vocabulary < length:
        remedy = "raise it, as the tokens of a sequence are distinct"
        raise InputError("vocabulary", f"at least the length, {length}", vocabulary, remedy)
    return (torch.arange(whole("sequences", config.sequences))[:, None] + torch.arange(length)) % vocabulary


def _decoder_config(config: Config, *cell: Any) -> DecoderConfig:
    """Return the decoder's config for a cell, which is one value for each name of `TABLE`."""
    options = dict(zip(TABLE, cell, strict=True))
    return DecoderConfig(
        vocabulary=config.vocabulary,
        width=config.width,
        heads=config.heads,
        length=config.length,
        **{**options, "residual": options["residual"] == "on"},
    )


def cells(run: xr.Dataset, group: str) -> xr.DataArray:
    """Return the largest gap of every cell of a group of `GROUPS`: [seed, cell]."""
    return run.largest.sel(GROUPS[group]).stack(cell=tuple(TABLE)).transpose("seed", "cell")


_CHANGE = "largest change of the last position's logits over permutations, relative to their spread"
_OURS = "The bound is ours, eight orders of magnitude above rounding"

CLAIMS = (
    Claim(
        "full-mask",
        "Without encoding or causal mask, the prediction is the same for every order of the earlier tokens.",
        lambda run: cells(run, "none, full").max("cell", skipna=False),
        at_most(MAX_INVARIANT),
        kind="theorem",
        quantity=f"{_CHANGE}; the largest of 18 decoders. The bound is what rounding in float64 may do",
    ),
    Claim(
        "one-causal-layer",
        "Without encoding, one causal layer predicts the same for every order of the earlier tokens.",
        lambda run: cells(run, "none, causal, 1 layer").max("cell", skipna=False),
        at_most(MAX_INVARIANT),
        kind="theorem",
        quantity=f"{_CHANGE}; the largest of 6 decoders (arXiv 2501.00659)",
    ),
    Claim(
        "causal-mask",
        "Without encoding, two causal layers are enough for the order to change the prediction.",
        lambda run: cells(run, "none, causal, 2 or 4").min("cell", skipna=False),
        at_least(MIN_BROKEN),
        kind="reading",
        quantity=f"{_CHANGE}; the smallest of 12 decoders (arXiv 2501.00659). {_OURS}",
    ),
    Claim(
        "encodings",
        "Every positional encoding lets the order change the prediction, with either mask and at any depth.",
        lambda run: cells(run, "any encoding").min("cell", skipna=False),
        at_least(MIN_BROKEN),
        kind="reading",
        quantity=f"{_CHANGE}; the smallest of 108 decoders. {_OURS}",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Return what came out, in one sentence: the largest and smallest changes of the groups of decoders."""
    full, one_layer = (float(cells(run, group).max()) for group in ("none, full", "none, causal, 1 layer"))
    causal, encoded = (float(cells(run, group).min()) for group in ("none, causal, 2 or 4", "any encoding"))
    return (
        f"Without an encoding, reordering the earlier tokens changes the prediction by at most {full:.1g} of its "
        f"spread under a full mask and {one_layer:.1g} in one causal layer, but by at least {causal:.2g} in two or "
        f"four causal layers; with an encoding, by at least {encoded:.2g} ({run.sizes['seed']} seeds)."
    )


def draw_table(run: xr.Dataset) -> Figure:
    """Draw the table as an image: the largest gap over seeds of invariant cells, the least of the others."""
    figure, axes = canvas(1, 1, width=8.2, height=3.9)
    invariant = run.largest.max("seed") < MIDDLE
    gaps = xr.where(invariant, run.largest.max("seed"), run.largest.min("seed"))
    table = np.log10(gaps.clip(FLOOR).stack(row=ROWS, column=COLUMNS).transpose("row", "column"))
    image = axes[0, 0].imshow(table, cmap="cividis", vmin=-16, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(table.values):
        text = f"{round(value, 1) + 0.0:.1f}".replace("-", "−")  # + 0.0: never "−0.0"
        colour = "white" if value < -7 else "black"
        axes[0, 0].text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    _label_table(axes[0, 0])
    axes[0, 0].set_title("Dark: every order gives the same prediction. Yellow: the order matters.", pad=34)
    figure.colorbar(image, ax=axes[0, 0], label="log₁₀ of the largest change / spread", pad=0.01)
    return figure


def _label_table(axes: Axes) -> None:
    """Label the rows, and the columns on three lines: norm, residual, layers."""
    rows = [f"{positions}, {mask}" for positions, mask in itertools.product(*(TABLE[name] for name in ROWS))]
    axes.set_yticks(range(len(rows)), rows)
    norms, residuals, layers = (TABLE[name] for name in ("norm", "residual", "layers"))
    axes.set_xticks(range(len(norms) * len(residuals) * len(layers)), list(norms) * len(residuals) * len(layers))
    axes.set(xlabel="norm", ylabel="positional encoding, mask")
    for block, (count, residual) in enumerate(itertools.product(layers, residuals)):
        middle = (block + 0.5) * len(norms) - 0.5
        axes.text(middle, -0.62, f"residual {residual}", ha="center", va="bottom", fontsize=8)
        axes.axvline((block + 1) * len(norms) - 0.5, color="white", linewidth=0.8 if residual == "on" else 3)
        if residual == "on":
            unit = "layer" if count == 1 else "layers"
            axes.text(middle + len(norms) / 2, -1.1, f"{count} {unit}", ha="center", va="bottom", fontsize=9)
    for row in range(1, len(rows)):
        axes.axhline(row - 0.5, color="white", linewidth=3 if row % len(TABLE["mask"]) == 0 else 0.8)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_highlight(run: xr.Dataset) -> Figure:
    """Draw whether order matters, by encoding, mask and depth."""
    figure, axes = canvas(1, 1, width=3.2, height=2.3)
    panel, rows = axes[0, 0], {"no encoding": ["none"], "encoding": ["sinusoidal", "learned", "rotary"]}
    labels = list(itertools.product(rows, TABLE["mask"]))
    answers = [
        [_answer(run.largest.sel(positions=rows[name], mask=mask, layers=layers)) for layers in TABLE["layers"]]
        for name, mask in labels
    ]
    changes = np.array([[change for change, _ in row] for row in answers])
    panel.imshow(np.log10(changes.clip(FLOOR)), cmap="cividis", vmin=-16, vmax=1, aspect="auto")
    for (row, column), change in np.ndenumerate(changes):
        colour = "white" if change < MIDDLE else "black"
        panel.text(column, row, answers[row][column][1], ha="center", va="center", fontsize=8, color=colour)
    panel.set_xticks(range(len(TABLE["layers"])), [str(layers) for layers in TABLE["layers"]])
    panel.set_yticks(range(len(labels)), [f"{name},\n{mask} mask" for name, mask in labels])
    panel.set(xlabel="layers", title="Does the order of tokens matter?")
    panel.grid(visible=False)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return figure


def _answer(changes: xr.DataArray) -> tuple[float, str]:
    """Return the change that is nearest to the opposite answer, and the answer: whether order matters."""
    low, high = float(changes.min()), float(changes.max())
    if high < MIDDLE:
        return high, f"no: {high:.0e}"
    return (low, f"yes: {low:.1g}") if low > MIDDLE else (MIDDLE, "in some")


def draw_cells(run: xr.Dataset) -> Figure:
    """Draw every cell's gap with its range over seeds, by kind, and the spread of the logits by depth."""
    figure, axes = canvas(1, 2, width=4.1, height=2.9)
    _draw_gaps(axes[0, 0], run)
    _draw_spread(axes[0, 1], run)
    letters(axes)
    return figure


def _draw_gaps(axes: Axes, run: xr.Dataset) -> None:
    """Draw the gaps of all cells, those of a kind side by side and sorted, with the thresholds of the claims."""
    start = 0
    for index, group in enumerate(GROUPS):
        gaps = cells(run, group)
        gaps = gaps.isel(cell=np.argsort(gaps.mean("seed").values))
        measured(axes, start + np.arange(gaps.sizes["cell"]), gaps.clip(FLOOR), index, group)
        start += gaps.sizes["cell"] + 4
    for threshold in (MAX_INVARIANT, MIN_BROKEN):
        axes.axhline(threshold, color="grey", linewidth=0.8)
    axes.set(
        xlabel="decoders of each group, sorted",
        ylabel="largest change / spread",
        yscale="log",
        title="All 144 decoders: rounding, or far above it",
    )
    axes.set_xticks([])
    axes.legend(loc="center right")


def _draw_spread(axes: Axes, run: xr.Dataset) -> None:
    """Draw the spread of the logits over random earlier tokens against depth, without encoding and with a full mask."""
    for index, (residual, norm) in enumerate((("on", "pre"), ("off", "pre"), ("off", "none"))):
        spread = run.spread.sel(positions="none", mask="full", residual=residual, norm=norm)
        measured(axes, run.layers, spread, index, f"residual {residual}, norm {norm}", linestyle="-")
    axes.set(
        xlabel="layers",
        ylabel="spread of the logits",
        yscale="log",
        title="How far other earlier tokens move the logits",
    )
    axes.set_xticks(TABLE["layers"])
    axes.legend()


STUDY = Study(
    name="permutation",
    title="An encoding, or a causal mask with two layers, makes the order of tokens matter",
    source="Breaking Symmetry When Training Transformers (arXiv 2402.05969v2); arXiv 2501.00659",
    statement=(
        "Without positional encodings and without a causal mask, the prediction after the last token does not depend "
        "on the order of the tokens before it (Zuo and Guerzhoy, arXiv 2402.05969). The causal mask must therefore be "
        "what lets models without encodings learn order; Irie (arXiv 2501.00659) adds that this needs more than one "
        "layer. The proof is in docs/permutation.md."
    ),
    about=(
        "We draw random weights, in float64, for 144 decoders: 4 encodings, 2 masks, 3 depths, residual connections on "
        "or off, 3 norms. For each we try every order of the tokens before the last one, and divide the largest change "
        "of the last position's logits by their spread over random earlier tokens. A change of 1 means that order "
        "matters as much as which tokens there are. Nothing is trained."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=8),
        "paper": Preset(Config(width=32, heads=4, vocabulary=20, length=7), seeds=10, seconds=240),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    highlight=Highlight(
        "Permutation",
        draw_highlight,
        "A table of encoding and mask by number of layers. Order does not matter without an encoding under a full "
        "mask, nor in one causal layer; it does everywhere else.",
    ),
    threads=1,
    figures={
        "table": Drawing(
            draw_table,
            "Each cell is one decoder. Its number is the power of ten of the largest change of the last position's "
            "logits over all orders of the earlier tokens, relative to their spread: about −15 is rounding, 0 means "
            "that order matters as much as the tokens do. Of the seeds, the largest where order does not matter, the "
            "smallest where it does.",
        ),
        "cells": Drawing(
            draw_cells,
            "(a) Points: mean over seeds, bars from the smallest to the largest seed. Grey lines: invariant decoders "
            "must stay below the lower one, the others above the upper one. (b) No encoding, full mask: without "
            "residual connections and norms the logits hardly depend on the earlier tokens in deep decoders, so that "
            "rounding is a larger part of their spread.",
        ),
    },
)
