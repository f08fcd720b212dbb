"""Theorem 5 in training: tokens of a latent tree that share a lower ancestor gain mutual attention earlier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma import schedule
from joma.arguments import whole
from joma.data.trees import HBLT
from joma.drawing import band, canvas, letters, measured, theory
from joma.models.transformer import Decoder, DecoderConfig
from joma.studies.hierarchy import association
from joma.studies.hierarchy.association import DOUBLED, average_gain, deep_gain, doubling_time, mean_by_height
from joma.studies.hierarchy.hidden_tokens import (
    COUSINS,
    ROOT,
    SIBLINGS,
    TOKENS,
    VOCABULARY,
    Sequences,
    answer_loss,
    draw_sequences,
    predictions,
    trees,
)
from joma.studies.hierarchy.mutual_attention import attention_measure
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, at_most
from joma.train import Optimiser, Record

LAYERS = 3


@dataclass(frozen=True)
class Config:
    """The deep tree's ρ, and the training of a decoder."""

    rho: float = 0.85
    """ρ of the deep tree."""
    asked: int = 4
    """Number of hidden tokens in each sequence, each with a query."""
    width: int = 32
    rate: float = 3e-3
    """Learning rate of Adam."""
    steps: int = 360
    batch: int = 48
    pool: int = 360
    """Number of different minibatches; after the last one training goes on with the first."""
    probes: int = 256
    """Number of held-out sequences over which attention is averaged."""
    moments: int = 36
    """Number of records of attention, about: one every `steps // moments` steps."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train decoders of three layers on each tree, and one of one layer on the deep tree."""
    tree_by_name = trees(config.rho)
    trainings = {f"{name}, {LAYERS} layers": (tree, LAYERS) for name, tree in tree_by_name.items()}
    trainings["deep, 1 layer"] = tree_by_name["deep"], 1
    results = [_train(config, context, tree, layers, label=label) for label, (tree, layers) in trainings.items()]
    diverged = xr.concat([result.diverged for result in results], dim=xr.Variable("training", list(trainings)))
    *full, single = (result.drop_vars("diverged") for result in results)
    single = single.squeeze("layer", drop=True).rename({name: f"{name}_single" for name in single.data_vars})
    predicted = [predictions(tree) for tree in tree_by_name.values()]
    tree_names = xr.Variable("tree", list(tree_by_name))
    parts = [xr.concat(full, dim=tree_names), xr.concat(predicted, dim=tree_names), single]
    return xr.merge(parts).assign(diverged=diverged)


