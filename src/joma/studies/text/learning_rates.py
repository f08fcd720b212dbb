"""The learning-rate figure: at which rates does attention bounce, when, and at which does it collapse?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.arguments import distinct, positive, whole
from joma.report.figure import COLOURS, band, canvas, letters, measured
from joma.studies.text import language_training
from joma.studies.text.language_training import LEAST, SURE, bounces, mark_least
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, at_least, at_most

COLLAPSED = 0.1  # of its start, to which a layer's entropy has fallen if its attention collapsed; ours as well
LOSS = 0.1  # nats by which a collapsed model is worse; ours
THEIRS = 1e-4  # the rate of the paper's other figures


@dataclass(frozen=True)
class Config(language_training.Setting):
    """The setting, the depth and the rates; `rate` itself is not used."""

    layers: int = 5
    rates: tuple[float, ...] = (1e-6, 4.64e-6, 2.15e-5, 1e-4, 4.64e-4, 2.15e-3, 1e-2)


def run(config: Config, context: Context) -> xr.Dataset:
    """Train all rates and seeds at once: at each rate a seed has the same start, text and dropout."""
    rates = distinct("rates", [float(rate) for rate in positive("rates", config.rates, ndim=1)])
    layers, text = whole("layers", config.layers), language_training.read_text(config, context)
    label = f"learning-rates, {layers} layers"
    found = language_training.train(config, context, text, layers=layers, label=label, rates=sorted(rates))
    return measured_in(found)


def measured_in(found: xr.Dataset) -> xr.Dataset:
    """Add the bounce of entropy's mean over layers, and that of each layer (`layer_bounce`, `layer_turn`)."""
    layers = bounces(found.entropy, each_layer=True)[["bounce", "turn"]]
    return found.merge(bounces(found.entropy)).merge(layers.rename(bounce="layer_bounce", turn="layer_turn"))


def kept(run: xr.Dataset) -> xr.DataArray:
    """Entropy at the end over that at the start, of the layer that kept least [rate, seed]; 0 for a seed lost."""
    entropy = run.entropy.mean("head")
    return (entropy.isel(step=-1) / entropy.isel(step=0)).fillna(0.0).min("layer")


def final_loss(run: xr.Dataset) -> xr.DataArray:
    """Validation loss at the end [rate, seed]; infinite for a seed lost."""
    return run.valid_loss.isel(step=-1).fillna(np.inf)


def best(run: xr.Dataset) -> float:
    """The rate of the least validation loss at the end, mean over seeds."""
    return float(final_loss(run).mean("seed").idxmin("rate"))


def hastening(run: xr.Dataset, bounce: str = "bounce", turn: str = "turn") -> float:
    """Slope of ln(step of the minimum) over ln(rate) where attention bounces; NaN unless it does at two rates.

    Of layers it is one slope through all, each from a level of its own; NaN unless one does so at two rates.
    """
    there = run[bounce] >= LEAST
    parts = run.rate.broadcast_like(run[turn]).where(there), run[turn].where(there & (run[turn] > 0))
    rate, step = (xr.DataArray(np.log(own)) for own in parts)
    within = [axis for axis in ("rate", "seed") if axis in there.dims]
    rate, step = rate - rate.mean(within), step - step.mean(within)
    spread = float((rate**2).sum())
    return float((rate * step).sum()) / spread if spread > 1e-12 else np.nan


def cost(run: xr.Dataset) -> xr.DataArray:
    """Validation loss at the end at the greatest rate, less that at the best one, per seed."""
    loss = final_loss(run)
    return loss.sel(rate=run.rate.max(), drop=True) - loss.sel(rate=best(run), drop=True)


def at_theirs(run: xr.Dataset, bounce: str = "bounce") -> xr.DataArray:
    """The bounce at the paper's rate, per seed; `NotInRun` where it was not trained."""
    there = np.isclose(run.rate, THEIRS, rtol=1e-3, atol=0.0)
    if not there.any():
        raise NotInRun
    return run[bounce].isel(rate=int(there.argmax()))


_SIZE = "less of fall and recovery beyond chance, over the start"
_BOUNCE = f"{_SIZE}, 0 unless p ≤ {SURE:g}"

