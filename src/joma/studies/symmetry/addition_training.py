"""Decoders that learn addition: the setting, training, and the exact match of their sums.

The defaults are those of our pilot: 6 layers, 6 heads, width 384, pre-norm, GELU, batch 512, AdamW at 1e-3 with warm-up
and cosine. Arms of one kind, with all their seeds, are trained as one model with a longer leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from joma import noise
from joma.arguments import InputError, scalar, whole
from joma.data import addition
from joma.models.transformer import Decoder, DecoderConfig
from joma.studies.symmetry.addition_arms import Arm
from joma.study import Arms, Context
from joma.train import Compute, Optimiser, Record

SPLIT_SEED = 0  # all seeds share one split of the pairs: they differ in weights and batches
FOLDS = 5  # of the readout of positions, which needs at least one sequence for each
MAX_TOKENS = {"cpu": 1 << 13, "cuda": 1 << 19}  # of all models together in one forward pass without gradients


@dataclass(frozen=True)
class AdditionSetting:
    """The task, the model and how it is trained."""

    digits: int = 3
    reverse: bool = False
    """Whether the sum's last digit comes first."""
    held: float = 0.1
    """Share of unordered pairs that are held out of training."""
    layers: int = 6
    heads: int = 6
    width: int = 384
    init: str = "linear"
    batch: int = 512
    steps: int = 3_000
    rate: float = 1e-3
    warm_up: int = 100
    """Steps over which the learning rate rises; it then falls to 0 along a cosine."""
    weight_decay: float = 0.01
    precision: str = "bf16"
    """Of matrix products on CUDA: highest, high (TF32) or bf16."""


def decoder_config(setting: AdditionSetting, arm: Arm) -> DecoderConfig:
    """Return the config of an arm's decoder, without its residual connections: these are an argument of the model."""
    return DecoderConfig(
        vocabulary=len(addition.CHARACTERS),
        width=setting.width,
        layers=setting.layers,
        heads=setting.heads,
        length=3 * whole("digits", setting.digits) + 3,
        positions=arm.positions,
        mask=arm.mask,
        activation="gelu",
        init=setting.init,
    )


def check_setting(setting: AdditionSetting) -> None:
    """Raise `InputError`, naming the field, if a setting cannot be run."""
    count = 10 ** whole("digits", setting.digits, high=addition.MAX_ENUMERATED_DIGITS)
    unordered = count * (count + 1) // 2
    if not FOLDS <= round(scalar("held", setting.held, low=0.0, high=1.0) * unordered) < unordered:
        expected = f"a share that holds out at least {FOLDS} of {unordered} pairs, and not all"
        raise InputError("held", expected, setting.held, "give a share nearer to a half")
    for name in ("batch", "steps", "warm_up"):
        whole(name, getattr(setting, name))
    for name in ("rate", "weight_decay"):
        scalar(name, getattr(setting, name), low=0.0)
    decoder_config(setting, Arm())


def split_pairs(setting: AdditionSetting, context: Context) -> addition.Pairs:
    """Split all pairs of numbers into training pairs and test pairs, the latter in random order."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    pairs = addition.split(setting.digits, share=setting.held, generator=generator)
    order = torch.randperm(len(pairs.test), generator=generator)
    return addition.Pairs(pairs.train, pairs.test[order]).to(context.device)


def train(
    setting: AdditionSetting,
    context: Context,
    train_pairs: Int[Tensor, "pair 2"],
    arms: Mapping[str, Arm],
    *,
    label: str,
    record: Record,
) -> xr.Dataset:
    """Train every seed of arms of one kind as one model; return its trajectory [arm, seed, step, ...].

    In every arm a seed starts with the same weights and reads the same batches, which are drawn at each step.

    Args:
        setting, context: the setting and the run.
        train_pairs: the pairs to draw from.
        arms: arms by name, of one kind.
        label: names the progress bar and the folder of checkpoints.
        record: what is measured of the models, arms times seeds, and at which steps.
    """
    first = next(iter(arms.values()))
    if any(arm.kind != first.kind for arm in arms.values()):
        remedy = "train arms with a rotary encoding, and arms with different masks, as models of their own"
        raise InputError("arms", "of one kind", ", ".join(arms), remedy)
    axis = Arms("arm", list(arms))
    seeds = torch.tensor(context.models(axis), device=context.device)
    positions = context.per_model([arm.positions for arm in arms.values()])
    model = Decoder(
        decoder_config(setting, first),
        generators=context.seed_generators(axis),
        residual=_residual(setting, context, arms),
        positions=None if first.positions == "rotary" else positions,
    )
    batch = whole("batch", setting.batch)

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        drawn = addition.draw(train_pairs, size=batch, key=noise.key(seeds, step))
        return surprisal(model, encode_pairs(setting, drawn), setting.digits).mean(dim=(1, 2))

    return context.fit(
        model,
        loss,
        label=label,
        optimiser=optimiser(setting),
        steps=setting.steps,
        record=record,
        compute=Compute(setting.precision),
        arms=axis,
    )


def _residual(
    setting: AdditionSetting, context: Context, arms: Mapping[str, Arm]
) -> Bool[Tensor, "seed layer 2"] | None:
    """Return each model's residual connections, or None if every arm has all of them."""
    if all(arm.residual is None for arm in arms.values()):
        return None
    rows = [arm.residual or ((True, True),) * setting.layers for arm in arms.values()]
    return torch.tensor(context.per_model(rows))


