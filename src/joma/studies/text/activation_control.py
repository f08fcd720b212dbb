"""Linear against nonlinear: does attention on real text only get sparser where the MLP is linear?

Theorem 2 says that with a linear activation it does, Theorem 4 that with a nonlinear one it becomes dense again. Both
are of a block far simpler than a language model; whether they decide what happens in one is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from joma.arguments import choice, distinct, whole
from joma.drawing import activation_name, band, canvas, letters, measured
from joma.models.block import ACTIVATIONS
from joma.studies.text import language_training
from joma.studies.text.entropy_bounce import BOUNCE, MIN_BOUNCE, SIGNIFICANCE, bounces, is_complete, mark_minimum
from joma.studies.text.language_training import QUICK_RATE, LayeredSetting, Variant
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, select

LINEAR = "linear"
NONLINEAR = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}
LABELS = {LINEAR: "a linear MLP", **NONLINEAR}


@dataclass(frozen=True)
class Config(LayeredSetting):
    """The setting of text, the model and its training, and the activations that are compared."""

    rate: float = 1e-4
    layers: int = 1
    activations: tuple[str, ...] = (LINEAR, *NONLINEAR)


def run(config: Config, context: Context) -> xr.Dataset:
    """Train a model with each activation: a seed has the same start, text and dropout in all of them."""
    activations = distinct("activations", config.activations)
    for activation in activations:
        choice("activations", activation, ACTIVATIONS)
    layers, text = whole("layers", config.layers), language_training.read_text(config, context)
    variants = {f"activation-control, {name}": Variant(layers, name, config.alike) for name in activations}
    trajectories = language_training.train_variants(config, context, text, variants, rate=config.rate)
    trajectory = xr.concat(trajectories, xr.Variable("activation", list(activations)))
    return trajectory.merge(bounces(trajectory.entropy))


def with_activation(run: xr.Dataset, name: str, activation: str) -> xr.DataArray:
    """Return a measure with one activation, per seed, NaN if it diverged; `NotInRun` where it was not trained."""
    arm = select(run, activation=activation)
    return arm[name].where(is_complete(arm.entropy))


def recovery_beyond_chance(run: xr.Dataset) -> xr.DataArray:
    """Return how much more entropy recovers than noise alone would, over its start [activation, seed]."""
    return (run.recovery - run.chance) / run.entropy.isel(step=0).mean(("layer", "head"))


def nonlinear_excess(run: xr.Dataset) -> xr.DataArray:
    """Return the least recovery beyond chance of the nonlinear activations less that of the linear one, per seed."""
    run = run.assign(beyond=recovery_beyond_chance(run))
    least = np.min([with_activation(run, "beyond", activation) for activation in NONLINEAR], axis=0)
    return least - with_activation(run, "beyond", LINEAR)


def linear_fall(run: xr.Dataset) -> xr.DataArray:
    """Return the fall of entropy with the linear activation over its start, per seed."""
    start = select(run.entropy, activation=LINEAR).isel(step=0).mean(("layer", "head"))
    return with_activation(run, "fall", LINEAR) / start


_OURS = "the bound is our choice"

CLAIMS = (
    *(
        Claim(
            f"bounce-{name}",
            f"With {label} in the MLP attention on text turns sparse, then dense again, as in Theorem 4.",
            partial(with_activation, name="bounce", activation=name),
            at_least(MIN_BOUNCE),
            kind="control",
            quantity=f"{BOUNCE}; interval over seeds; {_OURS}",
            across="interval",
        )
        for name, label in NONLINEAR.items()
    ),
    Claim(
        "sparser-linear",
        "With a linear MLP attention on text turns sparser, as in Theorem 2.",
        linear_fall,
        at_least(MIN_BOUNCE),
        kind="control",
        quantity=f"fall of entropy over its start, interval over seeds; {_OURS}",
        across="interval",
    ),
    Claim(
        "monotone-linear",
        "With a linear MLP attention on text never becomes dense again, as in Theorem 2.",
        partial(with_activation, name="p_value", activation=LINEAR),
        at_least(SIGNIFICANCE),
        kind="control",
        quantity="how often noise on a curve that never rises would rise as clearly, each seed",
    ),
    Claim(
        "apart",
        "A nonlinear MLP brings entropy back further than a linear one.",
        nonlinear_excess,
        above(0.0),
        kind="control",
        quantity="recovery beyond chance over the start, the least of ReLU, GELU and SiLU less that of the linear MLP "
        "from the same start, interval over seeds",
        across="interval",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Return what came out: how far entropy recovers with each activation."""
    recoveries = {name: float(run.recovery.sel(activation=name).mean()) for name in run.activation.values.tolist()}
    parts = [f"{size:.2f} nats with {LABELS.get(name, name)}" for name, size in recoveries.items()]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"After its minimum entropy recovers by {listed} (mean over seeds)."


