"""Table 1: hidden units come to represent the latents of a hierarchy; and what attention's training adds to that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor

from joma import schedule
from joma.arguments import distinct, whole
from joma.data.combinations import Collapsed, Combinations, CombinationTree, minibatch_counts
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.alignment import latent_alignment, mean_alignment
from joma.report.figure import MARKERS, band, bars, canvas, letters, marker
from joma.study import Arms, Claim, Context, Drawing, NotInRun, Preset, Study, above, between, select
from joma.train import Compute, Optimiser, Record

PUBLISHED = {0: (0.94, 1.00), 1: (0.55, 0.81)}  # by latent layer s
CLASSES, CHILDREN, LATENTS = (20, 30), (2, 3), ((10, 20), (20, 30))
ARMS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"attention": "frozen"},
    "uniform": {"attention": "uniform"},
    "linear": {"activation": "linear"},
}
ARM_NAMES = {
    "trained": "attention trained",
    "frozen": "attention frozen at its start",
    "uniform": "uniform attention",
    "linear": "linear activation",
}


@dataclass(frozen=True)
class Config:
    """Table 1's setting; every cell is (classes, children, (N0, N1))."""

    classes: tuple[int, ...] = CLASSES
    children: tuple[int, ...] = CHILDREN
    latents: tuple[tuple[int, int], ...] = LATENTS
    vocabulary: int = 100
    length: int = 30
    width: int = 1024
    layers: int = 3
    hidden: int = 400
    rate: float = 1e-5
    weight_decay: float = 1e-4
    batch: int = 128
    steps: int = 10_000
    records: int = 20
    controls: tuple[int, ...] = (20,)
    """The numbers of classes at which the controls are trained too; () for none."""
    precision: str = "bf16"
    """Of matrix products on CUDA: highest, high (TF32) or bf16."""
    compiled: bool = True
    """Whether a step is compiled on CUDA before it is captured."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train each cell with all seeds at once, and its controls where they are asked for."""
    trainings = [
        (arm, classes, children)
        for arm, classes, children in product(ARMS, config.classes, config.children)
        if arm == "trained" or classes in config.controls
    ]
    _check(config)
    for _, classes, children in trainings:
        _trees(config, context, classes, children)  # bad input is found before any training
    with context.progress.task("alignment", total=len(trainings)) as work:
        parts = []
        for arm, classes, children in trainings:
            parts.append(_trained(config, context, arm, classes, children))
            work.advance()
    found = xr.combine_by_coords(parts, join="outer", combine_attrs="drop", data_vars="all")
    assert isinstance(found, xr.Dataset)
    chance = _chance(config, context)
    return found.assign(chance=chance).reindex(arm=[arm for arm in ARMS if arm in found.arm.values], cell=chance.cell)


def _check(config: Config) -> None:
    for name in ("classes", "children", "latents"):
        distinct(name, getattr(config, name))
    whole("layers", config.layers, low=2)  # hidden units of layer s are compared with latents s = 0 and 1
    whole("records", config.records, low=2)


def cell(classes: int, children: int, latents: tuple[int, int]) -> str:
    """A cell's name.

    >>> cell(20, 2, (10, 20))
    '20 classes, 2 children, (10, 20)'
    """
    return f"{classes} classes, {children} children, ({latents[0]}, {latents[1]})"


def _trees(config: Config, context: Context, classes: int, children: int) -> list[Combinations]:
    """One draw of trees, a tree a seed, for each (N0, N1)."""
    law = CombinationTree(classes, children, vocabulary=config.vocabulary, length=config.length)
    return [replace(law, latents=latents).draw(context.generators("trees")) for latents in config.latents]


