"""Training of a one-layer Transformer in the settings of `value-invariant`, and its comparison with the value law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, scalar, whole
from joma.data.tokens import token_classes
from joma.models.one_layer import OneLayer
from joma.models.one_layer_config import OneLayerConfig
from joma.studies.surprisal import surprisal
from joma.studies.theorems.invariance_training import DIVERGED, concat, overlapping
from joma.study import Arms, Context, LabelledTraining
from joma.theory import factored, invariants
from joma.train import Optimiser, Record
from joma.train.optimiser import Schedule

RATES = {"equal": (1.0, 1.0), "unequal": (0.6, 1.7)}  # factors of the rates of logits (or keys) and of values
SHOWN_STEPS = 50


@dataclass(frozen=True)
class Config:
    """A one-layer Transformer on classes of token frequencies, and the ladder from it to a language model."""

    classes: int = 6
    distinct: int = 6
    common: int = 6
    queries: int = 3
    values: int = 8
    """Length of a value vector."""
    head_width: int = 6
    """Length of a query and of a key, where logits are products."""
    hidden: int = 16
    scale: float = 0.3
    """Standard deviation of all initial weights and logits."""
    steps: int = 400
    rate: float = 0.05
    overlap: float = 0.2
    """Cosine between any two embeddings under the breaker `overlap`."""
    decay: float = 0.01
    """Weight decay under the breaker `decay`, and where the laws of a head are followed with weight decay."""
    adam_rate: float = 0.01
    samples: int = 64
    """Sequences of the ladder."""
    length: int = 10
    """Tokens that a query of the ladder sees at most."""
    batch: int = 16
    """Sequences in a minibatch of the ladder."""
    ladder_steps: int = 400
    until: float = 5.0
    """End of the gradient flows; a step of SGD lasts for the time `rate`."""

    @property
    def tokens(self) -> int:
        """The number of contextual tokens."""
        return self.distinct + self.common

    @property
    def dim(self) -> int:
        """The length of an embedding; one more than orthonormal ones need, for those that overlap."""
        return self.tokens + self.queries + 1


@dataclass(frozen=True)
class ValueSetting:
    """What the trainings of this study differ in."""

    attention: str = "exp"
    logits: str = "free"
    values: bool = True
    norm: bool = True
    head: bool = True
    skip: bool = True
    breaker: str = "none"
    unequal: bool = False
    """Whether it is trained at unequal rates too."""

    @property
    def arms(self) -> dict[str, tuple[float, float]]:
        """The factors of the learning rates of logits and of values, by the arm's name."""
        return RATES if self.unequal else {"equal": RATES["equal"]}

    @property
    def label(self) -> str:
        """The label of the progress bar and of the folder of checkpoints."""
        switches = [name for name in ("values", "norm", "head", "skip") if getattr(self, name)]
        return f"{self.attention}, {self.logits} logits, {' '.join(switches) or 'plain'}, breaker {self.breaker}"


LAWS = {
    "exp": ValueSetting("exp", unequal=True),
    "linear": ValueSetting("linear", unequal=True),
    "softmax": ValueSetting("softmax", unequal=True),
    "keys linear": ValueSetting("linear", "product", unequal=True),
    "keys exp": ValueSetting("exp", "product", unequal=True),
    "keys softmax": ValueSetting("softmax", "product", unequal=True),
}
BASE = LAWS["exp"]
_PLAIN = ValueSetting(norm=False, head=False, skip=False)
ABOVE = {
    "units": _PLAIN,
    "norm": replace(_PLAIN, norm=True),
    "head": replace(_PLAIN, head=True),
    "skip": replace(_PLAIN, head=True, skip=True),
    "all": BASE,
}
BREAKERS = {
    "none": BASE,
    "learned": ValueSetting(breaker="learned"),
    "overlap": ValueSetting(breaker="overlap"),
    "adam": ValueSetting(breaker="adam"),
    "decay": ValueSetting(breaker="decay"),
}


class Data(NamedTuple):
    """Samples of each model: token frequencies, query token and class, which depends on both."""

    x: Float[Tensor, "model sample token"]
    query: Int[Tensor, " sample"]
    label: Int[Tensor, " sample"]


