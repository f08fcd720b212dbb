"""Theorem 5 in training: tokens of a latent tree that share a lower ancestor gain mutual attention earlier."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from joma.studies.hierarchy import association, layer_entropy
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
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, above, at_least, at_most
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
    results = [train_on_tree(config, context, tree, layers, label=label) for label, (tree, layers) in trainings.items()]
    diverged = xr.concat([result.diverged for result in results], dim=xr.Variable("training", list(trainings)))
    *full, single = (result.drop_vars("diverged") for result in results)
    single = single.squeeze("layer", drop=True).rename({name: f"{name}_single" for name in single.data_vars})
    predicted = [predictions(tree) for tree in tree_by_name.values()]
    tree_names = xr.Variable("tree", list(tree_by_name))
    parts = [xr.concat(full, dim=tree_names), xr.concat(predicted, dim=tree_names), single]
    return xr.merge(parts).assign(diverged=diverged)


def train_on_tree(config: Config, context: Context, tree: HBLT, layers: int, *, label: str) -> xr.Dataset:
    """Train a decoder on a tree and record each pair's gain in mutual attention since the start of training.

    `gain` is the mean over layers, `last_gain` that of each layer at the last step: all steps of all layers would be
    most of a stored run.
    """
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
    gains = {"gain": gain.mean("layer"), "last_gain": gain.isel(step=-1, drop=True)}
    return trajectory[["loss", "entropy", "diverged"]].assign(gains).assign_coords(layer=np.arange(1, layers + 1))


def order_claims(layers: int) -> tuple[Claim, ...]:
    """Return the claims on the order in which pairs gain attention, for a decoder of `layers` layers."""
    depth = _depth(layers)
    return (
        Claim(
            f"order-{layers}",
            f"With {depth}, pairs that occur together more often are associated earlier.",
            partial(association.order_of_times, layers=layers),
            above(0.0),
            kind="reading",
            quantity="rank correlation over pairs of Theorem 5's co-occurrence with how early the odds of attention "
            "double; at most 0.91, or more if pairs of equal co-occurrence never reach it and so have equal times",
            across="interval",
        ),
        Claim(
            f"gains-{layers}",
            f"With {depth}, pairs that occur together more often gain more attention.",
            partial(association.order_of_gains, layers=layers),
            above(0.0),
            kind="reading",
            quantity="rank correlation over pairs of Theorem 5's co-occurrence with the gain, averaged over training",
            across="interval",
        ),
        Claim(
            f"order-{layers}-mean",
            f"With {depth}, the rank correlation of co-occurrence with being associated early is at least 0.5.",
            partial(association.order_of_times, layers=layers),
            at_least(0.5),
            kind="check",
            quantity="rank correlation over pairs of Theorem 5's co-occurrence with how early the odds of attention "
            "double; the bound is ours",
            across="mean",
        ),
    )


def height_claims(layers: int) -> tuple[Claim, ...]:
    """Return the claims on what pairs of different heights gain, for a decoder of `layers` layers."""
    depth = _depth(layers)
    return (
        Claim(
            f"bottom-up-{layers}",
            f"With {depth}, siblings are associated before cousins, and cousins before all others.",
            partial(association.least_delay, layers=layers),
            above(0.0),
            kind="reading",
            quantity="the smaller of the two delays until the odds of attention double, in steps",
            across="interval",
        ),
        Claim(
            f"heights-{layers}",
            f"With {depth}, a pair gains the less the higher its lowest common ancestor is.",
            partial(association.least_fall, layers=layers),
            above(0.0),
            kind="reading",
            quantity="least fall of the gain from one height to the next, averaged over training, in nats",
            across="interval",
        ),
        Claim(
            f"high-{layers}",
            f"With {depth}, pairs that only a high latent joins end with more attention than at the start.",
            partial(association.final_high_gain, layers=layers),
            above(0.0),
            kind="reading",
            quantity=f"last gain of the pairs of height {ROOT - 1}, in nats",
            across="interval",
            presets=("paper",),  # a short run cannot tell later from never
        ),
    )


def bounce_claims(layers: int) -> tuple[Claim, ...]:
    """Return the claims that attention turns sparse and then dense again, for each layer of a decoder."""
    return tuple(claim for layer in range(1, layers + 1) for claim in _layer_bounce_claims(layers, layer))


def _layer_bounce_claims(layers: int, layer: int) -> tuple[Claim, Claim]:
    """Return the claims that attention in one layer comes back in most seeds, and on average over them."""
    name = f"bounce-{layers}" if layers == 1 else f"bounce-{layers}-layer-{layer}"
    attention = (
        f"With {_depth(layers)}, attention{f' in layer {layer}' * (layers > 1)} turns sparse and then dense again"
    )
    most = Claim(
        name,
        f"{attention} in most seeds.",
        partial(layer_entropy.has_bounced, layers=layers, layer=layer),
        above(0.5),
        kind="reading",
        quantity="share of the seeds whose entropy falls and comes back beyond noise",
        across="interval",
        presets=("paper",),
    )
    average = replace(
        most,
        name=f"{name}-mean",
        statement=f"{attention}, on average over seeds.",
        measure=partial(layer_entropy.bounce_of_layer, layers=layers, layer=layer),
        expected=above(0.0),
        kind="check",
        quantity="the smaller of fall and recovery of the entropy, beyond noise, as a share of its start; 0 where "
        "noise explains it. It is never below 0, so that a few seeds decide: the measure of earlier versions",
    )
    return most, average


def _depth(layers: int) -> str:
    return "one layer" if layers == 1 else f"{layers} layers"


# What the latents between two cousins do to them.
LATER = Claim(
    "later",
    "Cousins are associated later than in a tree without the latents between them.",
    partial(association.delay_of_cousins, tree="shallow"),
    above(0.0),
    kind="reading",
    quantity="delay until the odds of attention double, in steps; the other tree has the same ρ",
    across="interval",
)
HIGHER = Claim(
    "higher",
    "Cousins are associated in a higher layer than in a tree without the latents between them.",
    partial(association.lift_of_cousins, tree="shallow"),
    above(0.0),
    kind="reading",
    quantity="distance of the centres of the last gain, in layers; the other tree has the same ρ",
    across="interval",
    presets=("paper",),
)
DEPTH_CLAIMS = (
    LATER,
    replace(
        LATER,
        name="later-matched",
        statement="The latents between cousins delay their association even at equal co-occurrence.",
        measure=partial(association.delay_of_cousins, tree="matched"),
        kind="control",
        quantity="delay until the odds of attention double, in steps; in the other tree they co-occur equally",
    ),
    replace(
        HIGHER,
        name="above-siblings",
        statement="Cousins are associated in a higher layer than siblings.",
        measure=association.lift_above_siblings,
        quantity="distance of the centres of the last gain, in layers",
    ),
    HIGHER,
    replace(
        HIGHER,
        name="higher-matched",
        statement="The latents between cousins lift their association even at equal co-occurrence.",
        measure=partial(association.lift_of_cousins, tree="matched"),
        kind="control",
        quantity="distance of the centres of the last gain, in layers; in the other tree they co-occur equally",
    ),
    replace(
        HIGHER,
        name="higher-beyond-root",
        statement="Beyond what pairs joined at the root gain, cousins are associated in a higher layer.",
        measure=partial(association.lift_of_cousins, tree="shallow", layer=association.gain_layer_beyond_root),
        kind="control",
    ),
)


CLAIMS = (
    *order_claims(1),
    *height_claims(1),
    *order_claims(LAYERS),
    *height_claims(LAYERS),
    *DEPTH_CLAIMS,
    *bounce_claims(1),
    *bounce_claims(LAYERS),
    Claim(
        "same-tokens",
        "In the deep tree and the shallow ones each token occurs equally often.",
        association.marginal_difference,
        at_most(1e-12),
        kind="check",
        quantity="largest difference of a token's probability",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say how well the order follows co-occurrence, what high pairs gain, and whether attention comes back."""
    order, high = (
        [float(measure(run, layers).mean(skipna=False)) for layers in (1, LAYERS)]
        for measure in (association.order_of_times, association.final_high_gain)
    )
    if not np.isfinite([*order, *high]).all():
        raise NotInRun("gain in every seed")
    bounced = [(layer_entropy.layer_bounce(run, layers) > 0).sum("seed").values for layers in (1, LAYERS)]
    seeds = run.sizes["seed"]
    return (
        f"The order in which pairs are associated correlates with co-occurrence by {order[0]:.2f} with one layer and "
        f"{order[1]:.2f} with {LAYERS}; pairs that only a high latent joins gain {high[0]:+.2f} and "
        f"{high[1]:+.2f} nats. Attention turns sparse and then dense again in {bounced[0][0]} of {seeds} seeds with "
        f"one layer; with {LAYERS} layers, in {_listed(bounced[1])} of them in layers 1 to {LAYERS}."
    )


