"""Table 1: hidden units come to represent the latents of a hierarchy, and what training attention adds to that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor

from joma import schedule
from joma.arguments import distinct, whole
from joma.data.combinations import Collapsed, Combinations, CombinationTree, minibatch_counts
from joma.drawing import MARKERS, band, bars, canvas, letters, marker, measured
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.alignment import latent_alignment, mean_alignment
from joma.study import (
    Arms,
    Claim,
    Context,
    Drawing,
    Highlight,
    LabelledTraining,
    NotInRun,
    Preset,
    Study,
    above,
    at_least,
    between,
    mean_interval,
    select,
)
from joma.train import Compute, Optimiser, Record

PUBLISHED = {0: (0.94, 1.00), 1: (0.55, 0.81)}  # range of the table's cells by latent layer s, means of 5 seeds
# A confidence interval may extend beyond 1, a correlation cannot: for s = 0 only the lower bound says something.
EXPECTED = {0: at_least(0.94), 1: between(0.55, 0.81)}
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
    """Train all cells with all seeds at once, then the controls of those whose number of classes `controls` has."""
    _check(config)
    pairs = {
        arm: [
            (classes, children)
            for classes, children in product(config.classes, config.children)
            if arm == "trained" or classes in config.controls
        ]
        for arm in ARMS
    }
    for classes, children in pairs["trained"]:
        draw_trees(config, context, classes, children)  # bad input is refused before any training
    with context.progress.task("alignment", total=sum(map(len, pairs.values()))) as task:
        trajectories = []
        for arm, cells in pairs.items():
            trajectories.extend(train_cells(config, context, arm, cells))
            task.advance(len(cells))
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
    full = torch.cat([tree.sequence for tree in trees])
    sequence = full[..., -width:]
    multiplicity = torch.ones(width, dtype=torch.long)
    multiplicity[0] += full.shape[-1] - width
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


def train_cells(config: Config, context: Context, arm: str, pairs: Sequence[tuple[int, int]]) -> list[xr.Dataset]:
    """Train the cells of each (classes, children), and record their alignment on the way; on CUDA side by side."""
    trainings = [_training(config, context, arm, classes, children) for classes, children in pairs]
    trajectories = []
    for trajectory, pair in zip(context.fit_together(trainings), pairs, strict=True):
        caps = torch.stack([tree.accuracy_cap for tree in draw_trees(config, context, *pair)])
        measures = trajectory[["loss", "accuracy", "alignment", "diverged"]].expand_dims(arm=[arm])
        trajectories.append(measures.assign(accuracy_cap=(("cell", "seed"), caps.numpy())))
    return trajectories


def _training(config: Config, context: Context, arm: str, classes: int, children: int) -> LabelledTraining:
    """Return the training of all (N0, N1) and seeds of one (classes, children), as one model."""
    trees, steps = draw_trees(config, context, classes, children), whole("steps", config.steps)
    cells = Arms("cell", [cell(classes, children, latents) for latents in config.latents])
    data = merge_pads(trees)
    sequence, multiplicity = data.sequence.to(context.device), data.multiplicity[0].to(context.device)
    model = Decoder(decoder_config(config, arm, classes), generators=context.generators("weights", cells))
    streams = context.generators("minibatches")
    counts = minibatch_counts(classes, batch=config.batch, steps=steps + 1, generators=streams)
    counts = counts.repeat(1, len(cells.labels), 1).to(context.device)  # a seed has the same minibatches in every cell
    share, label = counts.to(torch.float32) / config.batch, torch.arange(classes, device=context.device)[:, None]

    def loss(model: Decoder, step: Tensor) -> Tensor:
        """The loss of a minibatch: each class has one sequence, weighted by how often it was drawn."""
        surprisal = model.surprisal(sequence, label, last=1, multiplicity=multiplicity)[:, :, 0]
        return (share.index_select(0, step.view(1))[0] * surprisal).sum(dim=-1)

    return LabelledTraining(
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


def gain_over_chance(run: xr.Dataset, layer: int) -> xr.DataArray:
    """Return the alignment after training less that of as many Gaussian numbers, averaged over cells, per seed."""
    end = run.alignment.isel(step=-1, latent_layer=layer, layer=layer).sel(arm="trained")
    return (end - run.chance.isel(latent_layer=layer)).mean("cell", skipna=False)


def table_claims() -> tuple[Claim, ...]:
    """Return a claim for each cell of Table 1 and each layer of latents."""
    return tuple(
        Claim(
            f"table-{classes}-{children}-{latents[0]}-{latents[1]}-s{layer}",
            f"Table 1, {cell(classes, children, latents)}: alignment of s = {layer} is in the table's range.",
            partial(final_alignment, arm="trained", name=cell(classes, children, latents), layer=layer),
            EXPECTED[layer],
            kind="figure",
            quantity=f"largest correlation of a latent with a hidden unit of layer {layer} after training, mean over "
            "latents; expected is the range of all eight published cells",
            across="interval",
            presets=("paper",),
        )
        for classes, children, latents, layer in product(CLASSES, CHILDREN, LATENTS, (0, 1))
    )


def gain_claims(layer: int) -> tuple[Claim, ...]:
    """Return the claims that training aligns hidden units with one layer of latents, beyond each control."""
    latents = f"the latents s = {layer}"
    controls = {
        "frozen": f"Trained attention aligns {latents} better than attention frozen at its start does.",
        "uniform": f"Trained attention aligns {latents} better than uniform attention does.",
        "linear": f"ReLU aligns {latents} better than a linear activation does.",
    }
    return (
        Claim(
            f"learned-s{layer}",
            f"Training aligns hidden units with {latents}.",
            partial(gain_over_start, layer=layer),
            above(0.0),
            kind="reading",
            quantity="alignment after training less that of the untrained network, mean over cells",
            across="interval",
        ),
        Claim(
            f"chance-s{layer}",
            f"Trained hidden units match {latents} better than as many Gaussian numbers do.",
            partial(gain_over_chance, layer=layer),
            above(0.0),
            kind="control",
            quantity="alignment after training less that of Gaussian numbers, mean over cells",
            across="interval",
        ),
        *(
            Claim(
                f"{arm}-s{layer}",
                statement,
                partial(gain_over_control, control=arm, layer=layer),
                above(0.0),
                kind="control",
                quantity=f"alignment after training less that with {ARM_LABELS[arm]}, mean over cells",
                across="interval",
            )
            for arm, statement in controls.items()
        ),
    )


CLAIMS = (*table_claims(), *gain_claims(0), *gain_claims(1))


def outcome(run: xr.Dataset) -> str:
    """Say how our cells compare with the published ranges, and what training adds."""
    trained = run.alignment.sel(arm="trained")
    before, after = (
        [_range_of_cells(trained.isel(step=step, latent_layer=layer, layer=layer)) for layer in (0, 1)]
        for step in (0, -1)
    )
    changes = [_with_interval(gain_over_start(run, layer)) for layer in (0, 1)]
    cells = run.sizes["cell"]
    return (
        f"After training, the best hidden unit correlates with a latent by {after[0]} for the lowest latents (s = 0) "
        f"and by {after[1]} for the next ones (s = 1), in {cells} cell{'s' * (cells > 1)} of the table; published are "
        f"0.94 to 1.00 and 0.55 to 0.81. Before any training it is {before[0]} and {before[1]}: training changes it by "
        f"{changes[0]} and {changes[1]}."
    )


def _range_of_cells(alignment: xr.DataArray) -> str:
    """Return the least and the greatest cell, each the mean over seeds, as text."""
    mean = alignment.mean("seed", skipna=False)
    if mean.isnull().any():
        raise NotInRun("alignment in every cell")
    low, high = f"{float(mean.min()):.2f}", f"{float(mean.max()):.2f}"
    return low if low == high else f"{low} to {high}"


def _with_interval(values: xr.DataArray) -> str:
    """Return the mean over seeds as text, with its confidence interval if there are several seeds."""
    low, high = mean_interval(values.values)
    interval = f" (95 % interval {low:+.3f} to {high:+.3f})" if values.sizes["seed"] > 1 else ""
    return f"{float(values.mean()):+.3f}{interval}"


def draw_highlight(run: xr.Dataset) -> Figure:
    """Draw our cells of Table 1 as points, before and after training, and the published ranges in grey."""
    figure, axes = canvas(1, 1, width=3.2, height=2.3)
    panel, cells = axes[0, 0], np.arange(run.sizes["cell"])
    trained = run.alignment.sel(arm="trained")
    for layer in (0, 1):
        panel.axhspan(*PUBLISHED[layer], color="0.88", linewidth=0)
        alignment = trained.isel(latent_layer=layer, layer=layer)
        measured(panel, cells - 0.12, alignment.isel(step=0).mean("seed"), 1, "untrained" if layer else None)
        after = alignment.isel(step=-1).transpose("cell", "seed")
        measured(panel, cells + 0.12, after, 0, "trained" if layer else None)
        panel.text(len(cells) - 0.45, sum(PUBLISHED[layer]) / 2, f"s = {layer}", va="center", fontsize=8)
    panel.set(ylim=(0.4, 1.03), xlim=(-0.6, len(cells) + 0.25), xticks=[], ylabel="alignment with latents")
    panel.set(xlabel="cells of Table 1" if len(cells) > 1 else "a cell of Table 1")
    panel.set_title("Table 1: points ours, grey published", fontsize=9)
    panel.legend(loc="lower left", ncols=2)
    return figure


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
        panel.set(xlabel="alignment", title=f"Latents s = {layer}: trained beside controls", xlim=(0.2, 1.05))
        panel.set_yticks(rows, run.cell.values)
    axes[0, 0].set_ylim(len(rows) - 0.55, -0.45)  # from top to bottom; the other panel shares this axis
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
        axes[0, layer].set(
            xlabel="step + 1", ylabel="alignment", xscale="log", title=f"Alignment of latents s = {layer}"
        )
    axes[0, 2].axhline(
        float(first.accuracy_cap.mean()), color="0.5", linestyle=":", label="cap: some classes look alike"
    )
    axes[0, 2].set(xlabel="step + 1", ylabel="accuracy", xscale="log", title="Accuracy and its cap", ylim=(0, 1.05))
    axes[0, 2].legend(loc="lower right")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS))
    letters(axes)
    return figure


STUDY = Study(
    name="alignment",
    title="Table 1: hidden units match the latents of a hierarchy, mostly before any training",
    source="JoMA, Table 1 (arXiv 2310.00535)",
    statement=(
        "Table 1 of JoMA (arXiv 2310.00535) says how well hidden units match the latents of a hierarchy after "
        "training: the largest correlation of a latent with a hidden unit of its layer is 0.94 to 1.00 for the lowest "
        "latents, s = 0, and 0.55 to 0.81 for the next ones, s = 1. The authors conclude that the layers of a "
        "Transformer learn the hierarchy."
    ),
    about=(
        "A decoder of three layers learns to name the class of sequences that a hierarchy of combinations generates. "
        "Each cell of the table has controls that the paper does not have: the untrained network, attention "
        "frozen at its start, uniform attention, a linear activation, and as many Gaussian numbers as hidden units. "
        "An entry is the largest of 400 correlations over 20 or 30 classes, so it is far from zero without any "
        "learning; what training adds is the difference from a control. Each class has one sequence, so a minibatch is "
        "a vector of counts and leading pads are merged, which is exact."
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
                steps=160,
                records=12,
            ),
            seeds=3,
            seconds=10,
        ),
        # Not timed as a whole: ten trainings of 10,000 steps, 2.5 s each in a trial of a few steps.
        "paper": Preset(Config(), seeds=5, seconds=250_000),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    highlight=Highlight(
        "Table 1",
        draw_highlight,
        "Alignment of hidden units with the latents s = 0 and s = 1 in our cells of Table 1, before and after "
        "training, beside the published ranges 0.94 to 1.00 and 0.55 to 0.81.",
    ),
    threads=1,
    exact_shards=False,
    figures={
        "table": Drawing(
            draw_table,
            "Table 1 with its controls, where they were trained. Points: mean over seeds. Bars: least to greatest "
            "seed. Grey: the range of the published cells.",
        ),
        "training": Drawing(
            draw_training,
            "The first cell over training. Lines: mean over seeds. Bands: least to greatest seed. Dotted: the largest "
            "possible accuracy, since classes that share a sequence cannot be told apart.",
        ),
    },
)
