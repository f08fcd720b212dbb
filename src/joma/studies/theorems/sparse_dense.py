"""Theorem 4 and Figure 4: with a nonlinear activation attention turns sparse, then dense again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.special import softmax

from joma import schedule
from joma.arguments import real, whole
from joma.studies.entropy_return import recovery
from joma.studies.theorems import driven_block, real_units, sparse_dense_figures
from joma.studies.theorems.real_units import VISIBLE
from joma.studies.theorems.sparse_dense_figures import VISIBLE_ABOVE
from joma.study import Claim, Context, Drawing, Expected, Highlight, Preset, Study, above, at_least, at_most, near
from joma.theory import bounce, flows, growth
from joma.theory.integration import Solver, integrate

# The targets that Figure 4 was drawn with: 1 + 3u for ten uniform numbers u, sorted.
FIGURE_4 = (1.265432, 1.396091, 1.922268, 2.366884, 2.470280, 2.488770, 2.896919, 2.902236, 3.304665, 3.689334)
# Convergence ratios of μ = 1.5 and 1, by time, as computed when the closed form was derived.
RATIOS = {0.5: 1.013, 1.0: 1.151, 2.0: 1.487, 4.0: 1.714, 20.0: 1.841}
PAIR_TOLERANCE = 1e-10  # of the integrator that the closed form of the convergence ratio is compared with


@dataclass(frozen=True)
class Config(real_units.UnitsConfig, driven_block.DriveConfig):
    """Figure 4's flow, Theorem 4's example, a block with the theorems' drives, bounces counted, and real units."""

    figure_4_mu: tuple[float, ...] = FIGURE_4
    figure_4_temperature: float = 3.0
    figure_4_step: float = 0.02
    figure_4_steps: int = 5000
    example_mu: tuple[float, ...] = (1.0, 1.5, 2.0, 2.5, 3.0)
    pair_mu: tuple[float, float] = (1.5, 1.0)
    draws: int = 100
    """Random targets for each seed whose bounces are counted, uniform between 0.1 and a bound uniform in [0.3, 3.5]."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve Figure 4 and Theorem 4's examples, train the blocks, and count bounces, all independent of each other."""
    solved = [_figure_4(config), _example(config), _pair(config), _counted(config, context)]
    return xr.merge([*solved, driven_block.train(config, context), real_units.train(config, context)])


