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
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most

TABLE: dict[str, tuple[Any, ...]] = {
    "positions": ("none", "sinusoidal", "learned", "rotary"),
    "mask": ("full", "causal"),
    "layers": (1, 2, 4),
    "residual": ("on", "off"),
    "norm": ("pre", "post", "none"),
}
ROWS, COLUMNS = ("positions", "mask"), ("layers", "residual", "norm")
MAX_INVARIANT, MIN_BROKEN = 1e-10, 1e-2  # of a gap: rounding in float64, and a change that counts
FLOOR = 1e-17  # drawn instead of smaller gaps: a gap of 0 has no logarithm
KINDS: dict[str, dict[str, Any]] = {
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


def cells(run: xr.Dataset, kind: str) -> xr.DataArray:
    """Return the largest gap of every cell of a kind of `KINDS`: [seed, cell]."""
    return run.largest.sel(KINDS[kind]).stack(cell=tuple(TABLE)).transpose("seed", "cell")


CLAIMS = (
    Claim(
        "full-mask",
        "Without encoding and with a full mask, the prediction does not change when earlier tokens are permuted "
        "(18 cells: the largest change over the spread).",
        lambda run: cells(run, "none, full").max("cell"),
        at_most(MAX_INVARIANT),
    ),
    Claim(
        "one-causal-layer",
        "Without encoding, with a causal mask and one layer, the prediction does not change either: the last "
        "position attends to all the others, and what it reads there are embeddings, which know no order (6 cells: "
        "the largest).",
        lambda run: cells(run, "none, causal, 1 layer").max("cell"),
        at_most(MAX_INVARIANT),
    ),
    Claim(
        "causal-mask",
        "From the second layer on the causal mask alone breaks the symmetry: what is read there has seen its own past "
        "and no more (12 cells: the least of the largest changes over the spread).",
        lambda run: cells(run, "none, causal, 2 or 4").min("cell"),
        at_least(MIN_BROKEN),
    ),
    Claim(
        "encodings",
        "Every positional encoding breaks the symmetry, with either mask and any number of layers (108 cells: the "
        "least).",
        lambda run: cells(run, "any encoding").min("cell"),
        at_least(MIN_BROKEN),
    ),
)


def draw_table(run: xr.Dataset) -> Figure:
    """Draw the table as an image: the largest gap over seeds of invariant cells, the least of the others."""
    figure, axes = canvas(1, 1, width=8.2, height=3.9)
    invariant = run.largest.max("seed") < np.sqrt(MAX_INVARIANT * MIN_BROKEN)
    gaps = xr.where(invariant, run.largest.max("seed"), run.largest.min("seed"))
    table = np.log10(gaps.clip(FLOOR).stack(row=ROWS, column=COLUMNS).transpose("row", "column"))
    image = axes[0, 0].imshow(table, cmap="cividis", vmin=-16, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(table.values):
        text = f"{round(value, 1) + 0.0:.1f}"  # + 0.0: never "-0.0"
        colour = "white" if value < -7 else "black"
        axes[0, 0].text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    _label_table(axes[0, 0])
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
    for index, kind in enumerate(KINDS):
        gaps = cells(run, kind)
        gaps = gaps.isel(cell=np.argsort(gaps.mean("seed").values))
        measured(axes, start + np.arange(gaps.sizes["cell"]), gaps.clip(FLOOR), index, kind)
        start += gaps.sizes["cell"] + 4
    for threshold in (MAX_INVARIANT, MIN_BROKEN):
        axes.axhline(threshold, color="grey", linewidth=0.8)
    axes.set(xlabel="cells, sorted", ylabel="largest change / spread", yscale="log", title="All 144 cells")
    axes.set_xticks([])
    axes.legend(loc="center right")


def _draw_spread(axes: Axes, run: xr.Dataset) -> None:
    """Draw the spread of the logits over random earlier tokens against depth, without encoding and with a full mask."""
    for index, (residual, norm) in enumerate((("on", "pre"), ("off", "pre"), ("off", "none"))):
        spread = run.spread.sel(positions="none", mask="full", residual=residual, norm=norm)
        measured(axes, run.layers, spread, index, f"residual {residual}, norm {norm}", linestyle="-")
    axes.set(xlabel="layers", ylabel="spread of the logits", yscale="log", title="What earlier tokens change")
    axes.set_xticks(TABLE["layers"])
    axes.legend()


STUDY = Study(
    name="permutation",
    title="Who tells a Transformer the order of its tokens",
    source="Breaking Symmetry When Training Transformers (arXiv 2402.05969)",
    about=(
        "Decoders with random weights, in float64: 4 positional encodings x 2 masks x 3 depths x residual connections "
        "on or off x 3 norms. For each, all permutations of the tokens before the last are tried, and the largest "
        "change of the last position's logits is divided by their spread over random earlier tokens, the last token "
        "held: 1 says that order matters as much as which tokens there are. Neither residual connections nor norms "
        "decide whether there is symmetry; an encoding does, or a causal mask and a second layer. With one causal "
        "layer the last position, the only one that sees all, reads embeddings, whose sum under attention has no "
        "order. Without residuals and norms the spread falls by orders of magnitude from layer to layer, so that "
        "rounding, which does not fall, comes nearer to it."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=8),
        "paper": Preset(Config(width=32, heads=4, vocabulary=20, length=7), seeds=10, seconds=240),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    figures={
        "table": Drawing(
            draw_table,
            "The largest change of the last position's logits under permutations of the earlier tokens, over their "
            "spread, as a power of ten: the greatest seed where the symmetry holds, the least where it is broken.",
        ),
        "cells": Drawing(
            draw_cells,
            "(a) Every cell by its encoding, mask and layers, bars from least to greatest seed, with the lines that "
            "invariant cells must stay below and broken ones above. (b) How far other earlier tokens move the logits, "
            "without encoding and with a full mask: without residuals and norms, depth wipes out the difference "
            "between inputs.",
        ),
    },
)
