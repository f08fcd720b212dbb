"""The learning-rate figure: at which rates does attention bounce, when, and at which does it collapse?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.arguments import distinct, positive, whole
from joma.drawing import COLOURS, band, canvas, letters, measured
from joma.studies.text import language_training
from joma.studies.text.entropy_bounce import BOUNCE, MIN_BOUNCE, SIGNIFICANCE, bounces, is_complete, mark_minimum
from joma.studies.text.language_training import LayeredSetting, Variant
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, at_least, at_most, below

COLLAPSE = 0.1  # share of its start to which a layer's entropy falls if its attention collapses; the choice is ours
MIN_COST = 0.1  # nats by which a collapsed model is worse; the choice is ours
AUTHORS_RATE = 1e-4  # the rate of the paper's other figures


@dataclass(frozen=True)
class Config(LayeredSetting):
    """The setting of text, the model, and the learning rates at which it is trained."""

    activation: str = "relu"
    layers: int = 5
    rates: tuple[float, ...] = (1e-6, 4.64e-6, 2.15e-5, 1e-4, 4.64e-4, 2.15e-3, 1e-2)


def run(config: Config, context: Context) -> xr.Dataset:
    """Train all rates and seeds at once: at each rate a seed has the same start, text and dropout."""
    rates = distinct("rates", [float(rate) for rate in positive("rates", config.rates, ndim=1)])
    variant = Variant(whole("layers", config.layers), config.activation, config.alike)
    text = language_training.read_text(config, context)
    label = f"learning-rates, {variant.layers} layers"
    trajectory = language_training.train(config, context, text, variant, rate=sorted(rates), label=label)
    return add_bounces(trajectory)


def add_bounces(trajectory: xr.Dataset) -> xr.Dataset:
    """Add the bounce of entropy's mean over layers, and that of each layer (`layer_bounce`, `layer_turn`)."""
    by_layer = bounces(trajectory.entropy, each_layer=True)[["bounce", "turn"]]
    by_layer = by_layer.rename(bounce="layer_bounce", turn="layer_turn")
    return trajectory.merge(bounces(trajectory.entropy)).merge(by_layer)


def entropy_left(run: xr.Dataset) -> xr.DataArray:
    """Return the final over the initial entropy, of the layer where this ratio is least [rate, seed].

    NaN for a seed that diverged: it has no attention that could have collapsed.
    """
    entropy = run.entropy.mean("head")
    return (entropy.isel(step=-1) / entropy.isel(step=0)).min("layer", skipna=False)


def trained_bounce(run: xr.Dataset, name: str = "bounce") -> xr.DataArray:
    """Return `bounce` or `layer_bounce` [rate, seed, ...]; NaN for a seed that diverged."""
    return run[name].where(is_complete(run.entropy))


def final_loss(run: xr.Dataset) -> xr.DataArray:
    """Return the final validation loss [rate, seed]; infinite for a seed that diverged."""
    return run.valid_loss.isel(step=-1).fillna(np.inf)


def best_rate(run: xr.Dataset) -> float:
    """Return the rate with the least final validation loss, mean over seeds."""
    return float(final_loss(run).mean("seed").idxmin("rate"))


def turn_slope(run: xr.Dataset, bounce: str = "bounce", turn: str = "turn") -> float:
    """Return the slope of ln(step of the minimum) over ln(rate) where attention bounces; NaN unless at two rates.

    For `layer_bounce` and `layer_turn` it is one slope with an intercept for each layer; NaN unless a layer bounces at
    two rates.
    """
    bounced = run[bounce] >= MIN_BOUNCE
    log_rate = xr.DataArray(np.log(run.rate.broadcast_like(run[turn]).where(bounced)))
    log_step = xr.DataArray(np.log(run[turn].where(bounced & (run[turn] > 0))))
    within = [axis for axis in ("rate", "seed") if axis in bounced.dims]
    log_rate, log_step = log_rate - log_rate.mean(within), log_step - log_step.mean(within)
    spread = float((log_rate**2).sum())
    return float((log_rate * log_step).sum()) / spread if spread > 1e-12 else np.nan


