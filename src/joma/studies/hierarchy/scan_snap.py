"""Scan and Snap: attention turns from common to distinct tokens, and then freezes, if the decoder is the faster one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma import schedule
from joma.arguments import InputError, real, scalar, whole
from joma.data.tokens import SequenceClasses, sequence_classes
from joma.drawing import canvas, letters, measured, theory
from joma.models.block import Block, BlockConfig
from joma.studies.hierarchy import growth_phases
from joma.studies.hierarchy.decoder_flow import clock_exponent, logit_flows, relative_gain, transition_time
from joma.studies.hierarchy.distinct_tokens import by_frequency, distinct_logits
from joma.studies.hierarchy.growth_phases import FAST, local_exponent, slowing_time, winning_logits
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, between, near
from joma.train import Optimiser, Record

ARMS = {"faster": 10.0, "equal": 1.0, "slower": 0.1}  # learning rate of the decoder over that of the attention logits


@dataclass(frozen=True)
class Config:
    """One layer: softmax attention over the context, f divided by its norm, a linear decoder; all zero at the start."""

    queries: int = 2
    classes: int = 4
    """Number of classes (next tokens) of each query."""
    distinct: int = 5
    """Number of tokens of each class that occur in no other class."""
    common: int = 5
    """Number of tokens that occur in every class."""
    share: float = 0.5
    """Part of a sequence that consists of common tokens."""
    variation: float = 0.5
    """How much a common token's frequency differs between classes."""
    outputs: int = 64
    """Vocabulary of the decoder; the classes come first, and the other outputs are never the next token."""
    rate_z: float = 0.1
    """Learning rate of the attention logits; the decoder's is 10, 1 and 0.1 times as large."""
    steps: int = 4000
    records: int = 80
    """Number of records, about: steps that round to the same number are recorded once."""
    sweep: tuple[float, ...] = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
    """Ratios of the decoder's rate to that of the logits for which the flow's transition time is measured."""

    @property
    def labels(self) -> int:
        """K, the number of classes of all queries."""
        return self.queries * self.classes


def run(config: Config, context: Context) -> xr.Dataset:
    """Train with a faster, an equal and a slower decoder, and integrate the flow of the same data."""
    _check(config)
    data = sequence_classes(
        generators=context.seed_generators(),
        queries=config.queries,
        classes=config.classes,
        distinct=config.distinct,
        common=config.common,
        share=config.share,
        variation=config.variation,
    )
    arms = xr.IndexVariable("arm", list(ARMS))
    trained = xr.concat([_train(config, context, data, arm) for arm in ARMS], arms, join="exact")
    flow = xr.concat([_flow(config, context, data, arm, trained.step.values) for arm in ARMS], arms, join="exact")
    result = xr.merge([trained, flow.rename({name: f"{name}_flow" for name in flow})], join="exact")
    rates = config.rate_z * np.array(list(ARMS.values()))
    result["cooccurrence"] = (("seed", "label", "rank"), by_frequency(data, data.frequency.numpy()))
    result["gain"] = relative_gain(result.logit, result.cooccurrence)
    result["unit"] = result.step * xr.DataArray(rates, dims="arm") / config.labels
    result["clock"] = (result.unit.dims, clock_exponent(result.unit.values, config.outputs))
    result["transition"] = ("arm", transition_time(config.labels, config.outputs, rates))
    result = result.assign(_sweep(config, context, data))
    return result.transpose("seed", "arm", "step", ..., missing_dims="ignore")


def _check(config: Config) -> None:
    """Raise `InputError` for a bad config before anything is trained."""
    whole("records", config.records, low=20)
    whole("steps", config.steps, low=1000)
    whole("distinct", config.distinct, low=2)
    scalar("rate_z", config.rate_z, low=1e-6, high=1e6)  # at 1e30 the flow takes minutes
    ratios = np.unique(real("sweep", config.sweep, ndim=1, low=1e-3, high=1e4))
    if (ratios >= FAST).sum() < 2:
        remedy = "add some: the power of η is measured among these"
        raise InputError("sweep", f"at least two ratios of {FAST:g} or more", config.sweep, remedy, must="have")
    labels = whole("queries", config.queries) * whole("classes", config.classes, low=2)
    whole("outputs", config.outputs, low=labels)


