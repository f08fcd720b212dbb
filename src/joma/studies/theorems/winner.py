"""Theorem 2 and Figure 3: with a linear activation the most salient token takes all of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from joma import schedule
from joma.arguments import InputError, scalar, whole
from joma.data.tokens import token_classes
from joma.drawing import canvas, letters, measured, theory
from joma.models.block import Block, BlockConfig
from joma.studies.theorems import single_unit
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, near
from joma.theory import flows, growth
from joma.train import Optimiser, Record

LARGEST_SALIENCE = np.sqrt(np.pi / 2)  # saliences are scaled to this max|Δ|, so that the winner blows up at t = 1
LATE = 1 - 1e-6  # just before the blow-up


@dataclass(frozen=True)
class Config:
    """The block of Theorem 2 (exp attention, one hidden unit, constant gradient) and that of Figure 3."""

    tokens: int = 8
    samples: int = 40
    steps: int = 2000
    """SGD steps to the blow-up time; the run is repeated with half as many."""
    until: float = 0.99
    """Fraction of the blow-up time that is trained."""
    figure_3_steps: int = 2000
    figure_3_rate: float = 0.1
    figure_3_temperature: float = 0.5


def run(config: Config, context: Context) -> xr.Dataset:
    """Train the block on random data, each seed with its own saliences, and solve its flow in two ways."""
    x, g, delta = _data(config, context)
    trained, coarse = (_train(config, context, x, g, substeps=substeps) for substeps in (2, 1))
    times = trained.time.values
    solutions = [flows.linear(salience, [*times, LATE, 2.0]) for salience in delta]
    states = np.stack([solution.states for solution in solutions])
    predicted = np.moveaxis(growth.linear(delta, times), 0, 1)
    dims = ("seed", "time", "token")
    return trained.assign(
        {
            "coarse": coarse.trained,
            "salience": (("seed", "token"), delta),
            "predicted": (dims, predicted),
            "integrated": (dims, states[:, : len(times)]),
            "late": (("seed", "token"), states[:, len(times)]),
            "limit": (("seed", "token"), np.stack([growth.linear_limit(salience) for salience in delta])),
            "blow_up": ("seed", np.array([solution.blow_up for solution in solutions])),
            "blow_up_predicted": ("seed", growth.blow_up_time(delta).min(axis=-1)),
            "entropy_predicted": (("seed", "time"), growth.attention_entropy(predicted)),
        }
    ).merge(_figure_3(config, context))


def _data(config: Config, context: Context) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return contexts x [seed, sample, token], gradients g [seed, sample] and their salience Δ = E[g x]."""
    samples, tokens = whole("samples", config.samples), whole("tokens", config.tokens, low=2)
    draws = [
        (
            torch.rand((samples, tokens), generator=generator, dtype=torch.float64),
            torch.randn(samples, generator=generator).double(),
        )
        for generator in context.generators("contexts")
    ]
    x, g = (torch.stack(tensors) for tensors in zip(*draws, strict=True))
    x = x**4 / (x**4).sum(dim=-1, keepdim=True)  # a few tokens make up most of a context
    salience = (g[..., None] * x).mean(dim=1)
    scale = LARGEST_SALIENCE / salience.abs().amax(dim=-1, keepdim=True)
    return x, g * scale, (salience * scale).numpy()


