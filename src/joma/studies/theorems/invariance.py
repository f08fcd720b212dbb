"""Theorem 1 and Figure 2: what joint training of attention and MLP keeps constant, and what the prediction omits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, scalar, whole
from joma.data.tokens import token_classes
from joma.drawing import canvas, letters, marker, measured, theory
from joma.models.block import Block, BlockConfig
from joma.study import Arms, Claim, Context, Drawing, Preset, Study, at_least, at_most
from joma.theory import invariants
from joma.train import Optimiser, Record

ATTENTIONS = ("softmax", "exp", "linear")
ACTIVATIONS = ("linear", "relu", "gelu")
TOKEN_KINDS = ("gaussian", "random")
TERMS = ("drift", "gap", "step")  # of the ledger
CORRECTIONS = {"none": "ẑ", "drift": "ẑ − drift", "gap": "ẑ − drift − gap", "step": "ẑ − drift − gap − step"}
BREAKERS = {
    "norm": "LayerNorm before W",
    "skip": "a skip of f past W",
    "overlap": "embeddings that are not orthogonal",
    "decay": "weight decay",
    "adam": "Adam",
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
        """κ = η_z/η_w."""
        return self.rate_z / self.rate


@dataclass(frozen=True)
class BlockSetting:
    """What the trainings of this study differ in. Each trains both kinds of tokens and all seeds as one model."""

    attention: str
    activation: str
    breaker: str = "none"

    @property
    def label(self) -> str:
        """The label of the progress bar and of the folder of checkpoints."""
        breaker = f", {BREAKERS[self.breaker]}" if self.breaker in BREAKERS else ""
        return f"{self.attention} attention, {NAMES[self.activation]}{breaker}"


BROKEN = BlockSetting("exp", "gelu")  # in which the breakers are switched on


def run(config: Config, context: Context) -> xr.Dataset:
    """Train every attention with every activation, then each breaker, and compare all with the law."""
    settings = [BlockSetting(*pair) for pair in product(ATTENTIONS, ACTIVATIONS)]
    settings += [replace(BROKEN, breaker=breaker) for breaker in BREAKERS]
    for setting in settings:
        _prepare(config, context, setting)  # bad input is reported before any training
    trials = {}
    with context.progress.task("invariance", total=len(settings)) as task:
        for setting in settings:
            trials[setting] = trial(config, context, setting)
            task.advance()
    rows = {
        attention: _concat({name: trials[BlockSetting(attention, name)] for name in ACTIVATIONS}, "activation")
        for attention in ATTENTIONS
    }
    errors = {breaker: trials[replace(BROKEN, breaker=breaker)].error for breaker in ("none", *BREAKERS)}
    broken = _concat(errors, "breaker").sel(correction="step", drop=True)
    return _concat(rows, "attention").assign(broken=broken).transpose("seed", "step", ..., missing_dims="ignore")


def trial(config: Config, context: Context, setting: BlockSetting) -> xr.Dataset:
    """Train one block on both kinds of tokens with all seeds at once, and compare its logits with the law.

    Returns:
        Over `seed`, `step` and `kind`: `error` of the law after each `correction`, `size` of each `term` of the ledger
        (both over ‖z − z(0)‖), `correlation`, the change of `logit_sum`, `loss`; at the end, by `token`, the `law`'s
        quantity (Σ_m z_m, or Σ_m z_m² for linear attention) and what is `predicted` after each correction.
        Diverged seeds are NaN.
    """
    x, block, optimiser = _prepare(config, context, setting)
    trajectory = _train(config, context, setting, x=x, block=block, optimiser=optimiser)
    return _compare(config, setting.attention, trajectory, x.numpy())


def _concat(parts: Mapping[str, Any], dim: str) -> Any:
    return xr.concat(list(parts.values()), xr.IndexVariable(dim, list(parts)), join="exact")


def _prepare(config: Config, context: Context, setting: BlockSetting) -> tuple[Tensor, Block, Optimiser]:
    """Return the token frequencies [kind and seed, class, token], the block and the optimiser of a setting.

    A seed draws its data and then its weights from one stream, the same in every setting.
    """
    generators = {kind: context.seed_generators() for kind in TOKEN_KINDS}
    draw = partial(token_classes, classes=config.classes, distinct=config.distinct, common=config.common)
    x = torch.cat([draw(kind, generators=generators[kind]).frequency for kind in TOKEN_KINDS])
    optimiser = _optimiser(config, setting.breaker)
    embeddings = overlapping(config.dim, x.shape[-1] + 1, config.overlap) if setting.breaker == "overlap" else None
    block_config = BlockConfig(
        tokens=x.shape[-1],
        hidden=config.classes,
        dim=config.dim,
        attention=setting.attention,
        activation=setting.activation,
        temperature=_temperature(config, setting.attention),
        norm=setting.breaker == "norm",
        skip=setting.breaker == "skip",
    )
    return x, Block(block_config, generators=list(chain(*generators.values())), embeddings=embeddings), optimiser


def _temperature(config: Config, attention: str) -> float:
    return config.temperature if attention == "softmax" else 1.0


def _optimiser(config: Config, breaker: str) -> Optimiser:
    """Return SGD with the rates of the config, with weight decay or replaced by Adam if that is the breaker."""
    rate, rate_z = (scalar(name, getattr(config, name), above=0.0) for name in ("rate", "rate_z"))
    if breaker == "adam":
        return Optimiser("adam", config.adam_rate, {"z": config.kappa * config.adam_rate})
    return Optimiser("sgd", rate, {"z": rate_z}, weight_decay=config.decay if breaker == "decay" else 0.0)


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


def _train(
    config: Config, context: Context, setting: BlockSetting, *, x: Tensor, block: Block, optimiser: Optimiser
) -> xr.Dataset:
    """Train, and record `v` and `z` at every step, for softmax also what its ledger needs."""
    x, softmax = x.to(context.device), setting.attention == "softmax"

    def loss(model: Block, _step: Tensor) -> Tensor:
        """Cross entropy: sample i is class i, and hidden unit k is the logit of class k."""
        h = model(x)
        return (h.logsumexp(dim=-1) - h.diagonal(dim1=-2, dim2=-1)).mean(dim=-1)

    def measure(model: Block, _step: int) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {"w": model.w, "z": model.z}
        return weights | {"b_bar": model.mean_attention(), "pull": model.pull()} if softmax else weights

    dims = {"w": ("dim", "hidden"), "z": ("query", "token"), "b_bar": ("token",), "pull": ("token",)}
    trajectory = context.fit(
        block,
        loss,
        optimiser=optimiser,
        steps=whole("steps", config.steps),
        record=Record(measure, dims=dims),
        arms=Arms("kind", TOKEN_KINDS),
        label=setting.label,
    )
    v = block.U_C.T.cpu().numpy() @ trajectory.w.values  # of all steps at once: cheaper than in `measure`
    return trajectory.drop_vars("w").assign(v=(("kind", "seed", "step", "token", "hidden"), v))


def _compare(config: Config, attention: str, trajectory: xr.Dataset, x: np.ndarray) -> xr.Dataset:
    """Compare the logits with the law at about a hundred steps; diverged seeds are NaN in the result."""
    below = abs(trajectory[["v", "z"]]) < DIVERGED  # False for NaN
    finite = (below.v.all(("step", "token", "hidden")) & below.z.all(("step", "query", "token"))).values
    if not finite.any():
        raise InputError("rate", "small enough to train with", config.rate, "every seed diverged: lower it")
    kinds, seeds = (xr.DataArray(index, dims="model") for index in np.nonzero(finite))
    path = trajectory.isel(kind=kinds, seed=seeds).transpose("step", "model", ...)
    predicted, ledger = _predict(config, attention, path, x[finite.ravel()])
    steps = list(schedule.every(max(1, config.steps // 100), config.steps))
    z = path.z.values[steps]
    law = (z ** invariants.ATTENTIONS[attention].power).sum(axis=-2)
    terms = np.stack([ledger.drift, ledger.gap, ledger.step])[:, steps]
    corrected = predicted[steps] - np.cumsum([np.zeros_like(law), *terms], axis=0)
    over_steps = ("step", "model")
    compared = xr.Dataset(
        {
            "error": (("correction", *over_steps), invariants.relative_error(law, corrected, law[0])),
            "size": (("term", *over_steps), invariants.relative_error(law, law + terms, law[0])),
            "correlation": (over_steps, invariants.correlation(law, corrected[0])),
            "logit_sum": (over_steps, np.abs(z.sum(axis=-1) - z[0].sum(axis=-1)).max(axis=-1)),
            "loss": (over_steps, path.loss.values[steps]),
            "law": (("model", "token"), law[-1]),
            "predicted": (("correction", "model", "token"), corrected[:, -1]),
        },
        {"correction": list(CORRECTIONS), "term": list(TERMS), "step": steps, "kind": path.kind, "seed": path.seed},
    )
    compared = compared.set_index(model=["kind", "seed"]).unstack("model")
    return compared.reindex(kind=list(TOKEN_KINDS), seed=trajectory.seed.values)


def _predict(config: Config, attention: str, path: xr.Dataset, x: np.ndarray) -> tuple[np.ndarray, invariants.Ledger]:
    """Return what Theorem 1 predicts at every step, [step, model, token], and the ledger of what it leaves out."""
    v, z, temperature = path.v.values, path.z.values, _temperature(config, attention)
    b_ref = np.stack([invariants.reference(frequency) for frequency in x])
    predicted = invariants.predict(attention, v, v[0], z[0], kappa=config.kappa, temperature=temperature, b_ref=b_ref)
    if attention != "softmax":
        zero = np.zeros_like(predicted)
        return predicted, invariants.Ledger(zero, zero, invariants.finite_steps(attention, v, z, kappa=config.kappa))
    b_bar, pull, rates = path.b_bar.values[:-1], path.pull.values[:-1], {"rate_w": config.rate, "rate_z": config.rate_z}
    return predicted, invariants.ledger(v, b_bar, pull, temperature=temperature, b_ref=b_ref, **rates)


def worst(values: xr.DataArray, *, least: bool = False) -> xr.DataArray:
    """Return the largest (or least) value of each seed; NaN where one of its trainings diverged."""
    axes = [dim for dim in values.dims if dim != "seed"]
    return values.min(axes, skipna=False) if least else values.max(axes, skipna=False)


def at_end(run: xr.Dataset, name: str, **labels: Any) -> xr.DataArray:
    """Return a variable after the last step, selected by label."""
    return run[name].isel(step=-1).sel(labels)


FIGURE_2 = {"attention": "softmax", "activation": "linear"}


def _breaks(breaker: str) -> Claim:
    return Claim(
        f"breaks-{breaker}",
        f"Not conserved any more with {BREAKERS[breaker]}: relative error of the finite-step law, exp attention, GELU.",
        lambda run: worst(at_end(run, "broken", breaker=breaker), least=True),
        at_least(0.05),
    )


CLAIMS = (
    Claim(
        "correlation",
        "Figure 2: ẑ, computed from the MLP's weights, follows z (correlation after training, Gaussian tokens).",
        lambda run: at_end(run, "correlation", **FIGURE_2, kind="gaussian"),
        at_least(0.95),
    ),
    Claim(
        "correlation-random",
        "Figure 2 with random tokens: ẑ follows z (correlation after training).",
        lambda run: at_end(run, "correlation", **FIGURE_2, kind="random"),
        at_least(0.95),
    ),
    Claim(
        "equality",
        "Figure 2 read as agreement: ẑ equals z (relative error ‖z − ẑ‖/‖z − z(0)‖, Gaussian tokens).",
        lambda run: at_end(run, "error", **FIGURE_2, kind="gaussian", correction="none"),
        at_most(0.1),
    ),
    Claim(
        "ledger",
        "ẑ less drift, gap and step is z to rounding: largest relative error over training, softmax, all settings.",
        lambda run: worst(run.error.sel(attention="softmax", correction="step")),
        at_most(1e-10),
    ),
    Claim(
        "ledger-flow",
        "Without the step term, as along the flow, what is left is of the order of the rate (at the end).",
        lambda run: worst(at_end(run, "error", attention="softmax", correction="gap")),
        at_most(0.01),
    ),
    Claim(
        "sum",
        "Softmax attention keeps the sum of its logits: largest change over training, all settings.",
        lambda run: worst(run.logit_sum.sel(attention="softmax")),
        at_most(1e-10),
    ),
    Claim(
        "finite-steps",
        "Theorem 1, linear and exp attention: exact for SGD too, once each step's Δv² (and Δz²) is counted.",
        lambda run: worst(run.error.sel(attention=["linear", "exp"], correction="step")),
        at_most(1e-10),
    ),
    Claim(
        "linear",
        "Theorem 1, linear attention: SGD keeps to the flow's law (relative error after training, all settings).",
        lambda run: worst(at_end(run, "error", attention="linear", correction="none")),
        at_most(0.01),
    ),
    Claim(
        "exp",
        "Theorem 1, exp attention: SGD keeps to the flow's law (relative error after training, all settings).",
        lambda run: worst(at_end(run, "error", attention="exp", correction="none")),
        at_most(0.01),
    ),
    *(_breaks(breaker) for breaker in BREAKERS),
)


def _thin(values: xr.DataArray, count: int = 12) -> xr.DataArray:
    """Return about `count` of the recorded steps, without step 0, where nothing has moved."""
    return values.isel(step=slice(1, None, max(1, values.sizes["step"] // count)))


def _measured_steps(axes: Axes, values: xr.DataArray, index: int, label: str) -> None:
    """Draw a series over a few of its steps."""
    thinned = _thin(values)
    measured(axes, thinned.step, thinned, index, label)


def _write_bound(axes: Axes, name: str, values: xr.DataArray) -> None:
    """Write values far below the panel's scale as a bound: drawn to scale they would flatten all the rest."""
    bound = 10.0 ** np.ceil(np.log10(np.maximum(values.max(), 1e-300)))
    axes.text(0.03, 0.03, f"{name}: below {float(bound):.0e}", transform=axes.transAxes, fontsize=8)