def _collapsed(trees: list[Combinations]) -> Collapsed:
    """The sequences of all trees one after the other, leading pads merged, of one length."""
    parts = [tree.collapsed(fill=True) for tree in trees]
    width, length = max(part.sequence.shape[-1] for part in parts), trees[0].sequence.shape[-1]
    if width > 16:
        width = 8 * -(-width // 8)  # what matrix units like; positions before the first do not exist
    whole_sequence = torch.cat([tree.sequence for tree in trees])
    sequence = F.pad(whole_sequence, (max(0, width - length), 0), value=trees[0].padding)[..., -width:]
    multiplicity = torch.ones(width, dtype=torch.long)
    multiplicity[: max(0, width - length)] = 0
    multiplicity[0] += max(0, length - width)
    return Collapsed(sequence, multiplicity.expand_as(sequence))


def _decoder(config: Config, arm: str, classes: int) -> DecoderConfig:
    return DecoderConfig(
        vocabulary=config.vocabulary,
        width=config.width,
        layers=config.layers,
        hidden=config.hidden,
        outputs=classes,
        norm="post",
        projection=False,
        attention_bias=False,
        **ARMS[arm],
    )


def _trained(config: Config, context: Context, arm: str, classes: int, children: int) -> xr.Dataset:
    """Train all (N0, N1) and seeds of one (classes, children) as one model, and measure its alignment on the way."""
    trees, device, steps = _trees(config, context, classes, children), context.device, whole("steps", config.steps)
    arms = Arms("cell", [cell(classes, children, latents) for latents in config.latents])
    data = _collapsed(trees)
    sequence, multiplicity = data.sequence.to(device), data.multiplicity[0].to(device)
    model = Decoder(_decoder(config, arm, classes), generators=context.generators("weights", arms))
    draws = context.generators("minibatches", arms)
    counts = minibatch_counts(classes, batch=config.batch, steps=steps + 1, generators=draws).to(device)
    share, label = counts.to(torch.float32) / config.batch, torch.arange(classes, device=device)[:, None]

    def loss(model: Decoder, step: Tensor) -> Tensor:
        """The loss of a minibatch: each class has one sequence, weighted by how often it was drawn."""
        own = model.surprisal(sequence, label, last=1, multiplicity=multiplicity)[:, :, 0]
        return (share.index_select(0, step.view(1))[0] * own).sum(dim=-1)

    found = context.fit(
        model,
        loss,
        optimiser=Optimiser("adam", config.rate, weight_decay=config.weight_decay),
        steps=steps,
        record=Record(
            partial(_measured, sequence=sequence, multiplicity=multiplicity, trees=trees),
            at=schedule.logarithmic(config.records, steps),
            dims={"alignment": ("latent_layer", "layer")},
            gradients=False,
        ),
        compute=Compute(config.precision, compiled=config.compiled, dynamic=True),
        arms=arms,
        label=f"alignment, {ARM_NAMES[arm]}, {classes} classes, {children} children",
    )
    caps = torch.stack([tree.accuracy_cap for tree in trees])
    kept = found[["loss", "accuracy", "alignment", "diverged"]]
    return kept.expand_dims(arm=[arm]).assign(accuracy_cap=(("cell", "seed"), caps.numpy()))


def _measured(
    model: Decoder, step: int, *, sequence: Tensor, multiplicity: Tensor, trees: list[Combinations]
) -> dict[str, Tensor]:
    """Alignment of each latent layer with each layer's hidden units, and accuracy, [tree and seed, ...]."""
    del step
    with torch.no_grad():
        hidden = model.activations(sequence, ("hidden",), multiplicity=multiplicity)["hidden"]
        logits = model(sequence, last=1, multiplicity=multiplicity)[:, :, 0]
        right = logits.argmax(dim=-1) == torch.arange(logits.shape[1], device=logits.device)
        parts = [layer.chunk(len(trees)) for layer in hidden]
        rows = [
            torch.stack([_aligned(tree, part) for part in layers], dim=-1)
            for tree, layers in zip(trees, zip(*parts, strict=True), strict=True)
        ]
    return {"alignment": torch.cat(rows), "accuracy": right.double().mean(dim=-1)}


def _aligned(tree: Combinations, hidden: Tensor) -> Tensor:
    """Mean alignment of each latent layer with one layer's hidden units, [seed, latent layer]."""
    reached = [table.to(hidden.device) for table in tree.reached]
    return torch.stack([mean_alignment(latent_alignment(table, hidden)) for table in reached], dim=-1)


def _chance(config: Config, context: Context) -> xr.DataArray:
    """What units of pure chance would reach: as many Gaussian ones as there are hidden units, [cell, seed, s]."""
    values, names = [], []
    for classes, children in product(config.classes, config.children):
        for latents, tree in zip(config.latents, _trees(config, context, classes, children), strict=True):
            drawn = [torch.randn(classes, config.hidden, generator=one) for one in context.generators("chance")]
            values.append(_aligned(tree, torch.stack(drawn)))
            names.append(cell(classes, children, latents))
    coords = {"cell": names, "seed": list(context.seeds)}
    return xr.DataArray(torch.stack(values).numpy(), coords, ("cell", "seed", "latent_layer"))


def at_end(run: xr.Dataset, arm: str, name: str, layer: int) -> xr.DataArray:
    """Alignment of latent layer s with the hidden units of layer s after training, per seed."""
    return select(run.alignment.isel(step=-1, latent_layer=layer, layer=layer), arm=arm, cell=name)


def gain(run: xr.Dataset, over: str, layer: int) -> xr.DataArray:
    """How much the network as it is adds to the alignment over a control, mean over the cells that have both, per seed.

    A seed that was lost in one of them is NaN.
    """
    end = run.alignment.isel(step=-1, latent_layer=layer, layer=layer, cell=_cells(run, over))
    if not end.sizes["cell"]:
        raise NotInRun(over)
    return (end.sel(arm="trained") - end.sel(arm=over)).mean("cell", skipna=False)


def _cells(run: xr.Dataset, arm: str) -> np.ndarray:
    """In which cells an arm was trained."""
    if arm not in run.arm.values:
        return np.zeros(run.sizes["cell"], dtype=bool)
    return run.diverged.sel(arm=arm).notnull().all("seed").values


def learned(run: xr.Dataset, layer: int) -> xr.DataArray:
    """How much training adds to the alignment of the untrained network, mean over cells, per seed."""
    own = run.alignment.isel(latent_layer=layer, layer=layer).sel(arm="trained")
    return (own.isel(step=-1) - own.isel(step=0)).mean("cell", skipna=False)


def _table() -> tuple[Claim, ...]:
    return tuple(
        Claim(
            f"table-{classes}-{children}-{latents[0]}-{latents[1]}-s{layer}",
            f"Table 1, {cell(classes, children, latents)}: alignment of the latents s = {layer} after training.",
            partial(at_end, arm="trained", name=cell(classes, children, latents), layer=layer),
            between(*PUBLISHED[layer]),
            across="mean",
            presets=("paper",),
        )
        for classes, children, latents, layer in product(CLASSES, CHILDREN, LATENTS, (0, 1))
    )


CLAIMS = (
    *_table(),
    *(
        Claim(
            f"learned-s{layer}",
            f"Training aligns hidden units with the latents s = {layer}: gain over the untrained network, all cells.",
            partial(learned, layer=layer),
            above(0.0),
        )
        for layer in (0, 1)
    ),
    *(
        Claim(
            f"{arm}-s{layer}",
            f"{'The activation' if arm == 'linear' else 'Training attention'} matters: alignment of s = {layer}, gain "
            f"over {ARM_NAMES[arm]}.",
            partial(gain, over=arm, layer=layer),
            above(0.0),
            across="mean",
        )
        for arm, layer in product(("frozen", "uniform", "linear"), (0, 1))
    ),
)


def draw_table(run: xr.Dataset) -> Figure:
    """Draw every cell's alignment: trained, its controls, untrained and chance, over the published range."""
    figure, axes = canvas(1, 2, width=5.4, height=0.9 + 0.55 * run.sizes["cell"], sharey=True)
    end = run.alignment.isel(step=-1)
    start = run.alignment.isel(step=0).sel(arm="trained")
    places = np.arange(run.sizes["cell"])
    for layer, panel in enumerate(axes[0]):
        panel.axvspan(*PUBLISHED[layer], color="0.9", label="published range")
        rows = {ARM_NAMES[arm]: end.isel(latent_layer=layer, layer=layer).sel(arm=arm) for arm in run.arm.values}
        rows |= {"untrained": start.isel(latent_layer=layer, layer=layer), "Gaussian units": run.chance[..., layer]}
        for index, (name, values) in enumerate(rows.items()):
            mean, spread = bars(values)
            offset = 0.12 * (index - (len(rows) - 1) / 2)
            panel.errorbar(mean, places + offset, xerr=spread, label=name, capsize=2, **marker(index % len(MARKERS)))
        panel.set(xlabel="alignment", title=f"Latents s = {layer}, hidden units of layer {layer}", xlim=(0.2, 1.05))
        panel.set_yticks(places, run.cell.values)
    axes[0, 0].invert_yaxis()  # the other panel shares it
    axes[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    letters(axes)
    return figure


def draw_training(run: xr.Dataset) -> Figure:
    """Draw alignment and accuracy over training in the first cell, for every arm trained there."""
    figure, axes = canvas(1, 3, width=3.3, height=2.8)
    first = run.isel(cell=0)
    for index, arm in enumerate(arm for arm in run.arm.values if _cells(run, arm)[0]):
        one = first.sel(arm=arm)
        for layer in (0, 1):
            band(
                axes[0, layer], run.step + 1, one.alignment.isel(latent_layer=layer, layer=layer), index, ARM_NAMES[arm]
            )
        band(axes[0, 2], run.step + 1, one.accuracy, index)
    for layer in (0, 1):
        axes[0, layer].set(xlabel="step + 1", ylabel="alignment", xscale="log", title=f"Latents s = {layer}")
    axes[0, 2].axhline(
        float(first.accuracy_cap.mean()), color="0.5", linestyle=":", label="cap: classes that are twins"
    )
    axes[0, 2].set(xlabel="step + 1", ylabel="accuracy", xscale="log", title="Accuracy", ylim=(0, 1.05))
    axes[0, 2].legend(loc="lower right")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS))
    letters(axes)
    return figure