def _listed(numbers: np.ndarray) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"


TREE_LABELS = {"deep": "deep", "shallow": "shallow, same ρ", "matched": "shallow, same P[l | m]"}
HEIGHT_LABELS = {level: f"height {level}" for level in range(1, ROOT)} | {ROOT: "the root"}


def draw_order(run: xr.Dataset) -> Figure:
    """Draw gains over training by height, for one and for three layers, and doubling times against co-occurrence."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    deep = run.sel(tree="deep")
    for panel, layers in ((axes[0, 0], 1), (axes[0, 1], LAYERS)):
        curves = mean_by_height(deep_gain(run, layers), deep.height)
        for index, (level, label) in enumerate(HEIGHT_LABELS.items()):
            band(panel, run.step, curves.sel(level=level), index, label)
        panel.axhline(DOUBLED, color="0.4", linewidth=0.8)
        title = f"{_depth(layers).capitalize()}: low ancestors first"
        panel.set(xlabel="step", ylabel="gain in attention / nats", title=title)
        _leave_room_for_legend(panel)
        panel.legend(title="joined at", title_fontsize=8, loc="upper center", ncols=2)
    cooccurrence = mean_by_height(deep.cooccurrence, deep.height)
    for index, layers in enumerate((1, LAYERS)):
        times = mean_by_height(doubling_time(deep_gain(run, layers)), deep.height)
        label = f"{layers} layer{'s' * (layers > 1)}: {float(association.order_of_times(run, layers).mean()):.2f}"
        measured(axes[0, 2], cooccurrence, times, index, label, markersize=6)
    axes[0, 2].set(xlabel="co-occurrence P[l | m], Theorem 5", ylabel="odds doubled at step")
    axes[0, 2].set_title("Pairs that co-occur more come first")
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
    times = doubling_time(run.gain)
    shown = [(tree, COUSINS, label) for tree, label in TREE_LABELS.items()] + [("deep", SIBLINGS, "deep, siblings")]
    for index, (tree, height, label) in enumerate(shown):
        curve, time, gain_by_layer = (
            association.mean_of_deep_pairs(values, run, height).sel(tree=tree)
            for values in (run.gain, times, run.last_gain)
        )
        centre = association.gain_layer(run, height).sel(tree=tree)
        band(axes[0, 0], run.step, curve, index, label)
        measured(axes[0, 1], time, centre.values, index, label, markersize=6)
        theory(axes[0, 2], run.layer, gain_by_layer.mean("seed"), index, linewidth=0.8)
        measured(axes[0, 2], run.layer, gain_by_layer.transpose("seed", "layer"), index)
    axes[0, 0].axhline(DOUBLED, color="0.4", linewidth=0.8)
    axes[0, 0].set(xlabel="step", ylabel="gain in attention / nats", title="Latents in between delay cousins")
    (lines, labels), (points, _) = (panel.get_legend_handles_labels() for panel in axes[0, :2])
    figure.legend([*zip(lines, points, strict=True)], labels, loc="outside lower center", ncols=len(shown))
    axes[0, 1].set(
        xlabel="odds doubled at step",
        ylabel="centre of the gain / layer",
        title="Cousins come later and in higher layers",
    )
    axes[0, 2].axhline(0, color="0.4", linewidth=0.8)
    axes[0, 2].set(xlabel="layer", ylabel="last gain / nats", title="Which layers associate cousins")
    axes[0, 2].set_xticks(run.layer.values)
    letters(axes)
    return figure


def draw_matrices(run: xr.Dataset) -> Figure:
    """Draw matrices over tokens: Theorem 5's co-occurrence, and the gain's average over training."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    single, full = (average_gain(deep_gain(run, layers)).mean("seed") for layers in (1, LAYERS))
    matrices = {
        "Theorem 5: co-occurrence": (run.cooccurrence.sel(tree="deep"), "P[l | m]"),
        "One layer attends alike": (single, "average gain / nats"),
        f"{LAYERS} layers attend alike": (full, "average gain / nats"),
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


def draw_entropy(run: xr.Dataset) -> Figure:
    """Draw the entropy of attention over training, for one layer and for each of three."""
    figure, axes = canvas(1, 2, width=4.2, height=2.9, sharey=True)
    for panel, layers in zip(axes[0], (1, LAYERS), strict=True):
        entropy, bounced = layer_entropy.deep_entropy(run, layers), layer_entropy.layer_bounce(run, layers) > 0
        for index, layer in enumerate(entropy.layer.values):
            count = f"{int(bounced.sel(layer=layer).sum())} of {run.sizes['seed']} seeds"
            band(panel, run.step, entropy.sel(layer=layer), index, f"layer {layer}: back in {count}")
        panel.set(xlabel="step", title=f"{_depth(layers).capitalize()}: does entropy come back?")
        panel.legend(loc="upper right")
    axes[0, 0].set_ylabel("entropy of attention / nats")
    letters(axes)
    return figure


STUDY = Study(
    name="hierarchy-order",
    title="A hierarchy is learned bottom up: tokens with a low ancestor first",
    source="JoMA, Theorem 5 (arXiv 2310.00535) and its slides",
    statement=(
        "Theorem 5 of JoMA (arXiv 2310.00535) says how often two tokens of a latent tree occur together: the lower "
        "their common ancestor, the more often. The authors conclude that attention learns the tree bottom up: tokens "
        "with a low ancestor attend to each other first, the others later and in higher layers, and attention turns "
        "sparse and then dense again on the way."
    ),
    about=(
        "Decoders of one and of three layers learn which of the hidden tokens of a sequence belong there, given the "
        "visible ones. We follow the attention that the query for one token pays to another, relative to a start token "
        "and to the beginning of training; a pair is associated once these odds have doubled, or at the last step if "
        "they never do. Siblings are tokens that share a parent (a pair of height 1), cousins share a grandparent "
        "(height 2). Two shallow trees lack the parents: one has the same ρ, in the other cousins occur together "
        "exactly as often as in the deep tree. The entropy of the queries' attention is recorded in every layer."
    ),
    version=5,
    presets={
        # Cousins do not double their odds in the short run: in which layer they are associated is not decided by then.
        "quick": Preset(Config(steps=320, moments=16), seeds=3, seconds=30),
        # With 8 seeds the spread of the layers' centres, 0.3 of a layer, was as large as their distances.
        "paper": Preset(
            Config(width=64, rate=2e-3, steps=3000, batch=96, pool=1000, probes=512, moments=100),
            seeds=24,
            seconds=9000,
        ),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    figures={
        "order": Drawing(
            draw_order,
            "Lines: mean over pairs and seeds. Bands and bars: least to greatest seed. Grey line: odds of attention "
            "doubled. (a, b) Pairs by the height of their lowest common ancestor; with three layers the mean of these. "
            "(c) Mean over the pairs of a height, at the last step if their odds never double; the legend has the rank "
            "correlation over all 120 pairs.",
        ),
        "depth": Drawing(
            draw_depth,
            "Three layers. Pairs that are cousins in the deep tree, there and in two shallow trees, beside the deep "
            "tree's siblings. Lines: mean over seeds. Bands and bars: least to greatest seed. "
            "(b) One point for each seed; the centre is the mean layer of the gain at the last step. (c) That gain by "
            "layer.",
        ),
        "matrices": Drawing(
            draw_matrices,
            "The deep tree token by token. (a) Co-occurrence by Theorem 5. (b, c) Gain in attention, averaged over "
            "training and seeds.",
        ),
        "entropy": Drawing(
            draw_entropy,
            "Entropy of the queries' attention in the deep tree. Lines: mean over seeds. Bands: least to greatest "
            "seed. The legend counts the seeds whose entropy falls and comes back beyond noise.",
        ),
    },
    threads=1,
    exact_shards=False,
)
