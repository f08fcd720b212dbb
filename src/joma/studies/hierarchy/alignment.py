"""Table 1: hidden units come to represent the latents of a hierarchy, and what training attention adds to that."""

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
from joma.drawing import MARKERS, band, bars, canvas, letters, marker
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.alignment import latent_alignment, mean_alignment
from joma.study import Arms, Claim, Context, Drawing, NotInRun, Preset, Study, above, between, select
from joma.train import Compute, Optimiser, Record

PUBLISHED = {0: (0.94, 1.00), 1: (0.55, 0.81)}  # by latent layer s
CLASSES, CHILDREN, LATENTS = (20, 30), (2, 3), ((10, 20), (20, 30))
ARMS: dict[str, dict[str, Any]] = {  # what each arm changes in `DecoderConfig`
    "trained": {},
    "frozen": {"attention": "frozen"},
    "uniform": {"attention": "uniform"},
    "linear": {"activation": "linear"},
}
ARM_LABELS = {
    "trained": "attention trained",
    "frozen": "attention frozen at its start",
    "uniform": "uniform attention",
    "linear": "linear activation",
}


@dataclass(frozen=True)
class Config:
    """The setting of Table 1, which has a cell for each (classes, children, (N0, N1))."""

    classes: tuple[int, ...] = CLASSES
    children: tuple[int, ...] = CHILDREN
    latents: tuple[tuple[int, int], ...] = LATENTS
    vocabulary: int = 100
    length: int = 30
    width: int = 1024
    layers: int = 3
    hidden: int = 400
    rate: float = 1e-5
    """Learning rate of Adam."""
    weight_decay: float = 1e-4
    batch: int = 128
    steps: int = 10_000
    records: int = 20
    """Number of records, about: steps that round to the same number are recorded once."""
    controls: tuple[int, ...] = (20,)
    """The numbers of classes at which the controls are trained too; () for none."""
    precision: str = "bf16"
    """Of matrix products on CUDA: highest, high (TF32) or bf16."""
    compiled: bool = True
    """Whether a step is compiled on CUDA before it is captured."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train each cell with all seeds at once, and its controls if `controls` has its number of classes."""
    trainings = [
        (arm, classes, children)
        for arm, classes, children in product(ARMS, config.classes, config.children)
        if arm == "trained" or classes in config.controls
    ]
    _check(config)
    for _, classes, children in trainings:
        draw_trees(config, context, classes, children)  # bad input is refused before any training
    with context.progress.task("alignment", total=len(trainings)) as task:
        trajectories = []
        for arm, classes, children in trainings:
            trajectories.append(train_cells(config, context, arm, classes, children))
            task.advance()
    trained = xr.combine_by_coords(trajectories, join="outer", combine_attrs="drop", data_vars="all")
    assert isinstance(trained, xr.Dataset)
    chance = _chance_alignment(config, context)
    arms = [arm for arm in ARMS if arm in trained.arm.values]
    return trained.assign(chance=chance).reindex(arm=arms, cell=chance.cell)


def _check(config: Config) -> None:
    for name in ("classes", "children", "latents"):
        distinct(name, getattr(config, name))
    whole("layers", config.layers, low=2)  # hidden units of layer s are compared with latents s = 0 and 1
    whole("records", config.records, low=2)


def cell(classes: int, children: int, latents: tuple[int, int]) -> str:
    """Return the name of a cell of the table.

    >>> cell(20, 2, (10, 20))
    '20 classes, 2 children, (10, 20)'
    """
    return f"{classes} classes, {children} children, ({latents[0]}, {latents[1]})"


def draw_trees(config: Config, context: Context, classes: int, children: int) -> list[Combinations]:
    """Draw the trees of all seeds for each (N0, N1)."""
    tree = CombinationTree(classes, children, vocabulary=config.vocabulary, length=config.length)
    return [replace(tree, latents=latents).draw(context.generators("trees")) for latents in config.latents]


