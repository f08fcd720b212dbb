"""The WikiText-2 figure: on real text attention falls sparse and becomes dense again, and deeper models learn more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.arguments import distinct, whole
from joma.drawing import COLOURS, LINES, band, canvas, letters
from joma.studies.text import language_training
from joma.studies.text.entropy_bounce import MIN_BOUNCE, bounce_p_value
from joma.studies.text.language_training import QUICK_RATE, LayeredSetting, Variant
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, at_least, at_most, near, select

PUBLISHED_LOSS = {1: 5.356, 2: 5.255, 5: 5.167, 10: 5.109}  # least validation loss by layers, mean of 3 seeds
WIKITEXT2 = {"types": 28_782, "tokens": 2_049_990}  # of the training text, by torchtext's rules
AUTHORS_LAYOUT = {"columns": 10, "length": 35}  # of the validation text, of which the authors show one window
FALL_STEPS = 4_000  # within which the attention of the one-layer model must fall
# The authors' own curves (arXiv 2310.00535), 3 seeds, every 1,000 steps.
PUBLISHED_CURVES = Path(__file__).with_name("wikitext2.csv")


@dataclass(frozen=True)
class Config(LayeredSetting):
    """The setting of text, the model and its training, and the numbers of layers that are trained."""

    activation: str = "relu"
    rate: float = 1e-4
    depths: tuple[int, ...] = (1, 2, 5, 10)


def run(config: Config, context: Context) -> xr.Dataset:
    """Train a model of each depth, all seeds at once."""
    depths = [whole("depths", depth) for depth in distinct("depths", config.depths)]
    text = language_training.read_text(config, context)
    trajectories = [
        language_training.train(
            config,
            context,
            text,
            Variant(depth, config.activation, config.alike),
            rate=config.rate,
            label=f"entropy-text, {depth} layers",
        )
        for depth in depths
    ]
    axis = xr.DataArray(depths, dims="depth", name="depth")
    trajectory = xr.concat(trajectories, axis, join="outer", combine_attrs="drop")
    layout = {"columns": text.valid.shape[0], "length": text.length, "glance": config.glance or 0}
    return trajectory.assign_attrs(types=text.types, tokens=int(text.counts.sum()), epoch=text.epoch, **layout)


@cache
def published() -> xr.Dataset:
    """Return the authors' curves: `entropy` and `valid_loss` over depth, layer, seed and step.

    >>> round(float(published().valid_loss.sel(depth=1).min("step").mean()), 3)
    5.356
    """
    table = np.genfromtxt(PUBLISHED_CURVES, delimiter=",", names=True)
    columns = {"depth": "layers", "layer": "layer", "seed": "seed", "step": "step"}
    labels = {axis: table[column].astype(int) for axis, column in columns.items()}
    coords = {axis: np.unique(values) for axis, values in labels.items()}
    row_indices = tuple(np.searchsorted(coords[axis], values) for axis, values in labels.items())
    curves = {}
    for name in ("entropy", "valid_loss"):
        values = np.full([coordinate.size for coordinate in coords.values()], np.nan)
        values[row_indices] = table[name]
        curves[name] = (tuple(coords), values)
    return xr.Dataset(curves, coords).assign(valid_loss=lambda dataset: dataset.valid_loss.isel(layer=0))


def on_wikitext(run: xr.Dataset) -> bool:
    """Return whether the text is WikiText-2, tokenised into words, by the numbers of its types and of its tokens."""
    return _has_attributes(run, WIKITEXT2)


def _has_attributes(run: xr.Dataset, numbers: Mapping[str, int]) -> bool:
    return all(int(run.attrs.get(name, 0)) == number for name, number in numbers.items())


def _comparable(run: xr.Dataset, depth: int) -> xr.Dataset:
    """Select one depth of a run on WikiText-2; `NotInRun` on any other text, of which nothing was published."""
    if not on_wikitext(run):
        raise NotInRun
    return select(run, depth=depth)


def first_layer(run: xr.Dataset) -> xr.DataArray:
    """Return the entropy of the one-layer model on WikiText-2, mean over heads, [seed, step]."""
    return _comparable(run, 1).entropy.isel(layer=0).mean("head").transpose("seed", "step")


def best_loss(run: xr.Dataset, depth: int) -> xr.DataArray:
    """Return the least validation loss on WikiText-2, per seed."""
    return _comparable(run, depth).valid_loss.min("step")


def fall(run: xr.Dataset, within: int) -> xr.DataArray:
    """Return how far entropy falls from its start within so many steps, per seed."""
    curve = first_layer(run)
    return curve.isel(step=0) - curve.sel(step=slice(0, within)).min("step")


def recovery(run: xr.Dataset) -> xr.DataArray:
    """Return how far entropy recovers from its minimum by the end, per seed."""
    curve = first_layer(run)
    return curve.isel(step=-1) - curve.min("step")


def distance(run: xr.Dataset, depth: int) -> float:
    """Return the mean absolute distance of entropy over all validation text from the published curves, by layer.

    The mean over seeds is compared with the authors' mean: a single run of ten layers is further
    from it, the authors' runs too.
    `NotInRun` where not all of that text was read, or not at all steps of the published curves.
    """
    if not _has_attributes(run, {"glance": 0}):
        raise NotInRun
    return _distance_from_published(_comparable(run, depth).entropy, depth)


def window_distance(run: xr.Dataset, depth: int) -> float:
    """Return the same distance in the window that the authors show; `NotInRun` where that window was not read."""
    trajectory = _comparable(run, depth)
    if "window_entropy" not in trajectory or not _has_attributes(run, AUTHORS_LAYOUT):
        raise NotInRun
    return _distance_from_published(trajectory.window_entropy, depth)


def _distance_from_published(entropy: xr.DataArray, depth: int) -> float:
    authors_mean = published().entropy.sel(depth=depth, layer=range(depth)).mean("seed")
    if not np.isin(authors_mean.step, entropy.step).all():
        raise NotInRun
    mean = entropy.sel(step=authors_mean.step, layer=authors_mean.layer).mean(("seed", "head"), skipna=False)
    return float(abs(mean - authors_mean).mean(skipna=False))


def largest_rise(run: xr.Dataset) -> xr.DataArray:
    """Return the largest rise of the least validation loss from one depth to the next, per seed; below 0 if none.

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
        for depth, value in PUBLISHED_LOSS.items()
    ),
    Claim(
        "fall",
        f"WikiText-2, 1 layer: attention falls sparse within {FALL_STEPS:,} steps, entropy by so many nats (mean, as "
        "published).",
        partial(fall, within=FALL_STEPS),
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
        f"unless it falls by {MIN_BOUNCE:.0%} of its start and comes back from there.",
        lambda run: bounce_p_value(select(run, depth=1).entropy.isel(layer=[0])),
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
        for depth in PUBLISHED_LOSS
    ),
    Claim(
        "deeper",
        "Deeper models reach a lower loss; largest rise from one depth to the next, mean over seeds as published.",
        largest_rise,
        at_most(0.0),
        across="mean",
    ),
)