def _train(config: Config, context: Context, data: SequenceClasses, arm: str) -> xr.Dataset:
    """Train all seeds from zero on the expected loss; record logits of distinct tokens and attention to common ones."""
    x, query = data.frequency.to(context.device), data.query.to(context.device)
    block = Block(
        BlockConfig(tokens=x.shape[-1], hidden=config.outputs, queries=config.queries, scale=0.0),
        generators=context.seed_generators(),
    )
    target = torch.arange(config.labels, device=context.device).expand(len(x), -1)
    is_common = (~data.distinct.any(dim=0)).to(x)

    def loss(model: Block, _: torch.Tensor) -> torch.Tensor:
        f = F.normalize(model.attend(x, query), dim=-1) @ model.U_C.T
        h = f @ model.w
        return F.cross_entropy(h.mT, target, reduction="none").mean(dim=-1)

    trajectory = context.fit(
        block,
        loss,
        optimiser=Optimiser("sgd", ARMS[arm] * config.rate_z, rates={"z": config.rate_z}),
        steps=config.steps,
        record=Record(
            lambda model, _: {"z": model.z, "common": model.attend(x, query) @ is_common},
            at=schedule.logarithmic(config.records, config.steps),
            dims={"z": ("query", "token"), "common": ("label",)},
        ),
        label=f"scan-snap, decoder {arm}",
    )
    trajectory["logit"] = (("seed", "step", "label", "rank"), distinct_logits(data, trajectory.z.values))
    return trajectory[["logit", "common", "loss", "diverged"]]


def _flow(config: Config, context: Context, data: SequenceClasses, arm: str, times: np.ndarray) -> xr.Dataset:
    """Integrate the flow of every seed, and return the quantities that `_train` records."""
    query, is_common = data.query.numpy(), ~data.distinct.any(dim=0).numpy()
    rate_w = ARMS[arm] * config.rate_z
    z = logit_flows(data, times, outputs=config.outputs, rate_w=rate_w, rate_z=config.rate_z)
    weight = data.frequency.numpy()[:, None] * np.exp(z[:, :, query])
    common = weight[..., is_common].sum(axis=-1) / weight.sum(axis=-1)
    return xr.Dataset(
        {
            "logit": (("seed", "step", "label", "rank"), distinct_logits(data, z)),
            "common": (("seed", "step", "label"), common),
        },
        {"seed": list(context.seeds), "step": times},
    )


def _sweep(config: Config, context: Context, data: SequenceClasses) -> xr.Dataset:
    """Measure when the flow's winning logits slow down, for many ratios of the two learning rates."""
    ratios = np.unique(config.sweep)
    transition = transition_time(config.labels, config.outputs, config.rate_z * ratios)
    slowing = np.empty((len(data.frequency), len(ratios)))
    with context.progress.task("scan-snap, flows", total=len(ratios)) as task:
        for index, ratio in enumerate(ratios):
            times, rate_w = transition[index] * np.geomspace(1e-3, 3.0, 100), config.rate_z * ratio
            z = logit_flows(data, np.r_[0.0, times], outputs=config.outputs, rate_w=rate_w, rate_z=config.rate_z)
            winners = distinct_logits(data, z[:, 1:])[..., 0].mean(axis=-1)
            slowing[:, index] = slowing_time(xr.DataArray(winners, {"step": times}, ("seed", "step")))
            task.advance()
    return xr.Dataset(
        {"sweep_slowing": (("seed", "ratio"), slowing), "sweep_transition": ("ratio", transition)},
        {"seed": list(context.seeds), "ratio": ratios},
    )


