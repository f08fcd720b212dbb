"""Theorem 5 in training: tokens of a latent tree that share a lower ancestor gain mutual attention earlier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Bool, Float, Integer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import rankdata
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, scalar, whole
from joma.data.trees import HBLT
from joma.models.transformer import Decoder, DecoderConfig
from joma.report.figure import band, canvas, letters, measured, theory
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, at_most
from joma.theory import hierarchy
from joma.train import Optimiser, Record

DEEP, SHALLOW = (2, 2, 2, 2), (2, 2, 4)  # 16 tokens each; the shallow tree lacks the latents just above the tokens
P0 = (0.5, 0.5)
P_CHILD = np.array([[0.8, -0.2], [0.8, -0.2]])  # of the deep tree: ρ_0 = 0.3 in both branches
TOKENS = math.prod(DEEP)
LEVELS = len(DEEP)  # heights 1 to 3 and, as height 4, the root
LAYERS = 3
SIBLINGS, COUSINS = 1, 2  # heights in the deep tree; the shallow tree's lowest latents join both kinds directly
DOUBLED = math.log(2)
# In the short run cousins end below the doubling of their odds: in which layer they are associated is not decided yet.


@dataclass(frozen=True)
class Config:
    """The deep tree, and a decoder's training."""

    rho: float = 0.85
    """ρ of the deep tree."""
    asked: int = 4
    """Tokens hidden, and asked for, in each sequence."""
    width: int = 32
    rate: float = 3e-3
    steps: int = 360
    batch: int = 48
    pool: int = 360
    """Minibatches drawn; they are taken in turn, again and again."""
    probes: int = 256
    """Sequences, not trained on, over which attention is averaged."""
    moments: int = 36
    """How often attention is measured."""


class Sequences(NamedTuple):
    """Sequences of a tree, some tokens hidden: what is visible, which tokens are asked for, and the answers."""

    visible: Bool[Tensor, "*batch token"]
    asked: Integer[Tensor, "*batch question"]
    answer: Bool[Tensor, "*batch question"]

    def inputs(self) -> tuple[Integer[Tensor, "*batch position"], Float[Tensor, "*batch position"]]:
        """Return tokens and multiplicities for a decoder: the start, a place for every token, and the questions.

        The start is token 0, token l is 1 + l, the question for it 1 + TOKENS + l. What is not visible and the
        questions have multiplicity 0: nobody sees them.
        """
        shape = self.visible.shape[:-1]
        places = torch.arange(1 + TOKENS, device=self.visible.device).expand(*shape, 1 + TOKENS)
        seen = F.pad(F.pad(self.visible, (1, 0), value=True), (0, self.asked.shape[-1]), value=False)
        return torch.cat([places, self.asked.long() + 1 + TOKENS], dim=-1), seen.float()


def trees(rho: float) -> dict[str, HBLT]:
    """Return the deep tree and two shallow ones in which every token occurs as often, given the class, as in it.

    Twice the probability of a token given class c is `1 − ρ^{L−1} p(c)`. `shallow` has the deep tree's ρ; `matched` has
    ρ², so that tokens under one of its lowest latents occur together as often as the deep tree's cousins.

    >>> [tree.depth for tree in trees(0.85).values()]
    [4, 3, 3]
    """
    # From 0.8 on, `matched` has p(c) = P_CHILD / ρ within [−1, 1].
    rho = scalar("rho", rho, low=0.8, high=0.99)
    return {
        "deep": HBLT.regular(DEEP, p0=P0, p_child=P_CHILD, rho=rho),
        "shallow": HBLT.regular(SHALLOW, p0=P0, p_child=P_CHILD * rho, rho=rho),
        "matched": HBLT.regular(SHALLOW, p0=P0, p_child=P_CHILD / rho, rho=rho**2),
    }


