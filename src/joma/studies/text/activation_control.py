"""Linear against nonlinear: does attention on real text only get sparser where the MLP is linear?

Theorem 2 says that with a linear activation it does, Theorem 4 that with a nonlinear one it becomes dense again. Both
are of a block far simpler than a language model; whether they decide what happens in one is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from joma.arguments import choice, distinct, whole
from joma.models.block import ACTIVATIONS
from joma.report.figure import band, canvas, letters, measured
from joma.studies.text import language_training
from joma.studies.text.language_training import LEAST, SURE, bounces, mark_least
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, select

LINEAR = "linear"
NONLINEAR = ("relu", "gelu", "silu")


@dataclass(frozen=True)
class Config(language_training.Setting):
    """The setting, the depth and the activations; `activation` itself is not used."""

    layers: int = 1
    activations: tuple[str, ...] = (LINEAR, *NONLINEAR)


def run(config: Config, context: Context) -> xr.Dataset:
    """Train a model with each activation: the same start, text and dropout for a seed in all of them."""
    names = distinct("activations", config.activations)
    for name in names:
        choice("activations", name, ACTIVATIONS)
    layers, text = whole("layers", config.layers), language_training.read_text(config, context)
    parts = [
        language_training.train(
            replace(config, activation=name), context, text, layers=layers, label=f"activation-control, {name}"
        )
        for name in names
    ]
    found = xr.concat(parts, xr.Variable("activation", list(names)))
    return found.merge(bounces(found.entropy))


def of(run: xr.Dataset, name: str, activation: str) -> xr.DataArray:
    """A measure with one activation, per seed; `NotInRun` where it was not trained."""
    return select(run[name], activation=activation)


def beyond(run: xr.Dataset) -> xr.DataArray:
    """How far entropy comes back beyond what noise alone makes, over its start [activation, seed]."""
    return (run.recovery - run.chance) / run.entropy.isel(step=0).mean(("layer", "head"))


def apart(run: xr.Dataset) -> xr.DataArray:
    """The recovery beyond chance of the nonlinear activation that has least, less that of the linear one, per seed."""
    own = run.assign(beyond=beyond(run))
    least = np.min([of(own, "beyond", name) for name in NONLINEAR], axis=0)
    return least - of(own, "beyond", LINEAR)


CLAIMS = (
    *(
        Claim(
            f"bounce-{name}",
            f"Theorem 4: with {name} entropy falls and bounces back (less of fall and recovery beyond chance, over the "
            f"start, 0 unless p ≤ {SURE:g}; the threshold is ours).",
            partial(of, name="bounce", activation=name),
            at_least(LEAST),
        )
        for name in NONLINEAR
    ),
    Claim(
        "sparser-linear",
        "Theorem 2: with a linear activation attention gets sparser (fall of entropy over its start; the threshold is "
        "ours).",
        lambda run: of(run, "fall", LINEAR) / of(run, "entropy", LINEAR).isel(step=0).mean(("layer", "head")),
        at_least(LEAST),
    ),
    Claim(
        "monotone-linear",
        "Theorem 2: with a linear activation attention only gets sparser: how often noise on a curve that never "
        "rises would rise as clearly.",
        partial(of, name="p_value", activation=LINEAR),
        at_least(SURE),
    ),
    Claim(
        "apart",
        "The nonlinearity is what brings entropy back: recovery beyond chance, over the start, the least of the "
        "nonlinear activations less the linear one, from the same start (the threshold is ours).",
        apart,
        at_least(LEAST),
    ),
)


def draw_activations(run: xr.Dataset) -> Figure:
    """Draw entropy and loss against the step by activation, the loss less the linear one's, and the recovery."""
    figure, axes = canvas(2, 2, width=3.6, height=2.6)
    (entropy, loss), (gap, recovery) = axes
    names = [str(name) for name in run.activation.values]
    for place, name in enumerate(names):
        own = run.sel(activation=name)
        curve = own.entropy.mean(("layer", "head"))
        band(entropy, run.step + 1, curve, place, name)
        mark_least(entropy, curve, place)
        band(loss, run.step + 1, own.valid_loss, place, name)
        if LINEAR in names and name != LINEAR:
            band(gap, run.step + 1, own.valid_loss - run.valid_loss.sel(activation=LINEAR), place, name)
        measured(recovery, [place - 0.1], own.recovery.expand_dims("point"), place)
        measured(recovery, [place + 0.1], own.chance.expand_dims("point"), place, markerfacecolor="0.6")
    labels = ("attention entropy (nats)", "validation loss (nats)", "loss − linear's (nats)")
    for panel, label in zip((entropy, loss, gap), labels, strict=True):
        panel.set(xscale="log", xlabel="step + 1", ylabel=label)
    recovery.set(ylabel="recovery of entropy (nats)", ylim=(0, None))
    recovery.set_xticks(range(len(names)), names)
    entropy.legend()
    letters(axes)
    return figure


STUDY = Study(
    name="activation-control",
    title="Is it the nonlinearity that makes attention dense again?",
    source="JoMA, Theorems 2 and 4 (arXiv 2310.00535), put to a test that the paper does not have",
    about=(
        "The same language model with a linear MLP and with ReLU, GELU and SiLU, each seed from the same start on the "
        "same text. By the theorems entropy falls and stays with the first and bounces with the others. Whether it "
        "comes back is judged against a curve that never rises with noise of the size seen. The theorems' block has a "
        "constant gradient from above, no LayerNorm and plain gradient flow; the language model has none of these, so "
        "that a bounce with a linear MLP would say that something else brings entropy back as well."
    ),
    version=1,
    presets={
        "quick": Preset(Config(**language_training.small()), seeds=3, seconds=45.0),
        "paper": Preset(Config(**language_training.wikitext()), seeds=3, seconds=400_000.0),  # an estimate
    },
    run=run,
    claims=CLAIMS,
    figures={
        "activations": Drawing(
            draw_activations,
            "By activation, mean and range over seeds: (a) attention entropy over the validation text, mean over "
            "layers, marks where the mean is least; (b) validation loss; (c) the same less the linear model's of "
            "the same seed; (d) how far entropy comes back from its least value to the end (hollow) and how far noise "
            "on a curve that never rises would (grey).",
        ),
    },
    threads=1,
    inputs=language_training.inputs,
)
