"""Theorem 1 and Figure 2: what training attention and MLP together keeps constant, and what the prediction omits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
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
from joma.models.block import Block, BlockConfig
from joma.report.figure import canvas, letters, marker, measured, theory
from joma.study import Arms, Claim, Context, Drawing, Preset, Study, at_least, at_most
from joma.theory import invariants
from joma.train import Optimiser, Record

ATTENTIONS = ("softmax", "exp", "linear")
ACTIVATIONS = ("linear", "relu", "gelu")
TOKENS = ("gaussian", "random")
TERMS = ("drift", "gap", "step")  # of the ledger; a correction subtracts its own and those before it
BREAKERS = {
    "norm": "LayerNorm before W",
    "skip": "a skip of f past W",
    "overlap": "embeddings that are not orthogonal",
    "decay": "weight decay",
    "adam": "Adam",
}
NAMES = {"linear": "linear", "relu": "ReLU", "gelu": "GELU", "gaussian": "Gaussian", "random": "random"}
CORRECTED = {"none": "ẑ", "drift": "ẑ − drift", "gap": "ẑ − drift − gap", "step": "ẑ − drift − gap − step"}


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
    """Cosine between any two embeddings, where the breaker says that they overlap."""
    decay: float = 0.01
    """Weight decay, where the breaker says so."""
    adam_rate: float = 0.01
    """Adam's learning rate, where the breaker says so; `rate_z / rate` times as much for the logits."""

    @property
    def kappa(self) -> float:
        """κ = η_z/η_w."""
        return self.rate_z / self.rate


@dataclass(frozen=True)
class Setting:
    """What one training differs in from another; both kinds of tokens and all seeds are trained together."""

    attention: str
    activation: str
    breaker: str = "none"

    @property
    def label(self) -> str:
        """For the progress bar."""
        breaker = f", {BREAKERS[self.breaker]}" if self.breaker in BREAKERS else ""
        return f"{self.attention} attention, {NAMES[self.activation]}{breaker}"


HUGE = 1e50  # beyond it fourth powers overflow

BROKEN = Setting("exp", "gelu")  # where the breakers are switched on


def run(config: Config, context: Context) -> xr.Dataset:
    """Train every attention with every activation, then each breaker, and compare all with the law."""
    settings = [Setting(*pair) for pair in product(ATTENTIONS, ACTIVATIONS)]
    settings += [replace(BROKEN, breaker=breaker) for breaker in BREAKERS]
    for setting in settings:
        _prepared(config, context, setting)  # bad input is found before any training
    found = {}
    with context.progress.task("invariance", total=len(settings)) as work:
        for setting in settings:
            found[setting] = trial(config, context, setting)
            work.advance()
    rows = {one: _joined({two: found[Setting(one, two)] for two in ACTIVATIONS}, "activation") for one in ATTENTIONS}
    broken = {breaker: found[replace(BROKEN, breaker=breaker)].error for breaker in ("none", *BREAKERS)}
    result = _joined(rows, "attention").assign(broken=_joined(broken, "breaker").sel(correction="step", drop=True))
    return result.transpose("seed", "step", ..., missing_dims="ignore")


def trial(config: Config, context: Context, setting: Setting) -> xr.Dataset:
    """Train one block on both kinds of tokens with all seeds at once, and compare its logits with the law.

    Returns:
        Over `seed`, `step` and `kind`: `error` of the law after each `correction`, `size` of each `term` of the ledger
        (both over ‖z − z(0)‖), `correlation`, the change of `logit_sum`, `loss`; at the end, by `token`, the `law`'s
        quantity (Σ_m z_m, or Σ_m z_m² for linear attention) and what is `predicted` after each correction.
    """
    x, block, optimiser = _prepared(config, context, setting)
    raw = _trained(config, context, setting, x=x, block=block, optimiser=optimiser)
    return _unfolded(_compared(config, setting.attention, raw, x.numpy()), context.seeds)


def _joined(parts: Mapping[str, Any], dim: str) -> Any:
    return xr.concat(list(parts.values()), xr.IndexVariable(dim, list(parts)), join="exact")


