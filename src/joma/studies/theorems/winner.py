"""Theorem 2 and Figure 3: with a linear activation the most salient token takes all of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor

from joma import schedule
from joma.arguments import scalar, whole
from joma.data.tokens import token_classes
from joma.models.block import Block, BlockConfig
from joma.probes.entropy import shannon_entropy
from joma.report.figure import canvas, letters, measured, theory
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, near
from joma.theory import flows, growth
from joma.train import Optimiser, Record

BLOW_UP = np.sqrt(np.pi / 2)  # saliences are scaled to this largest |Δ|, so that the winner blows up at t = 1
LATE = 1 - 1e-6


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
    """Train the block on random data of one salience a seed, beside the closed form and the integrated flow."""
    x, g, delta = _data(config, context)
    trained, coarse = (_train(config, context, x, g, parts=parts) for parts in (2, 1))
    times = trained.time.values
    solutions = [flows.linear(one, [*times, LATE, 2.0]) for one in delta]
    states = np.stack([solution.states for solution in solutions])
    predicted = np.moveaxis(growth.linear(delta, times), 0, 1)
    axes = ("seed", "time", "token")
    return trained.assign(
        {
            "coarse": coarse.trained,
            "salience": (("seed", "token"), delta),
            "predicted": (axes, predicted),
            "integrated": (axes, states[:, : len(times)]),
            "late": (("seed", "token"), states[:, len(times)]),
            "limit": (("seed", "token"), np.stack([growth.linear_limit(one) for one in delta])),
            "blow_up": ("seed", np.array([solution.blow_up for solution in solutions])),
            "blow_up_predicted": ("seed", growth.blow_up_time(delta).min(axis=-1)),
            "entropy_predicted": (("seed", "time"), growth.attention_entropy(predicted)),
        }
    ).merge(_figure_3(config, context))


def _data(config: Config, context: Context) -> tuple[Tensor, Tensor, np.ndarray]:
    """Contexts x [seed, sample, token], gradients g [seed, sample] and the salience Δ = E[g x] that they give."""
    shape = whole("samples", config.samples), whole("tokens", config.tokens, low=2)
    drawn = [
        (torch.rand(shape, generator=one, dtype=torch.float64), torch.randn(shape[0], generator=one).double())
        for one in context.generators("contexts")
    ]
    x, g = (torch.stack(part) for part in zip(*drawn, strict=True))
    x = x**4 / (x**4).sum(dim=-1, keepdim=True)  # a few tokens make up most of a context
    salience = (g[..., None] * x).mean(dim=1)
    scale = BLOW_UP / salience.abs().amax(dim=-1, keepdim=True)
    return x, g * scale, (salience * scale).numpy()


def _train(config: Config, context: Context, x: Tensor, g: Tensor, *, parts: int) -> xr.Dataset:
    """Train from zero weights and logits, each of `steps / 2` intervals of time cut into `parts` steps of SGD."""
    half = whole("steps", config.steps, low=200) // 2
    last = int(scalar("until", config.until, low=0.1, high=0.999) * half)
    block = Block(
        BlockConfig(tokens=x.shape[-1], hidden=1, attention="exp", scale=0.0), generators=context.generators("weights")
    )
    found = context.fit(
        block,
        lambda model, _: -(g * model(x)[..., 0]).mean(dim=-1),
        optimiser=Optimiser("sgd", 1 / (parts * half)),
        steps=parts * last,
        record=Record(
            lambda model, _: {"trained": model.v[..., 0], "entropy": shannon_entropy(model.z[:, 0].softmax(-1))},
            at=[parts * step for step in schedule.every(max(1, last // 50), last)],
            dims={"trained": ("token",)},
        ),
        label=f"winner, {parts * half} steps",
    )
    times = found.step.values / (parts * half)
    return found[["trained", "entropy"]].rename(step="time").assign_coords(time=times)


def _figure_3(config: Config, context: Context) -> xr.Dataset:
    """Train Figure 3's block: softmax attention, as many hidden units as classes, which are the classes' logits."""
    data = token_classes("gaussian", generators=context.generators("Figure 3, data"))
    generators = context.generators("Figure 3, weights")
    classes, label = len(data.label), data.label.expand(len(generators), -1)
    heat = config.figure_3_temperature
    block = Block(
        BlockConfig(tokens=data.frequency.shape[-1], hidden=classes, dim=30, temperature=heat), generators=generators
    )
    own = torch.eye(classes, dtype=torch.float64) - 1 / classes  # g at the start: 1 for the class itself less the mean
    salience = torch.einsum("sit,ik->stk", data.frequency, own) / classes
    steps = whole("figure_3_steps", config.figure_3_steps)
    found = context.fit(
        block,
        lambda model, _: torch.nn.functional.cross_entropy(model(data.frequency).mT, label, reduction="none").mean(
            dim=-1
        ),
        optimiser=Optimiser("sgd", config.figure_3_rate),
        steps=steps,
        record=Record(
            lambda model, _: {"figure_3": model.v},
            at=schedule.every(max(1, steps // 50), steps),
            dims={"figure_3": ("word", "hidden")},
        ),
        label="winner, Figure 3",
    )
    found["figure_3_salience"] = (("seed", "word", "hidden"), salience.numpy())
    return found[["figure_3", "figure_3_salience"]]


def distance(run: xr.Dataset, name: str, scale: float = 1.0) -> xr.DataArray:
    """Largest |v − scale · integrated flow| / (1 + |integrated flow|) over tokens and times, per seed."""
    gap = abs(scale * run[name] - run.integrated) / (1 + abs(run.integrated))
    return gap.max(("token", "time"))


def order(run: xr.Dataset) -> xr.DataArray:
    """By how much halving the step divides the trained block's distance from the flow."""
    return distance(run, "coarse") / distance(run, "trained")