class Law(NamedTuple):
    """A law's quantity over steps, [step, seed, token]: measured, predicted from values alone, and in full."""

    measured: np.ndarray
    predicted: np.ndarray
    exact: np.ndarray
    size: np.ndarray
    """The largest absolute value of the terms that the law adds, of each seed: what rounding is relative to."""


def draw_frequencies(config: Config, context: Context) -> Float[Tensor, "seed label token"]:
    """Return P[token | class] of each seed, of Figure 2's kind with Gaussian tokens."""
    return token_classes(
        "gaussian",
        generators=context.generators("tokens"),
        classes=config.classes,
        distinct=config.distinct,
        common=config.common,
    ).frequency


def draw_data(config: Config, context: Context, arms: int) -> Data:
    """Return every class with every query; the label is (class + query) modulo the number of classes."""
    frequency = draw_frequencies(config, context)
    queries = whole("queries", config.queries)
    query = torch.arange(queries).repeat_interleave(config.classes)
    label = (torch.arange(config.classes).repeat(queries) + query) % config.classes
    return Data(frequency.repeat(arms, queries, 1), query, label)


def build(config: Config, context: Context, setting: ValueSetting) -> OneLayer:
    """Return the model of a setting, with all arms and seeds on its leading axis."""
    if setting.head and whole("hidden", config.hidden) < 1:
        raise InputError("hidden", "at least 1", config.hidden, "give the MLP hidden units")
    options = OneLayerConfig(
        tokens=config.tokens,
        outputs=config.classes,
        hidden=config.hidden if setting.head else 0,
        queries=config.queries,
        dim=config.dim,
        logits=setting.logits,
        embeddings="learned" if setting.breaker == "learned" else "fixed",
        attention=setting.attention,
        activation="gelu",
        head_width=config.head_width,
        values=whole("values", config.values) if setting.values else 0,
        norm=setting.norm,
        skip=setting.skip,
        scale=config.scale,
        scale_z=config.scale,
        scale_qk=config.scale,
        scale_values=config.scale,
    )
    columns = config.tokens + config.queries
    embeddings = overlapping(config.dim, columns, config.overlap) if setting.breaker == "overlap" else None
    arms = Arms("rates", list(setting.arms))
    return OneLayer(options, generators=context.generators("weights", arms), embeddings=embeddings)


def optimiser(config: Config, context: Context, setting: ValueSetting) -> Optimiser:
    """Return SGD with the rates of each arm, with weight decay or replaced by Adam if that is the breaker."""
    if setting.breaker == "adam":
        return Optimiser("adam", scalar("adam_rate", config.adam_rate, above=0.0))
    rate = scalar("rate", config.rate, above=0.0)
    decay = scalar("decay", config.decay, low=0.0) if setting.breaker == "decay" else 0.0
    if not setting.unequal:
        return Optimiser("sgd", rate, weight_decay=decay)
    logits, values = (
        torch.tensor(context.per_model([factors[side] for factors in setting.arms.values()]), dtype=torch.float64)
        for side in (0, 1)
    )
    names = ("z",) if setting.logits == "free" else ("W_Q", "W_K")
    schedules: dict[str, Schedule] = {name: lambda step: logits.to(step.device) for name in names}
    schedules["W_V"] = lambda step: values.to(step.device)
    return Optimiser("sgd", [rate] * len(logits), weight_decay=decay, schedules=schedules)


DIMS = {
    "p": ("token", "value"),
    "k": ("token", "head"),
    "v": ("token", "hidden"),
    "z": ("query", "token"),
    "b_bar": ("token",),
    "pull": ("token",),
    "zeta": ("query", "token"),
}


def measure(model: OneLayer, query: Tensor) -> dict[str, Tensor]:
    """Return what the laws are about, from the last forward and backward pass.

    `v` are the weights of the MLP that multiply attention: those of the block of Theorem 1 are U_Cᵀ w, and with values
    the columns of W_O W_V U_C are in the place of the embeddings.
    """
    measures = {"z": model.logits}
    if model.W_V is None or model.W_O is None:
        return measures | {"v": model.v}
    p = model.value_vectors
    measures |= {"p": p, "v": p @ model.W_O @ model.w}
    if model.z is None:
        measures |= {"k": model.key_vectors, "zeta": _zeta(model, query)}
    if model.config.attention == "softmax":
        measures |= {"b_bar": model.mean_attention(), "pull": model.pull()}
    return measures


