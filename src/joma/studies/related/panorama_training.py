"""The models that `panorama` trains itself, since the stored runs of their studies hold no sinks or ranks.

Each is the model of another study, small, with all seeds as one model. Where contexts are frequencies of tokens,
attention is measured on a context that holds each of its tokens once: softmax of the logits alone, as in `ladder`, so
that logits of zero are uniform attention. In a decoder the map above attention is the lower layer of the MLP, as in the
papers' figures of the stable rank, and the numbers are means over sequences, layers and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, choice, distinct, whole
from joma.data.tokens import sequence_classes, token_classes
from joma.models.block import ACTIVATIONS, Block, BlockConfig
from joma.models.transformer import Decoder
from joma.studies.common_axes import NAMES, STEP, attention_axes
from joma.studies.hierarchy import scan_snap
from joma.studies.related.panorama_curves import stack
from joma.studies.related.panorama_sources import TRAINED
from joma.studies.surprisal import cross_entropy_by_row
from joma.studies.symmetry import addition_training
from joma.studies.symmetry.addition_arms import BASELINE, Arm
from joma.studies.text import language_training
from joma.studies.theorems import invariance_training, ladder_flows, ladder_worlds
from joma.study import Arms, Context
from joma.train import Optimiser, Record

SCAN_ARM = "faster"  # of `scan-snap`: attention moves and then freezes
PROBED = 8  # sequences on which the attention of a decoder is measured
Axes = dict[str, Float[Tensor, " seed"]]


@dataclass(frozen=True)
class TrainedConfig:
    """Which models are trained, for how many steps, and the sizes of the decoders."""

    trained: tuple[str, ...] = tuple(TRAINED)
    """Names of `panorama_sources.TRAINED`."""
    records: int = 50
    """Records of each training, about, evenly spaced in the logarithm of the step."""
    block_steps: int = 16_000
    overlap_steps: int = 4000
    scan_steps: int = 4000
    text_steps: int = 300
    text_width: int = 16
    text_rate: float = language_training.QUICK_RATE
    addition_digits: int = 1
    addition_layers: int = 1
    addition_width: int = 32
    addition_batch: int = 32
    addition_steps: int = 600
    addition_rate: float = 3e-3


def check(config: TrainedConfig) -> None:
    """Raise `InputError`, naming the field, if a config cannot be run."""
    for name in distinct("trained", config.trained):
        choice("trained", name, TRAINED)
    if not config.trained:
        raise InputError("trained", "one or more names", config.trained, f"choose from {', '.join(TRAINED)}")
    whole("records", config.records, low=10)
    for name in ("block_steps", "overlap_steps", "scan_steps", "text_steps", "addition_steps"):
        whole(name, getattr(config, name), low=10)
    addition_training.check_setting(_addition_setting(config))


def train(config: TrainedConfig, context: Context) -> xr.Dataset:
    """Train the models that the config names; return their curves over `trained_source`, `seed`, `trained_record`."""
    curves: dict[str, xr.Dataset] = {}
    for names, trainer in TRAINERS.items():
        wanted = [name for name in names if name in config.trained]
        if wanted:
            curves |= trainer(config, context, wanted)
    return stack({name: curves[name] for name in TRAINED if name in curves}, "trained", member="seed")


def _curve(trajectory: xr.Dataset) -> xr.Dataset:
    return trajectory[list(NAMES)].rename(step=STEP).transpose("seed", STEP)


class MixedUnits(Block):
    """Blocks with different units as one model: the leading axis is units, then seeds."""

    def __init__(self, config: BlockConfig, units: Sequence[str], *, generators: Sequence[torch.Generator]) -> None:
        super().__init__(config, generators=generators)
        self.units, self.activation = tuple(units), self.mixed_activation

    def mixed_activation(self, y: Float[Tensor, "model sample hidden"]) -> Float[Tensor, "model sample hidden"]:
        """Apply each kind of units to its part of y."""
        parts = zip(self.units, y.chunk(len(self.units)), strict=True)
        return torch.cat([ACTIVATIONS[name](part) for name, part in parts])


def _block_axes(model: Block, _step: int, *, visible: Bool[Tensor, "row token"], query: Tensor) -> Axes:
    """Return the axes of a block on contexts that hold each of their tokens once; a row is a context with its query."""
    logits = model.z.detach()[:, query] / model.config.temperature
    attention = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return attention_axes(attention, model.v.detach(), visible.expand_as(attention))


def _one_query(tokens: int, device: str) -> Callable[[Block, int], Axes]:
    """Return the measure of a block with one query that sees all tokens."""
    visible = torch.ones(1, tokens, dtype=torch.bool, device=device)
    return partial(_block_axes, visible=visible, query=torch.zeros(1, dtype=torch.long, device=device))


def _by_units(trajectory: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the curve of each arm."""
    return {str(name): _curve(trajectory.sel(model=name, drop=True)) for name in trajectory.model.values}