def cost(run: xr.Dataset) -> xr.DataArray:
    """Return the final validation loss at the greatest rate less that at the best one, per seed; NaN if diverged."""
    loss = run.valid_loss.isel(step=-1)
    return loss.sel(rate=run.rate.max(), drop=True) - loss.sel(rate=best_rate(run), drop=True)


def at_authors_rate(run: xr.Dataset, bounce: str = "bounce") -> xr.DataArray:
    """Return the bounce at the paper's rate, per seed; `NotInRun` where it was not trained."""
    matches = np.isclose(run.rate, AUTHORS_RATE, rtol=1e-3, atol=0.0)
    if not matches.any():
        raise NotInRun(f"learning rate {AUTHORS_RATE:g}")
    return trained_bounce(run, bounce).isel(rate=int(matches.argmax()))


def seed_slopes(run: xr.Dataset, bounce: str = "bounce", turn: str = "turn") -> xr.DataArray:
    """Return `turn_slope` of each seed; `NotInRun` where a seed does not bounce at two rates, and has no slope."""
    run = run.assign({bounce: trained_bounce(run, bounce)})
    slopes = [turn_slope(run.sel(seed=[seed]), bounce, turn) for seed in run.seed.values]
    if np.isnan(slopes).any():
        raise NotInRun("second rate at which attention bounces in every seed")
    return xr.DataArray(slopes, dims="seed")


_LAYER_BOUNCE = f"the smaller of fall and recovery beyond chance, over the start; 0 unless p ≤ {SIGNIFICANCE:g}/layers"
_SLOPE = "slope of ln(step of the minimum) over ln(rate) where attention bounces"
_OURS = "the bound is our choice"