def _figure_4(config: Config) -> xr.Dataset:
    """Solve Figure 4's flow by Euler steps as its authors took them, in closed form, and by the integrator."""
    mu, temperature = real("figure_4_mu", config.figure_4_mu, ndim=1), config.figure_4_temperature
    steps, step = whole("figure_4_steps", config.figure_4_steps), config.figure_4_step
    record_steps = np.array(schedule.every(max(1, steps // 500), steps))
    times = step * record_steps
    exact = growth.softmax_nonlinear(mu, times, config.v0, temperature)
    euler = _euler(mu, config.v0, temperature, step, steps)
    flow = flows.softmax_nonlinear(mu, times, config.v0, temperature=temperature).states
    dims = ("figure_4_time", "component")
    return xr.Dataset(
        {
            "figure_4_mu": ("component", mu),
            "figure_4_v": (dims, exact),
            "figure_4_flow": (dims, flow),
            "figure_4_euler": (dims, euler[record_steps]),
            "figure_4_entropy": ("figure_4_time", growth.attention_entropy(exact, temperature)),
            "figure_4_entropy_euler": ("figure_4_step", growth.attention_entropy(euler, temperature)),
            "figure_4_limit": growth.attention_entropy(mu, temperature),
        },
        {"figure_4_time": times, "figure_4_step": np.arange(steps + 1)},
    )


def _euler(
    mu: Float[np.ndarray, " component"], v0: float, temperature: float, step: float, steps: int
) -> Float[np.ndarray, "step component"]:
    """Return Euler's steps of v̇ = (μ − v) ∘ softmax(v²/T), which are what Figure 4 shows."""
    v = np.full((steps + 1, len(mu)), v0)
    for index in range(steps):
        v[index + 1] = v[index] + step * (mu - v[index]) * softmax(v[index] ** 2 / temperature)
    return v


def _example(config: Config) -> xr.Dataset:
    """Solve Theorem 4's flow for one μ, at times that are dense around the minimum of its entropy."""
    mu = real("example_mu", config.example_mu, ndim=1)
    times = np.concatenate([np.linspace(0, 1.5, 1501), np.geomspace(1.5, 1e3, 200)[1:]])
    v = growth.nonlinear(mu, times, config.v0)
    return xr.Dataset(
        {
            "example_mu": ("example_component", mu),
            "example_v": (("example_time", "example_component"), v),
            "example_entropy": ("example_time", growth.attention_entropy(v)),
        },
        {"example_time": times},
    )


def _pair(config: Config) -> xr.Dataset:
    """Compute how much faster one component converges than another: ln(1/δ_j) / ln(1/δ_k) over time.

    The independent solution integrates y = ln δ, δ = 1 − v/μ, for which Theorem 4's flow reads ẏ = −exp(v²/2): later
    the integrated v itself would differ from μ by rounding alone.
    """
    times = np.unique([*np.geomspace(0.5, 1e4, 60), 1.0, 2.0, 4.0, 20.0])
    closed = growth.nonlinear_log_gap(config.pair_mu, times, config.v0)
    mu = np.array(config.pair_mu)
    solver = Solver("LSODA", rtol=PAIR_TOLERANCE, atol=PAIR_TOLERANCE, bound=1e300)
    start = np.log(1 - config.v0 / mu)
    flow = integrate(lambda _, y: -np.exp((mu * -np.expm1(y)) ** 2 / 2), start, times, solver).states
    return xr.Dataset(
        {
            "pair_ratio": ("pair_time", closed[:, 0] / closed[:, 1]),
            "pair_ratio_flow": ("pair_time", flow[:, 0] / flow[:, 1]),
            "pair_limit": growth.convergence_ratio(*config.pair_mu),
        },
        {"pair_time": times},
    )


def _counted(config: Config, context: Context) -> xr.Dataset:
    """Compute the depth of the entropy's bounce for random targets of many scales."""
    draws, components = whole("draws", config.draws), whole("components", config.components, low=2)
    streams = [np.random.default_rng(seed) for seed in context.seeds]
    mu = np.stack([0.1 + rng.uniform(0.2, 3.4, (draws, 1)) * rng.random((draws, components)) for rng in streams])
    bounces = bounce.entropy_bounce(mu, config.v0)
    dims = ("seed", "draw")
    return xr.Dataset(
        {
            "counted_mean": (dims, mu.mean(axis=-1)),
            "counted_depth": (dims, bounces.depth),
            "counted_regained": (dims, bounces.depth / (bounces.start - bounces.least)),
        },
        {"seed": list(context.seeds)},
    )


def arrival_order(run: xr.Dataset) -> xr.DataArray:
    """Return the largest change of the arrival time of Figure 4's weights from one target to the next larger one.

    A weight has arrived when it has covered 1 − 1/e of its way to the target.
    """
    covered = (run.figure_4_euler - run.figure_4_euler[0]) / (run.figure_4_mu - run.figure_4_euler[0])
    arrival = run.figure_4_time.where(covered >= 1 - 1 / np.e).min("figure_4_time")
    return arrival.diff("component").max()


def pair_power(run: xr.Dataset) -> float:
    """Return the power of t with which the convergence ratio tends to its limit, fitted over the last two decades."""
    late = run.where(run.pair_time >= 100, drop=True)
    return float(np.polyfit(np.log(late.pair_time), np.log(late.pair_limit - late.pair_ratio_flow), 1)[0])


def pair_constants(run: xr.Dataset) -> float:
    """Return the largest distance of the closed form's convergence ratios from `RATIOS`."""
    ratio = run.pair_ratio.sel(pair_time=list(RATIOS), method="nearest")
    return float(abs(ratio - list(RATIOS.values())).max())


FIGURE_CLAIMS = (
    Claim(
        "figure-4",
        "Figure 4: attention turns sparse, then dense again.",
        lambda run: recovery(run.figure_4_entropy_euler, "figure_4_step"),
        above(0.0),
        kind="figure",
        quantity="entropy of the last Euler step less its minimum, in nats, with the targets of the figure",
    ),
    Claim(
        "figure-4-order",
        "Figure 4: the larger its target, the sooner a weight arrives.",
        arrival_order,
        at_most(0.0),
        kind="figure",
        quantity="largest change of the arrival time (1 − 1/e of the way) from one target to the next larger one",
    ),
)
DISTANCE = "largest distance |v − v̂| from the closed form over 1 + |v̂|, over tokens and times"
THEOREM_CLAIMS = (
    Claim(
        "trained",
        "SGD with the drive μ − v fed in as its gradient follows Theorem 4's closed form.",
        lambda run: driven_block.distance(run, "trained", "predicted"),
        at_most(0.01),
        kind="check",
        quantity=f"{DISTANCE}; an Euler integration of the theorem's flow, not a test of where its drive comes from",
    ),
    Claim(
        "nonlinear-returns",
        "With the drive μ − v of Theorem 4 the block's attention turns dense again.",
        lambda run: recovery(run.entropy, "time"),
        above(0.0),
        kind="reading",
        quantity="entropy at the end of SGD less its minimum, in nats",
    ),
    Claim(
        "linear-falls",
        "With the constant drive of Theorem 2 the same block's attention only gets sparser.",
        lambda run: run.linear_entropy.diff("time").max("time", skipna=False),
        at_most(0.0),
        kind="reading",
        quantity="largest rise of the entropy from one record of SGD to the next, in nats",
    ),
    Claim(
        "ratio-flow",
        "Theorem 4: the ratio of convergence of two weights is that of our closed form at every time.",
        lambda run: abs(run.pair_ratio_flow / run.pair_ratio - 1).max(),
        at_most(1000 * PAIR_TOLERANCE),
        kind="check",
        quantity="largest relative distance of ln(1/δ_j)/ln(1/δ_k), μ = 1.5 and 1, t from 0.5 to 10,000; the "
        "integrator's tolerance for a step is 1e-10",
    ),
    Claim(
        "ratio-limit",
        "Theorem 4: the ratio of convergence of two weights tends to exp((μ_j² − μ_k²)/2).",
        lambda run: abs(run.pair_ratio_flow[-1] / run.pair_limit - 1),
        at_most(1e-3),
        kind="control",
        quantity="relative distance of ln(1/δ_j)/ln(1/δ_k) from the limit at t = 10,000, integrated flow; "
        "it falls as 1/t; the bound is ours",
    ),
    Claim(
        "always",
        "Along Theorem 4's flow attention turns sparse and then dense again for every random target, however little.",
        lambda run: (run.counted_depth > 0).mean("draw"),
        at_least(1.0),
        kind="theorem",
        quantity="share of targets whose entropy ends above its minimum; proved in joma.theory.bounce for starts below "
        "all targets",
    ),
    Claim(
        "visible",
        "Along Theorem 4's flow every random target has a return to dense attention that one can see.",
        lambda run: (run.counted_regained > VISIBLE).mean("draw"),
        at_least(1.0),
        kind="control",
        quantity="share of targets whose entropy regains more than 1 % of its fall",
    ),
)
CHECKS = (
    Claim(
        "condition",
        "A return to dense attention can be seen where the mean of the targets μ exceeds 0.88, and only there.",
        lambda run: ((run.counted_regained > VISIBLE) == (run.counted_mean > VISIBLE_ABOVE)).mean("draw"),
        at_least(0.95),
        kind="check",
        quantity="share of targets for which this rule is right; it was found on such draws",
    ),
    Claim(
        "linear-trained",
        "SGD with the constant drive of Theorem 2 follows its closed form.",
        lambda run: driven_block.distance(run, "linear_trained", "linear_predicted"),
        at_most(0.01),
        kind="check",
        quantity=f"{DISTANCE}, up to 98 % of the blow-up time; `winner` is the study of this theorem",
    ),
    Claim(
        "figure-4-closed-form",
        "A change of time solves Figure 4's flow, which is normalised by softmax.",
        lambda run: abs(run.figure_4_v - run.figure_4_flow).max(),
        at_most(1e-8),
        kind="check",
        quantity="largest distance of the closed form from the integrated flow",
    ),
    Claim(
        "figure-4-euler",
        "Euler's steps of 0.02 follow Figure 4's flow.",
        lambda run: abs(run.figure_4_v - run.figure_4_euler).max(),
        at_most(0.02),
        kind="check",
        quantity="largest distance from the closed form",
    ),
    Claim(
        "ratio-power",
        "Theorem 4: the ratio of convergence of two weights approaches its limit as 1/t.",
        pair_power,
        near(-1.0, 0.02),
        kind="check",
        quantity="fitted power of t of the integrated flow, t from 100 to 10,000",
    ),
    Claim(
        "ratio-constants",
        "Theorem 4's closed form has the ratios of convergence that were computed when it was derived.",
        pair_constants,
        at_most(5e-4),
        kind="check",
        quantity="largest distance at t = 0.5, 1, 2, 4 and 20",
    ),
)


def _constant(name: str, statement: str, measure: Callable[[xr.Dataset], xr.DataArray], expected: Expected) -> Claim:
    """Return the check that a number is what it was when the closed form was derived."""
    return Claim(name, statement, measure, expected, kind="check", quantity="against a constant of our own")


def _figure_4_entropy(run: xr.Dataset) -> xr.DataArray:
    return run.figure_4_entropy_euler


CONSTANTS = (
    _constant(
        "figure-4-start",
        "Figure 4's entropy begins at ln 10.",
        lambda run: _figure_4_entropy(run)[0],
        near(2.3026, 1e-4),
    ),
    _constant(
        "figure-4-least",
        "Figure 4's entropy falls to 0.9416 nats.",
        lambda run: _figure_4_entropy(run).min(),
        near(0.9416, 1e-4),
    ),
    _constant(
        "figure-4-step",
        "Figure 4's entropy is least at step 669.",
        lambda run: _figure_4_entropy(run).idxmin(),
        near(669, 0),
    ),
    _constant(
        "figure-4-end",
        "Figure 4's entropy is 1.5493 nats at step 5,000.",
        lambda run: _figure_4_entropy(run)[-1],
        near(1.5493, 1e-4),
    ),
    _constant(
        "figure-4-limit",
        "The limit of Figure 4's entropy is 1.6216.",
        lambda run: run.figure_4_limit,
        near(1.6216, 1e-4),
    ),
    _constant(
        "example-least",
        "Theorem 4, μ = 1, 1.5, 2, 2.5, 3: the entropy falls to 0.4278 nats.",
        lambda run: run.example_entropy.min(),
        near(0.4278, 1e-4),
    ),
    _constant(
        "example-time",
        "Theorem 4, μ = 1, 1.5, 2, 2.5, 3: the entropy is least at t = 0.661.",
        lambda run: run.example_entropy.idxmin(),
        near(0.661, 1e-3),
    ),
    _constant(
        "example-end",
        "Theorem 4, μ = 1, 1.5, 2, 2.5, 3: the entropy comes back to 0.862 nats.",
        lambda run: run.example_entropy[-1],
        near(0.862, 5e-4),
    ),
)
CLAIMS = (*FIGURE_CLAIMS, *THEOREM_CLAIMS, *real_units.CLAIMS, *CHECKS, *CONSTANTS)


def outcome(run: xr.Dataset) -> str:
    """Return what came out: Figure 4's entropy, how closely SGD follows, and how often real units bounce."""
    entropy, distance = run.figure_4_entropy_euler, driven_block.distance(run, "trained", "predicted")
    return (
        f"In Figure 4's flow entropy falls from {float(entropy[0]):.2f} to {float(entropy.min()):.2f} nats and comes "
        f"back to {float(entropy[-1]):.2f}; SGD with Theorem 4's drive follows the closed form to "
        f"{100 * float(distance.max()):.2g} %. {real_units.outcome(run)}"
    )


STUDY = Study(
    name="sparse-dense",
    title="Attention turns sparse, then dense along Theorem 4's flow; in trained blocks it need not",
    source="JoMA, Theorem 4 and Figure 4 (arXiv 2310.00535)",
    statement=(
        "With a nonlinear activation the weights move towards a centre μ, and larger components arrive exponentially "
        "sooner (Theorem 4). So attention first concentrates on the largest ones and then spreads again (Figure 4); "
        "with a linear activation it only concentrates (Theorem 2)."
    ),
    about=(
        "We solve Figure 4's flow in closed form, beside Euler's steps as its authors took them and an adaptive "
        "integrator. A block with the theorems' drives fed in as its gradient is trained by SGD: that is an Euler "
        "integration of Theorems 2 and 4, not a test of where their drives come from. So beside it blocks with real "
        "units (linear, ReLU, GELU, SiLU, tanh) are trained on token classes, with softmax and exp attention, and we "
        "count how often the entropy of their attention comes back."
    ),
    version=3,
    presets={
        "quick": Preset(Config(classes=10, distinct=5, common=5), seeds=4, seconds=20),
        "paper": Preset(
            Config(rate=1e-4, draws=2000, components=10, units_steps=40_000, units_rate=0.02), seeds=10, seconds=340
        ),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    highlight=Highlight(
        "Figure 4",
        sparse_dense_figures.draw_highlight,
        "Entropy of attention over time along Figure 4's flow: it falls from 2.3 to 0.9 nats and comes back to 1.5.",
    ),
    threads=1,
    exact_shards=False,
    figures={
        "linear-nonlinear": Drawing(
            sparse_dense_figures.draw_linear_nonlinear,
            "The flows of Theorems 2 and 4. Lines: closed form. Points: SGD on a block with the theorem's drive as its "
            "gradient, seed 0. (a) Constant drive: the largest weight runs away. (b) Drive μ − v: every weight "
            "arrives at its target. (c) Entropy of their attention. (d) Blocks with real units trained on token "
            "classes, without such a drive: each point is one block, dotted lines are the largest with linear units.",
        ),
        "figure-4": Drawing(
            sparse_dense_figures.draw_figure_4,
            "Figure 4's setting. Lines: closed form. Points: Euler's steps. (a) Weights at five times against their "
            "targets. (b) Entropy of the attention softmax(v²/T).",
        ),
        "theorem-4": Drawing(
            sparse_dense_figures.draw_theorem_4,
            "Lines: closed form. (a) Entropy of attention for four seeds, each with its own targets; points: SGD on a "
            "block with the drive μ − v. (b) How much faster the component with μ = 1.5 converges than that with "
            "μ = 1; points: integrated flow.",
        ),
        "real-units": Drawing(
            sparse_dense_figures.draw_real_units,
            "Blocks with real units, trained by SGD on the cross entropy of token classes. Lines: mean entropy of "
            "attention over seeds and both kinds of tokens. Shaded: from the lowest to the highest block.",
        ),
        "bounce": Drawing(
            sparse_dense_figures.draw_bounce,
            "How much of its fall the entropy regains along Theorem 4's flow, for random targets of many scales. All "
            "bounce, but where the targets are small the bounce is too shallow to be seen.",
        ),
    },
)