def _train(config: Config, context: Context, x: Tensor, g: Tensor, *, substeps: int) -> xr.Dataset:
    """Train from zero weights and logits, with `substeps` steps of SGD in each of `steps / 2` intervals of time."""
    steps = whole("steps", config.steps, low=200)
    if steps % 2:
        raise InputError("steps", "even", steps, "give an even number: the run is repeated with half as many")
    half, x, g = steps // 2, x.to(context.device), g.to(context.device)
    last = int(scalar("until", config.until, low=0.1, high=0.999) * half)
    block_config = BlockConfig(tokens=x.shape[-1], hidden=1, attention="exp", scale=0.0)
    trajectory = single_unit.train(
        context,
        Block(block_config, generators=context.generators("weights")),
        lambda model, _: -(g * model(x)[..., 0]).mean(dim=-1),
        rate=1 / (substeps * half),
        steps=substeps * last,
        at=[substeps * step for step in schedule.every(max(1, last // 50), last)],
        label=f"winner, {substeps * half} steps",
    )
    return trajectory.rename(step="time").assign_coords(time=trajectory.step.values / (substeps * half))


def _figure_3(config: Config, context: Context) -> xr.Dataset:
    """Train Figure 3's block: softmax attention, as many hidden units as classes, which are the classes' logits."""
    data = token_classes("gaussian", generators=context.generators("Figure 3, data"))
    classes, tokens = data.frequency.shape[-2:]
    x, label = data.frequency.to(context.device), data.label.expand(len(context.seeds), -1).to(context.device)
    block_config = BlockConfig(tokens=tokens, hidden=classes, dim=30, temperature=config.figure_3_temperature)
    g = torch.eye(classes, dtype=torch.float64) - 1 / classes  # the gradient at the start: 1(k = label) − 1/classes
    salience = torch.einsum("sit,ik->stk", data.frequency, g) / classes
    steps = whole("figure_3_steps", config.figure_3_steps)
    trajectory = context.fit(
        Block(block_config, generators=context.generators("Figure 3, weights")),
        lambda model, _: F.cross_entropy(model(x).mT, label, reduction="none").mean(dim=-1),
        optimiser=Optimiser("sgd", config.figure_3_rate),
        steps=steps,
        record=Record(
            lambda model, _: {"figure_3": model.v},
            at=schedule.every(max(1, steps // 50), steps),
            dims={"figure_3": ("word", "hidden")},
        ),
        label="winner, Figure 3",
    )
    return trajectory[["figure_3"]].assign(figure_3_salience=(("seed", "word", "hidden"), salience.numpy()))


def distance(run: xr.Dataset, name: str, scale: float = 1.0) -> xr.DataArray:
    """Return the largest |scale · v − flow| / (1 + |flow|) over tokens and times, per seed, of the variable `name`."""
    return single_unit.distance(scale * run[name], run.integrated).max(("token", "time"))


def order(run: xr.Dataset) -> xr.DataArray:
    """Return the factor by which halving the step reduces the trained block's distance from the flow."""
    return distance(run, "coarse") / distance(run, "trained")


def takes_all(run: xr.Dataset) -> xr.DataArray:
    """Return 1 where the trained block's largest |v| is at the largest |Δ|, else 0, per seed."""
    winner = abs(run.trained.isel(time=-1)).argmax("token")
    return (winner == abs(run.salience).argmax("token")).astype(float)


def losers(run: xr.Dataset) -> xr.DataArray:
    """Return the largest distance of a losing component from its closed-form limit before the blow-up, per seed."""
    return abs(run.late - run.limit).where(np.isfinite(run.limit)).max("token")


def figure_3_winners(run: xr.Dataset) -> xr.DataArray:
    """Return the share of Figure 3's hidden units whose largest final |v| is on their most salient token, per seed."""
    winner = abs(run.figure_3.isel(step=-1)).argmax("word")
    return (winner == abs(run.figure_3_salience).argmax("word")).mean("hidden")


CLAIMS = (
    Claim(
        "closed-form",
        "Theorem 2: √(π/2) erf(v/√2) = Δ t solves the dynamics (against the integrated flow).",
        lambda run: distance(run, "predicted"),
        at_most(1e-8),
    ),
    Claim(
        "slides",
        "The slides print the solution as √(π/2) erf(v/2) = Δ t, which makes v larger by √2.",
        lambda run: distance(run, "predicted", np.sqrt(2)),
        at_most(1e-3),
    ),
    Claim(
        "trained",
        "A block trained by SGD follows the closed form to 0.99 of the blow-up time (distance over 1 + |v|).",
        lambda run: distance(run, "trained"),
        at_most(0.05),
    ),
    Claim(
        "first-order",
        "What is left of that distance is the step's: halving the step halves it.",
        order,
        near(2.0, 0.2),
    ),
    Claim(
        "blow-up",
        "The winner blows up at t* = √(π/2)/max|Δ| (relative error of the integrated flow's blow-up time).",
        lambda run: abs(run.blow_up / run.blow_up_predicted - 1),
        at_most(1e-6),
    ),
    Claim("winner", "The token with the largest |Δ| takes all: share of seeds.", takes_all, at_least(1.0)),
    Claim(
        "losers",
        "The others stop at √2 erfinv(√(2/π) Δ t*) (distance of the integrated flow at 0.999999 t*).",
        losers,
        at_most(1e-3),
    ),
    Claim(
        "sparser",
        "Attention only gets sparser: largest rise of its entropy between two records, in nats.",
        lambda run: run.entropy.diff("time").max("time"),
        at_most(0.0),
    ),
    Claim(
        "figure-3",
        "Figure 3: a hidden unit's largest weight ends on its most salient token: share of hidden units.",
        figure_3_winners,
        at_least(0.9),
        across="mean",
    ),
)


def draw_growth(run: xr.Dataset) -> Figure:
    """Draw the components of one seed, the spread of the distance, and the entropy."""
    figure, axes = canvas(1, 3, width=3.3, height=2.9)
    left, middle, right = axes[0]
    first = run.isel(seed=0)
    most_salient = abs(first.salience).argsort().values[::-1][:5]
    for index, token in enumerate(most_salient):
        theory(left, run.time, first.predicted.isel(token=token), index, f"Δ = {float(first.salience[token]):.2f}")
        thinned = first.isel(time=slice(None, None, 4), token=token)
        measured(left, thinned.time, thinned.trained, index)
    left.set(xlabel="time / blow-up time", ylabel="weight $v$", title="Components, seed 0")
    left.legend(loc="upper left")
    thinned = run.isel(time=slice(1, None, 4))
    for index, (name, label) in enumerate({"coarse": "half the steps", "trained": "all steps"}.items()):
        gap = single_unit.distance(thinned[name], thinned.integrated).max("token")
        measured(middle, thinned.time, gap, index, label)
    middle.set(xlabel="time / blow-up time", ylabel="distance / (1 + |v|)", yscale="log", title="SGD from flow")
    middle.legend(loc="upper left")
    theory(right, run.time, run.entropy_predicted.mean("seed"), 0, "theory, mean over seeds")
    measured(right, thinned.time, thinned.entropy, 1, "trained, all seeds")
    right.set(xlabel="time / blow-up time", ylabel="entropy / nats", title="Attention only gets sparser")
    right.legend(loc="lower left")
    letters(axes)
    return figure


def draw_figure_3(run: xr.Dataset) -> Figure:
    """Draw Figure 3: the weights after training and how the first hidden unit's components grew."""
    figure, axes = canvas(1, 3, width=3.3, height=2.9)
    images = {"Salience Δ at the start": run.figure_3_salience, "Weights v at the end": run.figure_3.isel(step=-1)}
    for panel, (title, values) in zip(axes[0], images.items(), strict=False):
        first = values.isel(seed=0)
        limit = float(abs(first).max())
        image = panel.imshow(first, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        panel.axhline(9.5, color="black", linewidth=0.8)
        panel.grid(visible=False)
        panel.set_yticks(range(0, first.sizes["word"], 5))
        panel.set(xlabel="hidden unit (class)", ylabel="token: distinct, then common", title=title)
        figure.colorbar(image, ax=panel)
    right = axes[0, 2]
    for word in range(4):
        growing = run.figure_3.isel(word=word, hidden=0, step=slice(None, None, 5))
        label = f"token {word}, Δ = {float(run.figure_3_salience.mean('seed')[word, 0]):.4f}"
        measured(right, run.step[::5], growing, word, label, linestyle="-")
    right.set(xlabel="step", ylabel="weight $v$ of hidden unit 0", title="Growth of four components")
    right.legend()
    letters(axes)
    return figure


STUDY = Study(
    name="winner",
    title="Linear activation: the winner takes all",
    source="JoMA, Theorem 2 and Figure 3 (arXiv 2310.00535)",
    about=(
        "A block with exp attention, one hidden unit and a constant gradient is trained by SGD on random contexts, "
        "each seed with its own saliences, scaled so that the winner blows up at time 1. Beside it: the closed form "
        "and the flow integrated numerically. Figure 3's block (softmax attention, 20 hidden units, cross entropy) is "
        "trained as well, to see whether its largest weights end on the most salient tokens, although its gradient is "
        "not constant."
    ),
    version=3,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=10),
        "paper": Preset(Config(tokens=20, samples=200, steps=20_000), seeds=20, seconds=60),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    figures={
        "growth": Drawing(
            draw_growth,
            "Lines: closed form. Points: a block trained by SGD. (a) The five most salient components of seed 0; "
            "(b) largest distance between SGD and flow over tokens, bars from least to greatest seed; (c) entropy of "
            "the attention.",
        ),
        "figure-3": Drawing(
            draw_figure_3,
            "Figure 3's block. (a) Salience of each token for each hidden unit at the start and (b) the weights after "
            "training, seed 0, the line between distinct and common tokens; (c) four components of hidden unit 0 over "
            "training, bars from least to greatest seed.",
        ),
    },
)