def _prepared(config: Config, context: Context, setting: Setting) -> tuple[Tensor, Block, Optimiser]:
    """Return the data of both kinds one after the other [kind and seed, class, token], the block and the optimiser.

    A seed draws its data and then its weights from one stream, whatever the setting.
    """
    streams = {kind: context.seed_generators() for kind in TOKENS}
    draw = partial(token_classes, classes=config.classes, distinct=config.distinct, common=config.common)
    x = torch.cat([draw(kind, generators=own).frequency for kind, own in streams.items()])
    options, optimiser = _broken(config, setting.breaker)
    embeddings = options.pop("embeddings", None)
    parts = BlockConfig(
        tokens=x.shape[-1],
        hidden=config.classes,
        dim=config.dim,
        attention=setting.attention,
        activation=setting.activation,
        temperature=_temperature(config, setting.attention),
        **options,
    )
    generators = [generator for own in streams.values() for generator in own]
    block = Block(parts, generators=generators, embeddings=embeddings)
    return x, block, optimiser


def _temperature(config: Config, attention: str) -> float:
    return config.temperature if attention == "softmax" else 1.0


def _broken(config: Config, breaker: str) -> tuple[dict[str, Any], Optimiser]:
    """Return the block's options and the optimiser with one of `BREAKERS` switched on, or none."""
    for name in ("rate", "rate_z"):
        if getattr(config, name) == 0:
            raise InputError(name, "above 0", 0, "give a positive number")
    sgd = Optimiser("sgd", config.rate, {"z": config.rate_z})
    if breaker == "overlap":
        return {"embeddings": overlapping(config.dim, config.distinct + config.common + 1, config.overlap)}, sgd
    if breaker == "decay":
        return {}, replace(sgd, weight_decay=config.decay)
    if breaker == "adam":
        return {}, Optimiser("adam", config.adam_rate, {"z": config.kappa * config.adam_rate})
    return {breaker: True} if breaker in ("norm", "skip") else {}, sgd


def overlapping(dim: int, columns: int, cosine: float) -> Float[Tensor, "dim column"]:
    """Return unit vectors, as columns, with the same cosine between any two: each leans towards one shared direction.

    >>> U = overlapping(5, 3, 0.2)
    >>> (U.T @ U)[0]
    tensor([1.0000, 0.2000, 0.2000], dtype=torch.float64)
    """
    cosine = scalar("overlap", cosine, low=0.0, high=1.0)
    if dim <= columns:
        raise InputError("dim", f"above {columns}, the number of embeddings", dim, "widen it")
    own, shared = torch.eye(dim - 1, columns, dtype=torch.float64), torch.ones(1, columns, dtype=torch.float64)
    return torch.cat([np.sqrt(1 - cosine) * own, np.sqrt(cosine) * shared])


def _trained(
    config: Config, context: Context, setting: Setting, *, x: Tensor, block: Block, optimiser: Optimiser
) -> xr.Dataset:
    """Train, keeping every step of `v` and `z`, and for softmax of what its ledger needs."""
    x, block = x.to(context.device), block.to(context.device)

    def loss(model: Block, _step: Tensor) -> Tensor:
        """Cross entropy: sample i is class i, and hidden unit k is the logit of class k."""
        h = model(x)
        return (h.logsumexp(dim=-1) - h.diagonal(dim1=-2, dim2=-1)).mean(dim=-1)

    def record(model: Block, _step: int) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {"w": model.w, "z": model.z}
        return (
            kept | {"b_bar": model.mean_attention(), "pull": model.pull()} if setting.attention == "softmax" else kept
        )

    dims = {"w": ("dim", "hidden"), "z": ("query", "token"), "b_bar": ("token",), "pull": ("token",)}
    raw = context.fit(
        block,
        loss,
        optimiser=optimiser,
        steps=whole("steps", config.steps),
        record=Record(record, dims=dims),
        arms=Arms("kind", TOKENS),
        label=setting.label,
    )
    raw = raw.stack(lead=("kind", "seed")).drop_vars(("lead", "kind", "seed")).rename(lead="seed")
    raw = raw.transpose("seed", "step", ...)
    v = block.U_C.T.cpu().numpy() @ raw.w.values  # at once: cheaper than at every step
    return raw.drop_vars("w").assign(v=(("seed", "step", "token", "hidden"), v))


