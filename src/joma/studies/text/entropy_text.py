"""The WikiText-2 figure: on real text attention falls sparse and becomes dense again, and deeper models learn more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.figure import Figure

from joma.arguments import distinct, whole
from joma.report.figure import COLOURS, LINES, band, canvas, letters
from joma.studies.text import language_training
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, at_least, at_most, near, select

BEST = {1: 5.356, 2: 5.255, 5: 5.167, 10: 5.109}  # published: least validation loss by layers, mean of 3 seeds
WIKITEXT2 = {"types": 28_782, "tokens": 2_049_990}  # of the training text, by torchtext's rules
LAID_OUT = {"columns": 10, "length": 35}  # the authors' validation text, of which they show one window
EARLY = 4_000  # steps within which the one-layer model's attention is to fall
# The authors' own curves (arXiv 2310.00535), 3 seeds, every 1,000 steps.
PUBLISHED = Path(__file__).with_name("wikitext2.csv")


@dataclass(frozen=True)
class Config(language_training.Setting):
    """The setting, and the numbers of layers that are trained."""

    depths: tuple[int, ...] = (1, 2, 5, 10)


def run(config: Config, context: Context) -> xr.Dataset:
    """Train a model of each depth, all seeds at once."""
    depths = [whole("depths", depth) for depth in distinct("depths", config.depths)]
    text = language_training.read_text(config, context)
    parts = [
        language_training.train(config, context, text, layers=depth, label=f"entropy-text, {depth} layers")
        for depth in depths
    ]
    found = xr.concat(parts, xr.DataArray(depths, dims="depth", name="depth"), join="outer", combine_attrs="drop")
    laid_out = {"columns": text.valid.shape[0], "length": text.length, "glance": config.glance or 0}
    return found.assign_attrs(types=text.types, tokens=int(text.counts.sum()), epoch=text.epoch, **laid_out)


@cache
def published() -> xr.Dataset:
    """The authors' curves: `entropy` and `valid_loss` over depth, layer, seed and step.

    >>> round(float(published().valid_loss.sel(depth=1).min("step").mean()), 3)
    5.356
    """
    table = np.genfromtxt(PUBLISHED, delimiter=",", names=True)
    axes = {
        "depth": table["layers"].astype(int),
        "layer": table["layer"].astype(int),
        "seed": table["seed"].astype(int),
        "step": table["step"].astype(int),
    }
    coords = {name: np.unique(values) for name, values in axes.items()}
    found = {}
    for name in ("entropy", "valid_loss"):
        values = np.full([own.size for own in coords.values()], np.nan)
        values[tuple(np.searchsorted(coords[axis], own) for axis, own in axes.items())] = table[name]
        found[name] = (tuple(coords), values)
    return xr.Dataset(found, coords).assign(valid_loss=lambda own: own.valid_loss.isel(layer=0))


def on_wikitext(run: xr.Dataset) -> bool:
    """Whether the text is WikiText-2, as words: by the numbers of its types and of its tokens."""
    return _says(run, WIKITEXT2)


def _says(run: xr.Dataset, numbers: Mapping[str, int]) -> bool:
    return all(int(run.attrs.get(name, 0)) == number for name, number in numbers.items())


def _published(run: xr.Dataset, depth: int) -> xr.Dataset:
    """One depth of a run on WikiText-2; `NotInRun` on any other text, of which nothing was published."""
    if not on_wikitext(run):
        raise NotInRun
    return select(run, depth=depth)


def first_layer(run: xr.Dataset) -> xr.DataArray:
    """Entropy of the one-layer model on WikiText-2, mean over heads, [seed, step]."""
    return _published(run, 1).entropy.isel(layer=0).mean("head").transpose("seed", "step")


def best_loss(run: xr.Dataset, depth: int) -> xr.DataArray:
    """The least validation loss on WikiText-2, per seed."""
    return _published(run, depth).valid_loss.min("step")


def fall(run: xr.Dataset, within: int) -> xr.DataArray:
    """How far entropy falls from its start within so many steps, per seed."""
    curve = first_layer(run)
    return curve.isel(step=0) - curve.sel(step=slice(0, within)).min("step")


def recovery(run: xr.Dataset) -> xr.DataArray:
    """How far entropy comes back from its least value to the end, per seed."""
    curve = first_layer(run)
    return curve.isel(step=-1) - curve.min("step")


def distance(run: xr.Dataset, depth: int) -> float:
    """Mean absolute distance of entropy over the whole validation text from the published curves, layer by layer.

    Of the mean over seeds from the mean over theirs: a single run of ten layers is further from that, theirs too.
    `NotInRun` where not all of that text was read, or not at all steps of the published curves.
    """
    if not _says(run, {"glance": 0}):
        raise NotInRun
    return _apart(_published(run, depth).entropy, depth)


def window_distance(run: xr.Dataset, depth: int) -> float:
    """The same of the entropy in the window that the authors show; `NotInRun` where it was not read, or is another."""
    own = _published(run, depth)
    if "window_entropy" not in own or not _says(run, LAID_OUT):
        raise NotInRun
    return _apart(own.window_entropy, depth)


def _apart(entropy: xr.DataArray, depth: int) -> float:
    theirs = published().entropy.sel(depth=depth, layer=range(depth)).mean("seed")
    if not np.isin(theirs.step, entropy.step).all():
        raise NotInRun
    ours = entropy.sel(step=theirs.step, layer=theirs.layer).mean(("seed", "head"), skipna=False)
    return float(abs(ours - theirs).mean(skipna=False))


def deeper(run: xr.Dataset) -> xr.DataArray:
    """The largest rise of the least validation loss from one depth to the next, per seed; below 0 if there is none.

    `NotInRun` where there is one depth only.
    """
    if run.sizes["depth"] < 2:
        raise NotInRun
    best = run.valid_loss.sortby("depth").min("step")
    return (best - best.shift(depth=1)).max("depth")


CLAIMS = (
    *(
        Claim(
            f"loss-{depth}",
            f"WikiText-2, {depth} layer{'s' * (depth > 1)}: least validation loss, as published.",
            partial(best_loss, depth=depth),
            near(value, 0.02),
            across="mean",
            presets=("paper",),
        )
        for depth, value in BEST.items()
    ),
    Claim(
        "fall",
        f"WikiText-2, 1 layer: attention falls sparse within {EARLY:,} steps, entropy by so many nats (mean, as "
        "published).",
        partial(fall, within=EARLY),
        at_least(0.8),
        across="mean",
        presets=("paper",),
    ),
    Claim(
        "recovery",
        "WikiText-2, 1 layer: attention becomes dense again, entropy comes back by so many nats by the end (mean).",
        recovery,
        at_least(0.4),
        across="mean",
        presets=("paper",),
    ),
    Claim(
        "bounce",
        "One layer: entropy falls and bounces back; how often noise on a curve that never rises would look so, 1 "
        f"unless it falls by {language_training.LEAST:.0%} of its start and comes back from there.",
        lambda run: language_training.chance(select(run, depth=1).entropy.isel(layer=[0])),
        at_most(0.01),
    ),
    *(
        Claim(
            kind if depth == 1 else f"{kind}-{depth}",
            f"WikiText-2, {depth} layer{'s' * (depth > 1)}: entropy {where} is along training the published curve"
            f"{'s, layer by layer' * (depth > 1)}; mean absolute distance in nats, of the mean over seeds from theirs.",
            partial(measure, depth=depth),
            at_most(0.1),
            presets=("paper",),
            seeds=3,
        )
        for kind, measure, where in (
            ("curve", distance, "over the whole validation text"),
            ("window", window_distance, "in the window that the authors show"),
        )
        for depth in BEST
    ),
    Claim(
        "deeper",
        "Deeper models reach a lower loss; largest rise from one depth to the next, mean over seeds as published.",
        deeper,
        at_most(0.0),
        across="mean",
    ),
)


def draw_entropy(run: xr.Dataset) -> Figure:
    """Entropy of every layer against the step, a panel a depth; on WikiText-2 the authors' curves over it."""
    depths = [int(depth) for depth in run.depth]
    figure, axes = canvas(1, len(depths), width=2.9, sharey=True)
    theirs = published().reindex(depth=depths, layer=range(max(depths))) if on_wikitext(run) else None
    for panel, depth in zip(axes[0], depths, strict=True):
        ours = run.entropy.sel(depth=depth).mean("head")
        for layer in range(depth):
            own, colour = ours.sel(layer=layer), colormaps["viridis"](0.9 * layer / max(1, depth - 1))
            label = f"layer {layer}" if layer in (0, depth // 2, depth - 1) else None
            panel.plot(own.step + 1, own.mean("seed"), color=colour, linestyle=LINES[layer % len(LINES)], label=label)
            panel.fill_between(own.step + 1, own.min("seed"), own.max("seed"), color=colour, alpha=0.15, linewidth=0)
            if theirs is not None:
                dots, at = theirs.entropy.sel(depth=depth, layer=layer), theirs.step + 1
                panel.plot(at, dots.mean("seed"), ".", color=colour, markersize=2.5, alpha=0.6)
                panel.vlines(at, dots.min("seed"), dots.max("seed"), color=colour, linewidth=0.5, alpha=0.3)
        panel.set(xscale="log", xlabel="step + 1", title=f"{depth} layer{'s' * (depth > 1)}")
        panel.legend()
    axes[0, 0].set_ylabel("attention entropy (nats)")
    letters(axes)
    return figure


def draw_learning(run: xr.Dataset) -> Figure:
    """Validation loss, and the stable rank of the lowest MLP's lower weights, against the step."""
    figure, axes = canvas(1, 2)
    for index, depth in enumerate(int(depth) for depth in run.depth):
        own = run.sel(depth=depth)
        label = f"{depth} layer{'s' * (depth > 1)}"
        band(axes[0, 0], own.step + 1, own.valid_loss, index, label)
        band(axes[0, 1], own.step + 1, own.stable_rank.isel(layer=0), index, label)
        best = float(own.valid_loss.min("step").mean())
        axes[0, 0].axhline(best, color=COLOURS[index], linewidth=0.6, alpha=0.5)
    axes[0, 0].set(xscale="log", xlabel="step + 1", ylabel="validation loss (nats)")
    axes[0, 1].set(xscale="log", xlabel="step + 1", ylabel="stable rank of the lowest MLP")
    axes[0, 0].legend()
    letters(axes)
    return figure


STUDY = Study(
    name="entropy-text",
    title="On text, attention falls sparse and bounces back",
    source="arXiv 2310.00535, the WikiText-2 figure; figures of the authors' own runs",
    about=(
        "Language models of several depths on real text, in the authors' setting, three seeds at once: the entropy of "
        "attention over the validation text (at the preset paper all of it, at quick the beginning of each column, as "
        "`glance` says), layer by layer, the validation loss, and the stable rank of the MLP's lower weights; on "
        "WikiText-2 beside the authors' published curves (dots, of one window), and only there are figures that "
        "were published judged. Their code makes a new Adam at every epoch, and so do we; `--set restart=False` keeps "
        "one throughout. Its layers start as copies of one, and so do ours, unless `--set alike=False`."
    ),
    version=3,
    presets={
        "quick": Preset(Config(**language_training.small(steps=1_500, every=50), depths=(1, 2)), seeds=3, seconds=75.0),
        "paper": Preset(Config(**language_training.wikitext()), seeds=3, seconds=500_000.0),
    },
    run=run,
    claims=CLAIMS,
    figures={
        "entropy": Drawing(
            draw_entropy,
            "Attention entropy over the validation text that is read (`glance`) by layer, mean and range over seeds; "
            "dots and thin lines, on WikiText-2: mean and range of the authors' own three.",
        ),
        "learning": Drawing(
            draw_learning,
            "(a) Validation loss, thin lines its least mean. (b) Stable rank of the first MLP's lower weights.",
        ),
    },
    threads=1,
    inputs=language_training.inputs,
)