def optimiser(setting: AdditionSetting) -> Optimiser:
    """Return AdamW whose learning rate rises over `warm_up` steps and falls to 0 along half a cosine."""
    warm_up, steps = whole("warm_up", setting.warm_up), whole("steps", setting.steps)

    def factor(step: Tensor) -> Tensor:
        return torch.minimum((step + 1) / warm_up, (1 + torch.cos(math.pi * step / steps)) / 2)

    rate, decay = scalar("rate", setting.rate, low=0.0), scalar("weight_decay", setting.weight_decay, low=0.0)
    return Optimiser("adamw", rate, weight_decay=decay, schedules={"*": factor})


def encode_pairs(setting: AdditionSetting, pairs: Int[Tensor, "*lead 2"]) -> Int[Tensor, "*lead position"]:
    """Return the tokens of pairs of numbers and their sums, in the order of digits that the setting says."""
    return addition.sequences(pairs, digits=setting.digits, reverse=setting.reverse)


def surprisal(model: Decoder, tokens: Int[Tensor, "*seed sample position"], digits: int) -> Float[Tensor, "seed _ d"]:
    """Return −ln p of every digit of the sum.

    Under a causal mask one pass predicts them all. Under a full mask a position would see the digit that it is to
    predict, so that every prefix is an example of its own, and only its last position predicts.
    """
    start, length = addition.answer(digits).start, tokens.shape[-1]
    if model.config.mask == "causal":
        return model.surprisal(tokens[..., :-1], tokens[..., start:], last=length - start)
    return model.surprisal(prefixes(tokens, start), tokens[..., start:], last=1, lengths=range(start, length))


def prefixes(tokens: Int[Tensor, "*lead position"], start: int) -> Int[Tensor, "*lead packed"]:
    """Return the tokens before each position from `start` on, one prefix after the other.

    >>> prefixes(torch.tensor([7, 8, 9]), 1)
    tensor([7, 7, 8])
    """
    return torch.cat([tokens[..., :length] for length in range(start, tokens.shape[-1])], dim=-1)


@torch.no_grad()
def exact_match(model: Decoder, tokens: Int[Tensor, "sample position"], digits: int) -> Float[Tensor, " seed"]:
    """Return the share of sums whose every digit is the likeliest given the true digits before it.

    It is also the share that is right if the model reads its own digits: up to the first wrong one they are the same.
    """
    start, models = addition.answer(digits).start, len(model.embedding)
    positions = tokens.shape[1] if model.config.mask == "causal" else sum(range(start, tokens.shape[1]))
    samples = max(1, MAX_TOKENS[tokens.device.type] // (models * positions))
    correct = [
        _likeliest_digits(model, block, start).eq(block[:, start:]).all(dim=-1).sum(dim=-1)
        for block in tokens.split(samples)
    ]
    return torch.stack(correct).sum(dim=0).double() / len(tokens)


def _likeliest_digits(
    model: Decoder, tokens: Int[Tensor, "sample position"], start: int
) -> Int[Tensor, "seed sample digit"]:
    """Return the likeliest token at each position from `start` on, given the true tokens before it."""
    if model.config.mask == "causal":
        return model(tokens[:, :-1], last=tokens.shape[1] - start).argmax(dim=-1)
    return model(prefixes(tokens, start), last=1, lengths=range(start, tokens.shape[1])).argmax(dim=-1)
