"""Values and attention trained together put all attention on one token: how fast, and for which losses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional as F

from joma import schedule
from joma.arguments import scalar, whole
from joma.models.block import Block, BlockConfig
from joma.probes.entropy import shannon_entropy
from joma.studies.common_axes import NAMES, STEP, attention_axes
from joma.studies.related import polarise_figures, polarise_flows
from joma.studies.related.polarise_flows import FlowConfig, Start, draw, orbit_entropy
from joma.study import Claim, Context, Drawing, Preset, Study, at_most, between, near, select
from joma.theory.value_softmax import late_error
from joma.train import Optimiser, Record

LATE = 10.0  # slopes over the logarithm of time are taken over the last factor of this size
SMALL_TARGET, LARGE_TARGET = 1.0, 30.0


@dataclass(frozen=True)
class Config(FlowConfig):
    """The flows, and the block that SGD trains along one of them."""

    rate: float = 0.1
    steps: int = 5000


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve the flows of each seed, and train a block on one sample with the logistic loss by SGD."""
    polarise_flows.check(config)
    scalar("rate", config.rate, above=0.0)
    whole("steps", config.steps, low=10)
    starts = [
        draw(generator, config.loss_tokens, config.dim, norm=config.norm, start=config.start)
        for generator in context.numpy_generators("losses")
    ]
    streams = zip(context.numpy_generators("constant"), context.numpy_generators("targets"), starts, strict=True)
    rows: list[xr.Dataset] = []
    with context.progress.task("polarise, flows", total=len(starts)) as task:
        for constant, targets, start in streams:
            parts = [
                polarise_flows.solve_constant(config, constant),
                polarise_flows.solve_losses(config, start),
                polarise_flows.solve_targets(config, targets),
                polarise_flows.solve_rates(config, start),
            ]
            rows.append(xr.merge(parts))
            task.advance()
    solved = xr.concat(rows, dim=xr.Variable("seed", list(context.seeds)))
    late = np.stack([late_error(solved.time.values[1:], tokens, norm=config.norm) for tokens in config.tokens])
    law = np.concatenate([np.full((len(late), 1), np.nan), late], axis=1)
    return xr.merge([solved.assign(law=(("tokens", "time"), law)), train(config, context, starts)])


def train(config: Config, context: Context, starts: list[Start]) -> xr.Dataset:
    """Train the softmax block on one sample, logistic loss, from the given starts.

    Returns:
        Over `seed` and `axes_step`: `sgd_margin`, `sgd_entropy`, the entropy `sgd_orbit` that the orbit has at that
        margin, and the numbers on common axes.
    """
    c = _stack([start.c for start in starts], context)
    block_config = BlockConfig(config.loss_tokens, config.dim, residual=False, scale=0.0)
    model = Block(block_config, generators=context.generators("weights"))
    model.z = nn.Parameter(_stack([start.logits[None] for start in starts], context))
    values = _stack([start.values for start in starts], context)
    model.w = nn.Parameter(F.pad(values, (0, 0, 0, 1)))  # the row of the query, which nothing reads
    x = torch.full((1, config.loss_tokens), 1 / config.loss_tokens, dtype=torch.float64, device=context.device)

    def measure(model: Block, _: int) -> dict[str, Tensor]:
        attention = model.mean_attention()
        margin = ((attention[:, None] @ model.v.detach())[:, 0] * c).sum(dim=-1)
        axes = attention_axes(attention[:, None], model.v.detach())
        return {"sgd_margin": margin, "sgd_entropy": shannon_entropy(attention), **axes}

    trajectory = context.fit(
        model,
        lambda model, _: F.softplus(-(model(x)[:, 0] * c).sum(dim=-1)),
        optimiser=Optimiser("sgd", config.rate),
        steps=config.steps,
        record=Record(measure, at=schedule.logarithmic(config.records, config.steps)),
        label="polarise, SGD",
    )
    trained = trajectory[["sgd_margin", "sgd_entropy", *NAMES]].rename(step=STEP)
    orbit = [orbit_entropy(start, margin) for start, margin in zip(starts, trained.sgd_margin.values, strict=True)]
    return trained.assign(sgd_orbit=(("seed", STEP), np.stack(orbit)))


