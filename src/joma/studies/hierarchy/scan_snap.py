"""Scan and Snap: attention turns from common to distinct tokens, and then freezes, if the decoder is the faster one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr

from joma import schedule
from joma.arguments import InputError, real, scalar, whole
from joma.data.tokens import SequenceClasses, sequence_classes
from joma.models.block import Block, BlockConfig
from joma.studies.hierarchy import growth_phases, premises
from joma.studies.hierarchy.decoder_flow import clock_exponent, logit_flows, relative_gain, transition_time
from joma.studies.hierarchy.distinct_tokens import by_frequency, distinct_logits
from joma.studies.hierarchy.growth_phases import FAST
from joma.studies.hierarchy.phase_figures import draw_premises, draw_scan, draw_snap
from joma.studies.hierarchy.premises import Rates
from joma.study import (
    Claim,
    Context,
    Drawing,
    NotInRun,
    Preset,
    Study,
    above,
    at_least,
    at_most,
    below,
    between,
    near,
)
from joma.train import Optimiser, Record


class Arm(NamedTuple):
    """What is trained: the decoder's rate over that of the attention logits, and over the config's `rate_z`."""

    ratio: float
    decoder: float
    share: float | None = None
    """Part of a sequence that consists of common tokens; the config's if None."""


PREMISES = "premises"  # the arm in which the paper's premises are met: a much faster decoder, rare common tokens
ARMS = {
    PREMISES: Arm(ratio=1000.0, decoder=3.0, share=0.01),
    "faster": Arm(ratio=10.0, decoder=10.0),
    "equal": Arm(ratio=1.0, decoder=1.0),
    "slower": Arm(ratio=0.1, decoder=0.1),
}


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
    """Learning rate of the attention logits where the decoder's is 10, 1 and 0.1 times as large."""
    steps: int = 4000
    records: int = 80
    """Number of records, about: steps that round to the same number are recorded once."""
    sweep: tuple[float, ...] = (0.1, 1.0, 10.0, 30.0, 100.0, 1000.0)
    """Ratios of the decoder's rate to that of the logits for which the flow is integrated."""
    shares: tuple[float, ...] = (0.5, 0.2, 0.1, 0.03, 0.01)
    """Shares of common tokens for which the flow is integrated, with a decoder 1,000 times as fast."""

    @property
    def labels(self) -> int:
        """K, the number of classes of all queries."""
        return self.queries * self.classes


def run(config: Config, context: Context) -> xr.Dataset:
    """Train every arm, integrate the flow of the same data, and let the flow approach its premises."""
    _check(config)
    arms = xr.IndexVariable("arm", list(ARMS))
    trained = xr.concat([_train(config, context, arm) for arm in ARMS], arms, join="exact")
    flow = xr.concat([_flow(config, context, arm, trained.step.values) for arm in ARMS], arms, join="exact")
    result = xr.merge([trained, flow.rename({name: f"{name}_flow" for name in flow})], join="exact")
    data, rates = _draw(config, context, config.share), config.rate_z * np.array([arm.decoder for arm in ARMS.values()])
    # Only ratios of co-occurrences matter below, and these are the same for every share of common tokens.
    result["cooccurrence"] = (("seed", "label", "rank"), by_frequency(data, data.frequency.numpy()))
    result["gain"] = relative_gain(result.logit.isel(step=-1, drop=True), result.cooccurrence)
    result["unit"] = result.step * xr.DataArray(rates, dims="arm") / config.labels
    result["clock"] = (result.unit.dims, clock_exponent(result.unit.values, config.outputs))
    result["arm_ratio"] = ("arm", [arm.ratio for arm in ARMS.values()])
    result["transition"] = ("arm", transition_time(config.labels, config.outputs, rates))
    result = result.assign(_approach(config, context)).assign(premises.clock_values(config.outputs))
    return result.transpose("seed", "arm", "step", ..., missing_dims="ignore")