CLAIMS = (
    Claim(
        "bounces",
        f"There is a rate at which entropy falls and bounces back ({_BOUNCE}; the threshold is ours).",
        lambda run: run.bounce.max("rate"),
        at_least(LEAST),
    ),
    Claim(
        "bounces-1e-4",
        f"At the paper's rate, 1e-4, entropy falls and bounces back ({_BOUNCE}).",
        at_theirs,
        at_least(LEAST),
        presets=("paper",),
    ),
    Claim(
        "layer-1e-4",
        f"Layers apart, as the paper draws them: at its rate, 1e-4, one falls and bounces back ({_SIZE}, of the layer "
        f"that does most, 0 unless p ≤ {SURE:g} over the number of layers).",
        lambda run: at_theirs(run, "layer_bounce").max("layer"),
        at_least(LEAST),
        presets=("paper",),
    ),
    Claim(
        "slow",
        f"At the lowest rate entropy does not yet bounce by the end ({_BOUNCE}).",
        lambda run: run.bounce.sel(rate=run.rate.min(), drop=True),
        at_most(LEAST),
    ),
    Claim(
        "sooner",
        "The higher the rate, the sooner the minimum: slope of ln step over ln rate among the runs that bounce. "
        "The flow's clock is rate times step, a slope of −1; that half of it will do is our choice.",
        hastening,
        at_most(-0.5),
        presets=("paper",),
    ),
    Claim(
        "layer-sooner",
        "Layer by layer, too, the higher the rate, the sooner the minimum: slope of ln step over ln rate among the "
        "layers that bounce, each from a level of its own.",
        lambda run: hastening(run, "layer_bounce", "layer_turn"),
        at_most(-0.5),
        presets=("paper",),
    ),
    Claim(
        "collapse",
        "At the greatest rate attention collapses: entropy that the sparsest layer has left, over its start "
        "(the threshold is ours).",
        lambda run: kept(run).sel(rate=run.rate.max(), drop=True),
        at_most(COLLAPSED),
    ),
    Claim(
        "cost",
        "Collapse costs: validation loss at the end, the greatest rate's less the best rate's (the threshold is ours).",
        cost,
        at_least(LOSS),
    ),
    Claim(
        "best",
        f"At the rate of the least validation loss attention bounces ({_BOUNCE}).",
        lambda run: run.bounce.sel(rate=best(run), drop=True),
        at_least(LEAST),
    ),
)


def draw_entropy(run: xr.Dataset) -> Figure:
    """Draw entropy against the step at every rate, a panel a layer, the least value marked."""
    layers = run.sizes["layer"]
    figure, axes = canvas(1, layers, width=2.9, height=2.9, sharey=True)
    for layer, panel in enumerate(axes[0]):
        for place, rate in enumerate(run.rate.values):
            curve = run.entropy.sel(rate=rate).isel(layer=layer).mean("head")
            band(panel, run.step + 1, curve, place, f"{rate:.3g}")
            mark_least(panel, curve, place)
        panel.set(xscale="log", xlabel="step + 1", title=f"layer {layer}")
    axes[0, 0].set_ylabel("attention entropy (nats)")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, title="learning rate", loc="outside lower center", ncols=run.sizes["rate"])
    letters(axes)
    return figure


def draw_rates(run: xr.Dataset) -> Figure:
    """Draw against the rate: the bounce and what entropy is left, the step of the minimum, the loss at the end."""
    figure, axes = canvas(1, 3, width=3.1, height=2.7)
    measured(axes[0, 0], run.rate, run.bounce.transpose("rate", "seed"), 0, "bounce", linestyle="-")
    measured(axes[0, 0], run.rate, kept(run), 1, "left in the sparsest layer", linestyle="--")
    for place, level in enumerate((LEAST, COLLAPSED)):
        axes[0, 0].axhline(level, color=COLOURS[place], linewidth=0.7, alpha=0.6)
    axes[0, 0].set(ylabel="share of the entropy at the start", ylim=(-0.05, 1.4))
    axes[0, 0].legend(loc="upper left")
    there, fell = run.bounce >= LEAST, run.fall >= LEAST * (run.fall + run.least)
    for place, (kind, chosen) in enumerate({"bounces": there, "falls only": fell & ~there}.items()):
        if chosen.any():
            _draw_turns(axes[0, 1], run.turn.where(chosen), 1 - place, kind)
            axes[0, 1].legend()
    loss = final_loss(run).where(np.isfinite(final_loss(run)))
    measured(axes[0, 2], run.rate, loss.transpose("rate", "seed"), 0, linestyle="-")
    axes[0, 2].set(ylabel="validation loss at the end (nats)")
    for panel in axes[0]:
        panel.set(xscale="log", xlabel="learning rate")
    letters(axes)
    return figure