def run(config: Config, context: Context) -> xr.Dataset:
    """Train decoders of three layers on each tree, and one of one layer on the deep tree."""
    grown = trees(config.rho)
    trainings = {f"{name}, {LAYERS} layers": (tree, LAYERS) for name, tree in grown.items()}
    trainings["deep, 1 layer"] = grown["deep"], 1
    found = [_trained(config, context, tree, layers, label=label) for label, (tree, layers) in trainings.items()]
    lost = xr.concat([own.diverged for own in found], dim=xr.Variable("training", list(trainings)))
    *full, single = (own.drop_vars("diverged") for own in found)
    single = single.squeeze("layer", drop=True).rename({name: f"{name}_single" for name in single.data_vars})
    predicted = [_predicted(tree) for tree in grown.values()]
    named = xr.Variable("tree", list(grown))
    return xr.merge([xr.concat(full, dim=named), xr.concat(predicted, dim=named), single]).assign(diverged=lost)


def _predicted(tree: HBLT) -> xr.Dataset:
    """Theorem 5 for every pair of tokens; their common ancestor's height, and how often a token occurs."""
    one, other = np.triu_indices(TOKENS, k=1)
    together = hierarchy.cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho)
    return xr.Dataset(
        {
            "height": ("pair", tree.depth - hierarchy.common_depth(tree.parents)[one, other]),
            "cooccurrence": ("pair", together[one, other]),
            "marginal": ("token", hierarchy.marginals(tree.parents, tree.p0, tree.p_child, tree.rho)),
        },
        {"one": ("pair", one), "other": ("pair", other)},
    )


