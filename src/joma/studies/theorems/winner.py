"""Theorem 2 and Figure 3: with a linear activation the most salient token takes all of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn import functional as F

from joma import schedule
from joma.arguments import InputError, scalar, whole
from joma.data.tokens import sequence_classes, token_classes
from joma.models.block import Block, BlockConfig
from joma.studies.theorems import single_unit, winner_figures
from joma.studies.theorems.winner_measures import (
    distance,
    figure_3_winners,
    growing_units,
    late_speed,
    losers,
    of_others,
    of_winner,
    ratio_spread,
    salience_of_common,
    takes_all,
)
from joma.study import (
    Claim,
    Context,
    Drawing,
    Highlight,
    Preset,
    Study,
    above,
    at_least,
    at_most,
    below,
    near,
)
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


def salience(frequency: Tensor) -> Tensor:
    """Return Δ [seed, token, class] at zero weights, for classes of equal probability and cross entropy.

    The gradient is g_k = 1(k = label) − 1/classes, and Δ_lk = E[g_k x_l]: what class k has of token l beyond the mean.

    >>> salience(torch.tensor([[[0.75, 0.25], [0.25, 0.75]]]))
    tensor([[[ 0.1250, -0.1250],
             [-0.1250,  0.1250]]])
    """
    return (frequency - frequency.mean(dim=-2, keepdim=True)).mT / frequency.shape[-2]


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
    steps = whole("figure_3_steps", config.figure_3_steps)
    trajectory = context.fit(
        Block(block_config, generators=context.generators("Figure 3, weights")),
        lambda model, _: F.cross_entropy(model(x).mT, label, reduction="none").mean(dim=-1),
        optimiser=Optimiser("sgd", config.figure_3_rate),
        steps=steps,
        record=Record(
            lambda model, _: {"figure_3": model.v},
            at=schedule.every(max(1, steps // 20), steps),
            dims={"figure_3": ("word", "hidden")},
        ),
        label="winner, Figure 3",
    )
    equal = sequence_classes(generators=context.generators("equal frequencies"), queries=1, variation=0.0)
    common = ~equal.distinct.any(dim=0)  # tokens that are as frequent in every class
    return trajectory[["figure_3"]].assign(
        figure_3=trajectory.figure_3.astype(np.float32),
        figure_3_salience=(("seed", "word", "hidden"), salience(data.frequency).numpy()),
        equal_common=("seed", _root_mean_square(salience(equal.frequency)[:, common])),
        equal_distinct=("seed", _root_mean_square(salience(equal.frequency)[:, ~common])),
    )


def _root_mean_square(delta: Tensor) -> np.ndarray:
    return delta.square().mean(dim=(-2, -1)).sqrt().numpy()


ONE_NUMBER = "one number: all seeds have the same largest Δ"
THEOREM_CLAIMS = (
    Claim(
        "closed-form",
        "Theorem 2, corrected: √(π/2) erf(v/√2) = Δ t solves the dynamics.",
        lambda run: distance(run, "predicted").max("token", skipna=False),
        at_most(1e-8),
        kind="theorem",
        quantity="largest |v − flow| / (1 + |v|) over tokens and times, against the flow integrated numerically; "
        "the slides print v/2 for v/√2",
    ),
    Claim(
        "ratio",
        "Theorem 2, corrected: erf(v/√2)/Δ is the same for all tokens.",
        lambda run: ratio_spread(run, np.sqrt(2)).max("time"),
        at_most(1e-6),
        kind="theorem",
        quantity="largest over smallest ratio of a token, less 1, along the integrated flow; largest over times",
    ),
    Claim(
        "ratio-slides",
        "Theorem 2, as the slides print it: erf(v/2)/Δ is the same for all tokens.",
        lambda run: ratio_spread(run, 2.0).max("time"),
        at_most(1e-6),
        kind="reading",
        quantity="largest over smallest ratio of a token, less 1, along the integrated flow; largest over times",
    ),
    Claim(
        "trained",
        "Theorem 2, tokens that do not win: a block trained by SGD follows the flow within 5 %.",
        lambda run: of_others(run, "trained"),
        at_most(0.05),
        kind="control",
        quantity="largest |v − flow| / (1 + |v|) over these tokens, to 0.99 of the blow-up time; the bound is ours",
    ),
    Claim(
        "trained-winner",
        "Theorem 2, the winner: a block trained by SGD follows the flow within 5 %.",
        lambda run: of_winner(run, "trained"),
        at_most(0.05),
        kind="control",
        quantity="largest |v − flow| / (1 + |v|) of the winner, to 0.99 of the blow-up time; the bound is ours; "
        f"{ONE_NUMBER}",
    ),
    Claim(
        "first-order",
        "Theorem 2, tokens that do not win: halving SGD's step halves its distance from the flow.",
        lambda run: of_others(run, "coarse") / of_others(run, "trained"),
        near(2.0, 0.2),
        kind="check",
        quantity="that distance with half as many steps, over that with all steps",
    ),
    Claim(
        "first-order-winner",
        "Theorem 2, the winner: halving SGD's step halves its distance from the flow.",
        lambda run: of_winner(run, "coarse") / of_winner(run, "trained"),
        near(2.0, 0.2),
        kind="check",
        quantity=f"that distance with half as many steps, over that with all steps; {ONE_NUMBER}",
    ),
    Claim(
        "blow-up",
        "Theorem 2: the winning weight blows up at the time t* = √(π/2) / max|Δ|.",
        lambda run: float(abs(run.blow_up / run.blow_up_predicted - 1).max()),
        at_most(1e-6),
        kind="theorem",
        quantity=f"relative error of the integrated flow's blow-up time; {ONE_NUMBER}",
    ),
    Claim(
        "winner",
        "Theorem 2: the most salient token wins in every trained block.",
        takes_all,
        at_least(1.0),
        kind="theorem",
        quantity="1 if the largest |v| of the trained block is at the largest |Δ|, else 0",
    ),
    Claim(
        "losers",
        "Theorem 2: when the winner blows up, the other weights are at √2 erfinv(√(2/π) Δ t*).",
        losers,
        at_most(1e-3),
        kind="check",
        quantity="largest distance of the integrated flow from these limits at 0.999999 of the blow-up time",
    ),
    Claim(
        "sparser",
        "With a linear activation attention only gets sparser.",
        lambda run: run.entropy.diff("time").max("time", skipna=False),
        at_most(0.0),
        kind="reading",
        quantity="largest rise of the trained block's attention entropy between two records, in nats",
    ),
)
FIGURE_CLAIMS = (
    Claim(
        "figure-3-grow",
        "Figure 3: some weights of every hidden unit keep growing.",
        growing_units,
        at_least(1.0),
        kind="figure",
        quantity="share of hidden units with a weight that moves away from zero in the last tenth of training, and no "
        "more slowly than on average",
    ),
    Claim(
        "figure-3-saturate",
        "Figure 3: more than half of all weights slow down.",
        lambda run: late_speed(run).median(("word", "hidden"), skipna=False),
        below(1.0),
        kind="figure",
        quantity="speed in the last tenth of training over mean speed (1 at constant speed): median over all weights; "
        "the paper says that they saturate",
    ),
    Claim(
        "figure-3-chance",
        "Figure 3: more often than by chance, a unit's largest weight is on its most salient token.",
        lambda run: figure_3_winners(run) - 1 / run.sizes["word"],
        above(0.0),
        kind="control",
        quantity="share of hidden units, less 1 / number of tokens",
        across="interval",
    ),
    Claim(
        "figure-3",
        "Figure 3: in nine of ten hidden units the largest weight is on the unit's most salient token.",
        figure_3_winners,
        at_least(0.9),
        kind="control",
        quantity="share of hidden units",
        across="interval",
    ),
    Claim(
        "salience-order",
        "Figure 3: distinct tokens are more salient than common ones.",
        salience_of_common,
        below(1.0),
        kind="reading",
        quantity="root mean square Δ of common tokens over that of distinct ones, Figure 3's tokens, at the start",
        across="interval",
    ),
    Claim(
        "salience-common",
        "Figure 3: common tokens have nearly no salience.",
        salience_of_common,
        at_most(0.1),
        kind="reading",
        quantity="root mean square Δ of common tokens over that of distinct ones, Figure 3's tokens, at the start; the "
        "bound is ours",
        across="interval",
    ),
    Claim(
        "salience-equal",
        "Tokens that are as frequent in every class have no salience.",
        lambda run: run.equal_common / run.equal_distinct,
        at_most(1e-12),
        kind="control",
        quantity="root mean square Δ of these tokens over that of distinct ones, classes with equal common tokens",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: how near SGD is to Theorem 2, by how much the slides' ratio is off, and Figure 3."""
    speed = late_speed(run)
    printed = ratio_spread(run, 2.0).isel(time=-1)
    return (
        f"SGD stays within {100 * float(distance(run, 'trained').max()):.1f} % of Theorem 2 up to "
        f"{float(run.time[-1]):.2g} of the blow-up time, where the ratio in the slides differs by "
        f"{100 * float(printed.mean()):.0f} % between tokens. In Figure 3's block "
        f"{100 * float((speed >= 1).mean()):.0f} % of the weights end at their mean speed or faster, and half have "
        f"slowed to {100 * float(speed.median()):.0f} % of it or less."
    )