def _stack(arrays: list[np.ndarray], context: Context) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(context.device)


def late_slope(run: xr.Dataset, y: xr.DataArray, x: xr.DataArray) -> xr.DataArray:
    """Return the slope of y over x between the last record and that nearest to a tenth of its ln t, per seed."""
    log_time = run.log_time.isel(point=slice(1, None))  # without time 0
    tenth = 1 + abs(np.log(log_time * LATE / log_time.isel(point=-1))).argmin("point")
    rise, distance = (values.isel(point=-1) - values.isel(point=tenth) for values in (y, x))
    return rise / distance


def fixed_rate(run: xr.Dataset) -> xr.DataArray:
    """Return d gap/d ln t with fixed values over the last factor of ten in ln t, per seed."""
    return late_slope(run, run.fixed_gap, run.log_time)


def trained_rate(run: xr.Dataset) -> xr.DataArray:
    """Return d gap/d ln ln t with trained values over the last factor of ten in ln t, per seed."""
    return late_slope(run, run.trained_gap, np.log(run.log_time.where(run.log_time > 0)))


def law_ratio(run: xr.Dataset) -> xr.DataArray:
    """Return (1/ε)/law at the last time, [seed, tokens]."""
    return (run.law / run.error).isel(time=-1)


def farthest_ratio(run: xr.Dataset) -> xr.DataArray:
    """Return the ratio of `law_ratio` that is farthest from 1, per seed."""
    ratio = law_ratio(run)
    return ratio.isel(tokens=abs(ratio - 1).argmax("tokens"))


def relative_final_entropy(run: xr.Dataset) -> xr.DataArray:
    """Return the final entropy of the square loss over that of uniform attention, [seed, target]."""
    return run.final_entropy / run.largest_entropy


