"""Training of Figure 2's block in every setting of the study `invariance`, and its comparison with Theorem 1's law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, scalar, whole
from joma.data.tokens import token_classes
from joma.models.block import Block, BlockConfig
from joma.studies.surprisal import cross_entropy_by_row
from joma.study import Arms, Context, LabelledTraining
from joma.theory import invariants
from joma.train import Optimiser, Record

ATTENTIONS = ("softmax", "exp", "linear")
ACTIVATIONS = ("linear", "relu", "gelu")
TOKEN_KINDS = ("gaussian", "random")
TERMS = ("drift", "gap", "step")  # of the ledger
PARTS = ("squares", "norm")  # of the softmax prediction: ½ Σ_k v_k², and b_ref times the sum of it over tokens
CORRECTIONS = {"none": "ẑ", "drift": "ẑ − drift", "gap": "ẑ − drift − gap", "step": "ẑ − drift − gap − step"}
BREAKERS = {
    "norm": "LayerNorm before W",
    "skip": "residual around the MLP",
    "overlap": "embeddings that are not orthogonal",
    "decay": "weight decay",
    "adam": "Adam",
}
ARMS = {
    "base": "equal rates",
    "small": "small rates",
    "unequal": "unequal rates",
    "zero": "zero start",
}
NAMES = {"linear": "linear", "relu": "ReLU", "gelu": "GELU", "gaussian": "Gaussian", "random": "random"}
DIVERGED = 1e50  # a weight or logit of this size: the comparison takes fourth powers, which must not overflow


@dataclass(frozen=True)
class Config:
    """Figure 2's setting: one query, and as many hidden units as classes, which are the classes' logits."""

    classes: int = 20
    distinct: int = 10
    common: int = 10
    dim: int = 30
    steps: int = 2000
    rate: float = 0.1
    rate_z: float = 0.1
    """Learning rate of the attention logits; `rate` is that of the weights."""
    small_rate: float = 0.01
    """Learning rate of the weights in the arm `small`; that of the logits is `rate_z / rate` times as large."""
    ratio: float = 4.0
    """The arm `unequal` divides the learning rate of the weights by this number, and leaves that of the logits."""
    long_steps: int = 0
    """Steps of one more training at `small_rate`, with exp attention and linear units; 0 leaves it out."""
    temperature: float = 0.5
    """Of softmax attention."""
    overlap: float = 0.2
    """Cosine between any two embeddings under the breaker `overlap`."""
    decay: float = 0.01
    """Weight decay under the breaker `decay`."""
    adam_rate: float = 0.01
    """Learning rate of the weights under the breaker `adam`; that of the logits is `rate_z / rate` times as large."""

    @property
    def kappa(self) -> float:
        """κ = η_z/η_w in the arms with the rates of Figure 2."""
        return self.rate_z / self.rate


@dataclass(frozen=True)
class Arm:
    """The learning rates of one arm, and whether it starts from zero weights and logits."""

    rate: float
    rate_z: float
    zero: bool = False

    @property
    def kappa(self) -> float:
        """κ = η_z/η_w."""
        return self.rate_z / self.rate


@dataclass(frozen=True)
class BlockSetting:
    """What the trainings of this study differ in. Each trains its arms, both kinds of tokens and all seeds at once."""

    attention: str
    activation: str
    breaker: str = "none"

    @property
    def label(self) -> str:
        """The label of the progress bar and of the folder of checkpoints."""
        breaker = f", {BREAKERS[self.breaker]}" if self.breaker in BREAKERS else ""
        return f"{self.attention} attention, {NAMES[self.activation]}{breaker}"

    def arms(self, config: Config) -> dict[str, Arm]:
        """Return the arms that are trained in this setting."""
        base = Arm(scalar("rate", config.rate, above=0.0), scalar("rate_z", config.rate_z, above=0.0))
        small_rate = scalar("small_rate", config.small_rate, above=0.0)
        arms = {
            "base": base,
            "small": Arm(small_rate, base.kappa * small_rate),
            "unequal": replace(base, rate=base.rate / scalar("ratio", config.ratio, above=0.0)),
            "zero": replace(base, zero=True),
        }
        return {name: arms[name] for name in ("base", *TRAINED_ARMS.get(self, ()))}


# Beside `base`. From zero, ReLU units and linear attention never move: their gradients are zero.
TRAINED_ARMS: dict[BlockSetting, tuple[str, ...]] = {
    BlockSetting("exp", "linear"): ("small",),
    BlockSetting("exp", "gelu"): ("small", "unequal", "zero"),
    BlockSetting("softmax", "gelu"): ("unequal",),
    BlockSetting("linear", "gelu"): ("unequal",),
    BlockSetting("exp", "gelu", "skip"): ("small",),
}


@dataclass(frozen=True)
class Prepared:
    """What a training starts from: token frequencies [kind and seed, class, token], the block and its optimiser."""

    x: Tensor
    block: Block
    optimiser: Optimiser


def trial(config: Config, context: Context, setting: BlockSetting) -> xr.Dataset:
    """Train one block in all its arms, on both kinds of tokens, with all seeds at once; compare it with the law.

    Returns:
        Over `seed`, `step`, `kind` and `arm`: `error` of the law after each `correction`, `size` of each `term` of the
        ledger (both over ‖z − z(0)‖), `correlation` of the prediction with z, and `part_correlation` of each `part` of
        it, the change of `logit_sum`, `loss`; at the end, by `token`, the `law`'s quantity (Σ_m z_m, or Σ_m z_m² for
        linear attention) and what is `predicted` after each correction. Diverged seeds are NaN.
    """
    prepared = prepare(config, context, setting)
    trajectory = _train(config, context, setting, prepared)
    compared = {}
    for name, arm in setting.arms(config).items():
        path = trajectory.sel(arm=[f"{name} {kind}" for kind in TOKEN_KINDS]).rename(arm="kind")
        path = path.assign_coords(kind=list(TOKEN_KINDS)).transpose("kind", "seed", "step", ...)
        compared[name] = _compare(config, setting.attention, arm, path, prepared.x.numpy())
    if compared["base"] is None:
        raise InputError("rate", "small enough to train with", config.rate, "every seed diverged: lower it")
    parts = {name: xr.full_like(compared["base"], np.nan) if part is None else part for name, part in compared.items()}
    return concat(parts, "arm")


def long_trial(config: Config, context: Context) -> xr.DataArray:
    """Return the error of the flow's law at about a hundred of `long_steps` steps at the small rates.

    Exp attention and linear units: where SGD begins to oscillate late in training.
    """
    setting = BlockSetting("exp", "linear")
    arm = setting.arms(config)["small"]
    x, generators = _draw_tokens(config, context)
    block = Block(_block_config(config, setting, x.shape[-1]), generators=generators)
    steps = whole("long_steps", config.long_steps)
    at = schedule.every(max(1, steps // 100), steps)
    trajectory = context.fit(
        block,
        lambda model, _: cross_entropy_by_row(model(x.to(context.device))),
        optimiser=Optimiser("sgd", arm.rate, {"z": arm.rate_z}),
        steps=steps,
        record=Record(measure_exp, at=at, dims=DIMS),
        arms=Arms("kind", TOKEN_KINDS),
        label=f"{setting.label}, small rate",
    ).transpose("step", "kind", "seed", ...)
    v, z = trajectory.v.values, trajectory.z.values
    finite = np.maximum(np.abs(v).max(axis=(0, -2, -1)), np.abs(z).max(axis=(0, -2, -1))) < DIVERGED  # False for NaN
    v, z = (np.where(finite[..., None, None], weights, 0.0) for weights in (v, z))
    error = invariants.relative_error(
        z.sum(axis=-2), invariants.predict("exp", v, v[0], z[0], kappa=arm.kappa), z[0].sum(axis=-2)
    )
    dims, coords = ("long_step", "kind", "seed"), {"long_step": list(at), "kind": list(TOKEN_KINDS)}
    return xr.DataArray(np.where(finite, error, np.nan), {**coords, "seed": trajectory.seed.values}, dims)


def concat(parts: Mapping[str, Any], dim: str) -> Any:
    """Join datasets or arrays along a new dimension whose labels are their names."""
    return xr.concat(list(parts.values()), xr.IndexVariable(dim, list(parts)), join="exact")


def _draw_tokens(config: Config, context: Context) -> tuple[Tensor, list[torch.Generator]]:
    """Return the token frequencies [kind and seed, class, token], and the streams to draw the weights from.

    A seed draws its data and then its weights from one stream, the same in every setting and arm.
    """
    generators, frequencies = [], []
    for kind in TOKEN_KINDS:
        streams = context.seed_generators()
        data = token_classes(
            kind, generators=streams, classes=config.classes, distinct=config.distinct, common=config.common
        )
        frequencies.append(data.frequency)
        generators += streams
    return torch.cat(frequencies), generators


def _block_config(config: Config, setting: BlockSetting, tokens: int) -> BlockConfig:
    return BlockConfig(
        tokens=tokens,
        hidden=config.classes,
        dim=config.dim,
        attention=setting.attention,
        activation=setting.activation,
        temperature=_temperature(config, setting.attention),
        norm=setting.breaker == "norm",
        skip=setting.breaker == "skip",
    )


def prepare(config: Config, context: Context, setting: BlockSetting) -> Prepared:
    """Draw the data and weights of a setting, and check its config."""
    arms = setting.arms(config).values()
    draws = [_draw_tokens(config, context) for _ in arms]
    x, generators = draws[0][0], [generator for _, streams in draws for generator in streams]
    embeddings = overlapping(config.dim, x.shape[-1] + 1, config.overlap) if setting.breaker == "overlap" else None
    block = Block(_block_config(config, setting, x.shape[-1]), generators=generators, embeddings=embeddings)
    start = torch.tensor([0.0 if arm.zero else 1.0 for arm in arms], dtype=block.w.dtype)
    start = start.repeat_interleave(len(x))[:, None, None]
    with torch.no_grad():
        block.w.mul_(start)
        block.z.mul_(start)
    return Prepared(x, block, _optimiser(config, setting, models=len(x)))


def _temperature(config: Config, attention: str) -> float:
    return config.temperature if attention == "softmax" else 1.0


def _optimiser(config: Config, setting: BlockSetting, models: int) -> Optimiser:
    """Return SGD with the rates of each arm, with weight decay or replaced by Adam if that is the breaker."""
    if setting.breaker == "adam":
        return Optimiser("adam", config.adam_rate, {"z": config.kappa * config.adam_rate})
    decay, (base, *others) = config.decay if setting.breaker == "decay" else 0.0, setting.arms(config).values()
    if not others:  # one rate for all models is faster than one for each
        return Optimiser("sgd", base.rate, {"z": base.rate_z}, weight_decay=decay)
    arms = [arm for arm in (base, *others) for _ in range(models)]
    kappa = torch.tensor([arm.kappa for arm in arms], dtype=torch.float64)
    return Optimiser(
        "sgd", [arm.rate for arm in arms], weight_decay=decay, schedules={"z": lambda step: kappa.to(step.device)}
    )


def overlapping(dim: int, columns: int, cosine: float) -> Float[Tensor, "dim column"]:
    """Return unit vectors, as columns, with the same cosine between any two: each leans towards one shared direction.

    >>> U = overlapping(5, 3, 0.2)
    >>> (U.T @ U)[0]
    tensor([1.0000, 0.2000, 0.2000], dtype=torch.float64)
    """
    cosine = scalar("overlap", cosine, low=0.0, high=1.0)
    if dim <= columns:
        raise InputError("dim", f"above {columns}, the number of embeddings", dim, "widen it")
    orthogonal, shared = torch.eye(dim - 1, columns, dtype=torch.float64), torch.ones(1, columns, dtype=torch.float64)
    return torch.cat([np.sqrt(1 - cosine) * orthogonal, np.sqrt(cosine) * shared])


DIMS = {"v": ("token", "hidden"), "z": ("query", "token"), "b_bar": ("token",), "pull": ("token",)}


def measure_exp(model: Block, _step: int) -> dict[str, Tensor]:
    """Return what the law of exp and linear attention needs of a step: weights and logits."""
    return {"v": model.v, "z": model.z}


def measure_softmax(model: Block, step: int) -> dict[str, Tensor]:
    """Return what the law of softmax attention and its ledger need of a step."""
    return {**measure_exp(model, step), "b_bar": model.mean_attention(), "pull": model.pull()}


def _train(config: Config, context: Context, setting: BlockSetting, prepared: Prepared) -> xr.Dataset:
    """Train, and record `v` and `z` at every step, for softmax also what its ledger needs."""
    arms = [f"{arm} {kind}" for arm, kind in product(setting.arms(config), TOKEN_KINDS)]
    x = prepared.x.to(context.device).repeat(len(arms) // len(TOKEN_KINDS), 1, 1)
    measure = measure_softmax if setting.attention == "softmax" else measure_exp
    training = LabelledTraining(
        prepared.block,
        lambda model, _: cross_entropy_by_row(model(x)),
        optimiser=prepared.optimiser,
        steps=whole("steps", config.steps),
        record=Record(measure, dims=DIMS),
        arms=Arms("arm", arms),
        label=setting.label,
        brief=True,
    )
    return context.fit_together([training])[0]


def _compare(config: Config, attention: str, arm: Arm, trajectory: xr.Dataset, x: np.ndarray) -> xr.Dataset | None:
    """Compare the logits with the law at about a hundred steps; diverged seeds are NaN in it; None if all diverged."""
    finite = (_largest(trajectory.v) < DIVERGED) & (_largest(trajectory.z) < DIVERGED)  # False for NaN
    if not finite.any():
        return None
    path = trajectory.stack(model=("kind", "seed"), create_index=False).transpose("step", "model", ...)
    path = path if finite.all() else path.isel(model=finite.ravel())
    b_ref = np.stack([invariants.reference(frequency) for frequency in x[finite.ravel()]])
    predicted, ledger = _predict(config, attention, arm, path, b_ref)
    steps = list(schedule.every(max(1, config.steps // 100), config.steps))
    z, squares = path.z.values[steps], (path.v.values[steps] ** 2).sum(axis=-1)
    law = (z ** invariants.ATTENTIONS[attention].power).sum(axis=-2)
    terms = np.stack([ledger.drift, ledger.gap, ledger.step])[:, steps]
    corrected = predicted[steps] - np.cumsum([np.zeros_like(law), *terms], axis=0)
    parts = [squares, -b_ref * squares.sum(axis=-1, keepdims=True)]
    over_steps = ("step", "model")
    compared = xr.Dataset(
        {
            "error": (("correction", *over_steps), invariants.relative_error(law, corrected, law[0])),
            "size": (("term", *over_steps), invariants.relative_error(law, law + terms, law[0])),
            "correlation": (over_steps, invariants.correlation(law, corrected[0])),
            "part_correlation": (("part", *over_steps), np.stack([invariants.correlation(law, p) for p in parts])),
            "logit_sum": (over_steps, np.abs(z.sum(axis=-1) - z[0].sum(axis=-1)).max(axis=-1)),
            "loss": (over_steps, path.loss.values[steps]),
            "law": (("model", "token"), law[-1]),
            "predicted": (("correction", "model", "token"), corrected[:, -1]),
        },
        {
            "correction": list(CORRECTIONS),
            "term": list(TERMS),
            "part": list(PARTS),
            "step": steps,
            "kind": path.kind,
            "seed": path.seed,
        },
    )
    compared = compared.set_index(model=["kind", "seed"]).unstack("model")
    return compared.reindex(kind=list(TOKEN_KINDS), seed=trajectory.seed.values)


def _largest(weights: xr.DataArray) -> np.ndarray:
    """Return the largest absolute value of each kind and seed; NaN if one is NaN."""
    axes = tuple(range(2, weights.ndim))
    return np.maximum(weights.values.max(axis=axes), -weights.values.min(axis=axes))


def _predict(
    config: Config, attention: str, arm: Arm, path: xr.Dataset, b_ref: np.ndarray
) -> tuple[np.ndarray, invariants.Ledger]:
    """Return what Theorem 1 predicts at every step, [step, model, token], and the ledger of what it leaves out."""
    v, z, temperature = path.v.values, path.z.values, _temperature(config, attention)
    predicted = invariants.predict(attention, v, v[0], z[0], kappa=arm.kappa, temperature=temperature, b_ref=b_ref)
    if attention != "softmax":
        zero = np.zeros_like(predicted)
        return predicted, invariants.Ledger(zero, zero, invariants.finite_steps(attention, v, z, kappa=arm.kappa))
    b_bar, pull, rates = path.b_bar.values[:-1], path.pull.values[:-1], {"rate_w": arm.rate, "rate_z": arm.rate_z}
    return predicted, invariants.ledger(v, b_bar, pull, temperature=temperature, b_ref=b_ref, **rates)