def draw_figure_2(run: xr.Dataset) -> Figure:
    """Draw correlation, relative error after each correction, and predicted against trained logits."""
    figure, axes = canvas(1, 3, width=3.4, height=3.0)
    left, middle, right = axes[0]
    figure_2 = run.sel(FIGURE_2)
    for index, kind in enumerate(TOKEN_KINDS):
        _measured_steps(left, figure_2.correlation.sel(kind=kind), index, f"{NAMES[kind]} tokens")
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set(xlabel="step", ylabel="correlation of ẑ and z", title="What Figure 2 shows", ylim=(None, 1.02))
    left.legend(loc="lower left")
    error = figure_2.error.sel(kind="gaussian")
    for index, correction in enumerate(("none", "drift", "gap")):
        _measured_steps(middle, error.sel(correction=correction), index, CORRECTIONS[correction])
    _write_bound(middle, CORRECTIONS["step"], error.sel(correction="step"))
    low, high = middle.get_ylim()
    middle.set(xlabel="step", ylabel="‖z − prediction‖ / ‖z − z(0)‖", yscale="log", title="Error, Gaussian tokens")
    middle.set_ylim(max(low, 2e-4), 10 * high)
    middle.legend(loc="upper left")
    _scatter(right, figure_2.sel(kind="gaussian"))
    letters(axes)
    return figure