def draw_entropy(run: xr.Dataset) -> Figure:
    """Draw the entropy of every layer against the step, a panel a depth; on WikiText-2 with the authors' curves."""
    depths = [int(depth) for depth in run.depth]
    figure, axes = canvas(1, len(depths), width=2.9, sharey=True)
    authors = published().reindex(depth=depths, layer=range(max(depths))) if on_wikitext(run) else None
    for panel, depth in zip(axes[0], depths, strict=True):
        for layer in range(depth):
            colour = colormaps["viridis"](0.9 * layer / max(1, depth - 1))
            look = {"color": colour, "linestyle": LINES[layer % len(LINES)]}
            label = f"layer {layer}" if layer in (0, depth // 2, depth - 1) else None
            entropy = run.entropy.sel(depth=depth).mean("head").sel(layer=layer)
            steps = entropy.step + 1
            panel.plot(steps, entropy.mean("seed"), **look, label=label)
            panel.fill_between(steps, entropy.min("seed"), entropy.max("seed"), color=colour, alpha=0.15, linewidth=0)
            if authors is not None:
                _draw_published(panel, authors.entropy.sel(depth=depth, layer=layer), colour)
        panel.set(xscale="log", xlabel="step + 1", title=f"{depth} layer{'s' * (depth > 1)}")
        panel.legend()
    axes[0, 0].set_ylabel("attention entropy (nats)")
    letters(axes)
    return figure


def _draw_published(panel: Axes, entropy: xr.DataArray, colour: tuple[float, ...]) -> None:
    """Draw the mean over the authors' seeds as dots and their range as thin lines."""
    steps = entropy.step + 1
    panel.plot(steps, entropy.mean("seed"), ".", color=colour, markersize=2.5, alpha=0.6)
    panel.vlines(steps, entropy.min("seed"), entropy.max("seed"), color=colour, linewidth=0.5, alpha=0.3)


def draw_learning(run: xr.Dataset) -> Figure:
    """Draw the validation loss, and the stable rank of the lowest MLP's lower weights, against the step."""
    figure, axes = canvas(1, 2)
    for index, depth in enumerate(int(depth) for depth in run.depth):
        trajectory = run.sel(depth=depth)
        label = f"{depth} layer{'s' * (depth > 1)}"
        band(axes[0, 0], trajectory.step + 1, trajectory.valid_loss, index, label)
        band(axes[0, 1], trajectory.step + 1, trajectory.stable_rank.isel(layer=0), index, label)
        best = float(trajectory.valid_loss.min("step").mean())
        axes[0, 0].axhline(best, color=COLOURS[index % len(COLOURS)], linewidth=0.6, alpha=0.5)
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
        "quick": Preset(
            Config(**language_training.quick_fields(steps=1_500, every=50), rate=QUICK_RATE, depths=(1, 2)),
            seeds=3,
            seconds=75.0,
        ),
        "paper": Preset(Config(**language_training.paper_fields()), seeds=3, seconds=500_000.0),
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