def _draw(config: Config, context: Context, share: float) -> SequenceClasses:
    """Draw the classes of every seed; their tokens' relative frequencies are the same for every share."""
    return sequence_classes(
        generators=context.seed_generators(),
        queries=config.queries,
        classes=config.classes,
        distinct=config.distinct,
        common=config.common,
        share=share,
        variation=config.variation,
    )


def _check(config: Config) -> None:
    """Raise `InputError` for a bad config before anything is trained."""
    whole("records", config.records, low=20)
    whole("steps", config.steps, low=1000)
    whole("distinct", config.distinct, low=2)
    scalar("rate_z", config.rate_z, low=1e-6, high=1e6)  # at 1e30 the flow takes minutes
    _check_shares("share", (config.share,))
    _check_shares("shares", config.shares)
    if len(set(config.shares)) < 2:
        raise InputError("shares", "at least two shares", config.shares, "add some: they are compared", must="have")
    ratios = np.unique(real("sweep", config.sweep, ndim=1, low=1e-3, high=1e4))
    if (ratios >= FAST).sum() < 2:
        remedy = "add some: the power of η is measured among these"
        raise InputError("sweep", f"at least two ratios of {FAST:g} or more", config.sweep, remedy, must="have")
    labels = whole("queries", config.queries) * whole("classes", config.classes, low=2)
    whole("outputs", config.outputs, low=labels)


def _check_shares(name: str, shares: tuple[float, ...]) -> None:
    """Refuse shares without common tokens, to which no attention could be lost, or without distinct ones."""
    for share in real(name, shares, ndim=1):
        if not 1e-4 <= share <= 0.99:
            remedy = "leave tokens of both kinds: attention moves from common tokens to distinct ones"
            raise InputError(name, "from 0.0001 to 0.99", share, remedy)


def _train(config: Config, context: Context, name: str) -> xr.Dataset:
    """Train all seeds from zero on the expected loss; record logits of distinct tokens and attention to common ones."""
    data, rates = _arm(config, context, name)
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
        optimiser=Optimiser("sgd", rates.decoder, rates={"z": rates.logits}),
        steps=config.steps,
        record=Record(
            lambda model, _: {"z": model.z, "common": model.attend(x, query) @ is_common},
            at=schedule.logarithmic(config.records, config.steps),
            dims={"z": ("query", "token"), "common": ("label",)},
        ),
        label=f"scan-snap, {name}",
    )
    trajectory["logit"] = (("seed", "step", "label", "rank"), distinct_logits(data, trajectory.z.values))
    return trajectory[["logit", "common", "loss", "diverged"]]


def _arm(config: Config, context: Context, name: str) -> tuple[SequenceClasses, Rates]:
    """Return the data and the learning rates of an arm."""
    arm = ARMS[name]
    decoder = arm.decoder * config.rate_z
    data = _draw(config, context, config.share if arm.share is None else arm.share)
    return data, Rates(decoder, decoder / arm.ratio, config.outputs)


def _flow(config: Config, context: Context, name: str, times: np.ndarray) -> xr.Dataset:
    """Integrate the flow of every seed, and return the quantities that `_train` records."""
    data, rates = _arm(config, context, name)
    query, is_common = data.query.numpy(), ~data.distinct.any(dim=0).numpy()
    z = logit_flows(data, times, outputs=rates.outputs, rate_w=rates.decoder, rate_z=rates.logits)
    weight = data.frequency.numpy()[:, None] * np.exp(z[:, :, query])
    common = weight[..., is_common].sum(axis=-1) / weight.sum(axis=-1)
    return xr.Dataset(
        {
            "logit": (("seed", "step", "label", "rank"), distinct_logits(data, z)),
            "common": (("seed", "step", "label"), common),
        },
        {"seed": list(context.seeds), "step": times},
    )