def _scatter(axes: Axes, run: xr.Dataset) -> None:
    """Draw predicted against trained logits of all seeds and tokens, with the line of agreement."""
    theory(axes, [run.law.min(), run.law.max()], [run.law.min(), run.law.max()], 0, "agreement")
    for index, correction in enumerate(("none", "step"), start=1):
        predicted = run.predicted.sel(correction=correction)
        axes.plot(run.law.values.ravel(), predicted.values.ravel(), label=CORRECTIONS[correction], **marker(index))
    axes.set(xlabel="trained logit z", ylabel="predicted logit", title="After training, each token")
    axes.legend(loc="upper left")


def draw_laws(run: xr.Dataset) -> Figure:
    """Draw the error of the prediction from the weights alone for every attention, activation and kind of tokens."""
    figure, axes = canvas(len(TOKEN_KINDS), len(ATTENTIONS), width=3.4, height=2.5, sharex=True, sharey=True)
    for (row, kind), (column, attention) in product(enumerate(TOKEN_KINDS), enumerate(ATTENTIONS)):
        panel, error = axes[row, column], run.error.sel(attention=attention, kind=kind)
        for index, activation in enumerate(ACTIVATIONS):
            _measured_steps(panel, error.sel(activation=activation, correction="none"), index, NAMES[activation])
        _write_bound(panel, "finite-step law", error.sel(correction="step"))
        panel.set(yscale="log", title=f"{attention} attention, {NAMES[kind]} tokens")
    axes[0, 0].set_ylim(bottom=2e-5)
    for panel in axes[:, 0]:
        panel.set_ylabel("relative error of the law")
    for panel in axes[-1]:
        panel.set_xlabel("step")
    axes[0, 2].legend(loc="upper left", title="activation")
    letters(axes)
    return figure