def _compared(config: Config, attention: str, raw: xr.Dataset, x: np.ndarray) -> xr.Dataset:
    """Put prediction and measurement side by side; of every step's arrays, a hundred steps' figures are kept."""
    alive = (worst(abs(raw.v)) < HUGE).values & (worst(abs(raw.z)) < HUGE).values  # False for NaN: the seed diverged
    if not alive.any():
        raise InputError("rate", "small enough to train with", config.rate, "every seed diverged: lower it")
    path = raw.isel(seed=alive).transpose("step", ...)
    predicted, book = _predicted(config, attention, path, x[alive])
    kept = list(schedule.every(max(1, config.steps // 100), config.steps))
    z = path.z.values[kept]
    law = (z ** invariants.ATTENTIONS[attention].power).sum(axis=-2)
    terms = np.stack([book.drift, book.gap, book.step])[:, kept]
    corrected = predicted[kept] - np.cumsum([np.zeros_like(law), *terms], axis=0)
    over_steps = ("step", "lead")
    return xr.Dataset(
        {
            "error": (("correction", *over_steps), invariants.relative_error(law, corrected, law[0])),
            "size": (("term", *over_steps), invariants.relative_error(law, law + terms, law[0])),
            "correlation": (over_steps, invariants.correlation(law, corrected[0])),
            "logit_sum": (over_steps, np.abs(z.sum(axis=-1) - z[0].sum(axis=-1)).max(axis=-1)),
            "loss": (over_steps, path.loss.values[kept]),
            "law": (("lead", "token"), law[-1]),
            "predicted": (("correction", "lead", "token"), corrected[:, -1]),
        },
        coords={"correction": list(CORRECTED), "term": list(TERMS), "step": kept, "lead": np.flatnonzero(alive)},
    )


def _predicted(config: Config, attention: str, path: xr.Dataset, x: np.ndarray) -> tuple[np.ndarray, invariants.Ledger]:
    """Return what Theorem 1 predicts at every step, [step, lead, token], and the ledger of what it leaves out."""
    v, z, heat = path.v.values, path.z.values, _temperature(config, attention)
    b_ref = np.stack([invariants.reference(own) for own in x])
    predicted = invariants.predict(attention, v, v[0], z[0], kappa=config.kappa, temperature=heat, b_ref=b_ref)
    if attention != "softmax":
        none = np.zeros_like(predicted)
        return predicted, invariants.Ledger(none, none, invariants.finite_steps(attention, v, z, kappa=config.kappa))
    mean, pull, rates = path.b_bar.values[:-1], path.pull.values[:-1], {"rate_v": config.rate, "rate_z": config.rate_z}
    return predicted, invariants.ledger(v, mean, pull, temperature=heat, b_ref=b_ref, **rates)


def _unfolded(found: xr.Dataset, seeds: tuple[int, ...]) -> xr.Dataset:
    """Split the leading axis into kind of tokens and seed; a seed that diverged is NaN."""
    found = found.reindex(lead=range(len(TOKENS) * len(seeds)))
    kinds, own = np.repeat(TOKENS, len(seeds)), np.tile(seeds, len(TOKENS))
    labelled = found.assign_coords(kind=("lead", kinds), seed=("lead", own)).set_index(lead=["kind", "seed"])
    return labelled.unstack("lead")


def worst(values: xr.DataArray, *, least: bool = False) -> xr.DataArray:
    """The largest (or least) value over all axes but the seed's; NaN where a run diverged."""
    axes = [dim for dim in values.dims if dim != "seed"]
    return values.min(axes, skipna=False) if least else values.max(axes, skipna=False)


def at_end(run: xr.Dataset, name: str, **where: Any) -> xr.DataArray:
    """A variable after the last step, in one setting."""
    return run[name].isel(step=-1).sel(where)


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
    """About `count` of the recorded steps, without step 0, where nothing has moved."""
    return values.isel(step=slice(1, None, max(1, values.sizes["step"] // count)))


def _floor(axes: Axes, name: str, values: xr.DataArray) -> None:
    """Write what lies far below the panel's scale as a bound: drawn to scale it would flatten all the rest."""
    bound = 10.0 ** np.ceil(np.log10(np.maximum(values.max(), 1e-300)))
    axes.text(0.03, 0.03, f"{name}: below {float(bound):.0e}", transform=axes.transAxes, fontsize=8)


def draw_figure_2(run: xr.Dataset) -> Figure:
    """Draw correlation, relative error after each correction, and predicted against trained logits."""
    figure, axes = canvas(1, 3, width=3.4, height=3.0)
    one = run.sel(FIGURE_2)
    for place, kind in enumerate(TOKENS):
        few = _thin(one.correlation.sel(kind=kind))
        measured(axes[0, 0], few.step, few, place, f"{NAMES[kind]} tokens")
    axes[0, 0].axhline(1.0, color="black", linewidth=0.8)
    axes[0, 0].set(xlabel="step", ylabel="correlation of ẑ and z", title="What Figure 2 shows", ylim=(None, 1.02))
    axes[0, 0].legend(loc="lower left")
    error = one.error.sel(kind="gaussian")
    for place, correction in enumerate(("none", "drift", "gap")):
        few = _thin(error.sel(correction=correction))
        measured(axes[0, 1], few.step, few, place, CORRECTED[correction])
    _floor(axes[0, 1], CORRECTED["step"], error.sel(correction="step"))
    low, high = axes[0, 1].get_ylim()
    axes[0, 1].set(xlabel="step", ylabel="‖z − prediction‖ / ‖z − z(0)‖", yscale="log", title="Error, Gaussian tokens")
    axes[0, 1].set_ylim(max(low, 2e-4), 10 * high)
    axes[0, 1].legend(loc="upper left")
    _scatter(axes[0, 2], one.sel(kind="gaussian"))
    letters(axes)
    return figure


def _scatter(axes: Axes, one: xr.Dataset) -> None:
    """Predicted against trained logits, all seeds and tokens, with the line of agreement."""
    theory(axes, [one.law.min(), one.law.max()], [one.law.min(), one.law.max()], 0, "agreement")
    for place, correction in enumerate(("none", "step")):
        predicted = one.predicted.sel(correction=correction)
        look = marker(place + 1)
        axes.plot(one.law.values.ravel(), predicted.values.ravel(), label=CORRECTED[correction], **look)
    axes.set(xlabel="trained logit z", ylabel="predicted logit", title="After training, each token")
    axes.legend(loc="upper left")


def draw_laws(run: xr.Dataset) -> Figure:
    """Draw the error of the prediction from the weights alone for every attention, activation and kind of tokens."""
    figure, axes = canvas(len(TOKENS), len(ATTENTIONS), width=3.4, height=2.5, sharex=True, sharey=True)
    for (row, kind), (column, attention) in product(enumerate(TOKENS), enumerate(ATTENTIONS)):
        panel, error = axes[row, column], run.error.sel(attention=attention, kind=kind)
        for place, activation in enumerate(ACTIVATIONS):
            few = _thin(error.sel(activation=activation, correction="none"))
            measured(panel, few.step, few, place, NAMES[activation])
        _floor(panel, "finite-step law", error.sel(correction="step"))
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
    figure, axes = canvas(1, len(TOKENS), width=3.6, height=3.0, sharey=True)
    for panel, kind in zip(axes[0], TOKENS, strict=True):
        broken = run.broken.sel(kind=kind)
        for place, (breaker, label) in enumerate(BREAKERS.items()):
            few = _thin(broken.sel(breaker=breaker))
            measured(panel, few.step, few, place, label)
        _floor(panel, "none of them", broken.sel(breaker="none"))
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