def _approach(config: Config, context: Context) -> xr.Dataset:
    """Measure the flow for many ratios of the two learning rates, and for many shares of common tokens."""
    data = _draw(config, context, config.share)
    ratios, shares = np.unique(config.sweep).tolist(), np.unique(config.shares)[::-1].tolist()
    with context.progress.task("scan-snap, flows", total=len(ratios) + len(shares)) as task:

        def measure(data: SequenceClasses, ratio: float) -> xr.Dataset:
            measures = premises.flow_measures(data, Rates(ratio * config.rate_z, config.rate_z, config.outputs))
            task.advance()
            return measures.assign_coords(seed=list(context.seeds))

        by_ratio = {ratio: measure(data, ratio) for ratio in ratios}
        by_share = {share: measure(_draw(config, context, share), ARMS[PREMISES].ratio) for share in shares}
    return xr.merge([premises.stack(by_ratio, "ratio"), premises.stack(by_share, "share")])


# In the arm that meets the premises, and in the limit of the flow.
THEOREMS = (
    Claim(
        "distinct-grows",
        "Scan and Snap, Theorem 2: the attention logit of every distinct token never falls.",
        partial(growth_phases.distinct_growth, arm=PREMISES),
        at_least(0.0),
        kind="theorem",
        quantity="smallest growth between two records, over distinct tokens and classes; premises met",
    ),
    Claim(
        "order",
        "Scan and Snap, Theorem 3: the distinct tokens of a class gain attention in the order of their co-occurrence.",
        partial(growth_phases.final_order, arm=PREMISES),
        at_least(1.0),
        kind="theorem",
        quantity="rank correlation of final logit and co-occurrence, least class; premises met",
    ),
    Claim(
        "relative-gain",
        "Scan and Snap, Theorem 3: the logit of one distinct token of a class determines those of the others.",
        partial(growth_phases.gain_error, arm=PREMISES),
        at_most(ARMS[PREMISES].share or 0.0),
        kind="theorem",
        quantity="relative error of the predicted logits at the end; the bound is the share of common tokens where "
        "the premises are met",
    ),
    Claim(
        "gain-limit",
        "Scan and Snap, Theorem 3: the error of the relative gain falls as the decoder gets faster.",
        lambda run: premises.largest_step(run.ratio_gain_error.sel(ratio=slice(1.0, None)), "ratio"),
        below(1.0),
        kind="theorem",
        quantity="error at a ratio of rates over that at the next smaller ratio, largest from ratio 1 on; flow",
    ),
    Claim(
        "scan",
        "Scan and Snap, Theorem 4: the winning logits first grow as t².",
        partial(growth_phases.scan_exponent, arm=PREMISES),
        near(2.0, 0.2),
        kind="theorem",
        quantity="power of t from 0.1 to 0.25 of the time 2 K ln M/η; premises met. The tolerance is ours",
    ),
    Claim(
        "logarithm",
        "Scan and Snap, Theorem 4: the winning logits end up growing more like ln t than like t.",
        partial(growth_phases.late_straightness, arm=PREMISES),
        below(1.0),
        kind="theorem",
        quantity="residual of the best line in ln t over that of the best line in t, last decade of steps; premises "
        "met",
    ),
    Claim(
        "phase-time",
        "Scan and Snap, Theorem 4: the phases change at about 2 K ln M/η.",
        partial(growth_phases.slowing_over_transition, arm=PREMISES),
        between(0.5, 2.0),
        kind="theorem",
        quantity="time at which the power of t falls to 1, over 2 K ln M/η; premises met. The factor of two is ours",
    ),
    Claim(
        "phase-limit",
        "Scan and Snap, Theorem 4: with a much faster decoder, the time at which the phases change goes as 1/η.",
        growth_phases.rate_exponent,
        near(-1.0, 0.1),
        kind="theorem",
        quantity="power of η, decoders at least 100 times as fast as attention; flow. The tolerance is ours",
    ),
    Claim(
        "share-limit",
        "Scan and Snap, Theorem 4: the rarer common tokens are, the nearer growth is to the closed form.",
        lambda run: premises.largest_step(run.share_clock_distance, "share"),
        below(1.0),
        kind="theorem",
        quantity="largest distance between the powers of t of flow and closed form, at a share over that at the "
        "next larger share; the largest such ratio",
    ),
    Claim(
        "clock",
        "Scan and Snap, Theorem 4: with rare common tokens and a much faster decoder, growth follows the closed form.",
        lambda run: run.share_clock_distance.isel(share=-1),
        at_most(ARMS[PREMISES].share or 0.0),
        kind="theorem",
        quantity="largest distance between the powers of t of flow and closed form at the least share of common "
        "tokens; the bound is that share",
    ),
)


