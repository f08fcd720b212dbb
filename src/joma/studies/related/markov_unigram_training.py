"""The arms of the study `markov-unigram`: chains, tied or untied weights, optimisers, and what else might trap a model.

Arms that share an optimiser and the shape of the model are trained as one model, all seeds of all of them at once. A
seed sees the same random numbers in every arm of a length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from joma import noise
from joma.arguments import InputError, choice, distinct, real, scalar, whole
from joma.studies.common_axes import NAMES, STEP, attention_axes
from joma.studies.related.markov_unigram_model import (
    DTYPE,
    ChainTransformer,
    ChainTransformerConfig,
    unigram_hessian,
)
from joma.study import Arms, Context
from joma.tensors import of_finite
from joma.theory import markov
from joma.train import Optimiser, Record

PROBE = -1  # the step whose random numbers are the probe's: training has no such step
SYMBOLS = 0  # the site of the noise
HESSIAN_POSITIONS = 8  # of which the Hessian at the unigram takes its mean
AXES_SAMPLES = 8  # sequences whose attention is measured for the common axes
AUTHORS_RATE, AUTHORS_DECAY, AUTHORS_INIT = 2e-3, 1e-3, 0.02  # of AdamW in the authors' public code
USUAL_BETAS, AUTHORS_BETAS = (0.9, 0.999), (0.9, 0.95)  # PyTorch's defaults, and those of their code
AUTHORS_STEPS, AUTHORS_SIMPLE_STEPS = 400, 1000  # the defaults of their models with and without LayerNorm
WARM_UP, FIRST_FACTOR, LAST_FACTOR = 0.02, 0.01, 0.2  # of their schedule: 1/100 of the rate at first, 1/5 at last


@dataclass(frozen=True)
class Setting:
    """What arms must share to be trained as one model: the optimiser, the number of steps, the shape of the model."""

    model: ChainTransformerConfig
    optimiser: str
    rate: float
    steps: int
    decay: float = 0.0
    cosine: bool = False
    betas: tuple[float, float] = USUAL_BETAS


@dataclass(frozen=True)
class Arm:
    """A chain, a start and a setting.

    Attributes:
        name: the label in the run.
        group: `sgd`, `init`, `adam`, or the name of a variant.
        chain: p and q.
        tied: whether head and embedding are the same.
        init: standard deviation of the initial weights.
        setting: how it is trained.
    """

    name: str
    group: str
    chain: tuple[float, float]
    tied: bool
    init: float
    setting: Setting


@dataclass(frozen=True)
class Variant:
    """What a variant of the arm `adam` (or of `sgd`) changes; the words complete "with …"."""

    about: str
    sgd: bool = False
    setting: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    lengthened: bool = False
    widened: bool = False


AUTHORS = {
    "optimiser": "adamw",
    "rate": AUTHORS_RATE,
    "decay": AUTHORS_DECAY,
    "betas": AUTHORS_BETAS,
    "cosine": True,
}
VARIANTS: dict[str, Variant] = {
    "decay": Variant("weight decay 0.1", setting={"optimiser": "adamw", "decay": 0.1}),
    "strong-decay": Variant("weight decay 1", setting={"optimiser": "adamw", "decay": 1.0}),
    "schedule": Variant("the cosine schedule", setting={"cosine": True}),
    "long": Variant("long sequences", lengthened=True),
    "wide": Variant("a wide model", widened=True),
    "norm": Variant("LayerNorm", model={"norm": True}),
    "deep": Variant("two layers", model={"layers": 2}),
    "deep-sgd": Variant("two layers, SGD", sgd=True, model={"layers": 2}),
    "authors": Variant(
        "the authors' settings and LayerNorm",
        setting={**AUTHORS, "steps": AUTHORS_STEPS},
        model={"norm": True},
        lengthened=True,
    ),
    "authors-simple": Variant(
        "the authors' settings, no LayerNorm", setting={**AUTHORS, "steps": AUTHORS_SIMPLE_STEPS}, lengthened=True
    ),
    "authors-usual-betas": Variant(
        "the authors' settings, no LayerNorm, second decay rate 0.999",
        setting={**AUTHORS, "betas": USUAL_BETAS, "steps": AUTHORS_SIMPLE_STEPS},
        lengthened=True,
    ),
    "authors-short": Variant(
        "the authors' settings, no LayerNorm, 400 steps",
        setting={**AUTHORS, "steps": AUTHORS_STEPS},
        lengthened=True,
    ),
    "authors-patient": Variant(
        "the authors' settings, no LayerNorm, five times as long",
        setting={**AUTHORS, "steps": 5 * AUTHORS_SIMPLE_STEPS},
        lengthened=True,
    ),
    "authors-deep": Variant(
        "the authors' settings, LayerNorm, two layers",
        setting={**AUTHORS, "steps": AUTHORS_STEPS},
        model={"norm": True, "layers": 2},
        lengthened=True,
    ),
}


@dataclass(frozen=True)
class TrainingConfig:
    """The chains, the transformer and how it is trained."""

    chains: tuple[tuple[float, float], ...] = ((0.5, 0.8), (0.9, 0.9), (0.2, 0.3))
    """Pairs of p = P(0→1) and q = P(1→0). Starts and variants are tried on the first, for which p + q > 1."""
    length: int = 16
    width: int = 8
    batch: int = 16
    steps: int = 800
    rate: float = 0.5
    """Learning rate of SGD."""
    inits: tuple[float, ...] = (0.05, 0.2, 0.4)
    """Standard deviations of the initial weights: the first for all chains, all of them for the first chain, tied."""
    adam_rate: float = 3e-3
    adam_init: float = AUTHORS_INIT
    variants: tuple[str, ...] = ("deep-sgd",)
    """Names of `markov_unigram_training.VARIANTS`, trained on the first chain with tied weights."""
    long_length: int = 64
    wide_width: int = 16
    probe: int = 64
    """Sequences of each seed on which the loss is measured."""
    records: int = 20


def arms(config: TrainingConfig) -> list[Arm]:
    """Return all arms of the study."""
    _check(config)
    sgd = Setting(ChainTransformerConfig(config.length, config.width), "sgd", config.rate, config.steps)
    adam = replace(sgd, optimiser="adam", rate=config.adam_rate)
    first, init = config.chains[0], config.inits[0]
    members = [
        Arm(f"sgd, {'tied' if tied else 'untied'}, {p:g}/{q:g}", "sgd", (p, q), tied, init, sgd)
        for p, q in config.chains
        for tied in (True, False)
    ]
    members += [Arm(f"sgd, init {start:g}", "init", first, True, start, sgd) for start in config.inits[1:]]
    members += [
        Arm(f"adam, {p:g}/{q:g}", "adam", (p, q), True, config.adam_init, adam) for p, q in config.chains if p + q > 1
    ]
    for name in config.variants:
        variant = VARIANTS[name]
        start = init if variant.sgd else config.adam_init
        members.append(Arm(name, name, first, True, start, _varied(sgd if variant.sgd else adam, variant, config)))
    return members


def _varied(setting: Setting, variant: Variant, config: TrainingConfig) -> Setting:
    sizes = dict(variant.model)
    if variant.lengthened:
        sizes["length"] = config.long_length
    if variant.widened:
        sizes["width"] = config.wide_width
    return replace(setting, model=replace(setting.model, **sizes), **variant.setting)


def _check(config: TrainingConfig) -> None:
    distinct("chains", config.chains)
    for chain in config.chains:
        markov.stationary(*chain)
        if abs(sum(chain) - 1) < 1e-9:
            remedy = "its symbols are independent, and there is nothing to learn"
            raise InputError("chains", "pairs with p + q other than 1", chain, remedy)
    if sum(config.chains[0]) < 1:
        raise InputError("chains", "a first pair with p + q > 1", config.chains[0], "put another first")
    distinct("inits", config.inits, least=2)
    real("inits", config.inits, ndim=1, low=0.0)
    distinct("variants", config.variants, least=0)
    for name in config.variants:
        choice("variants", name, VARIANTS)
    for name in ("length", "width", "long_length", "wide_width", "batch", "probe"):
        whole(name, getattr(config, name))
    whole("steps", config.steps, low=whole("records", config.records))
    for name in ("rate", "adam_rate", "adam_init"):
        scalar(name, getattr(config, name), low=0.0)


def train(config: TrainingConfig, context: Context) -> xr.Dataset:
    """Train every arm and return what was recorded of it.

    Returns:
        Over `seed`, `arm` and `record`: `loss`, the cross entropy on the probe given the chain's true transitions, and
        `curvature`, the least eigenvalue of the Hessian at the unigram over 2|C| (NaN for untied weights). Over `arm`
        and `record` the `step`; over `arm` the arm's `group`, `p`, `q`, `tied` and `init`, and its losses `unigram` and
        `kernel`, H(π) and the entropy rate. Of the first arm by Adam the common axes.
    """
    members = arms(config)
    groups: dict[Setting, list[Arm]] = {}
    for arm in members:
        groups.setdefault(arm.setting, []).append(arm)
    parts = [_train_group(config, context, setting, group) for setting, group in groups.items()]
    names = [arm.name for arm in members]
    joined = xr.concat([part.drop_vars(NAMES) for part in parts], dim="arm").sel(arm=names).transpose("seed", ...)
    shown = next(arm.name for arm in members if arm.group == "adam")
    axes = next(part for part in parts if shown in part.arm.values)[list(NAMES)].sel(arm=shown, drop=True)
    steps = joined.step.sel(arm=shown).values
    axes = axes.rename(record=STEP).assign_coords({STEP: steps}).transpose("seed", STEP)
    return xr.merge([_described(joined, members), axes])


def _described(run: xr.Dataset, members: Sequence[Arm]) -> xr.Dataset:
    """Return the run with what each arm is, and the two losses that it may end at."""
    p, q = np.array([arm.chain for arm in members]).T
    return run.assign(
        group=("arm", [arm.group for arm in members]),
        p=("arm", p),
        q=("arm", q),
        tied=("arm", np.array([arm.tied for arm in members], dtype=np.int8)),
        init=("arm", [arm.init for arm in members]),
        unigram=("arm", markov.unigram_entropy(p, q)),
        kernel=("arm", markov.entropy_rate(p, q)),
    )


def _train_group(config: TrainingConfig, context: Context, setting: Setting, group: Sequence[Arm]) -> xr.Dataset:
    """Train the arms of one setting as one model, whose leading axis is arm, seed."""
    axis = Arms("arm", [arm.name for arm in group])
    model = ChainTransformer(
        setting.model,
        generators=context.generators("weights", axis),
        tied=context.per_model([arm.tied for arm in group]),
        scale=context.per_model([arm.init for arm in group]),
    )
    task = Task(config, context, setting, group)
    records = config.records
    trajectory = context.fit(
        model,
        task.loss,
        optimiser=Optimiser(
            setting.optimiser,
            setting.rate,
            weight_decay=setting.decay,
            betas=setting.betas,
            schedules={"*": cosine_schedule(setting.steps)} if setting.cosine else {},
        ),
        steps=setting.steps,
        record=Record(
            task.measure,
            at=[setting.steps * record // records for record in range(records + 1)],
            gradients=False,
        ),
        arms=axis,
        label=f"markov-unigram, {group[0].name} and the like",  # a folder's name has at most 255 characters
    )
    steps = np.tile(trajectory.step.values, (len(group), 1))
    recorded = trajectory[["probe_loss", "curvature", *NAMES]].rename(probe_loss="loss", step="record")
    return recorded.drop_vars("record").assign(step=(("arm", "record"), steps))


def cosine_schedule(steps: int) -> Callable[[Tensor], Tensor]:
    """Return the factor of the learning rate of the authors' schedule: a cosine up for 2 % of the steps, then down.

    >>> [round(float(cosine_schedule(1000)(torch.tensor(step))), 3) for step in (0, 20, 510, 1000)]
    [0.01, 1.0, 0.6, 0.2]
    """
    peak = max(1.0, WARM_UP * steps)

    def factor(step: Tensor) -> Tensor:
        rising = FIRST_FACTOR + (1 - FIRST_FACTOR) * (1 - torch.cos(math.pi * step / peak)) / 2
        falling = (
            LAST_FACTOR + (1 - LAST_FACTOR) * (1 + torch.cos(math.pi * (step - peak) / max(1.0, steps - peak))) / 2
        )
        return torch.where(step < peak, rising, falling)

    return factor


def chain_symbols(
    uniform: Float[Tensor, "model sample position"], p: Float[Tensor, " model"], q: Float[Tensor, " model"]
) -> Float[Tensor, "model sample position"]:
    """Return stationary chains of 0 and 1 from uniform numbers, all positions at once.

    A number u takes 0 to 1[u < p] and 1 to 1[u < 1 − q]. Where both are the same the past is forgotten, elsewhere the
    symbol stays or changes. So a symbol is that of the last position that forgot, and whether there is an odd number of
    changes since then.

    >>> u = torch.tensor([[[0.3, 0.9, 0.4, 0.1]]])
    >>> chain_symbols(u, torch.tensor([0.5]), torch.tensor([0.8]))
    tensor([[[1., 0., 1., 1.]]])
    """
    p, q = p[:, None, None], q[:, None, None]
    first = uniform[..., :1] < p / (p + q)
    from_0 = torch.cat([first, uniform[..., 1:] < p], dim=-1)
    from_1 = torch.cat([first, uniform[..., 1:] < 1 - q], dim=-1)
    place = torch.arange(uniform.shape[-1], device=uniform.device).expand_as(from_0)
    last = torch.where(from_0 == from_1, place, 0).cummax(dim=-1).values
    changes = (from_0 & ~from_1).long().cumsum(dim=-1)
    since = changes - changes.gather(-1, last)
    return ((from_0.long().gather(-1, last) + since) % 2).to(uniform.dtype)


class Task:
    """The sequences that a group of arms is trained and measured on, its loss and its measures."""

    def __init__(self, config: TrainingConfig, context: Context, setting: Setting, group: Sequence[Arm]) -> None:
        device, chains = context.device, torch.tensor([arm.chain for arm in group], dtype=DTYPE)
        self.batch, self.length, self.arms = config.batch, setting.model.length, len(group)
        self.seeds = torch.tensor(context.seeds, device=device)
        self.p, self.q = (column.repeat_interleave(len(context.seeds)).to(device) for column in chains.T)
        self.tied = torch.tensor(context.per_model([arm.tied for arm in group]), device=device)
        self.probe = self.draw(PROBE, config.probe)[..., :-1]

    def draw(self, step: Tensor | int, samples: int) -> Float[Tensor, "model sample symbol"]:
        """Return the sequences of each model at a step, one symbol longer than the model's input."""
        key = noise.key(self.seeds, step)
        uniform = noise.uniform((samples, self.length + 1), key=key, site=SYMBOLS)
        return chain_symbols(uniform.repeat(self.arms, 1, 1), self.p, self.q)

    def loss(self, model: ChainTransformer, step: Tensor) -> Float[Tensor, " model"]:
        """Return the cross entropy of each model on the sequences of a step."""
        symbols = self.draw(step, self.batch)
        logits = model(symbols[..., :-1])
        return (F.softplus(logits) - symbols[..., 1:] * logits).mean(dim=(1, 2))

    @torch.no_grad()
    def measure(self, model: ChainTransformer, _step: int) -> dict[str, Tensor]:
        """Return the loss on the probe, the curvature at the unigram, and the common axes."""
        logits, p, q = model(self.probe), self.p[:, None, None], self.q[:, None, None]
        next_is_1 = torch.where(self.probe > 0, 1 - q, p)  # in place of the next symbol, which is noise
        # The state of symbols has its stationary frequencies, not those of the probe: two means, one after each symbol.
        surprisal = F.softplus(logits) - next_is_1 * logits
        share = self.p / (self.p + self.q)
        after = [_mean_where(surprisal, self.probe == symbol) for symbol in (0, 1)]
        hessian = unigram_hessian(model, self.p, self.q, positions=HESSIAN_POSITIONS)
        unit = 2 * share * (1 - share) * (1 - self.p - self.q).abs()
        curvature = of_finite(lambda matrix: torch.linalg.eigvalsh(matrix)[..., 0], hessian) / unit
        attention = model.attention(self.probe[:, :AXES_SAMPLES]).transpose(0, 1)
        weight = model.W_O[:, 0].expand(len(attention), -1, -1, -1)
        axes = attention_axes(attention, weight, model.causal.expand_as(attention))
        return {
            "probe_loss": (1 - share) * after[0] + share * after[1],
            "curvature": torch.where(self.tied, curvature, torch.nan),
            **{name: values.mean(dim=0) for name, values in axes.items()},
        }


def _mean_where(values: Tensor, mask: Tensor) -> Float[Tensor, " model"]:
    return (values * mask).sum(dim=(1, 2)) / mask.sum(dim=(1, 2))