def draw_activations(run: xr.Dataset) -> Figure:
    """Draw entropy and loss against the step by activation, the loss less the linear one's, and the recovery."""
    figure, axes = canvas(2, 2, width=3.6, height=2.6)
    (entropy, loss), (gap, recovery) = axes
    activations = [str(activation) for activation in run.activation.values]
    for index, activation in enumerate(activations):
        trajectory = run.sel(activation=activation)
        curve = trajectory.entropy.mean(("layer", "head"))
        band(entropy, run.step + 1, curve, index, activation_name(activation))
        mark_minimum(entropy, curve, index)
        band(loss, run.step + 1, trajectory.valid_loss, index)
        if LINEAR in activations and activation != LINEAR:
            linear_loss = run.valid_loss.sel(activation=LINEAR)
            band(gap, run.step + 1, trajectory.valid_loss - linear_loss, index)
        measured(recovery, [index - 0.1], trajectory.recovery.expand_dims("point"), index)
        measured(recovery, [index + 0.1], trajectory.chance.expand_dims("point"), index, markerfacecolor="0.6")
    labels = ("attention entropy (nats)", "validation loss (nats)", "loss − linear's (nats)")
    for panel, label in zip((entropy, loss, gap), labels, strict=True):
        panel.set(xscale="log", xlabel="step + 1", ylabel=label)
    titles = (
        "Does entropy come back?",
        "Validation loss",
        "Loss minus that of the linear MLP",
        "How far it recovers (grey: noise)",
    )
    for panel, title in zip(axes.flat, titles, strict=True):
        panel.set_title(title)
    recovery.set(ylabel="recovery of entropy (nats)", ylim=(0, None))
    recovery.set_xticks(range(len(activations)), [activation_name(name) for name in activations])
    entropy.legend()
    letters(axes)
    return figure


STUDY = Study(
    name="activation-control",
    title="Attention on text becomes dense again with a linear MLP too",
    source="JoMA, Theorems 2 and 4 (arXiv 2310.00535); our control",
    statement=(
        "With a linear activation attention only turns sparser (Theorem 2); with a nonlinear one it turns sparse and "
        "then dense again (Theorem 4). Both theorems are about one block with a constant gradient from above, without "
        "LayerNorm, under gradient flow (JoMA, arXiv 2310.00535)."
    ),
    about=(
        "We train the same language model with a linear MLP and with ReLU, GELU and SiLU, each seed from the same "
        "start on the same text. None of the theorems' premises holds here. So a bounce with a linear MLP does not "
        "contradict Theorem 2; it shows that something else brings entropy back as well."
    ),
    version=2,
    presets={
        "quick": Preset(Config(**language_training.quick_fields(), rate=QUICK_RATE), seeds=3, seconds=45.0),
        "paper": Preset(Config(**language_training.paper_fields()), seeds=3, seconds=400_000.0),  # an estimate
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    figures={
        "activations": Drawing(
            draw_activations,
            "Top: attention entropy over the validation text, with its minimum marked, and validation loss. Bottom "
            "left: loss less that of the linear MLP from the same start. Bottom right: how far entropy recovers "
            "(hollow), and how far noise on a curve that never rises would (grey). Lines: mean over seeds. Bands and "
            "bars: range over seeds.",
        ),
    },
    threads=1,
    exact_shards=False,
    inputs=language_training.inputs,
)