def train_block(config: TrainedConfig, context: Context, names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Train JoMA's block in the setting of Figure 2: Gaussian tokens, softmax attention, cross entropy."""
    figure_2, arms = invariance_training.Config(), Arms("model", names)
    data = token_classes(
        "gaussian",
        generators=context.generators("panorama, block, data", arms),
        classes=figure_2.classes,
        distinct=figure_2.distinct,
        common=figure_2.common,
    )
    x = data.frequency.to(context.device)
    block = BlockConfig(x.shape[-1], figure_2.classes, dim=figure_2.dim, temperature=figure_2.temperature)
    trajectory = context.fit(
        MixedUnits(block, _units(names), generators=context.generators("panorama, block, weights", arms)),
        lambda model, _: cross_entropy_by_row(model(x)),
        label="panorama, block",
        optimiser=Optimiser("sgd", figure_2.rate, rates={"z": figure_2.rate_z}),
        steps=config.block_steps,
        record=Record(
            _one_query(x.shape[-1], context.device), at=schedule.logarithmic(config.records, config.block_steps)
        ),
        arms=arms,
    )
    return _by_units(trajectory)


def _units(names: Sequence[str]) -> list[str]:
    return ["gelu" if name.endswith("gelu") else "linear" for name in names]


def train_overlap(config: TrainedConfig, context: Context, names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Train the block by SGD on all contexts of the ladder's world *overlap*, from the start of the ladder's flows."""
    ladder, arms = ladder_flows.FlowConfig(), Arms("model", names)
    worlds = [
        ladder_worlds.named_worlds(ladder, ladder_flows.generator(seed, "worlds"))[0]["overlap"]
        for seed in context.models(arms)
    ]
    x = torch.from_numpy(worlds[0].x).to(context.device)  # the same multisets of tokens in every seed
    joint = torch.from_numpy(np.stack([world.joint for world in worlds])).to(context.device)
    block = BlockConfig(ladder.tokens, ladder.classes, residual=False, scale=0.0)
    model = MixedUnits(block, _units(names), generators=context.generators("panorama, overlap, weights", arms))
    ladder_flows.set_start(model, ladder, context.models(arms))
    trajectory = context.fit(
        model,
        ladder_flows.population_loss(x, joint),
        label="panorama, overlap",
        optimiser=Optimiser("sgd", ladder.rate, rates={"z": ladder.rate * ladder.rate_z}),
        steps=config.overlap_steps,
        record=Record(
            _one_query(ladder.tokens, context.device), at=schedule.logarithmic(config.records, config.overlap_steps)
        ),
        arms=arms,
    )
    return _by_units(trajectory)


def train_scan(config: TrainedConfig, context: Context, names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Train Scan and Snap's layer from zero, with a decoder ten times as fast as attention and half common tokens."""
    scan, arm = scan_snap.Config(), scan_snap.ARMS[SCAN_ARM]
    data = sequence_classes(
        generators=context.generators("panorama, scan-snap, data"),
        queries=scan.queries,
        classes=scan.classes,
        distinct=scan.distinct,
        common=scan.common,
        share=scan.share,
        variation=scan.variation,
    )
    x, query = data.frequency.to(context.device), data.query.to(context.device)
    target = torch.arange(scan.labels, device=context.device).expand(len(x), -1)
    block = BlockConfig(x.shape[-1], scan.outputs, queries=scan.queries, scale=0.0)

    def loss(model: Block, _step: Tensor) -> Tensor:
        f = F.normalize(model.attend(x, query), dim=-1) @ model.U_C.T
        return F.cross_entropy((f @ model.w).mT, target, reduction="none").mean(dim=-1)

    trajectory = context.fit(
        Block(block, generators=context.generators("panorama, scan-snap, weights")),
        loss,
        label="panorama, scan-snap",
        optimiser=Optimiser("sgd", scan.rate_z * arm.decoder, rates={"z": scan.rate_z * arm.decoder / arm.ratio}),
        steps=config.scan_steps,
        record=Record(
            partial(_block_axes, visible=x[0] > 0, query=query),
            at=schedule.logarithmic(config.records, config.scan_steps),
        ),
    )
    return {names[0]: _curve(trajectory)}


@torch.no_grad()
def decoder_axes(model: Decoder, tokens: Int[Tensor, "sample position"]) -> Axes:
    """Return the axes of a decoder with a causal mask on some sequences: means over sequences, layers and heads."""
    causal = torch.ones(tokens.shape[-1], tokens.shape[-1], dtype=torch.bool, device=tokens.device).tril()
    by_layer: list[Axes] = []
    for number, attention in enumerate(model.activations(tokens, ["attention"])["attention"]):
        rows = attention.flatten(1, 2)  # [seed, sample and head, query, key]
        weight = model.get_parameter(f"layers.{number}.lower.weight")[:, None].expand(-1, rows.shape[1], -1, -1)
        axes = attention_axes(rows, weight, causal.expand_as(rows))
        by_layer.append({name: values.double().mean(dim=-1) for name, values in axes.items()})
    return {name: torch.stack([axes[name] for axes in by_layer]).mean(dim=0) for name in NAMES}


def train_text(config: TrainedConfig, context: Context, names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Train a one-layer language model on the embedded text, in the setting of the studies of text."""
    width, steps = config.text_width, config.text_steps
    sizes = {"width": width, "hidden": width, "batch": 4, "columns": 2, "glance": 64, "steps": steps}
    setting = language_training.LanguageSetting(
        **language_training.quick_fields(**sizes, every=max(1, steps // config.records))
    )
    text = language_training.read_text(setting, context)
    windows = text.sample_windows(PROBED)
    trajectory = language_training.train(
        setting,
        context,
        text,
        language_training.Variant(),
        rate=config.text_rate,
        label="panorama, text",
        further=language_training.FurtherMeasures(partial(decoder_axes, tokens=windows), dict.fromkeys(NAMES, ())),
    )
    return {names[0]: _curve(trajectory)}


def _addition_setting(config: TrainedConfig) -> addition_training.AdditionSetting:
    """Return the setting of addition: without weight decay, so that the least loss is at infinity."""
    return addition_training.AdditionSetting(
        digits=config.addition_digits,
        layers=config.addition_layers,
        heads=2,
        width=config.addition_width,
        batch=config.addition_batch,
        steps=config.addition_steps,
        rate=config.addition_rate,
        warm_up=max(1, config.addition_steps // 20),
        weight_decay=0.0,
    )


def train_addition(config: TrainedConfig, context: Context, names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Train a decoder without positional encoding on sums, in the setting of `addition`."""
    setting = _addition_setting(config)
    pairs = addition_training.split_pairs(setting, context)
    tokens = addition_training.encode_pairs(setting, pairs.test[:PROBED])[:, :-1]
    trajectory = addition_training.train(
        setting,
        context,
        pairs.train,
        {BASELINE: Arm()},
        label="panorama, addition",
        record=Record(
            lambda model, _: decoder_axes(model, tokens),
            at=schedule.logarithmic(config.records, config.addition_steps),
            gradients=False,
        ),
    )
    return {names[0]: _curve(trajectory.isel(arm=0, drop=True))}


Trainer = Callable[[TrainedConfig, Context, Sequence[str]], dict[str, xr.Dataset]]
TRAINERS: dict[tuple[str, ...], Trainer] = {
    ("block", "block-gelu"): train_block,
    ("overlap", "overlap-gelu"): train_overlap,
    ("scan-snap",): train_scan,
    ("text",): train_text,
    ("addition",): train_addition,
}