STUDY = Study(
    name="winner",
    title="Linear activation: the most salient token wins, the others stop",
    source="JoMA, Theorem 2 and Figure 3 (arXiv 2310.00535)",
    statement=(
        "Theorem 2: with a linear activation, exp attention and a constant gradient, the salience Δ_l of a token "
        "determines how fast its weight v_l grows. As the slides print it, erf(v_l/2)/Δ_l = erf(v_l'/2)/Δ_l' for any "
        "two tokens. Salience is near zero for common tokens, so attention turns to the most salient distinct ones. "
        "Figure 3: in a trained block some weights grow and the rest saturate."
    ),
    about=(
        "We train a block with exp attention, one hidden unit and a constant gradient by SGD on random contexts. Each "
        "seed has its own saliences, scaled so that the winner blows up at time 1: the winner's numbers are the same "
        "in all seeds. Beside it are the closed form and the flow integrated numerically. Figure 3's block (softmax "
        "attention, 20 hidden units, cross entropy) is trained too, although its gradient is not constant."
    ),
    version=5,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=10),
        "paper": Preset(Config(tokens=20, samples=200, steps=20_000), seeds=20, seconds=60),
    },
    run=run,
    claims=(*THEOREM_CLAIMS, *FIGURE_CLAIMS),
    outcome=outcome,
    highlight=Highlight(
        "Figure 3",
        winner_figures.draw_highlight,
        "Weights of one hidden unit over training: a few keep growing in size, all others level off.",
    ),
    threads=1,
    figures={
        "growth": Drawing(
            winner_figures.draw_growth,
            "(a) The five most salient tokens of seed 0. Lines: closed form. Points: a block trained by SGD. (b) Its "
            "distance from the flow. Lines: the winner, the same in all seeds. Points: the largest of the others. "
            "(c) By how much erf(v/2)/Δ, as the slides print it, differs between tokens along the flow. (d) Entropy of "
            "attention. Bars: least to greatest seed.",
        ),
        "figure-3": Drawing(
            winner_figures.draw_figure_3,
            "Figure 3's block, seed 0. (a) Salience of each token for each hidden unit at the start; (b) weights after "
            "training; the line separates distinct from common tokens. (c) All weights of hidden unit 0 over "
            "training: in colour those that still grow at least as fast as on average, in grey the rest.",
        ),
    },
)
