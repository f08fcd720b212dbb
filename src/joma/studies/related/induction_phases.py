"""In-context Markov chains: two layers of attention learn counts of single symbols, then, at once, of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from joma.arguments import InputError, scalar, whole
from joma.studies.common_axes import NAMES, STEP
from joma.studies.related import induction_figures
from joma.studies.related.induction_data import CHAIN, DOUBLY, LAG_2, WORLDS, World
from joma.studies.related.induction_full import train_full
from joma.studies.related.induction_measures import (
    finds_lag,
    finds_parents,
    first_step,
    full_arm,
    full_delay,
    gradient_correlation,
    gradient_error,
    half_step,
    jump_width,
    minimal_closed,
    minimal_delay,
    one_layer_closed,
    passed_share,
    plateau_steps,
    predicts_lag,
    previous_attention,
    second_layer_lead,
    unigram_distance,
)
from joma.studies.related.induction_oracle import dependence, gradient
from joma.studies.related.induction_training import InductionConfig, train_minimal
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, at_most, below
from joma.train import Optimiser

MINIMAL_WORLDS = (CHAIN, LAG_2, DOUBLY)
MAX_PARENT = 4  # the windows of 4 symbols of an alphabet of 3 are 81
MEASURES = {"probe_loss": "loss", "weight": "weight", "diagonal": "diagonal"}


@dataclass(frozen=True)
class Config(InductionConfig):
    """The sequences, the minimal model with its oracle, and the full model."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train the minimal model in three worlds and with several parents, compute its oracle, train the full model."""
    worlds, several = [WORLDS[name] for name in MINIMAL_WORLDS], [World("parents", _checked_parents(config))]
    sgd = Optimiser("sgd", scalar("rate", config.rate, above=0.0))
    adam = Optimiser("adam", scalar("adam_rate", config.adam_rate, above=0.0))
    chains, baselines = train_minimal(config, context, worlds, sgd, whole("steps", config.steps, low=20))
    adaptive, _ = train_minimal(config, context, worlds[:1], adam, whole("adam_steps", config.adam_steps, low=20))
    parents_steps = whole("parents_steps", config.parents_steps, low=20)
    parents, references = train_minimal(config, context, several, sgd, parents_steps)
    one_head = chains.isel(head=0)
    parts = [
        _named(one_head, "minimal", "step"),
        _named(adaptive.isel(head=0, world=0, drop=True), "adam", "adam_step"),
        _named(parents.isel(world=0, drop=True), "parents", "parents_step"),
        baselines,
        references.isel(world=0, drop=True).rename({name: f"parents_{name}" for name in references.data_vars}),
        dependence(config, context, worlds).isel(head=0).rename("dependence"),
        dependence(config, context, several).isel(world=0, drop=True).rename("parents_dependence"),
        gradient(config, context),
    ]
    coords = {"lag": np.arange(1, config.lags + 1), "parent": list(config.parents)}
    run = xr.merge(parts, join="exact").rename(head="parent").assign_coords(coords)
    if config.full_steps:
        return run.merge(train_full(config, context), join="exact")
    return run.merge(one_head[list(NAMES)].sel(world=CHAIN, drop=True).rename(step=STEP))


def _checked_parents(config: Config) -> tuple[int, ...]:
    """Return the lags of the parents; each must be one that the first layer can look back by."""
    longest = min(whole("lags", config.lags), MAX_PARENT)
    parents = tuple(whole("parents", lag, high=longest) for lag in config.parents)
    if len(parents) < 2 or list(parents) != sorted({*parents}):
        expected = "two or more lags, from the nearest to the farthest"
        raise InputError("parents", expected, config.parents, "give each lag once")
    return parents


def _named(trajectory: xr.Dataset, prefix: str, step: str) -> xr.Dataset:
    """Return what is stored of a minimal model's training: measures over steps, and final weights of all lags."""
    measures = trajectory[list(MEASURES)].rename({name: f"{prefix}_{label}" for name, label in MEASURES.items()})
    final = trajectory.lag_weight.isel(step=-1, drop=True).rename(f"{prefix}_lag_weight")
    return xr.merge([measures, final]).rename({"step": step} if step != "step" else {})