# What the authors conclude of common tokens.
READINGS = (
    Claim(
        "common-falls",
        "Attention moves away from the common tokens.",
        growth_phases.common_left,
        below(1.0),
        kind="reading",
        quantity="attention to common tokens at the end over that at the start, largest over classes; half of the "
        "tokens common, all three ratios of rates",
    ),
    Claim(
        "common-always",
        "Attention to the common tokens never rises during training.",
        growth_phases.common_rise,
        at_most(0.0),
        kind="reading",
        quantity="largest rise between two records; decoder 10 times as fast, half of the tokens common",
    ),
)


# Arms in which a premise is removed on purpose.
CONTROLS = (
    Claim(
        "gain-at-10",
        "A decoder 10 times as fast is fast enough for the relative gain of Scan and Snap's Theorem 3.",
        partial(growth_phases.gain_error, arm="faster"),
        at_most(0.1),
        kind="control",
        quantity="relative error of the predicted logits at the end; the bound is ours",
    ),
    Claim(
        "scan-common",
        "If half of the tokens are common, the winning logits still grow as t² at first.",
        partial(growth_phases.scan_exponent, arm="faster"),
        near(2.0, 0.2),
        kind="control",
        quantity="power of t from 0.1 to 0.25 of the time 2 K ln M/η; decoder 10 times as fast. The tolerance is ours",
    ),
    Claim(
        "logarithm-common",
        "If half of the tokens are common, growth still ends up more like ln t than like t.",
        partial(growth_phases.late_straightness, arm="faster"),
        below(1.0),
        kind="control",
        quantity="residual of the best line in ln t over that of the best line in t, last decade of steps; decoder "
        "10 times as fast",
    ),
    Claim(
        "no-snap",
        "With a slower decoder, growth stays more like t than like ln t.",
        partial(growth_phases.late_straightness, arm="slower"),
        above(1.0),
        kind="control",
        quantity="residual of the best line in ln t over that of the best line in t, last decade of steps; decoder "
        "10 times slower",
    ),
    Claim(
        "order-slower",
        "With a slower decoder, distinct tokens still gain attention in the order of their co-occurrence.",
        partial(growth_phases.final_order, arm="slower"),
        at_least(1.0),
        kind="control",
        quantity="rank correlation of final logit and co-occurrence, least class; decoder 10 times slower",
    ),
    Claim(
        "phase-rate",
        "The time at which the phases change goes as 1/η also if the decoder is not much faster.",
        growth_phases.equal_over_faster,
        between(5.0, 20.0),
        kind="control",
        quantity="time at which the power of t falls to 1: equal rates over a decoder 10 times as fast; 10 by 1/η, "
        "and the factor of two is ours",
    ),
    Claim(
        "phase-later",
        "The slower the decoder, the later growth slows down.",
        growth_phases.least_slower_over_faster,
        above(1.0),
        kind="control",
        quantity="time at which the power of t falls to 1 over that of the next faster decoder, least",
    ),
)