CLAIMS = (
    Claim(
        "ledger",
        "A logit changes by half the change of its value's squared length, less its share of that of all values.",
        lambda run: run.ledger.max("tokens"),
        at_most(1000 * polarise_flows.SOLVER.atol),
        kind="theorem",
        quantity="largest residual of the ledger over tokens and times, constant gradient; its terms grow as "
        "½‖c‖²t², to 3e6 at time 2,000; the bound is 1,000 times the integrator's tolerance; derived in our documents",
    ),
    Claim(
        "gap-zero",
        "With one sample Theorem 1's law for softmax attention has no gap term.",
        lambda run: run.gap.max("tokens"),
        at_most(1e-12),
        kind="theorem",
        quantity="largest gap over largest drift along the package's flow of the block",
    ),
    Claim(
        "invariant",
        "Two tokens keep (s₁ − s₂)² − 4‖c‖² sinh²((a₁ − a₂)/2) constant.",
        lambda run: run.invariant,
        at_most(1e-8),
        kind="theorem",
        quantity="largest change over the largest (s₁ − s₂)², constant gradient; derived in our documents",
    ),
    Claim(
        "law",
        "With a constant gradient the losers' weight falls as 2(k − 1)/(k‖c‖²t²).",
        farthest_ratio,
        between(0.94, 1.01),
        kind="control",
        quantity="law over measured weight at the last time, of the number k of tokens where it is farthest from 1; "
        "corrections are of relative order 1/t and t^(−4/k)",
    ),
    Claim(
        "one-orbit",
        "The constant, the logistic and the square loss have the same attention at the same margin.",
        lambda run: abs(run.entropy - run.orbit_entropy).max(("loss", "time")),
        at_most(1e-8),
        kind="theorem",
        quantity="largest difference of the entropy of each flow from that of one orbit at its margin, in nats",
    ),
    Claim(
        "sgd",
        "A block trained by SGD on one sample stays on the orbit.",
        lambda run: abs(run.sgd_entropy - run.sgd_orbit).max(STEP, skipna=False),
        at_most(0.1),
        kind="control",
        quantity="largest difference of entropies at the same margin, in nats; the bound is the learning rate, the "
        "order of SGD's distance from the flow",
    ),
    Claim(
        "inherent",
        "Gradient flow on the square loss ends at low entropy, whatever the target is.",
        lambda run: select(relative_final_entropy(run), target=SMALL_TARGET),
        at_most(0.5),
        kind="reading",
        quantity="final entropy over ln k for a target of length 1; the paper's premises on the start are not known to "
        "us, and the bound is ours",
    ),
    Claim(
        "large-target",
        "Gradient flow on the square loss ends at low entropy if the target is large.",
        lambda run: select(run.final_entropy, target=LARGE_TARGET),
        at_most(0.05),
        kind="control",
        quantity="final entropy in nats for a target of length 30",
    ),
    Claim(
        "final-entropy",
        "The orbit predicts at which entropy the square loss ends.",
        lambda run: abs(run.final_entropy - run.predicted_entropy).max("target"),
        at_most(0.01),
        kind="control",
        quantity="largest difference over targets, in nats; the orbit is exact if values are along the target at the "
        "start, and the bound is the size of the values there",
    ),
    Claim(
        "rate-fixed",
        "With fixed values the winner's logit leads by ln t under the logistic loss.",
        fixed_rate,
        near(1.0, 0.01),
        kind="control",
        quantity="slope of the lead over ln t, over the last factor of ten in ln t",
    ),
    Claim(
        "rate-trained",
        "With trained values the winner's logit leads by 2 ln ln t only under the logistic loss.",
        trained_rate,
        near(2.0, 0.2),
        kind="control",
        quantity="slope of the lead over ln ln t, over the last factor of ten in ln t",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: how good the law is, where the square loss ends, and the two rates."""
    ratio, ends = law_ratio(run), 100 * relative_final_entropy(run).mean("seed")
    return (
        f"At time {float(run.time[-1]):g} the law is {float(ratio.min()):.3f} to {float(ratio.max()):.3f} times the "
        f"losers' weight. Three losses share one orbit to {float(abs(run.entropy - run.orbit_entropy).max()):.0e} "
        f"nats. The square loss ends at {float(ends[0]):.3g} % of the largest entropy for a target of length "
        f"{float(run.target[0]):g} and at {float(ends[-1]):.2g} % for one of {float(run.target[-1]):g}. Under the "
        f"logistic loss the winner's logit leads by {float(fixed_rate(run).mean()):.3f} ln t with fixed values and by "
        f"{float(trained_rate(run).mean()):.2f} ln ln t with trained ones."
    )


STUDY = Study(
    name="polarise",
    title="Values and attention trained together end on one token, extremely slowly",
    source="Varre, Rofin & Flammarion 2026 (arXiv 2603.06248); the laws are ours",
    statement=(
        "Gradient flow on L(V σ(a)), with a value matrix V and one softmax vector σ(a) both trained, is driven to "
        "attention of low entropy, for the logistic loss and the square loss among others (arXiv 2603.06248, abstract)."
    ),
    about=(
        "The flow is that of a softmax block with linear units on one sample. All losses of the margin c · y follow "
        "one orbit, on which the losers' weight tends to 2(k − 1)/(k‖c‖²τ²); docs/related/polarise.md derives it. "
        "We solve the block's flow with a constant gradient, the logistic loss and the square loss, compare each with "
        "that orbit, and train the same block by SGD. The square loss is solved to its end for targets of several "
        "lengths. Under the logistic loss the lead of the winner's logit is followed with fixed and with trained "
        "values to times of e^1000 and more."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=8),
        "paper": Preset(Config(tokens=(2, 5, 20, 64), records=14, steps=20_000), seeds=50, seconds=150),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "orbit": Drawing(
            polarise_figures.draw_orbit,
            "(a) Entropy of attention over the margin: three losses, solved apart, and a block trained by SGD; seed 0. "
            "(b) The losers' weight times the inverse of its law tends to 1: means over seeds, shaded from the lowest "
            "to the highest. (c) Final entropy of the square loss over the length of its target, points, and the "
            "entropy of the orbit there, line; bars from the lowest to the highest seed. (d) Lead of the winner's "
            "logit under the logistic loss: ln t with fixed values, 2 ln ln t with trained ones; lines are the laws.",
        ),
    },
)