def _train(config: Config, context: Context, tree: HBLT, layers: int, *, label: str) -> xr.Dataset:
    """Train a decoder on a tree and record each pair's gain in mutual attention since the start of training."""
    steps, batch, pool = (whole(name, getattr(config, name)) for name in ("steps", "batch", "pool"))
    queries = whole("asked", config.asked, high=TOKENS - 1)
    generators = context.seed_generators()
    decoder = DecoderConfig(
        vocabulary=VOCABULARY, width=config.width, layers=layers, outputs=1, positions="none", mask="full"
    )
    model = Decoder(decoder, generators=generators)  # its weights are drawn before the data, from the same streams
    data = draw_sequences(tree, (pool, batch), queries, generators, context.device)
    probes = draw_sequences(tree, (1, whole("probes", config.probes)), queries, generators, context.device)
    trajectory = context.fit(
        model,
        answer_loss(data),
        optimiser=Optimiser("adam", config.rate),
        steps=steps,
        record=Record(
            attention_measure(Sequences(*(part[0] for part in probes))),
            at=schedule.every(max(1, steps // whole("moments", config.moments)), steps),
            dims={"attention": ("layer", "pair"), "entropy": ("layer",)},
        ),
        label=label,
    )
    gain = trajectory.attention - trajectory.attention.isel(step=0)
    return trajectory[["loss", "entropy", "diverged"]].assign(gain=gain).assign_coords(layer=np.arange(1, layers + 1))


def order_claims(layers: int) -> tuple[Claim, ...]:
    """Return the claims on the order in which pairs gain attention, for a decoder of `layers` layers."""
    depth = _depth(layers)
    return (
        Claim(
            f"order-{layers}",
            f"Theorem 5, {depth}: the more often two tokens occur together, the earlier their odds of attention "
            "double: rank correlation over pairs, positive in every seed.",
            partial(association.order_of_times, layers=layers),
            above(0.0),
        ),
        Claim(
            f"order-{layers}-mean",
            f"Theorem 5, {depth}: the rank correlation of co-occurrence with how early odds double is at least 0.5 in "
            "the mean (ties between pairs allow at most 0.91).",
            partial(association.order_of_times, layers=layers),
            at_least(0.5),
            across="mean",
        ),
        Claim(
            f"gains-{layers}",
            f"Theorem 5, {depth}: rank correlation of co-occurrence with the average gain in attention over training.",
            partial(association.order_of_gains, layers=layers),
            at_least(0.5),
            across="mean",
        ),
    )


def height_claims(layers: int) -> tuple[Claim, ...]:
    """Return the claims on what pairs of different heights gain, for a decoder of `layers` layers."""
    depth = _depth(layers)
    return (
        Claim(
            f"bottom-up-{layers}",
            f"Theorem 5, {depth}: siblings' odds double before cousins', and cousins' before all others': least delay, "
            "in steps.",
            partial(association.least_delay, layers=layers),
            at_least(1.0),
        ),
        Claim(
            f"heights-{layers}",
            f"Theorem 5, {depth}: the average gain over training falls height by height up to the root: least fall "
            "from one height to the next, in nats.",
            partial(association.least_fall, layers=layers),
            above(0.0),
        ),
        Claim(
            f"high-{layers}",
            f"Slides, {depth}: what a high latent joins is learned too, only later: the last gain of pairs of height "
            f"{ROOT - 1}, in nats.",
            partial(association.final_high_gain, layers=layers),
            above(0.0),
        ),
    )


def _depth(layers: int) -> str:
    return "one layer" if layers == 1 else f"{layers} layers"


CLAIMS = (
    *order_claims(1),
    *height_claims(1),
    *order_claims(LAYERS),
    *height_claims(LAYERS),
    Claim(
        "same-tokens",
        "The deep tree and the shallow ones agree in how often each token occurs: largest difference.",
        association.marginal_difference,
        at_most(1e-12),
    ),
    Claim(
        "later",
        "Slides: tokens that the intermediate latent does not join directly are associated later than in the shallow "
        "tree of the same ρ, in steps.",
        partial(association.delay_of_cousins, tree="shallow"),
        at_least(1.0),
    ),
    Claim(
        "later-matched",
        "The intermediate latent itself delays tokens that it does not join directly: later than in a shallow tree "
        "in which they occur together equally often, in steps.",
        partial(association.delay_of_cousins, tree="matched"),
        at_least(1.0),
    ),
    Claim(
        "above-siblings",
        "Slides: tokens that the intermediate latent does not join directly are associated in a higher layer than "
        "those that it joins: distance of the gains' centres, in layers.",
        association.lift_above_siblings,
        above(0.0),
    ),
    Claim(
        "higher",
        "Slides: tokens that the intermediate latent does not join directly are associated in a higher layer than in "
        "the shallow tree of the same ρ: distance of the gains' centres, in layers.",
        partial(association.lift_of_cousins, tree="shallow"),
        above(0.0),
    ),
    Claim(
        "higher-matched",
        "The intermediate latent itself lifts tokens that it does not join directly: a higher layer than in the "
        "shallow tree of equal co-occurrence.",
        partial(association.lift_of_cousins, tree="matched"),
        above(0.0),
    ),
    Claim(
        "higher-beyond-root",
        "Slides, by another measure: tokens that the intermediate latent does not join directly are associated "
        "higher than in the shallow tree of the same ρ, by the centres of what pairs gain beyond those that only the "
        "root joins.",
        partial(association.lift_of_cousins, tree="shallow", layer=association.gain_layer_beyond_root),
        above(0.0),
    ),
)

TREE_LABELS = {"deep": "deep", "shallow": "shallow, same ρ", "matched": "shallow, same P[l | m]"}
HEIGHT_LABELS = {level: f"height {level}" for level in range(1, ROOT)} | {ROOT: "the root"}


def draw_order(run: xr.Dataset) -> Figure:
    """Draw gains over training by height, for one and for three layers, and doubling times against co-occurrence."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    deep = run.sel(tree="deep")
    for panel, layers, title in ((axes[0, 0], 1, "One layer"), (axes[0, 1], LAYERS, f"Mean of {LAYERS} layers")):
        curves = mean_by_height(deep_gain(run, layers), deep.height)
        for index, (level, label) in enumerate(HEIGHT_LABELS.items()):
            band(panel, run.step, curves.sel(level=level), index, label)
        panel.axhline(DOUBLED, color="0.4", linewidth=0.8)
        panel.set(xlabel="step", ylabel="gain in attention / nats", title=title)
        _leave_room_for_legend(panel)
        panel.legend(title="joined at", title_fontsize=8, loc="upper center", ncols=2)
    cooccurrence = mean_by_height(deep.cooccurrence, deep.height)
    for index, layers in enumerate((1, LAYERS)):
        times = mean_by_height(doubling_time(deep_gain(run, layers)), deep.height)
        label = f"{layers} layer{'s' * (layers > 1)}: {float(association.order_of_times(run, layers).mean()):.2f}"
        measured(axes[0, 2], cooccurrence, times, index, label, markersize=6)
    axes[0, 2].set(xlabel="co-occurrence P[l | m], Theorem 5", ylabel="odds doubled at step", title="When")
    axes[0, 2].set_ylim(0, None)
    axes[0, 2].legend(title="rank correlation", title_fontsize=8, loc="lower left")
    letters(axes)
    return figure


def _leave_room_for_legend(panel: Axes) -> None:
    """Extend the y axis so that the upper third of a panel is free for its legend."""
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + (high - low) / 2)


def draw_depth(run: xr.Dataset) -> Figure:
    """Draw when and in which layer the deep tree's cousins are associated, in that tree and in the shallow ones."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    curves, last = run.gain.mean("layer"), run.gain.isel(step=-1)
    times = doubling_time(curves)
    shown = [(tree, COUSINS, label) for tree, label in TREE_LABELS.items()] + [("deep", SIBLINGS, "deep, siblings")]
    for index, (tree, height, label) in enumerate(shown):
        curve, time, gain_by_layer = (
            association.mean_of_deep_pairs(values, run, height).sel(tree=tree) for values in (curves, times, last)
        )
        centre = association.gain_layer(run, height).sel(tree=tree)
        band(axes[0, 0], run.step, curve, index, label)
        measured(axes[0, 1], time, centre.values, index, label, markersize=6)
        theory(axes[0, 2], run.layer, gain_by_layer.mean("seed"), index, linewidth=0.8)
        measured(axes[0, 2], run.layer, gain_by_layer.transpose("seed", "layer"), index, label)
    axes[0, 0].axhline(DOUBLED, color="0.4", linewidth=0.8)
    axes[0, 0].set(xlabel="step", ylabel="gain in attention / nats", title="Cousins of the deep tree")
    _leave_room_for_legend(axes[0, 0])
    axes[0, 0].legend(loc="upper left")
    axes[0, 1].set(xlabel="odds doubled at step", ylabel="centre of the gain / layer", title="When and where")
    axes[0, 1].legend(loc="best")
    axes[0, 2].axhline(0, color="0.4", linewidth=0.8)
    axes[0, 2].set(xlabel="layer", ylabel="last gain / nats", title="Layer by layer", xticks=run.layer.values)
    letters(axes)
    return figure


def draw_matrices(run: xr.Dataset) -> Figure:
    """Draw matrices over tokens: Theorem 5's co-occurrence, and the gain's average over training."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    single, full = (average_gain(deep_gain(run, layers)).mean("seed") for layers in (1, LAYERS))
    matrices = {
        "Theorem 5": (run.cooccurrence.sel(tree="deep"), "P[l | m]"),
        "Trained, one layer": (single, "average gain / nats"),
        f"Trained, {LAYERS} layers": (full, "average gain / nats"),
    }
    for panel, (title, (values, label)) in zip(axes[0], matrices.items(), strict=True):
        matrix = np.full((TOKENS, TOKENS), np.nan)
        matrix[run.one, run.other] = matrix[run.other, run.one] = values
        image = panel.imshow(matrix, cmap="Greys")
        panel.grid(visible=False)
        panel.set(xlabel="token m", ylabel="token l", title=title, xticks=range(0, 16, 4), yticks=range(0, 16, 4))
        figure.colorbar(image, ax=panel, label=label)
    letters(axes)
    return figure


STUDY = Study(
    name="hierarchy-order",
    title="A hierarchy is learned bottom up: who shares a low ancestor attends to each other first",
    source="JoMA, Theorem 5 (arXiv 2310.00535) and its slides",
    about=(
        "Sequences of a latent tree lose four of their sixteen tokens' places, at random; for each of these a question "
        "is put to a decoder: does the token belong here? It answers from the tokens that are visible. This is the "
        "theory's block with one query a question: the query names a token, the context is the set of tokens present, "
        "and no position is encoded and the mask is full, for a set has no order. Questions see the context and not "
        "each other, and a start token, always there, is where attention rests when nothing is of use. The "
        "mutual attention of two tokens is ln(weight on one / weight on the start) when the other is asked for, "
        "averaged over held-out sequences and both directions, less its value before training; in the first layer that "
        "is a difference of the logits q·k/√d of two embeddings. A pair is associated when these odds have doubled; "
        "pairs that never get there count as associated at the last step. What a visible token says "
        "about the one asked for falls with the height of their ancestor as co-occurrence does, so that the order "
        "speaks for Theorem 5's salience, discriminancy times co-occurrence, and not for one factor alone. The deep "
        "tree is then compared with shallow ones that lack the latents just above the tokens: one with the same ρ, in "
        "which former cousins occur together more often, and one with ρ², in which they do so exactly as often as "
        "before, so that what is left is the effect of the intermediate latent itself."
    ),
    version=4,
    presets={
        # Cousins do not double their odds in the short run: in which layer they are associated is not decided by then.
        "quick": Preset(Config(), seeds=3, seconds=40),
        "paper": Preset(
            Config(width=64, rate=2e-3, steps=2000, batch=96, pool=1000, probes=512, moments=100), seeds=8, seconds=2000
        ),
    },
    run=run,
    claims=CLAIMS,
    figures={
        "order": Drawing(
            draw_order,
            "Gain in mutual attention of token pairs by the height of their lowest common ancestor, (a) with one layer "
            "and (b) as the mean of three; lines: mean over pairs and seeds, bands from least to greatest seed; grey: "
            "odds doubled. (c) The step at which a pair's odds of attention have doubled, mean over the pairs of a "
            "height, against their co-occurrence; bars from least to greatest seed. In the legend the rank correlation "
            "of co-occurrence with being early, over all 120 pairs, mean over seeds; ties allow at most 0.91.",
        ),
        "depth": Drawing(
            draw_depth,
            "Three layers. Pairs that are cousins in the deep tree, there and in two shallow trees whose lowest "
            "latents join them directly; beside them the deep tree's siblings. (a) Gain in mutual attention, mean over "
            "layers, bands from least to greatest seed; grey: odds doubled. (b) When the odds have doubled, and the "
            "layer around which the last gain lies, one point a seed. (c) The last gain layer by layer, bars from "
            "least to greatest seed.",
        ),
        "matrices": Drawing(
            draw_matrices,
            "Token by token in the deep tree: (a) co-occurrence by Theorem 5; (b, c) the gain in mutual attention, "
            "averaged over training and seeds, for one layer and as the mean of three.",
        ),
    },
    threads=1,
)