def draw_breakers(run: xr.Dataset) -> Figure:
    """Draw the error of the finite-step law with each breaker switched on."""
    figure, axes = canvas(1, len(TOKEN_KINDS), width=3.6, height=3.0, sharey=True)
    for panel, kind in zip(axes[0], TOKEN_KINDS, strict=True):
        broken = run.broken.sel(kind=kind)
        for index, (breaker, label) in enumerate(BREAKERS.items()):
            _measured_steps(panel, broken.sel(breaker=breaker), index, label)
        _write_bound(panel, "none of them", broken.sel(breaker="none"))
        panel.set(xlabel="step", yscale="log", title=f"{NAMES[kind]} tokens")
    axes[0, 0].set_ylabel("relative error of the law")
    axes[0, 0].set_ylim(bottom=2e-3)
    axes[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    letters(axes)
    return figure


STUDY = Study(
    name="invariance",
    title="What joint training of attention and MLP keeps constant",
    source="JoMA, Theorem 1 and Figure 2 (arXiv 2310.00535)",
    about=(
        "Figure 2's block is trained by SGD for three attentions, three activations and two kinds of tokens. Theorem 1 "
        "computes the attention logits z from the MLP's weights. For softmax attention its ẑ assumes that the mean "
        "attention stays where it began and is independent of the gradient. ẑ correlates with z and yet is several "
        "times too large: the ledger accounts for all of the difference, as drift (the mean attention moved), gap "
        "(it is not independent) and step (SGD's steps are finite). For linear and exp attention the law holds along "
        "the flow as it stands. SGD departs from it a little, and with exp attention and linear units by order one "
        "once the loss begins to oscillate; all of the departure is the steps' own squares, which make the law exact "
        "again. Five switches that the theorem excludes are "
        "shown to break it."
    ),
    version=2,
    presets={
        "quick": Preset(Config(), seeds=3, seconds=25),
        "paper": Preset(Config(), seeds=10, seconds=60),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    figures={
        "figure-2": Drawing(
            draw_figure_2,
            "Softmax attention, linear activation. (a) The correlation that the paper's Figure 2 reports; (b) the "
            "error of the same prediction, in units of what there was to predict, and after each term of the ledger "
            "is subtracted; (c) each token's logit after training, Gaussian tokens, all seeds. Points in (a) and (b): "
            "mean over seeds, bars from the least to the greatest.",
        ),
        "laws": Drawing(
            draw_laws,
            "Relative error of the logits predicted from the MLP's weights alone. Points: mean over seeds, bars from "
            "the least to the greatest. The finite-step law is the same prediction less the ledger (softmax) or the "
            "squares of SGD's steps (exp, linear): its error is rounding. Where SGD begins to oscillate, late in (b) "
            "with linear units, the flow's law is lost and the finite-step law is not.",
        ),
        "breakers": Drawing(
            draw_breakers,
            "Relative error of the finite-step law, exp attention and GELU units, with one thing switched on that "
            "Theorem 1 excludes. Points: mean over seeds, bars from the least to the greatest.",
        ),
    },
)