STUDY = Study(
    name="alignment",
    title="Hidden units come to represent the latents of a hierarchy",
    source="JoMA, Table 1 (arXiv 2310.00535)",
    about=(
        "A three-layer decoder learns to name the class of sequences generated by a hierarchy of combinations. For "
        "each latent the best correlated hidden unit of the same layer is sought, after the maximum over positions; "
        "the entry is the mean over latents. Beside the table stand the controls that it lacks: attention frozen at "
        "its start, uniform attention, a linear activation, the untrained network, and as many Gaussian numbers as "
        "there are hidden units. With few classes and many units the latter are far from zero: most of an entry comes "
        "without learning, and what training and attention add is the difference. Each class has one sequence, so a "
        "minibatch is a vector of counts; leading pads are alike, so they are merged. Both are exact."
    ),
    version=3,
    presets={
        "quick": Preset(
            Config(
                classes=(20,),
                children=(2,),
                latents=((10, 20),),
                width=64,
                rate=1e-3,
                steps=500,
                records=12,
            ),
            seeds=3,
            seconds=30,
        ),
        # Not timed as a whole: ten trainings of 10,000 steps, 2.5 s each in a trial of a few steps.
        "paper": Preset(Config(), seeds=5, seconds=250_000),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    figures={
        "table": Drawing(
            draw_table,
            "Table 1 with its controls. Points: mean over seeds, bars from the least to the greatest; grey: the range "
            "that the paper's cells span.",
        ),
        "training": Drawing(
            draw_training,
            "Alignment of the two layers of latents and accuracy over training in the first cell; lines are means over "
            "seeds, bands from the least to the greatest seed.",
        ),
    },
)