CLAIMS = (
    *THEOREMS,
    *READINGS,
    *CONTROLS,
    Claim(
        "snap",
        "Over the last decade of steps the winning logits grow more slowly than √t.",
        partial(growth_phases.late_exponent, arm="faster"),
        at_most(0.5),
        kind="check",
        quantity="power of t; decoder 10 times as fast. The bound is ours",
    ),
    Claim(
        "steady",
        "Over the last decade of steps the winning logits gain about as much in every e-fold of time.",
        partial(growth_phases.late_unevenness, arm="faster"),
        between(1.0, 2.0),
        kind="check",
        quantity="greatest over least dz/d ln t; decoder 10 times as fast. The bound is ours",
    ),
    Claim(
        "flow",
        "SGD follows the integrated flow of decoder and attention in every arm.",
        growth_phases.flow_distance,
        at_most(0.02),
        kind="check",
        quantity="largest distance of a distinct logit from the flow, over the arm's largest logit",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say how the errors change as the premises are met, and how much attention moves with them and without."""
    error, distance = (values.mean("seed").values for values in (run.ratio_gain_error, run.share_clock_distance))
    common = run.common.mean(("seed", "label"), skipna=False)
    lost = 1 - common.isel(step=-1) / common.isel(step=0)
    if not np.isfinite(lost).all():
        raise NotInRun("attention at the end of every arm")
    return (
        f"The error of the relative gain goes from {error[0]:.2g} to {error[-1]:.2g} as the ratio of rates goes from "
        f"{float(run.ratio[0]):g} to {float(run.ratio[-1]):g}; that of the power of t from {distance[0]:.2g} to "
        f"{distance[-1]:.2g} as the share of common tokens goes from {float(run.share[0]):g} to "
        f"{float(run.share[-1]):g}. Common tokens lose {float(lost.sel(arm=PREMISES)):.1g} of their attention where "
        f"both premises are met, and {float(lost.sel(arm='faster')):.2f} with a decoder 10 times as fast and a share "
        f"of {float(common.sel(arm='faster')[0]):g}."
    )


STUDY = Study(
    name="scan-snap",
    title="Scan and Snap: the nearer its premises are, the better its laws hold",
    source="Scan and Snap, Theorems 2 to 4 (arXiv 2305.16380)",
    statement=(
        "Scan and Snap (arXiv 2305.16380) solves one layer of softmax attention with a linear decoder that learns much "
        "faster than attention. Distinct tokens, which occur in one class alone, gain attention in the order of their "
        "co-occurrence with the query (Theorems 2 and 3). Their logits first grow as t² (scan), and from the time "
        "2 K ln M/η on as a logarithm (snap), so that attention hardly changes any more (Theorem 4)."
    ),
    about=(
        "The layer is trained by SGD from zero on classes of sequences with distinct and common tokens. One arm meets "
        "the premises: a decoder 1,000 times as fast as attention, and common tokens of a share of 0.01. The other "
        "three remove them on purpose: half of the tokens are common, and the decoder is 10, 1 and 0.1 times as fast. "
        "The flow of both layers, integrated for many ratios of rates and many shares, shows how the errors of the "
        "laws change as the premises are approached."
    ),
    version=5,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=25),
        "paper": Preset(Config(steps=30_000, records=120, outputs=128), seeds=12, seconds=220),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    figures={
        "premises": Drawing(
            draw_premises,
            "How well the laws hold as their premises are approached. Points: integrated flow, bars from least to "
            "greatest seed. Lines: (a) an error that falls as the ratio of rates grows, (b, c) the closed form for "
            "orthogonal classes.",
        ),
        "scan": Drawing(
            draw_scan,
            "Lines: integrated flow. Points: SGD. (a) Mean over classes, bars from least to greatest seed. (b) One "
            "class of seed 0; P is co-occurrence. (c) All seeds and classes, marks as in (a).",
        ),
        "snap": Drawing(
            draw_snap,
            "The logit of each class's most frequent distinct token, mean over classes; bars from least to greatest "
            "seed. Points: SGD. Lines: (a) integrated flow, (b) the closed form for orthogonal classes.",
        ),
    },
)