CLAIMS = (
    Claim(
        "bounces",
        "There is a learning rate at which attention turns sparse, then dense again.",
        lambda run: trained_bounce(run).max("rate"),  # a rate at which a seed diverges is none at which it bounces
        at_least(MIN_BOUNCE),
        kind="reading",
        quantity=f"{BOUNCE}; mean over layers, largest over rates, interval over seeds; {_OURS}",
        across="interval",
    ),
    Claim(
        "bounces-1e-4",
        "At the paper's learning rate, 1e-4, attention turns sparse, then dense again.",
        at_authors_rate,
        at_least(MIN_BOUNCE),
        kind="reading",
        quantity=f"{BOUNCE}; mean over layers, interval over seeds; {_OURS}",
        across="interval",
        presets=("paper",),
    ),
    Claim(
        "layer-1e-4",
        "At the paper's learning rate, 1e-4, a layer by itself turns sparse, then dense again.",
        lambda run: at_authors_rate(run, "layer_bounce").max("layer", skipna=False),
        at_least(MIN_BOUNCE),
        kind="reading",
        quantity=f"{_LAYER_BOUNCE}; largest over layers, interval over seeds; {_OURS}",
        across="interval",
        presets=("paper",),
    ),
    Claim(
        "slow",
        "At the lowest learning rate attention does not become dense again by the end.",
        lambda run: trained_bounce(run).sel(rate=run.rate.min(), drop=True),
        at_most(MIN_BOUNCE),
        kind="reading",
        quantity=f"{BOUNCE}; mean over layers, interval over seeds; {_OURS}",
        across="interval",
    ),
    Claim(
        "sooner",
        "The higher the learning rate, the sooner attention is sparsest.",
        seed_slopes,
        below(0.0),
        kind="reading",
        quantity=f"{_SLOPE}, mean over layers, interval over seeds; −1 where only rate times step matters",
        across="interval",
        presets=("paper",),
    ),
    Claim(
        "layer-sooner",
        "The higher the learning rate, the sooner each layer by itself is sparsest.",
        lambda run: seed_slopes(run, "layer_bounce", "layer_turn"),
        below(0.0),
        kind="reading",
        quantity=f"{_SLOPE}, one slope with an intercept for each layer, interval over seeds",
        across="interval",
        presets=("paper",),
    ),
    Claim(
        "half-clock",
        "The step of the sparsest attention falls at least as the square root of the learning rate rises.",
        lambda run: turn_slope(run.assign(bounce=trained_bounce(run))),
        at_most(-0.5),
        kind="check",
        quantity=f"{_SLOPE}, mean over layers, all seeds in one fit; {_OURS}, half of the flow's −1",
        presets=("paper",),
    ),
    Claim(
        "collapse",
        "At the greatest learning rate attention of a layer collapses.",
        lambda run: entropy_left(run).sel(rate=run.rate.max(), drop=True),
        at_most(COLLAPSE),
        kind="reading",
        quantity=f"final over initial entropy of the layer where this is least, interval over seeds; {_OURS}",
        across="interval",
    ),
    Claim(
        "cost",
        "At the greatest learning rate the validation loss ends higher than at the best one.",
        cost,
        at_least(MIN_COST),
        kind="reading",
        quantity=f"final validation loss less that at the best rate, in nats, interval over seeds; {_OURS}",
        across="interval",
    ),
    Claim(
        "best",
        "At the learning rate of the least validation loss attention turns sparse, then dense again.",
        lambda run: trained_bounce(run).sel(rate=best_rate(run), drop=True),
        at_least(MIN_BOUNCE),
        kind="reading",
        quantity=f"{BOUNCE}; mean over layers, interval over seeds; {_OURS}",
        across="interval",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Return what came out: the rates at which attention bounces, the best rate, and the entropy left at the end."""
    bounce = run.bounce.mean("seed")
    rates = [f"{rate:.3g}" for rate in run.rate.values[(bounce >= MIN_BOUNCE).values]]
    where = f"at {'rate' if len(rates) == 1 else 'rates'} {' and '.join(rates)}" if rates else "at none of the rates"
    best, greatest = best_rate(run), float(run.rate.max())
    loss = float(final_loss(run).mean("seed").min())
    left = float(entropy_left(run).sel(rate=greatest).mean())
    alone = "With one seed, which decides no claim that needs an interval over seeds: " if run.sizes["seed"] < 2 else ""
    return (
        f"{alone}{'e' if alone else 'E'}ntropy, mean over layers, bounces by {100 * MIN_BOUNCE:.0f} % of its start or "
        f"more {where}. The loss is least, {loss:.2f} nats, at rate {best:.3g}; at {greatest:.3g} the sparsest layer "
        f"keeps {100 * left:.1f} % of its entropy."
    )


def draw_entropy(run: xr.Dataset) -> Figure:
    """Draw entropy against the step at every rate, a panel a layer, with its minimum marked."""
    layers = run.sizes["layer"]
    figure, axes = canvas(1, layers, width=2.9, height=2.9, sharey=True)
    for layer, panel in enumerate(axes[0]):
        for index, rate in enumerate(run.rate.values):
            curve = run.entropy.sel(rate=rate).isel(layer=layer).mean("head")
            band(panel, run.step + 1, curve, index, f"{rate:.3g}")
            mark_minimum(panel, curve, index)
        panel.set(xscale="log", xlabel="step + 1", title=f"Entropy of layer {layer}")
    axes[0, 0].set_ylabel("attention entropy (nats)")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, title="learning rate", loc="outside lower center", ncols=run.sizes["rate"])
    letters(axes)
    return figure


def draw_rates(run: xr.Dataset) -> Figure:
    """Draw against the rate: the bounce and the entropy left, the step of the minimum, and the final loss."""
    figure, axes = canvas(1, 3, width=3.1, height=2.7)
    shares, turns, losses = axes[0]
    measured(shares, run.rate, run.bounce.transpose("rate", "seed"), 0, "bounce", linestyle="-")
    measured(shares, run.rate, entropy_left(run), 1, "left in the sparsest layer", linestyle="--")
    for index, threshold in enumerate((MIN_BOUNCE, COLLAPSE)):
        shares.axhline(threshold, color=COLOURS[index], linewidth=0.7, alpha=0.6)
    shares.set(ylabel="share of the entropy at the start", ylim=(-0.05, 1.4))
    shares.legend(loc="upper left")
    bounced, fell = run.bounce >= MIN_BOUNCE, run.fall >= MIN_BOUNCE * (run.fall + run.least)
    for index, label, shown in ((1, "bounces", bounced), (0, "falls only", fell & ~bounced)):
        if shown.any():
            _draw_turns(turns, run.turn.where(shown), index, label)
            turns.legend()
    loss = final_loss(run)
    measured(losses, run.rate, loss.where(np.isfinite(loss)).transpose("rate", "seed"), 0, linestyle="-")
    shares.set_title("Which rates bounce, which collapse")
    turns.set_title("When attention is sparsest")
    losses.set(ylabel="validation loss at the end (nats)", title="Which rate learns best")
    for panel in axes[0]:
        panel.set(xscale="log", xlabel="learning rate")
    letters(axes)
    return figure


def _draw_turns(panel: Axes, turn: xr.DataArray, index: int, label: str) -> None:
    """Draw the steps of minima [rate, seed] against the rate, one point each; NaN is left out."""
    points = turn.stack(point=("rate", "seed")).dropna("point")
    measured(panel, points.rate, np.asarray(points) + 1, index, label)
    panel.set(ylabel="step of the minimum + 1", yscale="log")


def draw_layers(run: xr.Dataset) -> Figure:
    """Draw the bounce of every layer at every rate, mean over seeds, and the step of the minimum of each bounce."""
    figure, axes = canvas(1, 2, width=4.2, height=max(2.7, 0.9 + 0.3 * run.sizes["layer"]))
    sizes, turns = axes[0]
    bounce = run.layer_bounce.mean("seed").transpose("layer", "rate")
    image = sizes.imshow(bounce, cmap="cividis", vmin=0, aspect="auto")
    figure.colorbar(image, ax=sizes, label="bounce (share of the start)")
    sizes.grid(visible=False)
    sizes.set_xticks(range(run.sizes["rate"]), [f"{rate:.3g}" for rate in run.rate.values], rotation=45)
    sizes.set_yticks(range(run.sizes["layer"]))
    sizes.set(xlabel="learning rate", ylabel="layer", title="Which layers bounce")
    for number in range(run.sizes["layer"]):
        layer = run.isel(layer=number)
        _draw_turns(turns, layer.layer_turn.where(layer.layer_bounce >= MIN_BOUNCE), number, f"layer {number}")
    turns.set(xscale="log", xlabel="learning rate", title="When a layer that bounces is sparsest")
    turns.set_xlim(0.7 * float(run.rate.min()), 1.4 * float(run.rate.max()))
    turns.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    letters(axes)
    return figure


STUDY = Study(
    name="learning-rates",
    title="Attention by learning rate: too slow to bounce, a bounce, a collapse",
    source="JoMA, the figure of learning rates on WikiText-2 (arXiv 2310.00535)",
    statement=(
        "The learning rate decides what attention does within a given training: it only turns sparse at low rates, "
        "turns sparse and then dense again at moderate ones, and collapses at high ones (JoMA, arXiv 2310.00535)."
    ),
    about=(
        "We train one language model at several learning rates, every seed with the same start, text and dropout at "
        "each. A bounce is judged against a curve that never rises with noise of the size seen, for the mean over "
        "layers and for each layer. The seven rates of the paper preset are evenly spaced in their logarithm, which is "
        "our choice. The quick preset has two layers and three rates, and reads a small text less than twice."
    ),
    version=3,
    presets={
        "quick": Preset(
            Config(**language_training.quick_fields(every=50), layers=2, rates=(1e-3, 3e-3, 1e-2)),
            seeds=3,
            seconds=35.0,
        ),
        "paper": Preset(Config(**language_training.paper_fields()), seeds=3, seconds=900_000.0),  # an estimate
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    figures={
        "entropy": Drawing(
            draw_entropy,
            "Attention entropy over the validation text, one panel for each layer. Lines and bands: mean and range "
            "over seeds. Marks: where the mean is least.",
        ),
        "rates": Drawing(
            draw_rates,
            "(a) Bounce of entropy's mean over layers, and entropy left at the end in the sparsest layer; thin "
            "lines: the bounds of a bounce and of a collapse. (b) The step of the least entropy, one point for "
            "each seed. (c) Validation loss at the end. Points and bars: mean and range over seeds.",
        ),
        "layers": Drawing(
            draw_layers,
            "(a) Bounce of each layer's entropy, mean over seeds; 0 where noise would rise as clearly. (b) The "
            "step of a layer's least entropy, one point for each seed where the layer bounces.",
        ),
    },
    threads=1,
    exact_shards=False,
    inputs=language_training.inputs,
)
