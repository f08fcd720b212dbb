"""Theorem 4 and Figure 4: with a nonlinear activation attention turns sparse, then dense again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.special import softmax

from joma import schedule
from joma.arguments import real, whole
from joma.drawing import canvas, letters, measured, theory
from joma.models.block import Block, BlockConfig
from joma.studies.theorems import single_unit
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, near
from joma.theory import bounce, flows, growth

# The targets that Figure 4 was drawn with: 1 + 3u for ten uniform numbers u, sorted.
FIGURE_4 = (1.265432, 1.396091, 1.922268, 2.366884, 2.470280, 2.488770, 2.896919, 2.902236, 3.304665, 3.689334)
# Convergence ratios of μ = 1.5 and 1, by time.
RATIOS = {0.5: 1.013, 1.0: 1.151, 2.0: 1.487, 4.0: 1.714, 20.0: 1.841}
VISIBLE = 0.01  # share of its fall that entropy must regain for a bounce that one can see
VISIBLE_ABOVE = 0.88  # mean of μ above which bounces are visible


@dataclass(frozen=True)
class Config:
    """Figure 4's flow, Theorem 4's example, a block trained towards random targets, and the bounce counted."""

    figure_4_mu: tuple[float, ...] = FIGURE_4
    figure_4_temperature: float = 3.0
    figure_4_step: float = 0.02
    figure_4_steps: int = 5000
    example_mu: tuple[float, ...] = (1.0, 1.5, 2.0, 2.5, 3.0)
    pair_mu: tuple[float, float] = (1.5, 1.0)
    v0: float = 0.05
    components: int = 6
    """Components of the targets of the trained block and of the counted draws."""
    until: float = 4.0
    """Time until which the block is trained, in steps of the learning rate `rate`."""
    rate: float = 1e-3
    draws: int = 100
    """Random targets for each seed whose bounces are counted, uniform between 0.1 and a bound uniform in [0.3, 3.5]."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve Figure 4 and Theorem 4's examples, train a block, and count bounces, all independent of each other."""
    parts = [_figure_4(config), _example(config), _pair(config), _trained(config, context), _counted(config, context)]
    return xr.merge(parts)


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
    """Compute how much faster one component converges than another: ln(1/δ_j) / ln(1/δ_k) over time."""
    times = np.unique([*np.geomspace(0.5, 1e4, 60), 1.0, 2.0, 4.0, 20.0])
    log_gap = growth.nonlinear_log_gap(config.pair_mu, times, config.v0)
    early = times[times <= 4.0]  # later δ = 1 − v/μ of the integrated flow is mostly rounding
    states = flows.nonlinear(config.pair_mu, early, config.v0).states
    integrated = np.log(1 - states / np.array(config.pair_mu))
    ratio = np.full(times.shape, np.nan)
    ratio[: len(early)] = integrated[:, 0] / integrated[:, 1]
    return xr.Dataset(
        {
            "pair_ratio": ("pair_time", log_gap[:, 0] / log_gap[:, 1]),
            "pair_ratio_flow": ("pair_time", ratio),
            "pair_limit": growth.convergence_ratio(*config.pair_mu),
        },
        {"pair_time": times},
    )