def _draw_turns(panel: Axes, turn: xr.DataArray, place: int, label: str) -> None:
    """Draw steps of minima [rate, seed] against the rate, a point each; NaN is left out."""
    points = turn.stack(one=("rate", "seed")).dropna("one")
    measured(panel, points.rate, np.asarray(points) + 1, place, label)
    panel.set(ylabel="step of the minimum + 1", yscale="log")


def draw_layers(run: xr.Dataset) -> Figure:
    """Draw the bounce of every layer at every rate, mean over seeds, and the step of the minimum where it is one."""
    figure, axes = canvas(1, 2, width=4.2, height=max(2.7, 0.9 + 0.3 * run.sizes["layer"]))
    shown = run.layer_bounce.mean("seed").transpose("layer", "rate")
    image = axes[0, 0].imshow(shown, cmap="cividis", vmin=0, aspect="auto")
    figure.colorbar(image, ax=axes[0, 0], label="bounce (share of the start)")
    axes[0, 0].grid(visible=False)
    axes[0, 0].set_xticks(range(run.sizes["rate"]), [f"{rate:.3g}" for rate in run.rate.values], rotation=45)
    axes[0, 0].set_yticks(range(run.sizes["layer"]))
    axes[0, 0].set(xlabel="learning rate", ylabel="layer")
    for layer in range(run.sizes["layer"]):
        own = run.isel(layer=layer)
        _draw_turns(axes[0, 1], own.layer_turn.where(own.layer_bounce >= LEAST), layer, f"layer {layer}")
    axes[0, 1].set(xscale="log", xlabel="learning rate")
    axes[0, 1].set_xlim(0.7 * float(run.rate.min()), 1.4 * float(run.rate.max()))
    axes[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    letters(axes)
    return figure


STUDY = Study(
    name="learning-rates",
    title="Too slow to bounce, a bounce, a collapse: attention by learning rate",
    source="JoMA, the figure of learning rates on WikiText-2 (arXiv 2310.00535)",
    about=(
        "One language model is trained at rates from far too low to far too high, every seed with the same start, text "
        "and dropout at each. A bounce is judged on entropy's mean over layers, and of each layer by itself, against a "
        "curve that never rises with noise of the size seen; a collapse on the layer that has least entropy left. The "
        "seven rates of the paper preset are evenly spaced in their logarithm, which is our choice. The quick preset "
        "has two layers and three rates, and reads its small text less than twice, where the paper reads its own "
        "twenty times."
    ),
    version=2,
    presets={
        "quick": Preset(Config(**language_training.small(), layers=2, rates=(1e-3, 3e-3, 1e-2)), seeds=3, seconds=35.0),
        "paper": Preset(Config(**language_training.wikitext()), seeds=3, seconds=900_000.0),  # an estimate
    },
    run=run,
    claims=CLAIMS,
    figures={
        "entropy": Drawing(
            draw_entropy,
            "Attention entropy over the validation text by layer and learning rate, mean and range over seeds; marks: "
            "where the mean is least.",
        ),
        "rates": Drawing(
            draw_rates,
            "By learning rate, mean and range over seeds: (a) the bounce and the entropy that is left at the end in "
            "the sparsest layer, thin lines the thresholds of a bounce and of a collapse; (b) the step at which "
            "entropy, mean over layers, is least, one point a seed where it falls; (c) validation loss at the end.",
        ),
        "layers": Drawing(
            draw_layers,
            "(a) The bounce of each layer's entropy by learning rate, mean over seeds; 0 where noise would rise as "
            "clearly. (b) The step at which a layer's entropy is least, one point a seed where it bounces.",
        ),
    },
    threads=1,
    inputs=language_training.inputs,
)
