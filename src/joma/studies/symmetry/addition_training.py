"""Decoders that learn addition: their parts, how they are trained, and what is asked of them.

Setting of our pilot: 6 layers, 6 heads, width 384, pre-norm, GELU, batch 512, AdamW at 1e-3 with warm-up and cosine.
Arms of one kind, and all their seeds, are one model with a longer leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from joma import noise, schedule
from joma.arguments import InputError, choice, scalar, whole
from joma.data import addition
from joma.models.transformer import CHOICES, Decoder, DecoderConfig
from joma.study import Arms, Context
from joma.train import Compute, Optimiser, Record

REMOVED = {"attention": (False, True), "mlp": (True, False), "both": (False, False)}  # what is left: attention, MLP
EVERY = "all"
BASE = "none causal"
SPLIT = 0  # of the one split of the pairs, which all seeds share, as they differ in weights and batches
FOLDS = 5  # of the readout of positions: at least so many sequences are read
AT_ONCE = {"cpu": 1 << 13, "cuda": 1 << 19}  # tokens of all models read in one pass where nothing is trained

Measure = Callable[[Decoder, int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Setting:
    """The task, the model and how it is trained."""

    digits: int = 3
    reverse: bool = False
    """Whether the sum's last digit comes first."""
    held: float = 0.1
    """Share of unordered pairs that are never trained on."""
    layers: int = 6
    heads: int = 6
    width: int = 384
    init: str = "linear"
    batch: int = 512
    steps: int = 3_000
    rate: float = 1e-3
    warm_up: int = 100
    """Steps over which the rate rises; it then falls to 0 along a cosine."""
    weight_decay: float = 0.01
    every: int = 250
    """Record so often, and a few times before the first."""
    precision: str = "bf16"
    """Of matrix products on CUDA: highest, high (TF32) or bf16."""


@dataclass(frozen=True)
class Arm:
    """A decoder's positional encoding, its mask, and which residual connections it has, a pair for each layer."""

    positions: str = "none"
    mask: str = "causal"
    residual: tuple[tuple[bool, bool], ...] | None = None

    @property
    def kind(self) -> tuple[bool, str]:
        """Arms of one kind can be one model: encodings that are added, or rotary ones, and one mask."""
        return self.positions == "rotary", self.mask


def arms(layers: int) -> dict[str, Arm]:
    """Return all arms by name: encoding x mask, and without encoding under a causal mask, residuals removed.

        "none causal", …, "rotary full"; "attention 0", …, "mlp all", "both all": what is removed and in which layer

    >>> len(arms(6)), arms(2)["mlp 1"].residual
    (29, ((True, True), (True, False)))
    """
    places = [*range(whole("layers", layers)), EVERY]
    table = {
        f"{positions} {mask}": Arm(positions, mask) for positions in CHOICES["positions"] for mask in CHOICES["mask"]
    }
    for part, left in REMOVED.items():
        for place in places:
            kept = tuple(left if place in (layer, EVERY) else (True, True) for layer in range(layers))
            table[f"{part} {place}"] = Arm(residual=kept)
    return table


def decoder(setting: Setting, arm: Arm) -> DecoderConfig:
    """Return the decoder of an arm; residual connections are the model's, not the config's."""
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


def check(setting: Setting) -> None:
    """Refuse a setting that cannot be run, by the name of the key that is wrong."""
    count = 10 ** whole("digits", setting.digits, high=addition.MAX_ENUMERATED_DIGITS)
    unordered = count * (count + 1) // 2
    if not FOLDS <= round(scalar("held", setting.held, low=0.0, high=1.0) * unordered) < unordered:
        expected = f"a share that holds out at least {FOLDS} of {unordered} pairs, and not all"
        raise InputError("held", expected, setting.held, "change it")
    for name in ("batch", "steps", "warm_up", "every"):
        whole(name, getattr(setting, name))
    for name in ("rate", "weight_decay"):
        scalar(name, getattr(setting, name), low=0.0)
    decoder(setting, Arm())


def pairs(setting: Setting, context: Context) -> addition.Pairs:
    """Split all pairs of numbers into those to train on and, in random order, those never seen."""
    generator = torch.Generator().manual_seed(SPLIT)
    found = addition.split(setting.digits, share=setting.held, generator=generator)
    order = torch.randperm(len(found.test), generator=generator)
    return addition.Pairs(found.train, found.test[order]).to(context.device)


def moments(setting: Setting) -> list[int]:
    """The steps at which to record: every so many, and at a few logarithmic ones before the first."""
    steps, every = whole("steps", setting.steps), whole("every", setting.every)
    early = schedule.logarithmic(5, min(every, steps))
    return sorted({*early, *schedule.every(every, steps)})