def merge_pads(trees: list[Combinations]) -> Collapsed:
    """Concatenate the sequences of all trees, their leading pads merged so that all have one length."""
    width = max(tree.collapsed(fill=True).sequence.shape[-1] for tree in trees)
    if width > 16:
        width = 8 * -(-width // 8)  # tensor cores are fastest at multiples of 8
    full = torch.cat([tree.sequence for tree in trees])
    added, merged = max(0, width - full.shape[-1]), max(0, full.shape[-1] - width)
    sequence = F.pad(full, (added, 0), value=trees[0].padding)[..., -width:]
    multiplicity = torch.ones(width, dtype=torch.long)
    multiplicity[:added] = 0  # added positions are not part of the sequence
    multiplicity[0] += merged
    return Collapsed(sequence, multiplicity.expand_as(sequence))


def decoder_config(config: Config, arm: str, classes: int) -> DecoderConfig:
    """Return the config of the decoder that one arm trains."""
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


def train_cells(config: Config, context: Context, arm: str, classes: int, children: int) -> xr.Dataset:
    """Train all (N0, N1) and seeds of one (classes, children) as one model, and record its alignment on the way."""
    trees, steps = draw_trees(config, context, classes, children), whole("steps", config.steps)
    cells = Arms("cell", [cell(classes, children, latents) for latents in config.latents])
    data = merge_pads(trees)
    sequence, multiplicity = data.sequence.to(context.device), data.multiplicity[0].to(context.device)
    model = Decoder(decoder_config(config, arm, classes), generators=context.generators("weights", cells))
    streams = context.generators("minibatches", cells)
    counts = minibatch_counts(classes, batch=config.batch, steps=steps + 1, generators=streams).to(context.device)
    share, label = counts.to(torch.float32) / config.batch, torch.arange(classes, device=context.device)[:, None]

    def loss(model: Decoder, step: Tensor) -> Tensor:
        """The loss of a minibatch: each class has one sequence, weighted by how often it was drawn."""
        surprisal = model.surprisal(sequence, label, last=1, multiplicity=multiplicity)[:, :, 0]
        return (share.index_select(0, step.view(1))[0] * surprisal).sum(dim=-1)

    trajectory = context.fit(
        model,
        loss,
        optimiser=Optimiser("adam", config.rate, weight_decay=config.weight_decay),
        steps=steps,
        record=Record(
            partial(_measure, sequence=sequence, multiplicity=multiplicity, trees=trees),
            at=schedule.logarithmic(config.records, steps),
            dims={"alignment": ("latent_layer", "layer")},
            gradients=False,
        ),
        compute=Compute(config.precision, compiled=config.compiled, dynamic=True),
        arms=cells,
        label=f"alignment, {ARM_LABELS[arm]}, {classes} classes, {children} children",
    )
    caps = torch.stack([tree.accuracy_cap for tree in trees])
    trajectory = trajectory[["loss", "accuracy", "alignment", "diverged"]].expand_dims(arm=[arm])
    return trajectory.assign(accuracy_cap=(("cell", "seed"), caps.numpy()))


def _measure(
    model: Decoder, _: int, *, sequence: Tensor, multiplicity: Tensor, trees: list[Combinations]
) -> dict[str, Tensor]:
    """Return the alignment of each latent layer with each layer's hidden units, and the accuracy, [model, ...].

    The models are those of all seeds for the first tree, then those for the second, and so on.
    """
    with torch.no_grad():
        hidden = model.activations(sequence, ("hidden",), multiplicity=multiplicity)["hidden"]
        logits = model(sequence, last=1, multiplicity=multiplicity)[:, :, 0]
        correct = logits.argmax(dim=-1) == torch.arange(logits.shape[1], device=logits.device)
        hidden_by_tree = zip(*(layer.chunk(len(trees)) for layer in hidden), strict=True)
        alignments = [
            torch.stack([_alignment(tree, layer) for layer in layers], dim=-1)
            for tree, layers in zip(trees, hidden_by_tree, strict=True)
        ]
    return {"alignment": torch.cat(alignments), "accuracy": correct.double().mean(dim=-1)}


def _alignment(tree: Combinations, hidden: Tensor) -> Tensor:
    """Return the mean alignment of each latent layer with the hidden units of one layer, [seed, latent layer]."""
    latents = [table.to(hidden.device) for table in tree.reached]
    return torch.stack([mean_alignment(latent_alignment(table, hidden)) for table in latents], dim=-1)


def _chance_alignment(config: Config, context: Context) -> xr.DataArray:
    """Return the alignment of Gaussian noise, as many units as there are hidden ones, [cell, seed, latent layer]."""
    values, names = [], []
    for classes, children in product(config.classes, config.children):
        for latents, tree in zip(config.latents, draw_trees(config, context, classes, children), strict=True):
            streams = context.generators("chance")
            noise = [torch.randn(classes, config.hidden, generator=stream) for stream in streams]
            values.append(_alignment(tree, torch.stack(noise)))
            names.append(cell(classes, children, latents))
    coords = {"cell": names, "seed": list(context.seeds)}
    return xr.DataArray(torch.stack(values).numpy(), coords, ("cell", "seed", "latent_layer"))


def final_alignment(run: xr.Dataset, arm: str, name: str, layer: int) -> xr.DataArray:
    """Return the final alignment of latent layer s with the hidden units of layer s in the cell `name`, per seed."""
    return select(run.alignment.isel(step=-1, latent_layer=layer, layer=layer), arm=arm, cell=name)


def gain_over_control(run: xr.Dataset, control: str, layer: int) -> xr.DataArray:
    """Return the alignment after training less that of a control, averaged over the cells that have both, per seed.

    A seed that diverged in any of these is NaN.
    """
    end = run.alignment.isel(step=-1, latent_layer=layer, layer=layer, cell=_trained_cells(run, control))
    if not end.sizes["cell"]:
        raise NotInRun(control)
    return (end.sel(arm="trained") - end.sel(arm=control)).mean("cell", skipna=False)


def _trained_cells(run: xr.Dataset, arm: str) -> np.ndarray:
    """Return for each cell whether an arm was trained there."""
    if arm not in run.arm.values:
        return np.zeros(run.sizes["cell"], dtype=bool)
    return run.diverged.sel(arm=arm).notnull().all("seed").values


def gain_over_start(run: xr.Dataset, layer: int) -> xr.DataArray:
    """Return the alignment after training less that of the untrained network, averaged over cells, per seed."""
    alignment = run.alignment.isel(latent_layer=layer, layer=layer).sel(arm="trained")
    return (alignment.isel(step=-1) - alignment.isel(step=0)).mean("cell", skipna=False)


def table_claims() -> tuple[Claim, ...]:
    """Return a claim for each cell of Table 1 and each layer of latents."""
    return tuple(
        Claim(
            f"table-{classes}-{children}-{latents[0]}-{latents[1]}-s{layer}",
            f"Table 1, {cell(classes, children, latents)}: alignment of the latents s = {layer} after training.",
            partial(final_alignment, arm="trained", name=cell(classes, children, latents), layer=layer),
            between(*PUBLISHED[layer]),
            across="mean",
            presets=("paper",),
        )
        for classes, children, latents, layer in product(CLASSES, CHILDREN, LATENTS, (0, 1))
    )


CLAIMS = (
    *table_claims(),
    *(
        Claim(
            f"learned-s{layer}",
            f"Training aligns hidden units with the latents s = {layer}: gain over the untrained network, all cells.",
            partial(gain_over_start, layer=layer),
            above(0.0),
        )
        for layer in (0, 1)
    ),
    *(
        Claim(
            f"{arm}-s{layer}",
            f"{'The activation' if arm == 'linear' else 'Training attention'} matters: alignment of s = {layer}, gain "
            f"over {ARM_LABELS[arm]}.",
            partial(gain_over_control, control=arm, layer=layer),
            above(0.0),
            across="mean",
        )
        for arm, layer in product(("frozen", "uniform", "linear"), (0, 1))
    ),
)


def draw_table(run: xr.Dataset) -> Figure:
    """Draw the alignment in every cell: trained, controls, untrained and chance, with the published range in grey."""
    figure, axes = canvas(1, 2, width=5.4, height=0.9 + 0.55 * run.sizes["cell"], sharey=True)
    end = run.alignment.isel(step=-1)
    start = run.alignment.isel(step=0).sel(arm="trained")
    rows = np.arange(run.sizes["cell"])
    for layer, panel in enumerate(axes[0]):
        panel.axvspan(*PUBLISHED[layer], color="0.9", label="published range")
        series = {ARM_LABELS[arm]: end.isel(latent_layer=layer, layer=layer).sel(arm=arm) for arm in run.arm.values}
        series |= {"untrained": start.isel(latent_layer=layer, layer=layer), "Gaussian units": run.chance[..., layer]}
        for index, (name, values) in enumerate(series.items()):
            mean, spread = bars(values)
            offset = 0.12 * (index - (len(series) - 1) / 2)
            panel.errorbar(mean, rows + offset, xerr=spread, label=name, capsize=2, **marker(index % len(MARKERS)))
        panel.set(xlabel="alignment", title=f"Latents s = {layer}, hidden units of layer {layer}", xlim=(0.2, 1.05))
        panel.set_yticks(rows, run.cell.values)
    axes[0, 0].invert_yaxis()  # the other panel shares this axis
    axes[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    letters(axes)
    return figure


def draw_training(run: xr.Dataset) -> Figure:
    """Draw alignment and accuracy over training in the first cell, for every arm that was trained there."""
    figure, axes = canvas(1, 3, width=3.3, height=2.8)
    first = run.isel(cell=0)
    for index, arm in enumerate(arm for arm in run.arm.values if _trained_cells(run, arm)[0]):
        trajectory = first.sel(arm=arm)
        for layer in (0, 1):
            alignment = trajectory.alignment.isel(latent_layer=layer, layer=layer)
            band(axes[0, layer], run.step + 1, alignment, index, ARM_LABELS[arm])
        band(axes[0, 2], run.step + 1, trajectory.accuracy, index)
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