MINIMAL_CLAIMS = (
    Claim(
        "unigram-first",
        "The minimal model starts as the predictor by counts of single symbols.",
        unigram_distance,
        at_most(1e-3),
        kind="control",
        quantity="distance of its loss from that predictor's on the same sequences, in nats, before training; exact at "
        "A = 0, and the bound is for the random start",
    ),
    Claim(
        "finite-gradient",
        "At A = 0 the second layer's gradient is a mean of the contexts' own dependences.",
        lambda run: run.gradient_a_error,
        at_most(1e-10),
        kind="theorem",
        quantity="largest distance of autograd's −∂L/∂A from Σ w Ĉ, as a share of its largest entry",
    ),
    Claim(
        "gradient",
        "The first layer's gradient measures the dependence between symbols at each lag.",
        gradient_correlation,
        at_least(0.99),
        kind="control",
        quantity="correlation over lags of autograd's −∂L/∂r with the law for long contexts, means over seeds",
    ),
    Claim(
        "gradient-size",
        "The law for long contexts gives the first layer's gradient at lag 1 within 6 %.",
        gradient_error,
        at_most(0.06),
        kind="control",
        quantity="relative error at lag 1, means over seeds, in contexts of finite length; the bound is ours",
    ),
    Claim(
        "predicted-lag",
        "The dependence is largest at the lag of a parent, for one parent and for two.",
        predicts_lag,
        at_least(1.0),
        kind="control",
        quantity="1 if c_δ is largest there in every world and for every parent, else 0",
    ),
    Claim(
        "lag",
        "The first layer finds the lag of the causal parent, 1 or 2.",
        finds_lag,
        at_least(1.0),
        kind="reading",
        quantity="1 if the largest weight after training is at that lag in both worlds, else 0",
    ),
    Claim(
        "two-parents",
        "Where symbols have two parents, each head of the first layer finds one of them.",
        finds_parents,
        at_least(1.0),
        kind="reading",
        quantity="1 if each head's largest weight after training is at its parent's lag, else 0",
    ),
    Claim(
        "jump",
        "The step from single symbols to pairs is abrupt under SGD.",
        lambda run: jump_width(minimal_closed(run).sel(world=CHAIN, drop=True), "step"),
        at_most(1.0),
        kind="reading",
        quantity="(t80 − t10)/t10, t being the step at which 80 % or 10 % of the gap to the Bayes predictor is closed",
    ),
    Claim(
        "second-layer-first",
        "The second layer begins to move before the first one.",
        lambda run: second_layer_lead(run, 0.1),
        above(0.0),
        kind="control",
        quantity="steps by which A's diagonal has made 10 % of its way before the first layer's weight of lag 1 has",
    ),
    Claim(
        "second-layer-half",
        "The second layer is half way before the first one.",
        lambda run: second_layer_lead(run, 0.5),
        above(0.0),
        kind="control",
        quantity="steps by which A's diagonal has made half of its way before the first layer's weight of lag 1 has",
    ),
    Claim(
        "bigram",
        "The minimal model ends near the predictor by counts of pairs.",
        lambda run: minimal_closed(run).isel(step=-1).sel(world=CHAIN, drop=True),
        at_least(0.8),
        kind="reading",
        quantity="share of the gap between the unigram's loss and the Bayes predictor's that is closed at the end",
    ),
    Claim(
        "minimal-delay",
        "The minimal model, too, counts pairs sooner if there is no unigram to learn.",
        minimal_delay,
        above(1.0),
        kind="control",
        quantity="step at which half of the gap is closed, chains over doubly stochastic chains of equal information",
        across="interval",
    ),
)
FULL_CLAIMS = (
    Claim(
        "plateau",
        "Two layers of a Transformer rest at the unigram's loss for 300 steps.",
        plateau_steps,
        at_least(300),
        kind="reading",
        quantity="steps within 0.02 nats of it, Adam at the judged rate",
        presets=("paper",),
    ),
    Claim(
        "transition",
        "Two layers of a Transformer leave the unigram for pairs.",
        lambda run: passed_share(full_arm(run)),
        at_least(0.8),
        kind="reading",
        quantity="share of seeds that close half of the gap to the Bayes predictor, Adam at the judged rate",
        presets=("paper",),
    ),
    Claim(
        "previous-symbol",
        "Where two layers count pairs, the first attends to the previous symbol.",
        previous_attention,
        at_least(0.5),
        kind="reading",
        quantity="its final attention to the position before, of the seeds that close half of the gap",
        presets=("paper",),
    ),
    Claim(
        "one-layer",
        "One layer of attention never counts pairs.",
        one_layer_closed,
        below(0.5),
        kind="reading",
        quantity="largest share of the gap to the Bayes predictor that it closes",
        presets=("paper",),
    ),
    Claim(
        "delay",
        "A Transformer counts pairs sooner if there is no unigram to learn.",
        full_delay,
        above(0.0),
        kind="reading",
        quantity="ln of the step at which half of the gap is closed, chains less doubly stochastic ones of equal "
        "information; a seed that never gets there counts with the last step",
        across="interval",
        presets=("paper",),
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: the jump, the lags, the gradient, and the full model if the run has one."""
    closed = minimal_closed(run).sel(world=CHAIN)
    early, late = (first_step(closed >= share, "step").mean("seed") for share in (0.1, 0.8))
    sentence = (
        f"The minimal model rests at the unigram and jumps between steps {float(early):.0f} and {float(late):.0f}; it "
        f"closes {100 * float(closed.isel(step=-1).mean()):.0f} % of the gap to the Bayes predictor. Autograd's "
        f"gradient of the first layer correlates with the dependence at each lag by {gradient_correlation(run):.4f}."
    )
    if "full_loss" not in run:
        return sentence
    arm = full_arm(run)
    passed = half_step(arm)
    return (
        f"{sentence} Of {run.sizes['seed']} Transformers with two layers {int(passed.notnull().sum())} count pairs, "
        f"from step {float(passed.median()):.0f} on (median); with doubly stochastic chains that step is "
        f"{float(np.exp(-full_delay(run).mean())):.2f} times as late."
    )


STUDY = Study(
    name="induction-phases",
    title="In context, attention counts single symbols first and pairs later, at once",
    source="Edelman et al. 2024 (arXiv 2402.11004); Nichani, Damian and Lee 2024 (arXiv 2402.14735)",
    statement=(
        "Trained on Markov chains that are drawn anew for each sequence, two layers of attention predict uniformly, "
        "then by the counts of single symbols in the context, then abruptly by its counts of pairs; the simpler "
        "solution may delay the better one (Edelman et al.). The gradient of the first layer's attention measures the "
        "dependence between positions and finds the causal parents (Nichani et al.)."
    ),
    about=(
        "A minimal model of two attention layers (one looks back by position, one compares symbols) is trained by SGD "
        "on chains of lag 1 and 2, on doubly stochastic chains, which have no unigram to learn, and with two parents. "
        "Beside it is an exact law for its gradient. At preset paper a Transformer of attention layers alone is "
        "trained too, with two layers and with one. Each kind of chain is called a world."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=4, seconds=15),
        "paper": Preset(
            Config(parents=(1, 3), oracle_chains=20_000, gradient_samples=256, full_steps=10_000),
            seeds=20,
            seconds=6100,
        ),
    },
    run=run,
    claims=(*MINIMAL_CLAIMS, *FULL_CLAIMS),
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "phases": Drawing(
            induction_figures.draw_phases,
            "The minimal model on chains. (a) Loss on held-out sequences; lines: predictors that are not trained. (b) "
            "The diagonal of A moves first, then the first layer's weight of lag 1. (c) Gradient of the first layer at "
            "A = 0.05 I: bars by the law for long contexts, points by autograd. (d) Final weights of the first layer. "
            "Bands and error bars: lowest to highest seed.",
        ),
        "worlds": Drawing(
            induction_figures.draw_worlds,
            "(a) Share of the gap between the best simple predictor and the Bayes predictor that the minimal model "
            "closes, in each world. Where a Transformer was trained: (b) its loss with two layers and with one; lines: "
            "predictors that are not trained. (c) Its first layer's attention to the previous symbol, and its second "
            "layer's to symbols that follow the querying one. (d) The gap that it closes, with and without a unigram "
            "to learn. Bands: lowest to highest seed.",
        ),
    },
)