def train(
    setting: Setting,
    context: Context,
    train_pairs: Int[Tensor, "pair 2"],
    chosen: Mapping[str, Arm],
    *,
    label: str,
    record: Measure,
    dims: Mapping[str, Sequence[str]],
    at: Iterable[int] | None = None,
) -> xr.Dataset:
    """Train every seed of arms of one kind as one model; return its trajectory [arm, seed, step, ...].

    In every arm a seed starts with the same weights and reads the same batches, drawn anew at each step.

    Args:
        setting, context: the setting and the run.
        train_pairs: the pairs to draw from.
        chosen: arms by name, of one kind.
        label: under which progress is reported and checkpoints are kept.
        record: from the model and the step to named measures [model, ...]; models are arms times seeds.
        dims: names of their axes after the model's.
        at: the steps at which to record, `moments` if not given.
    """
    first = next(iter(chosen.values()))
    if any(arm.kind != first.kind for arm in chosen.values()):
        raise InputError("chosen", "arms of one kind", ", ".join(chosen), "train rotary ones and other masks apart")
    arms = Arms("arm", list(chosen))
    seeds = torch.tensor(context.models(arms), device=context.device)
    positions = context.per_model([arm.positions for arm in chosen.values()])
    model = Decoder(
        decoder(setting, first),
        generators=context.seed_generators(arms),
        residual=_residual(setting, context, chosen),
        positions=None if first.positions == "rotary" else positions,
    )
    batch = whole("batch", setting.batch)

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        drawn = addition.draw(train_pairs, size=batch, key=noise.key(seeds, step))
        return surprisal(model, written(setting, drawn), setting.digits).mean(dim=(1, 2))

    at = moments(setting) if at is None else at
    measures = Record(record, at=at, dims=dims, gradients=False)
    return context.fit(model, loss, record=measures, arms=arms, label=label, **options(setting))


def _residual(setting: Setting, context: Context, chosen: Mapping[str, Arm]) -> Bool[Tensor, "seed layer 2"] | None:
    """Return each model's residual connections; None where all have all of them."""
    if all(arm.residual is None for arm in chosen.values()):
        return None
    rows = [arm.residual or ((True, True),) * setting.layers for arm in chosen.values()]
    return torch.tensor(rows).repeat_interleave(len(context.seeds), dim=0)


def options(setting: Setting) -> dict[str, Any]:
    """How a setting trains: optimiser, steps and precision."""
    return {"optimiser": _optimiser(setting), "steps": setting.steps, "compute": Compute(setting.precision)}


def _optimiser(setting: Setting) -> Optimiser:
    """AdamW whose rate rises over `warm_up` steps and falls to 0 along half a cosine."""
    rise, steps = whole("warm_up", setting.warm_up), whole("steps", setting.steps)

    def factor(step: Tensor) -> Tensor:
        return torch.minimum((step + 1) / rise, (1 + torch.cos(math.pi * step / steps)) / 2)

    rate, decay = scalar("rate", setting.rate, low=0.0), scalar("weight_decay", setting.weight_decay, low=0.0)
    return Optimiser("adamw", rate, weight_decay=decay, schedules={"*": factor})


def written(setting: Setting, chosen: Int[Tensor, "*lead 2"]) -> Int[Tensor, "*lead position"]:
    """Return the sequences of pairs of numbers, as the setting writes them."""
    return addition.sequences(chosen, digits=setting.digits, reverse=setting.reverse)


def surprisal(model: Decoder, tokens: Int[Tensor, "*seed sample position"], digits: int) -> Float[Tensor, "seed _ d"]:
    """Return −ln p of every digit of the sum.

    Under a causal mask one pass reads them all. Under a full one a position would see the digit it is to predict, so
    that every prefix is an example of its own, and only its last position predicts.
    """
    begin, length = addition.answer(digits).start, tokens.shape[-1]
    if model.config.mask == "causal":
        return model.surprisal(tokens[..., :-1], tokens[..., begin:], last=length - begin)
    return model.surprisal(prefixes(tokens, begin), tokens[..., begin:], last=1, lengths=range(begin, length))


def prefixes(tokens: Int[Tensor, "*lead position"], begin: int) -> Int[Tensor, "*lead places"]:
    """Return what stands before each position from `begin` on, one after the other.

    >>> prefixes(torch.tensor([7, 8, 9]), 1)
    tensor([7, 7, 8])
    """
    return torch.cat([tokens[..., :n] for n in range(begin, tokens.shape[-1])], dim=-1)


@torch.no_grad()
def exact_match(model: Decoder, tokens: Int[Tensor, "sample position"], digits: int) -> Float[Tensor, " seed"]:
    """Return the share of sums whose every digit is the likeliest given the true digits before it.

    It is also the share that is right if the model reads its own digits: up to the first wrong one they are the same.
    """
    begin, models = addition.answer(digits).start, len(model.embedding)
    places = tokens.shape[1] if model.config.mask == "causal" else sum(range(begin, tokens.shape[1]))
    rows = max(1, AT_ONCE[tokens.device.type] // (models * places))
    right = [_said(model, part, begin).eq(part[:, begin:]).all(dim=-1).sum(dim=-1) for part in tokens.split(rows)]
    return torch.stack(right).sum(dim=0).double() / len(tokens)


def _said(model: Decoder, tokens: Int[Tensor, "sample position"], begin: int) -> Int[Tensor, "seed sample digit"]:
    if model.config.mask == "causal":
        return model(tokens[:, :-1], last=tokens.shape[1] - begin).argmax(dim=-1)
    return model(prefixes(tokens, begin), last=1, lengths=range(begin, tokens.shape[1])).argmax(dim=-1)


@torch.no_grad()
def levels(model: Decoder, tokens: Int[Tensor, "sample position"]) -> Float[Tensor, "seed level sample position width"]:
    """Return the hidden states at the embeddings, level 0, and after each layer."""
    return torch.stack(model.activations(tokens, ["residual"])["residual"], dim=1)


def pick(names: Iterable[str] | None, layers: int) -> dict[str, Arm]:
    """Return the arms of these names, all if None, in the order of `arms`; an unknown name lists the known ones."""
    table: dict[str, Any] = arms(layers)
    wanted = set(table) if names is None else {*names}
    for name in sorted(wanted):
        choice("arms", name, table)
    if not wanted:
        raise InputError("arms", "at least one", "none", f"name some of {', '.join(table)}")
    return {name: arm for name, arm in table.items() if name in wanted}