def _zeta(model: OneLayer, query: Tensor) -> Float[Tensor, "model query token"]:
    """Return −∂loss/∂z, summed over the samples of each query, from the gradient of b."""
    if model.b is None or model.b.grad is None:
        raise RuntimeError("the measures of a step need its gradients")
    b, y = model.b.detach(), -model.b.grad
    if model.config.attention == "softmax":
        y = y - (b * y).sum(dim=-1, keepdim=True)
    return F.one_hot(query, model.config.queries).to(b.dtype).T @ (b * y)


def train(config: Config, context: Context, setting: ValueSetting) -> xr.Dataset:
    """Train one setting in all its arms, with all seeds at once; record at every step what the laws are about."""
    data = draw_data(config, context, len(setting.arms))
    x, query, label = (tensor.to(context.device) for tensor in data)

    def loss(model: OneLayer, _step: Tensor) -> Tensor:
        outputs = model(x, query)
        return surprisal(outputs, label.expand(outputs.shape[:-1])).mean(dim=-1)

    model = build(config, context, setting)
    training = LabelledTraining(
        model,
        loss,
        optimiser=optimiser(config, context, setting),
        steps=whole("steps", config.steps),
        record=Record(lambda model, _: measure(model, query), dims=DIMS),
        arms=Arms("rates", list(setting.arms)),
        label=setting.label,
        brief=True,
    )
    return context.fit_together([training])[0]


def trial(config: Config, context: Context, setting: ValueSetting) -> xr.Dataset:
    """Train one setting and return the errors of its laws over `seed`, `step` and `rates`.

    Returns:
        `value` is the error of the value law without (`none`) and with (`full`) its correction for SGD's steps and, for
        softmax, its ledger; `mlp` that of JoMA's law about the weights of the MLP, less the squares of SGD's steps;
        `value_residual` and `mlp_residual` what these leave over, relative to the largest term of the law; `loss` the
        cross entropy. Diverged seeds are NaN.
    """
    trajectory = train(config, context, setting)
    x = draw_data(config, context, 1).x
    b_ref = np.stack([invariants.reference(frequency) for frequency in x.numpy()])
    parts = {}
    for name, (factor_z, factor_v) in setting.arms.items():
        path, finite = arrays(trajectory.sel(rates=name, drop=True))
        rate, shown = config.rate, shown_steps(config.steps)
        errors: dict[str, Any] = {}
        if setting.values:
            law = value_law(setting.attention, path, rates=(factor_z * rate, factor_v * rate), b_ref=b_ref)
            errors["value"] = (("correction", "step", "seed"), law_errors(law, shown, finite))
            errors["value_residual"] = (("step", "seed"), law_residual(law, shown, finite))
        if setting.attention == "exp" and setting.logits == "free":
            law = mlp_law(path, kappa=factor_z)
            errors["mlp"] = (("step", "seed"), law_errors(law, shown, finite)[1])
            errors["mlp_residual"] = (("step", "seed"), law_residual(law, shown, finite))
        errors["loss"] = (("step", "seed"), np.where(finite, path["loss"][shown], np.nan))
        parts[name] = xr.Dataset(errors, {"step": shown, "seed": trajectory.seed.values})
    joined = concat(parts, "rates")
    return joined.assign_coords(correction=["none", "full"]) if setting.values else joined