def _trained(config: Config, context: Context, tree: HBLT, layers: int, *, label: str) -> xr.Dataset:
    """Train a decoder on a tree and follow the mutual attention of every pair of tokens from its start."""
    steps, batch, pool = (whole(name, getattr(config, name)) for name in ("steps", "batch", "pool"))
    asked = whole("asked", config.asked, high=TOKENS - 1)
    generators = context.seed_generators()
    decoder = DecoderConfig(
        vocabulary=1 + 2 * TOKENS, width=config.width, layers=layers, outputs=1, positions="none", mask="full"
    )
    model = Decoder(decoder, generators=generators)
    data = _drawn(tree, (pool, batch), asked, generators, context.device)
    probe = _drawn(tree, (1, whole("probes", config.probes)), asked, generators, context.device)
    found = context.fit(
        model,
        _loss(data),
        optimiser=Optimiser("adam", config.rate),
        steps=steps,
        record=Record(
            _watch(Sequences(*(part[0] for part in probe))),
            at=schedule.every(max(1, steps // whole("moments", config.moments)), steps),
            dims={"attention": ("layer", "pair")},
        ),
        label=label,
    )
    gain = found.attention - found.attention.isel(step=0)
    return found[["loss", "diverged"]].assign(gain=gain).assign_coords(layer=np.arange(1, layers + 1))


def _drawn(tree: HBLT, shape: tuple[int, int], asked: int, generators: list[torch.Generator], device: str) -> Sequences:
    """Draw sequences [pool, seed, sample, ...], each seed's from its own generator, and hide what is asked for."""
    token = torch.stack([tree.sample(math.prod(shape), generator=one).token for one in generators])
    order = torch.stack([torch.rand(own.shape, generator=one) for own, one in zip(token, generators, strict=True)])
    hidden = order.argsort(dim=-1)[..., :asked]
    parts = token.scatter(-1, hidden, value=False), hidden.to(torch.uint8), token.gather(-1, hidden)
    return Sequences(*(part.unflatten(1, shape).transpose(0, 1).contiguous().to(device) for part in parts))


def _loss(data: Sequences) -> Callable[[Decoder, Tensor], Tensor]:
    """The cross-entropy of the answers, minibatch after minibatch."""

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        turn = (step % len(data.answer))[None]  # `index_select` keeps the index on the device; `[step]` would not
        now = Sequences(*(part.index_select(0, turn)[0] for part in data))
        tokens, seen = now.inputs()
        score = model(tokens, multiplicity=seen)[:, :, 1 + TOKENS :, 0]
        return F.binary_cross_entropy_with_logits(score, now.answer.float(), reduction="none").mean(dim=(1, 2))

    return loss


def _watch(probe: Sequences) -> Callable[[Decoder, int], dict[str, Tensor]]:
    """Record mutual attention [seed, layer, pair] over the probe."""
    tokens, seen = probe.inputs()
    asked = F.one_hot(probe.asked.long(), TOKENS).float()
    if not _mutual(torch.ones_like(asked), probe.visible, asked).isfinite().all():
        remedy = "draw more sequences, or ask for more or fewer tokens"
        raise InputError("probes", "so many that every two tokens meet", len(probe.visible[0]), remedy)

    @torch.no_grad()
    def record(model: Decoder, _: int) -> dict[str, Tensor]:
        layers = model.activations(tokens, ["attention"], multiplicity=seen)["attention"]
        odds = [log_odds(weights[:, :, 0, 1 + TOKENS :, : 1 + TOKENS]) for weights in layers]
        return {"attention": torch.stack([_mutual(own, probe.visible, asked) for own in odds], dim=1)}

    return record


def log_odds(weights: Float[Tensor, "*batch place"]) -> Float[Tensor, "*batch token"]:
    """Return `ln(a_m / a_start)` of attention weights whose first place is the start.

    In the first layer, without positional encoding, this is a difference of logits q·k/√d and depends on the question
    and the token alone; and in any layer what the other tokens attract drops out of it.

    >>> log_odds(torch.tensor([0.25, 0.5, 0.25]))
    tensor([0.6931, 0.0000])
    """
    logs = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    return logs[..., 1:] - logs[..., :1]


def _mutual(
    odds: Float[Tensor, "seed sample question token"],
    visible: Bool[Tensor, "seed sample token"],
    asked: Float[Tensor, "seed sample question token"],
) -> Float[Tensor, "seed pair"]:
    """Average over the sequences in which one token of a pair is asked for and the other is visible, both ways."""
    present = visible[:, :, None].expand_as(odds).float()
    total, count = (torch.einsum("zsqa,zsqm->zam", asked, own) for own in (odds * present, present))
    one, other = np.triu_indices(TOKENS, k=1)
    return ((total + total.mT) / (count + count.mT))[:, one, other]


def doubling_time(gain: xr.DataArray) -> xr.DataArray:
    """The first step measured at which the odds have doubled, that is at which the gain is at least ln 2.

    Where they never do, the last step: a lower bound, so that a difference of two times is understated. NaN for a seed
    that was lost, whenever that was.
    """
    step = gain.step.broadcast_like(gain)
    time = step.where(gain >= DOUBLED, step.max()).min("step").where(gain.notnull().all("step"))
    return time.transpose(*(dim for dim in gain.dims if dim != "step"))


def early_gain(gain: xr.DataArray) -> xr.DataArray:
    """The gain's average over training, the area under its curve: the more the sooner a pair gains, without a mark."""
    return gain.integrate("step") / float(gain.step[-1] - gain.step[0])


def rank_correlation(x: xr.DataArray, y: xr.DataArray) -> xr.DataArray:
    """Spearman's rank correlation over pairs; ties have their mean rank, and what is constant correlates with nothing.

    What has a NaN has no correlation: NaN.

    >>> x, y = xr.DataArray([1.0, 2.0, 3.0], dims="pair"), xr.DataArray([[9.0, 5.0, 4.0]], dims=("seed", "pair"))
    >>> rank_correlation(x, y).values.round(12)
    array([-1.])
    """
    first, second = (
        xr.apply_ufunc(
            rankdata, own, input_core_dims=[["pair"]], output_core_dims=[["pair"]], kwargs={"axis": -1}
        ).pipe(lambda ranks: ranks - ranks.mean("pair"))
        for own in (x, y)
    )
    product, *squares = (own.sum("pair", skipna=False) for own in (first * second, first**2, second**2))
    size = math.prod(squares) ** 0.5
    return product / size.where(size != 0, np.inf)


def by_height(values: xr.DataArray, height: xr.DataArray) -> xr.DataArray:
    """Average over the pairs of each height, along a new axis `level`."""
    levels = np.unique(height)
    parts = [values.isel(pair=(height == level).values).mean("pair", skipna=False) for level in levels]
    return xr.concat(parts, dim=xr.Variable("level", levels))


def centre(gain: xr.DataArray) -> xr.DataArray:
    """The layer around which a gain lies: Σ_ℓ ℓ max(gain_ℓ, 0) / Σ_ℓ max(gain_ℓ, 0); NaN where no layer gains."""
    positive = gain.clip(min=0)
    return (gain.layer * positive).sum("layer") / positive.sum("layer").where(lambda total: total > 0)


def gains(run: xr.Dataset, layers: int) -> xr.DataArray:
    """The gain of each pair in the deep tree, with several layers their mean."""
    return run.gain_single if layers == 1 else run.gain.sel(tree="deep").mean("layer")


def order(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Rank correlation of Theorem 5's co-occurrence with the time at which a pair's odds double, negated, per seed."""
    return -rank_correlation(run.cooccurrence.sel(tree="deep"), doubling_time(gains(run, layers)))


def order_of_gains(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Rank correlation of Theorem 5's co-occurrence with the gain's average over training, per seed."""
    return rank_correlation(run.cooccurrence.sel(tree="deep"), early_gain(gains(run, layers)))


def delay(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Steps by which cousins double later than siblings, or all other pairs later than cousins: the lesser, per seed.

    Pairs of height 3 and of the root are taken together, for where neither double by the end there is nothing to say.
    """
    times = doubling_time(gains(run, layers))
    kind = run.height.sel(tree="deep").clip(max=COUSINS + 1)
    return by_height(times, kind).diff("level").min("level", skipna=False)


def fall(run: xr.Dataset, layers: int) -> xr.DataArray:
    """Least fall of the gain's average over training from one height to the next, the root included, per seed."""
    mean = by_height(early_gain(gains(run, layers)), run.height.sel(tree="deep"))
    return -mean.diff("level").max("level", skipna=False)


def high_gain(run: xr.Dataset, layers: int) -> xr.DataArray:
    """The last gain of the pairs that are joined by the highest latents, per seed."""
    return by_height(gains(run, layers).isel(step=-1), run.height.sel(tree="deep")).sel(level=LEVELS - 1)


def followed(values: xr.DataArray, run: xr.Dataset, height: int) -> xr.DataArray:
    """Average, in every tree, over those pairs that have this height in the deep tree."""
    return by_height(values, run.height.sel(tree="deep")).sel(level=height, drop=True)


def later(run: xr.Dataset, tree: str) -> xr.DataArray:
    """Steps by which cousins double later in the deep tree than the same tokens do in another, per seed."""
    times = followed(doubling_time(run.gain.mean("layer")), run, COUSINS)
    return times.sel(tree="deep") - times.sel(tree=tree)


def where(run: xr.Dataset, height: int) -> xr.DataArray:
    """The layer around which the last gain of these pairs lies, by tree and seed."""
    return centre(followed(run.gain.isel(step=-1), run, height))


def where_beyond_root(run: xr.Dataset, height: int) -> xr.DataArray:
    """The same of what these pairs gain beyond the pairs that only the root joins."""
    last = run.gain.isel(step=-1)
    return centre(followed(last, run, height) - followed(last, run, LEVELS))


def higher(run: xr.Dataset, tree: str, centres: Callable[[xr.Dataset, int], xr.DataArray] = where) -> xr.DataArray:
    """Layers by which the cousins' gain lies higher in the deep tree than that of the same tokens in another."""
    found = centres(run, COUSINS)
    return found.sel(tree="deep") - found.sel(tree=tree)


def above_siblings(run: xr.Dataset) -> xr.DataArray:
    """Layers by which the cousins' gain lies higher than the siblings', in the deep tree, per seed."""
    return (where(run, COUSINS) - where(run, SIBLINGS)).sel(tree="deep")


def unlike(run: xr.Dataset) -> float:
    """Largest difference between the trees in how often a token occurs."""
    return float((run.marginal.max("tree") - run.marginal.min("tree")).max())


def order_claims(layers: int) -> tuple[Claim, ...]:
    """The claims on the order in which pairs gain attention, for a decoder of so many layers."""
    words = "one layer" if layers == 1 else f"{layers} layers"
    return (
        Claim(
            f"order-{layers}",
            f"Theorem 5, {words}: the more often two tokens occur together, the earlier their odds of attention "
            "double: rank correlation over pairs, positive in every seed.",
            lambda run: order(run, layers),
            above(0.0),
        ),
        Claim(
            f"order-{layers}-mean",
            f"Theorem 5, {words}: the rank correlation of co-occurrence with how early odds double is at least 0.5 in "
            "the mean (ties between pairs allow at most 0.91).",
            lambda run: order(run, layers),
            at_least(0.5),
            across="mean",
        ),
        Claim(
            f"gains-{layers}",
            f"Theorem 5, {words}: rank correlation of co-occurrence with the average gain in attention over training.",
            lambda run: order_of_gains(run, layers),
            at_least(0.5),
            across="mean",
        ),
        Claim(
            f"bottom-up-{layers}",
            f"Theorem 5, {words}: siblings' odds double before cousins', and cousins' before all others': least delay, "
            "in steps.",
            lambda run: delay(run, layers),
            at_least(1.0),
        ),
        Claim(
            f"heights-{layers}",
            f"Theorem 5, {words}: the average gain over training falls height by height up to the root: least fall "
            "from one height to the next, in nats.",
            lambda run: fall(run, layers),
            above(0.0),
        ),
        Claim(
            f"high-{layers}",
            f"Slides, {words}: what a high latent joins is learned too, only later: the last gain of pairs of height "
            f"{LEVELS - 1}, in nats.",
            lambda run: high_gain(run, layers),
            above(0.0),
        ),
    )


CLAIMS = (
    *order_claims(1),
    *order_claims(LAYERS),
    Claim(
        "same-tokens",
        "The deep tree and the shallow ones agree in how often each token occurs: largest difference.",
        unlike,
        at_most(1e-12),
    ),
    Claim(
        "later",
        "Slides: tokens that the intermediate latent does not join directly are associated later than in the shallow "
        "tree of the same ρ, in steps.",
        lambda run: later(run, "shallow"),
        at_least(1.0),
    ),
    Claim(
        "later-matched",
        "The intermediate latent itself delays tokens that it does not join directly: later than in a shallow tree "
        "in which they occur together equally often, in steps.",
        lambda run: later(run, "matched"),
        at_least(1.0),
    ),
    Claim(
        "above-siblings",
        "Slides: tokens that the intermediate latent does not join directly are associated in a higher layer than "
        "those that it joins: distance of the gains' centres, in layers.",
        above_siblings,
        above(0.0),
    ),
    Claim(
        "higher",
        "Slides: tokens that the intermediate latent does not join directly are associated in a higher layer than in "
        "the shallow tree of the same ρ: distance of the gains' centres, in layers.",
        lambda run: higher(run, "shallow"),
        above(0.0),
    ),
    Claim(
        "higher-matched",
        "The intermediate latent itself lifts tokens that it does not join directly: a higher layer than in the "
        "shallow tree of equal co-occurrence.",
        lambda run: higher(run, "matched"),
        above(0.0),
    ),
    Claim(
        "higher-beyond-root",
        "Slides, by another measure: tokens that the intermediate latent does not join directly are associated "
        "higher than in the shallow tree of the same ρ, by the centres of what pairs gain beyond those that only the "
        "root joins.",
        lambda run: higher(run, "shallow", where_beyond_root),
        above(0.0),
    ),
)

NAMES = {"deep": "deep", "shallow": "shallow, same ρ", "matched": "shallow, same P[l | m]"}
HEIGHTS = {level: f"height {level}" for level in range(1, LEVELS)} | {LEVELS: "the root"}


def draw_order(run: xr.Dataset) -> Figure:
    """Draw the gains by height over training for one and for three layers, and the times over co-occurrence."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    deep = run.sel(tree="deep")
    for panel, layers, title in ((axes[0, 0], 1, "One layer"), (axes[0, 1], LAYERS, f"Mean of {LAYERS} layers")):
        found = by_height(gains(run, layers), deep.height)
        for place, (level, label) in enumerate(HEIGHTS.items()):
            band(panel, run.step, found.sel(level=level), place, label)
        panel.axhline(DOUBLED, color="0.4", linewidth=0.8)
        panel.set(xlabel="step", ylabel="gain in attention / nats", title=title)
        _room_above(panel)
        panel.legend(title="joined at", title_fontsize=8, loc="upper center", ncols=2)
    together = by_height(deep.cooccurrence, deep.height)
    for place, layers in enumerate((1, LAYERS)):
        times = by_height(doubling_time(gains(run, layers)), deep.height)
        label = f"{layers} layer{'s' * (layers > 1)}: {float(order(run, layers).mean()):.2f}"
        measured(axes[0, 2], together, times, place, label, markersize=6)
    axes[0, 2].set(xlabel="co-occurrence P[l | m], Theorem 5", ylabel="odds doubled at step", title="When")
    axes[0, 2].set_ylim(0, None)
    axes[0, 2].legend(title="rank correlation", title_fontsize=8, loc="lower left")
    letters(axes)
    return figure


def _room_above(panel: Axes) -> None:
    """Leave the upper third of a panel to its legend."""
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + (high - low) / 2)


def draw_depth(run: xr.Dataset) -> Figure:
    """Draw when and in which layer the deep tree's cousins are associated, there and in the shallow trees."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    curves, last = run.gain.mean("layer"), run.gain.isel(step=-1)
    times = doubling_time(curves)
    shown = [(name, COUSINS, label) for name, label in NAMES.items()] + [("deep", SIBLINGS, "deep, siblings")]
    for place, (name, height, label) in enumerate(shown):
        curve, time, layered = (followed(own, run, height).sel(tree=name) for own in (curves, times, last))
        band(axes[0, 0], run.step, curve, place, label)
        measured(axes[0, 1], time, where(run, height).sel(tree=name).values, place, label, markersize=6)
        theory(axes[0, 2], run.layer, layered.mean("seed"), place, linewidth=0.8)
        measured(axes[0, 2], run.layer, layered.transpose("seed", "layer"), place, label)
    axes[0, 0].axhline(DOUBLED, color="0.4", linewidth=0.8)
    axes[0, 0].set(xlabel="step", ylabel="gain in attention / nats", title="Cousins of the deep tree")
    _room_above(axes[0, 0])
    axes[0, 0].legend(loc="upper left")
    axes[0, 1].set(xlabel="odds doubled at step", ylabel="centre of the gain / layer", title="When and where")
    axes[0, 1].legend(loc="best")
    axes[0, 2].axhline(0, color="0.4", linewidth=0.8)
    axes[0, 2].set(xlabel="layer", ylabel="last gain / nats", title="Layer by layer", xticks=run.layer.values)
    letters(axes)
    return figure


def draw_matrices(run: xr.Dataset) -> Figure:
    """Draw token by token: Theorem 5's co-occurrence, and the gain's average over training."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    one = early_gain(gains(run, 1)).mean("seed")
    three = early_gain(gains(run, LAYERS)).mean("seed")
    pictures = {
        "Theorem 5": (run.cooccurrence.sel(tree="deep"), "P[l | m]"),
        "Trained, one layer": (one, "average gain / nats"),
        f"Trained, {LAYERS} layers": (three, "average gain / nats"),
    }
    for panel, (title, (values, label)) in zip(axes[0], pictures.items(), strict=True):
        picture = np.full((TOKENS, TOKENS), np.nan)
        picture[run.one, run.other] = picture[run.other, run.one] = values
        image = panel.imshow(picture, cmap="Greys")
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
    version=3,
    presets={
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
