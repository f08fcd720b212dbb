"""A small block of Theorem 1, trained at many learning rates at once, with its law and its ledger at every step.

The study `invariance` judges the law. This is for looking at it: training takes a fraction of a second, every step is
recorded, and the account of one pair of rates takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import xarray as xr

from joma.arguments import InputError, choice, distinct, positive, whole
from joma.data.tokens import token_classes
from joma.models.block import ACTIVATIONS, ATTENTIONS, Block, BlockConfig
from joma.studies.surprisal import cross_entropy_by_row
from joma.studies.theorems.invariance_training import (
    BREAKERS,
    DIMS,
    DIVERGED,
    measure_exp,
    measure_softmax,
    overlapping,
)
from joma.study import Arms, Context
from joma.theory import invariants
from joma.train import Optimiser, Record

CLASSES, DISTINCT, COMMON, SCALE = 6, 5, 5, 0.1
OVERLAP, DECAY, ADAM_SHARE = 0.2, 0.01, 0.1  # of the breakers; Adam's rates are a tenth, since its steps are larger


@dataclass(frozen=True)
class WatchedBlock:
    """What is trained.

    Attributes:
        attention, activation: names of `joma.models.ATTENTIONS` and `joma.models.ACTIVATIONS`.
        breaker: "none", or what breaks the law: a name of `BREAKERS`.
        rates: learning rates of the weights, η_w.
        kappas: ratios η_z/η_w; every rate is trained with every ratio.
        steps: of training.
        seeds: number of seeds.
    """

    attention: str = "softmax"
    activation: str = "linear"
    breaker: str = "none"
    rates: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    kappas: tuple[float, ...] = (0.5, 1.0, 2.0)
    steps: int = 200
    seeds: int = 3

    def __post_init__(self) -> None:
        choice("attention", self.attention, ATTENTIONS)
        choice("activation", self.activation, ACTIVATIONS)
        choice("breaker", self.breaker, {"none": "", **BREAKERS})
        for name in ("rates", "kappas"):
            positive(name, distinct(name, getattr(self, name)), ndim=1)
        whole("steps", self.steps)
        whole("seeds", self.seeds)


def train(setting: WatchedBlock) -> xr.Dataset:
    """Train a block at every pair of learning rates, with all seeds at once, and keep every step.

    Returns:
        Over `rate`, `kappa`, `seed` and `step`: weights `v`, logits `z`, and for softmax what the ledger needs; and the
        token frequencies `x` of each seed.
    """
    context, pairs = Context(tuple(range(setting.seeds))), list(product(setting.rates, setting.kappas))
    arms = Arms("pair", range(len(pairs)))
    x = token_classes(
        "gaussian", generators=context.generators("tokens"), classes=CLASSES, distinct=DISTINCT, common=COMMON
    ).frequency
    samples = x.repeat(len(pairs), 1, 1)
    trajectory = context.fit(
        _block(setting, context.generators("weights", arms)),
        lambda model, _: cross_entropy_by_row(model(samples)),
        optimiser=_optimiser(setting, pairs),
        steps=setting.steps,
        record=Record(measure_softmax if setting.attention == "softmax" else measure_exp, dims=DIMS),
        arms=arms,
        label="watched block",
    )
    rates, kappas = zip(*pairs, strict=True)
    trajectory = trajectory.assign_coords(rate=("pair", list(rates)), kappa=("pair", list(kappas)))
    trajectory = trajectory.set_index(pair=["rate", "kappa"]).unstack("pair")
    return trajectory.assign(x=(("seed", "sample", "token"), x.numpy()))


def _block(setting: WatchedBlock, generators: Sequence[torch.Generator]) -> Block:
    config = BlockConfig(
        DISTINCT + COMMON,
        CLASSES,
        attention=setting.attention,
        activation=setting.activation,
        norm=setting.breaker == "norm",
        skip=setting.breaker == "skip",
        scale=SCALE,
    )
    columns = DISTINCT + COMMON + 1
    embeddings = overlapping(columns + 1, columns, OVERLAP) if setting.breaker == "overlap" else None
    return Block(config, generators=generators, embeddings=embeddings)


def _optimiser(setting: WatchedBlock, pairs: list[tuple[float, float]]) -> Optimiser:
    """Return the optimiser with the rates of each pair, the same for all seeds."""
    rates, kappas = zip(*(pair for pair in pairs for _ in range(setting.seeds)), strict=True)
    ratio = torch.tensor(kappas, dtype=torch.float64)
    schedules = {"z": lambda _: ratio}
    if setting.breaker == "adam":
        return Optimiser("adam", [ADAM_SHARE * rate for rate in rates], schedules=schedules)
    decay = DECAY if setting.breaker == "decay" else 0.0
    return Optimiser("sgd", list(rates), weight_decay=decay, schedules=schedules)


def account(trajectory: xr.Dataset, attention: str, *, rate: float, kappa: float) -> xr.Dataset:
    """Return Theorem 1's account of one pair of learning rates at every step of `train`.

    Returns:
        Over `step`, `seed` and `token`: `law` (Σ_m z_m, or Σ_m z_m² for linear attention), `predicted` from the weights
        alone, and the terms that lie between them: `drift`, `gap` and `finite_steps` of the ledger, and `unexplained`,
        which is zero to rounding unless something breaks the law. Over `step` and `seed`: `error` of the prediction,
        and `size` of each term, both relative to ‖z − z(0)‖.
    """
    path = trajectory.sel(rate=rate, kappa=kappa).transpose("step", "seed", ...)
    v, z = path.v.values, path.z.values
    if not np.abs(v).max() < DIVERGED or not np.abs(z).max() < DIVERGED:  # NaN too
        raise InputError("rate", "small enough to train with", rate, "training diverged: lower it")
    b_ref = np.stack([invariants.reference(frequency) for frequency in path.x.transpose("seed", ...).values])
    predicted = invariants.predict(attention, v, v[0], z[0], kappa=kappa, b_ref=b_ref)
    law = (z ** invariants.ATTENTIONS[attention].power).sum(axis=-2)
    if attention == "softmax":
        ledger = invariants.ledger(
            v, path.b_bar.values[:-1], path.pull.values[:-1], b_ref=b_ref, rate_w=rate, rate_z=kappa * rate
        )
    else:
        zero = np.zeros_like(law)
        ledger = invariants.Ledger(zero, zero, invariants.finite_steps(attention, v, z, kappa=kappa))
    terms = {"drift": ledger.drift, "gap": ledger.gap, "finite_steps": ledger.step}
    terms["unexplained"] = predicted - sum(terms.values()) - law
    sizes = np.stack([invariants.relative_error(law, law + term, law[0]) for term in terms.values()])
    dims = ("step", "seed", "token")
    return xr.Dataset(
        {
            "law": (dims, law),
            "predicted": (dims, predicted),
            **{name: (dims, term) for name, term in terms.items()},
            "error": (dims[:2], invariants.relative_error(law, predicted, law[0])),
            "size": (("term", *dims[:2]), sizes),
        },
        {"step": path.step.values, "seed": path.seed.values, "term": list(terms)},
    )