def shown_steps(steps: int) -> list[int]:
    """Return about fifty steps at which errors are stored, the last among them."""
    return list(schedule.every(max(1, steps // SHOWN_STEPS), steps))


def arrays(trajectory: xr.Dataset) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the variables [step, seed, ...] with zeros in diverged seeds, and which seeds did not diverge."""
    over_steps = {name: values for name, values in trajectory.items() if "step" in values.dims}
    path = {name: values.transpose("step", "seed", ...).values for name, values in over_steps.items()}
    largest = [np.abs(values).reshape(*values.shape[:2], -1).max(axis=(0, 2)) for values in path.values()]
    finite = np.max(largest, axis=0) < DIVERGED  # False for NaN
    masked = {
        str(name): np.where(finite.reshape(1, -1, *(1,) * (values.ndim - 2)), values, 0.0)
        for name, values in path.items()
    }
    return masked, finite


def value_law(attention: str, path: Mapping[str, np.ndarray], *, rates: tuple[float, float], b_ref: np.ndarray) -> Law:
    """Return the law of the value path for logits (free) or for squared keys (products), over steps."""
    rate_z, rate_v = rates
    p, z, kappa = path["p"], path["z"], rate_z / rate_v
    if "k" in path:
        return _key_law(attention, path, rates)
    measured = (z ** invariants.ATTENTIONS[attention].power).sum(axis=-2)
    predicted = invariants.predict(attention, p, p[0], z[0], kappa=kappa, b_ref=b_ref)
    if attention != "softmax":
        steps = invariants.finite_steps(attention, p, z, kappa=kappa)
        return Law(measured, predicted, predicted - steps, _size(measured, _squares(p, kappa), steps))
    terms = invariants.ledger(p, path["b_bar"][:-1], path["pull"][:-1], rate_w=rate_v, rate_z=rate_z, b_ref=b_ref)
    size = _size(measured, _squares(p, kappa), terms.drift, terms.gap, terms.step)
    return Law(measured, predicted, predicted - terms.total, size)


def _key_law(attention: str, path: Mapping[str, np.ndarray], rates: tuple[float, float]) -> Law:
    """Return the law of ‖k_l‖² of product logits; what linear attention keeps is the prediction for the others too."""
    p, k, kappa = path["p"], path["k"], rates[0] / rates[1]
    keys, measured = np.swapaxes(k, -1, -2), _squares(k, 1.0)
    predicted = invariants.predict("linear", p, p[0], keys[0], kappa=kappa)
    if attention == "linear":
        steps = invariants.finite_steps("linear", p, keys, kappa=kappa)
        return Law(measured, predicted, predicted - steps, _size(measured, _squares(p, kappa), steps))
    pull = path["pull"][:-1] if attention == "softmax" else None
    terms = factored.key_ledger(attention, k, p, path["zeta"][:-1], path["z"][:-1], pull=pull, rates=rates)
    size = _size(measured, terms.level, terms.spread, terms.normalisation, terms.step)
    return Law(measured, predicted, measured[0] + 2 * terms.total, size)


def _squares(vectors: np.ndarray, factor: float) -> np.ndarray:
    return factor * (vectors**2).sum(axis=-1)


def _size(*terms: np.ndarray) -> np.ndarray:
    return np.abs(np.stack(terms)).max(axis=(0, 1, 3))


def mlp_law(path: Mapping[str, np.ndarray], *, kappa: float) -> Law:
    """Return JoMA's law of exp attention about the weights of the MLP that multiply attention."""
    v, z = path["v"], path["z"]
    predicted, steps = (
        invariants.predict("exp", v, v[0], z[0], kappa=kappa),
        invariants.finite_steps("exp", v, z, kappa=kappa),
    )
    measured = z.sum(axis=-2)
    return Law(measured, predicted, predicted - steps, _size(measured, _squares(v, kappa), steps))


def law_errors(law: Law, shown: list[int], finite: np.ndarray) -> np.ndarray:
    """Return the relative errors without and with correction at the steps shown, [2, step, seed]; NaN if diverged."""
    measured = law.measured[shown]
    errors = [invariants.relative_error(measured, side[shown], law.measured[0]) for side in (law.predicted, law.exact)]
    return np.where(finite, np.stack(errors), np.nan)


def law_residual(law: Law, shown: list[int], finite: np.ndarray) -> np.ndarray:
    """Return what the law in full leaves over, relative to the largest of its terms, [step, seed]; NaN if diverged."""
    residual = np.abs(law.measured - law.exact)[shown].max(axis=-1) / np.where(law.size > 0, law.size, 1.0)
    return np.where(finite, residual, np.nan)


def rounding(config: Config, steps: int, rows: int) -> float:
    """Return a bound of `law_residual` by rounding alone: the unit of rounding times the additions behind a number.

    In one step an inner product of −∂loss/∂b adds `dim + values` terms, the gradient of a value vector adds `rows`, and
    p · Δp adds `values`. A law adds the increments of all steps.
    """
    return float(np.finfo(np.float64).eps * steps * (rows + config.dim + 2 * config.values))