CLAIMS = (
    Claim(
        "common-falls",
        "Attention to common tokens falls: at the end over the start, for every class, query and ratio of rates.",
        growth_phases.common_left,
        at_most(0.999),
    ),
    Claim(
        "common-always",
        "Attention to common tokens never rises on the way, faster decoder (largest rise between two records).",
        growth_phases.common_rise,
        at_most(0.0),
    ),
    Claim(
        "distinct-grows",
        "Scan and Snap: the logit of every distinct token grows all the time, faster decoder (least growth).",
        growth_phases.distinct_growth,
        at_least(0.0),
    ),
    Claim(
        "order",
        "Among the distinct tokens of a class logits follow co-occurrence, faster decoder (Spearman, least class).",
        partial(growth_phases.final_order, arm="faster"),
        at_least(1.0),
    ),
    Claim(
        "order-slower",
        "The order follows co-occurrence where the decoder is the slower one, which the paper leaves out.",
        partial(growth_phases.final_order, arm="slower"),
        at_least(1.0),
    ),
    Claim(
        "relative-gain",
        "Relative gain: a distinct token's logit follows from the most frequent one's (relative error at the end).",
        partial(growth_phases.gain_error, arm="faster"),
        at_most(0.1),
    ),
    Claim(
        "scan", "Scan: the winning logits first grow as t² (power of t).", growth_phases.scan_exponent, near(2.0, 0.2)
    ),
    Claim(
        "snap",
        "Snap: with the faster decoder growth slows to logarithmic, power of t → 0 (over the last decade of steps).",
        partial(growth_phases.late_exponent, arm="faster"),
        at_most(0.5),
    ),
    Claim(
        "logarithm",
        "Snap: with the faster decoder z is, over the last decade of steps, straighter against ln t than against t "
        "(residual of the one over that of the other).",
        partial(growth_phases.late_straightness, arm="faster"),
        at_most(1.0),
    ),
    Claim(
        "steady",
        "Snap: with the faster decoder z gains, over the last decade of steps, as much in every e-fold of time, "
        "within a factor of 2 (greatest over least dz/d ln t).",
        partial(growth_phases.late_unevenness, arm="faster"),
        between(1.0, 2.0),
    ),
    Claim(
        "no-snap",
        "With the slower decoder z is, over the last decade of steps, straighter against t than against ln t.",
        partial(growth_phases.late_straightness, arm="slower"),
        at_least(1.0),
    ),
    Claim(
        "phase-time",
        "The phases change at about 2 K ln M/η: time at which the power of t falls to 1, over that, faster decoder.",
        growth_phases.slowing_over_transition,
        between(0.5, 2.0),
    ),
    Claim(
        "phase-rate",
        "The phases change at a time that goes as 1/η of the decoder: for one ten times slower it is ten times later.",
        growth_phases.equal_over_faster,
        between(5.0, 20.0),
    ),
    Claim(
        "phase-later",
        "The slower the decoder, the longer growth stays faster than logarithmic (least ratio of the times at which "
        "the power of t falls to 1).",
        growth_phases.least_slower_over_faster,
        at_least(1.0),
    ),
    Claim(
        "phase-limit",
        "Where the decoder is 10 to 1,000 times as fast the time at which phases change goes as 1/η (power of η, "
        "integrated flow).",
        growth_phases.rate_exponent,
        near(-1.0, 0.1),
    ),
    Claim(
        "flow",
        "SGD follows the flow of both layers (largest distance of a distinct logit over 1 + |z|, all arms).",
        growth_phases.flow_distance,
        at_most(0.02),
    ),
)


def draw_scan(run: xr.Dataset) -> Figure:
    """Draw attention to the common tokens, the logits of one class's distinct tokens, and their order at the end."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    thinned = run.isel(step=slice(1, None, 6))
    for index, arm in enumerate(ARMS):
        share = run.common_flow.sel(arm=arm).mean(("label", "seed"))
        theory(axes[0, 0], run.step[1:], share[1:], index)
        measured(axes[0, 0], thinned.step, thinned.common.sel(arm=arm).mean("label"), index, f"decoder {arm}")
    axes[0, 0].set(xlabel="step", xscale="log", ylabel="attention to common tokens", title="Common tokens lose")
    axes[0, 0].legend(loc="lower left")
    flow, points = (records.sel(arm="faster").isel(seed=0, label=0) for records in (run, thinned))
    for rank in range(min(5, run.sizes["rank"])):
        theory(axes[0, 1], run.step[1:], flow.logit_flow.isel(rank=rank)[1:], rank)
        label = f"P = {float(flow.cooccurrence[rank]):.3f}"
        measured(axes[0, 1], points.step, points.logit.isel(rank=rank), rank, label)
    axes[0, 1].set(xlabel="step", xscale="log", ylabel="logit $z$", title="Distinct tokens gain, by co-occurrence")
    axes[0, 1].legend(loc="upper left")
    _draw_order(axes[0, 2], run.isel(step=-1))
    letters(axes)
    return figure


def _draw_order(panel: Axes, end: xr.Dataset) -> None:
    grid = np.linspace(0, 1, 101)
    theory(panel, grid, grid**2, 0, "$(P_l/P_1)^2$")
    for index, arm in enumerate(ARMS):
        ratios = (values / values.isel(rank=0) for values in (end.cooccurrence, end.logit.sel(arm=arm)))
        x, y = (np.ravel(ratio.isel(rank=slice(1, None)).transpose("seed", "label", "rank")) for ratio in ratios)
        measured(panel, x, y, index, arm, markersize=2.5, markeredgewidth=0.7)
    panel.set(xlabel="co-occurrence $P_l / P_1$", ylabel="logit $z_l / z_1$", title="Order at the end, all seeds")
    panel.legend(loc="lower right")


def draw_snap(run: xr.Dataset) -> Figure:
    """Draw the growth of the winning logits, its local power of t, and when that falls to 1."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    thinned = run.isel(step=slice(20, None, 5))
    for index, arm in enumerate(ARMS):
        line = winning_logits(run, "logit_flow").sel(arm=arm).mean("seed").isel(step=slice(12, None))
        theory(axes[0, 0], line.step, line, index)
        measured(axes[0, 0], thinned.step, winning_logits(thinned).sel(arm=arm), index, f"decoder {arm}")
        power = local_exponent(winning_logits(run).sel(arm=arm)).isel(step=slice(15, None, 4))
        scale = float(run.unit.sel(arm=arm)[-1] / run.step[-1])
        measured(axes[0, 1], power.step * scale, power, index)
    axes[0, 0].set(xlabel="step", xscale="log", yscale="log", ylabel="winning logits $z$", title="Growth")
    axes[0, 0].legend(loc="lower right")
    clock = run.clock.where(run.unit > 0.01)
    order = np.argsort(run.unit.values, axis=None)
    theory(
        axes[0, 1], run.unit.values.ravel()[order], clock.values.ravel()[order], 0, "orthogonal classes", color="0.5"
    )
    axes[0, 1].axhline(1.0, color="0.6", linewidth=0.8)
    axes[0, 1].set(
        xlabel="decoder's time $\\eta_w t / K$", xscale="log", ylabel="local power of $t$", title="From scan to snap"
    )
    axes[0, 1].legend(loc="lower left")
    _draw_times(axes[0, 2], run)
    letters(axes)
    return figure