def _trained(config: Config, context: Context) -> xr.Dataset:
    """Train a block whose upper layer sends back μ − v: its logits are free, and Theorem 4 folds them into v.

    Each context is a single token, attention is exp, and there is one hidden unit. The logits begin at v0²/2, where
    Theorem 1 puts them for this v0.
    """
    tokens, steps = whole("components", config.components, low=2), round(config.until / config.rate)
    uniform = [torch.rand(tokens, generator=stream, dtype=torch.float64) for stream in context.seed_generators()]
    mu = torch.stack([0.5 + 2.5 * draw for draw in uniform])
    block_config = BlockConfig(tokens=tokens, hidden=1, attention="exp", residual=False, scale=0.0)
    block = Block(block_config, generators=context.seed_generators())
    with torch.no_grad():
        block.w[:, :tokens] = config.v0
        block.z[:] = config.v0**2 / 2
    x, target = torch.eye(tokens, dtype=torch.float64).to(context.device), mu.to(context.device)

    def loss(model: Block, _step: torch.Tensor) -> torch.Tensor:
        sent_back = (target - model.v[..., 0]).detach()
        return -(sent_back * model(x)[..., 0]).sum(dim=-1)

    at = schedule.every(max(1, steps // 160), steps)
    trajectory = single_unit.train(context, block, loss, rate=config.rate, steps=steps, at=at, label="sparse-dense")
    times = trajectory.step.values * config.rate
    predicted = np.moveaxis(growth.nonlinear(mu.numpy(), times, config.v0), 0, 1)
    return (
        trajectory.rename(step="time")
        .assign_coords(time=times)
        .assign(
            mu=(("seed", "token"), mu.numpy()),
            predicted=(("seed", "time", "token"), predicted),
            entropy_predicted=(("seed", "time"), growth.attention_entropy(predicted)),
        )
    )


def _counted(config: Config, context: Context) -> xr.Dataset:
    """Compute the depth of the entropy's bounce for random targets of many scales."""
    draws = whole("draws", config.draws)
    streams = [np.random.default_rng(seed) for seed in context.seeds]
    mu = np.stack([0.1 + rng.uniform(0.2, 3.4, (draws, 1)) * rng.random((draws, config.components)) for rng in streams])
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


def euler_minimum(run: xr.Dataset) -> xr.DataArray:
    """Return the step at which Euler's entropy of Figure 4 is least."""
    return run.figure_4_entropy_euler.argmin("figure_4_step")


def example_minimum(run: xr.Dataset) -> xr.DataArray:
    """Return the time at which the example's entropy is least."""
    return run.example_entropy.idxmin("example_time")


def pair_at(time: float) -> Claim:
    """Return the claim about the convergence ratio at one time."""
    return Claim(
        f"ratio-{time:g}",
        f"Convergence ratio ln(1/δ_j)/ln(1/δ_k) for μ = 1.5 and 1 at t = {time:g}.",
        lambda run: run.pair_ratio.sel(pair_time=time, method="nearest"),
        near(RATIOS[time], 5e-4),
    )


def pair_slope(run: xr.Dataset) -> float:
    """Return the power of t with which the convergence ratio tends to its limit, fitted over the last two decades."""
    late = run.where(run.pair_time >= 100, drop=True)
    return float(np.polyfit(np.log(late.pair_time), np.log(late.pair_limit - late.pair_ratio), 1)[0])


def trained_distance(run: xr.Dataset) -> xr.DataArray:
    """Return the largest distance of the trained block from the closed form, relative to 1 + |v|, per seed."""
    return single_unit.distance(run.trained, run.predicted).max(("token", "time"))


CLAIMS = (
    Claim(
        "figure-4-start",
        "Figure 4: the entropy begins at ln 10.",
        lambda run: run.figure_4_entropy_euler[0],
        near(2.3026, 1e-4),
    ),
    Claim(
        "figure-4-least",
        "Figure 4: the entropy falls to 0.9416 nats.",
        lambda run: run.figure_4_entropy_euler.min(),
        near(0.9416, 1e-4),
    ),
    Claim("figure-4-step", "Figure 4: the minimum is at step 669.", euler_minimum, near(669, 0)),
    Claim(
        "figure-4-end",
        "Figure 4: the entropy has bounced back to 1.5493 at step 5,000.",
        lambda run: run.figure_4_entropy_euler[-1],
        near(1.5493, 1e-4),
    ),
    Claim(
        "figure-4-limit",
        "Figure 4 was stopped early: the entropy's limit is 1.6216.",
        lambda run: run.figure_4_limit,
        near(1.6216, 1e-4),
    ),
    Claim(
        "figure-4-closed-form",
        "The change of time solves the softmax-normalised flow (largest distance from the integrated flow).",
        lambda run: abs(run.figure_4_v - run.figure_4_flow).max(),
        at_most(1e-8),
    ),
    Claim(
        "figure-4-euler",
        "Euler's steps of 0.02 follow the flow (largest distance).",
        lambda run: abs(run.figure_4_v - run.figure_4_euler).max(),
        at_most(0.02),
    ),
    Claim(
        "example-least",
        "Theorem 4, μ = 1, 1.5, 2, 2.5, 3: the entropy falls from 1.609 to 0.4278 nats.",
        lambda run: run.example_entropy.min(),
        near(0.4278, 1e-4),
    ),
    Claim("example-time", "Theorem 4, the same μ: the minimum is at t = 0.661.", example_minimum, near(0.661, 1e-3)),
    Claim(
        "example-end",
        "Theorem 4, the same μ: the entropy bounces back to 0.862 nats.",
        lambda run: run.example_entropy[-1],
        near(0.862, 5e-4),
    ),
    Claim(
        "trained",
        "A block with free logits, whose upper layer sends back μ − v, follows Theorem 4 (distance over 1 + |v|).",
        trained_distance,
        at_most(0.01),
    ),
    *(pair_at(time) for time in RATIOS),
    Claim(
        "ratio-limit",
        "The convergence ratio tends to exp((μ_j² − μ_k²)/2) as 1/t (fitted power of t).",
        pair_slope,
        near(-1.0, 0.02),
    ),
    Claim(
        "always",
        "Attention turns sparse and then dense again: share of random targets μ > v0 > 0 with a bounce of any depth.",
        lambda run: (run.counted_depth > 0).mean("draw"),
        at_least(1.0),
    ),
    Claim(
        "visible",
        "The bounce can be seen: share of random targets whose entropy regains over 1 % of its fall.",
        lambda run: (run.counted_regained > VISIBLE).mean("draw"),
        at_least(1.0),
    ),
    Claim(
        "condition",
        "A bounce can be seen where the mean of μ exceeds 0.88, and only there: share of targets for which that is so.",
        lambda run: ((run.counted_regained > VISIBLE) == (run.counted_mean > VISIBLE_ABOVE)).mean("draw"),
        at_least(0.95),
    ),
)


def draw_figure_4(run: xr.Dataset) -> Figure:
    """Draw Figure 4: the weights at five times, and the entropy over time."""
    figure, axes = canvas(1, 2, width=4.2, height=3.0)
    left, right = axes[0]
    component = np.arange(1, run.sizes["component"] + 1)
    for index, time in enumerate((0.0, 5.0, 13.4, 30.0, 100.0)):
        snapshot = run.sel(figure_4_time=time, method="nearest")
        theory(left, component, snapshot.figure_4_v, index, f"t = {time:g}")
        measured(left, component, snapshot.figure_4_euler, index)
    left.plot(component, run.figure_4_mu, color="0.5", linestyle=":", linewidth=2.5, label="target μ")
    left.set(xlabel="component, sorted by μ", ylabel="weight $v$", title="The largest targets are reached first")
    left.legend(ncols=2)
    theory(right, run.figure_4_time, run.figure_4_entropy, 0, "closed form")
    thinned = run.isel(figure_4_step=slice(None, None, 250))
    step = float(run.figure_4_time[-1]) / int(run.figure_4_step[-1])
    measured(right, step * thinned.figure_4_step, thinned.figure_4_entropy_euler, 1, "Euler, step 0.02")
    right.axhline(float(run.figure_4_limit), color="0.5", linestyle=":", label="limit")
    right.set(xlabel="time", ylabel="entropy / nats", title="Sparse, then dense", ylim=(0, None))
    right.legend()
    letters(axes)
    return figure


def draw_theorem_4(run: xr.Dataset) -> Figure:
    """Draw the trained block over Theorem 4, its entropy, and the convergence ratio."""
    figure, axes = canvas(1, 3, width=3.3, height=2.9)
    left, middle, right = axes[0]
    first, thinned = run.isel(seed=0), run.isel(time=slice(None, None, 8))
    for index, token in enumerate(np.argsort(first.mu.values)[::-1]):
        theory(left, run.time, first.predicted.isel(token=token), index, f"μ = {float(first.mu[token]):.2f}")
        measured(left, thinned.time, thinned.trained.isel(seed=0, token=token), index)
    left.set(xlabel="time", ylabel="weight $v$", title="A trained block, seed 0")
    left.legend(ncols=2)
    for index in range(min(4, run.sizes["seed"])):
        theory(middle, run.time, run.entropy_predicted.isel(seed=index), index, f"seed {index}")
        measured(middle, thinned.time, thinned.entropy.isel(seed=index), index)
    middle.set(xlabel="time", ylabel="entropy / nats", title="Entropy of its attention")
    middle.legend()
    theory(right, run.pair_time, run.pair_ratio, 0, "closed form")
    measured(right, run.pair_time, run.pair_ratio_flow, 1, "integrated flow")
    right.axhline(float(run.pair_limit), color="0.5", linestyle=":", label="limit")
    right.set(xlabel="time", xscale="log", ylabel=r"$\ln(1/\delta_j)\,/\,\ln(1/\delta_k)$", title="Who arrives first")
    right.legend(loc="lower right")
    letters(axes)
    return figure


def draw_bounce(run: xr.Dataset) -> Figure:
    """Draw the share of its fall that the entropy regains, against the mean of each random target."""
    figure, axes = canvas(1, 1, width=4.6, height=3.0)
    panel = axes[0, 0]
    for index, seed in enumerate(run.seed.values):
        draws = run.sel(seed=seed)
        measured(panel, draws.counted_mean, draws.counted_regained, index, f"seed {seed}", markersize=3)
    panel.axhline(VISIBLE, color="0.4", linestyle=":", label="1 %")
    panel.axvline(VISIBLE_ABOVE, color="0.4", linestyle="--", label="mean 0.88")
    panel.set(xlabel="mean of μ", ylabel="share of its fall regained", yscale="log", ylim=(1e-15, 2))
    panel.legend(ncols=2, loc="lower right")
    return figure


STUDY = Study(
    name="sparse-dense",
    title="Nonlinear activation: attention turns sparse, then dense",
    source="JoMA, Theorem 4 and Figure 4 (arXiv 2310.00535)",
    about=(
        "Figure 4's flow, solved in closed form by a change of time, beside Euler's steps as its authors took them and "
        "an adaptive integrator; Theorem 4's example and its convergence rates; a block with free attention logits "
        "trained by SGD towards random targets; and a count of how deep the entropy of random targets bounces."
    ),
    version=2,
    presets={
        "quick": Preset(Config(), seeds=4, seconds=12),
        "paper": Preset(Config(rate=1e-4, draws=2000, components=10), seeds=20, seconds=340),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    figures={
        "figure-4": Drawing(
            draw_figure_4,
            "Figure 4's setting. Lines: closed form. Points: Euler's steps. (a) Weights at five times against their "
            "targets; (b) entropy of the attention softmax(v²/T).",
        ),
        "theorem-4": Drawing(
            draw_theorem_4,
            "Lines: closed form. Points: a block trained by SGD with free logits, in (c) the integrated flow. "
            "(a) Weights of seed 0; (b) entropy of the attention for four seeds, each with its own targets; (c) how "
            "much faster the component with μ = 1.5 converges than that with μ = 1.",
        ),
        "bounce": Drawing(
            draw_bounce,
            "How much of its fall the entropy of attention regains, for random targets of many scales. All bounce, but "
            "where the targets are small the bounce is too shallow to be seen.",
        ),
    },
)
