"""The ladder of `value-invariant`: from one query on all data to a one-layer language model, one premise at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from joma.arguments import InputError, scalar, whole
from joma.data.tokens import contexts
from joma.models.one_layer import OneLayer, prefix_frequencies
from joma.models.one_layer_config import OneLayerConfig
from joma.studies.surprisal import surprisal
from joma.studies.theorems.invariance_training import concat
from joma.studies.theorems.value_training import (
    DIMS,
    Config,
    arrays,
    draw_frequencies,
    law_errors,
    law_residual,
    shown_steps,
    value_law,
)
from joma.study import Context, LabelledTraining
from joma.theory import invariants
from joma.train import Optimiser, Record


@dataclass(frozen=True)
class Rung:
    """One model of the ladder; each rung changes one premise of the rung before."""

    name: str
    all_positions: bool = False
    minibatch: bool = False
    product: bool = False
    learned: bool = False
    adam: bool = False


def _rungs() -> tuple[Rung, ...]:
    """Return the rungs from the lowest to the highest; each keeps the changes of those below it."""
    rungs = [Rung("block")]
    for name, change in {
        "positions": "all_positions",
        "minibatch": "minibatch",
        "product": "product",
        "learned": "learned",
        "adam": "adam",
    }.items():
        rungs.append(replace(rungs[-1], name=name, **{change: True}))
    return tuple(rungs)


RUNGS = _rungs()
Loss = Callable[[OneLayer, Tensor], Tensor]


def draw_sequences(config: Config, context: Context) -> Int[Tensor, "seed sample position"]:
    """Return the sequences that all rungs train on, one token longer than what a query sees."""
    frequency = draw_frequencies(config, context)
    length = whole("length", config.length) + 1
    samples, generators = whole("samples", config.samples), context.generators("sequences")
    return contexts(frequency, samples=samples, length=length, generators=generators).token


def draw_batches(config: Config, context: Context) -> Int[Tensor, "seed step sample"]:
    """Return which sequences are in the minibatch of each step, drawn with replacement."""
    shape = (whole("ladder_steps", config.ladder_steps) + 1, whole("batch", config.batch))
    samples = whole("samples", config.samples)
    return torch.stack([torch.randint(samples, shape, generator=stream) for stream in context.generators("batches")])


def build_rung(config: Config, context: Context, rung: Rung) -> OneLayer:
    """Return the model of a rung: softmax attention, values, LayerNorm, an MLP with a residual, and a head."""
    options = OneLayerConfig(
        tokens=config.tokens,
        outputs=config.tokens,
        hidden=whole("hidden", config.hidden),
        dim=config.tokens + 1,
        positions="all" if rung.all_positions else "one",
        logits="product" if rung.product else "free",
        embeddings="learned" if rung.learned else "fixed",
        activation="gelu",
        head_width=config.head_width,
        values=whole("values", config.values),
        norm=True,
        skip=True,
        scale=config.scale,
        scale_z=config.scale,
        scale_qk=config.scale,
        scale_values=config.scale,
    )
    return OneLayer(options, generators=context.generators("weights"))


def rung_loss(config: Config, context: Context, rung: Rung, *, substeps: int = 1) -> Loss:
    """Return the cross entropy of the next token: of the last one, or of each after the first.

    Each minibatch is the loss of `substeps` steps.
    """
    token = draw_sequences(config, context).to(context.device)
    batches = draw_batches(config, context).to(context.device) if rung.minibatch else None
    frequency = _visible(token, config.tokens)[:, :, -1]

    def loss(model: OneLayer, step: Tensor) -> Tensor:
        if not rung.all_positions:
            return surprisal(model(frequency), token[..., -1]).mean(dim=-1)
        shown = token
        if batches is not None:
            chosen = batches.index_select(1, step.reshape(1) // substeps).squeeze(1)
            shown = token.gather(1, chosen[..., None].expand(-1, -1, token.shape[-1]))
        return surprisal(model(shown[..., :-1]), shown[..., 1:]).mean(dim=(-2, -1))

    return loss


def _visible(token: Int[Tensor, "seed sample position"], tokens: int) -> Tensor:
    """Return the frequencies of the tokens that each position sees, but for the last, which nobody sees."""
    return prefix_frequencies(token[..., :-1], tokens)


def _measure(model: OneLayer, _step: int) -> dict[str, Tensor]:
    measures = {"p": model.value_vectors, "z": model.logits}
    return measures | {"b_bar": model.mean_attention(), "pull": model.pull()}


def _optimiser(config: Config, rung: Rung) -> Optimiser:
    if rung.adam:
        return Optimiser("adam", scalar("adam_rate", config.adam_rate, above=0.0))
    return Optimiser("sgd", scalar("rate", config.rate, above=0.0))


def train_rung(config: Config, context: Context, rung: Rung) -> xr.Dataset:
    """Train one rung with all seeds at once, and compare the logits with the value law.

    Returns:
        Over `seed` and `step`: `error` of Σ_m z predicted from the value vectors, alone (`none`) and with softmax's
        ledger (`full`); the `residual` that the latter leaves; `correlation` over tokens of the predicted with the true
        change; `loss`. Diverged seeds are NaN.
    """
    training = LabelledTraining(
        build_rung(config, context, rung),
        rung_loss(config, context, rung),
        optimiser=_optimiser(config, rung),
        steps=whole("ladder_steps", config.ladder_steps),
        record=Record(_measure, dims=DIMS),
        label=f"ladder, {rung.name}",
        brief=True,
    )
    trajectory = context.fit_together([training])[0]
    path, finite = arrays(trajectory)
    visible = _visible(draw_sequences(config, context), config.tokens)
    rows = visible.flatten(1, 2) if rung.all_positions else visible[:, :, -1]
    b_ref = np.stack([invariants.reference(frequency) for frequency in rows.numpy()])
    rate = config.adam_rate if rung.adam else config.rate
    law = value_law("softmax", path, rates=(rate, rate), b_ref=b_ref)
    shown = shown_steps(config.ladder_steps)
    changes = (side[shown] - law.measured[0] for side in (law.measured, law.predicted))
    correlation = np.where(finite, invariants.correlation(*changes), np.nan)
    over_steps = ("step", "seed")
    return xr.Dataset(
        {
            "error": (("correction", *over_steps), law_errors(law, shown, finite)),
            "residual": (over_steps, law_residual(law, shown, finite)),
            "correlation": (over_steps, correlation),
            "loss": (over_steps, np.where(finite, path["loss"][shown], np.nan)),
        },
        {"correction": ["none", "full"], "step": shown, "seed": trajectory.seed.values},
    )


def check_ladder(config: Config, context: Context) -> None:
    """Report bad input before any training."""
    if whole("batch", config.batch) > config.samples:
        raise InputError("batch", f"at most `samples`, {config.samples}", config.batch, "draw smaller minibatches")
    draw_sequences(config, context)
    draw_batches(config, context)
    for rung in RUNGS:
        build_rung(config, context, rung)
        _optimiser(config, rung)


def ladder(config: Config, context: Context) -> xr.Dataset:
    """Train all rungs; the variables have the rung as a dimension, and steps of their own."""
    trained = {}
    with context.progress.task("ladder", total=len(RUNGS)) as task:
        for rung in RUNGS:
            trained[rung.name] = train_rung(config, context, rung)
            task.advance()
    joined = concat(trained, "rung").rename(step="ladder_step")
    return joined.rename({name: f"ladder_{name}" for name in ("error", "residual", "correlation", "loss")})