def _draw_times(panel: Axes, run: xr.Dataset) -> None:
    theory(panel, run.ratio, run.sweep_slowing.mean("seed"), 0, "integrated flow")
    theory(panel, run.ratio, run.sweep_transition, 1, r"$2 K \ln M / \eta_w$")
    measured(panel, list(ARMS.values()), slowing_time(winning_logits(run)), 2, "SGD")
    panel.set(xlabel=r"ratio of rates $\eta_w / \eta_z$", xscale="log", yscale="log", ylabel="steps until power 1")
    panel.set_title("When growth slows")
    panel.legend(loc="lower left")


STUDY = Study(
    name="scan-snap",
    title="Scan and snap: distinct tokens win, then attention freezes",
    source="Scan and Snap, Theorems 2 to 4 (arXiv 2305.16380)",
    about=(
        "One layer with softmax attention, normalisation of f and a linear decoder is trained by SGD from zero on "
        "classes of sequences with distinct and common tokens, with a decoder that is 10, 1 and 0.1 times as fast as "
        "the attention logits. Beside it: the flow of both layers, integrated; the paper's relation between the "
        "distinct tokens of a class, which takes the decoder to be infinitely faster; and the clock of a decoder whose "
        "classes have orthogonal features, z growing as t² and then as ln² t. Common tokens break that clock: they "
        "predict the classes against the rest of the vocabulary, so that distinct tokens gain little until the decoder "
        "has learned to leave the rest out. And growth slows down with a slower decoder too: later in steps, but "
        "sooner in the decoder's own time."
    ),
    version=3,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=20),
        "paper": Preset(Config(steps=30_000, records=120, outputs=128), seeds=20, seconds=340),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    figures={
        "scan": Drawing(
            draw_scan,
            "Lines: the integrated flow. Points: SGD; in (a) bars from least to greatest seed. (a) Share of attention "
            "that common tokens get, mean over classes; (b) logits of one class's distinct tokens, faster decoder, "
            "seed 0, by co-occurrence P; (c) final logits of the distinct tokens relative to the most frequent one of "
            "their class, all seeds and classes; the line is what an infinitely faster decoder and small logits give.",
        ),
        "snap": Drawing(
            draw_snap,
            "Bars from least to greatest seed. (a) Logit of each class's most frequent distinct token, mean over "
            "classes: integrated flow (lines) and SGD (points); (b) its local power of t in the decoder's own time, "
            "marks as in (a), beside the closed form for classes with orthogonal features; (c) step at which that "
            "power falls to 1 against the ratio of rates, beside the paper's order of magnitude.",
        ),
    },
)