def takes_all(run: xr.Dataset) -> xr.DataArray:
    """1 where the trained block's largest |v| is at the largest |Δ|, per seed."""
    winner = abs(run.trained.isel(time=-1)).argmax("token")
    return (winner == abs(run.salience).argmax("token")).astype(float)


def losers(run: xr.Dataset) -> xr.DataArray:
    """Largest distance of a losing component from its closed-form limit just before the blow-up, per seed."""
    return abs(run.late - run.limit).where(np.isfinite(run.limit)).max("token")


def figure_3_winners(run: xr.Dataset) -> xr.DataArray:
    """Share of Figure 3's hidden units whose largest final |v| is on their most salient token, per seed."""
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
    one = run.isel(seed=0)
    ranked = abs(one.salience).argsort().values[::-1][:5]
    for place, token in enumerate(ranked):
        theory(axes[0, 0], run.time, one.predicted.isel(token=token), place, f"Δ = {float(one.salience[token]):.2f}")
        shown = one.isel(time=slice(None, None, 4), token=token)
        measured(axes[0, 0], shown.time, shown.trained, place)
    axes[0, 0].set(xlabel="time / blow-up time", ylabel="weight $v$", title="Components, seed 0")
    axes[0, 0].legend(loc="upper left")
    few = run.isel(time=slice(1, None, 4))
    for place, (name, label) in enumerate({"coarse": "half the steps", "trained": "all steps"}.items()):
        gap = (abs(few[name] - few.integrated) / (1 + abs(few.integrated))).max("token")
        measured(axes[0, 1], few.time, gap, place, label)
    axes[0, 1].set(xlabel="time / blow-up time", ylabel="distance / (1 + |v|)", yscale="log", title="SGD from flow")
    axes[0, 1].legend(loc="upper left")
    theory(axes[0, 2], run.time, run.entropy_predicted.mean("seed"), 0, "theory, mean over seeds")
    measured(axes[0, 2], few.time, few.entropy, 1, "trained, all seeds")
    axes[0, 2].set(xlabel="time / blow-up time", ylabel="entropy / nats", title="Attention only gets sparser")
    axes[0, 2].legend(loc="lower left")
    letters(axes)
    return figure


def draw_figure_3(run: xr.Dataset) -> Figure:
    """Draw Figure 3: the weights after training and how the first hidden unit's components grew."""
    figure, axes = canvas(1, 3, width=3.3, height=2.9)
    for panel, (values, title) in enumerate(
        ((run.figure_3_salience, "Salience Δ at the start"), (run.figure_3.isel(step=-1), "Weights v at the end"))
    ):
        picture = values.isel(seed=0)
        limit = float(abs(picture).max())
        image = axes[0, panel].imshow(picture, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        axes[0, panel].axhline(9.5, color="black", linewidth=0.8)
        axes[0, panel].grid(visible=False)
        axes[0, panel].set_yticks(range(0, picture.sizes["word"], 5))
        axes[0, panel].set(xlabel="hidden unit (class)", ylabel="token: distinct, then common", title=title)
        figure.colorbar(image, ax=axes[0, panel])
    for word in range(4):
        measured(
            axes[0, 2],
            run.step[::5],
            run.figure_3.isel(word=word, hidden=0, step=slice(None, None, 5)),
            word,
            f"token {word}, Δ = {float(run.figure_3_salience.mean('seed')[word, 0]):.4f}",
            linestyle="-",
        )
    axes[0, 2].set(xlabel="step", ylabel="weight $v$ of hidden unit 0", title="Growth of four components")
    axes[0, 2].legend()
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
