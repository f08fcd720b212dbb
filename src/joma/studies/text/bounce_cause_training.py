"""Training and measures of `bounce-cause`: arms of one shape are one model, different shapes train side by side.

The weights of a seed come from a stream of this study, and so do its dropout masks: seed 0 here is not seed 0 of the
other studies of text. Within the study a seed has the same stream in every arm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from joma import noise, schedule
from joma.arguments import scalar, whole
from joma.models.transformer import Decoder
from joma.probes.attention_call import AttentionCall
from joma.probes.entropy import shannon_entropy
from joma.probes.summary import summary_rows
from joma.studies.text import language_training
from joma.studies.text.bounce_cause_arms import DROPOUTS, PARTS, UNCHANGED, Arm, group_arms
from joma.studies.text.bounce_control import is_before
from joma.studies.text.language_training import LanguageSetting, TextColumns, Variant
from joma.study import Arms, Context, LabelledTraining
from joma.train import Compute, Optimiser, Record
from joma.train.optimiser import Schedule

STREAM = "bounce-cause"
STARTS = ("end", "fresh")  # of W_Q and W_K where attention trains alone: those of the end, or drawn anew
QUERY_KEY = ("attention.query.", "attention.key.")
TRAIN_BATCHES = 4  # of the training text, evenly spaced, on which loss and entropy are measured
WHOLE_BATCHES = 16  # of a training text so small that loss and entropy are measured on all of it
ATTENTION_RECORDS = 20
DIMS = {
    "entropy": ("layer", "head"),
    "train_entropy": ("layer", "head"),
    "position_entropy": ("position",),
    "distance": ("layer",),
}


@dataclass(frozen=True)
class CauseSetting(LanguageSetting):
    """The setting of text, and what the arms need."""

    rate: float = 1e-4
    sgd_rate: float = 5.0
    """Learning rate of the arm with SGD; the default is that of PyTorch's tutorial on this model."""
    dropout_at: str = "none"
    """Where the unchanged model has dropout: none, embedding or published (everywhere)."""
    memorised: int = 8
    """Windows of each column of the training text that the arm `memorised` reads again and again."""
    attention_rate: float = 1e-3
    """Learning rate, falling to 0, where attention trains alone and the rest is frozen at its final values."""
    attention_steps: int = 10_000
    """Steps of that training; 0 to leave it out."""


def check_setting(setting: CauseSetting, text: TextColumns, arms: Mapping[str, Arm]) -> None:
    """Raise `InputError`, naming the field, if a setting cannot be run."""
    for name in ("rate", "sgd_rate", "attention_rate"):
        scalar(name, getattr(setting, name), low=0.0)
    whole("attention_steps", setting.attention_steps, low=0)
    small = any(arm.memorised for arm in arms.values())
    whole("memorised", setting.memorised, high=min(WHOLE_BATCHES, text.epoch) if small else WHOLE_BATCHES)


def memorised_text(setting: CauseSetting, text: TextColumns) -> TextColumns:
    """Return the text with a training text of the first `memorised` windows of each column."""
    return replace(text, train=text.train[:, : setting.memorised * text.length + 1])


def train_arms(
    setting: CauseSetting,
    context: Context,
    text: TextColumns,
    arms: Mapping[str, Arm],
    *,
    later_steps: Int[np.ndarray, " seed"] | None = None,
    free: Decoder | None = None,
) -> tuple[list[xr.Dataset], dict[str, Decoder]]:
    """Train the arms side by side, and attention alone where `free` is given.

    Args:
        setting, context, text: the setting, the run and its text.
        arms: by name.
        later_steps: the step from which arms that are frozen later are frozen in each seed.
        free: the trained model of the unchanged arm, whose attention is then trained alone in addition.

    Returns:
        A trajectory for each group of arms, over `arm`, `seed` and `step`; that of attention alone, if it was trained,
        last, over `start`, `seed` and `step`. And the trained model of each group, by the name of its first arm.
    """
    groups = group_arms(arms)
    trainings = [_training(setting, context, text, group, later_steps) for group in groups]
    if free is not None:
        trainings.append(_attention_training(setting, context, text, free))
    trajectories = context.fit_together(trainings)
    models = {next(iter(group)): training.model for group, training in zip(groups, trainings, strict=False)}
    return [_labelled(trajectory) for trajectory in trajectories], models


def _labelled(trajectory: xr.Dataset) -> xr.Dataset:
    return trajectory.assign_coords(
        layer=range(trajectory.sizes["layer"]),
        head=range(trajectory.sizes["head"]),
        position=range(trajectory.sizes["position"]),
    )


def _training(
    setting: CauseSetting,
    context: Context,
    text: TextColumns,
    group: Mapping[str, Arm],
    later_steps: Int[np.ndarray, " seed"] | None,
) -> LabelledTraining:
    """Return the training of a group of arms of one kind."""
    first, labels = next(iter(group.values())), Arms("arm", list(group))
    text = memorised_text(setting, text) if first.memorised else text
    config = language_training.decoder_config(setting, variant(first), text.types)
    positions = context.per_model([arm.positions for arm in group.values()])
    others = len(group) - 1
    return LabelledTraining(
        Decoder(config, generators=context.generators(STREAM, labels), positions=positions),
        _loss(context, text, labels, with_dropout=bool(config.sites)),
        label=f"bounce-cause, {labels.labels[0]}" + (f" and {others} more" if others else ""),
        optimiser=Optimiser(
            first.optimiser,
            setting.sgd_rate if first.optimiser == "sgd" else setting.rate,
            clip=setting.clip,
            restart=text.epoch if first.restart else None,
            schedules=freeze_schedules(freeze_steps(group, setting.steps, context, later_steps), context.device),
        ),
        steps=setting.steps,
        record=_record(setting, text, language_training.record_steps(setting, text)),
        compute=Compute(setting.precision),
        arms=labels,
    )


def variant(arm: Arm) -> Variant:
    """Return the model of an arm, without what is frozen and the positional encoding."""
    return Variant(arm.layers, arm.activation, norm=arm.norm, sites=DROPOUTS[arm.dropout or "none"])


def _loss(
    context: Context, text: TextColumns, labels: Arms, *, with_dropout: bool
) -> Callable[[Decoder, Tensor], Tensor]:
    """Return the loss of a training step: the mean surprisal of the next window of every column."""
    streams = [generator.initial_seed() for generator in context.generators(f"{STREAM}, dropout", labels)]
    seeds = torch.tensor(streams, device=context.device)

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        tokens, targets = text.window(step)
        key = noise.key(seeds, step) if with_dropout else None
        return model.surprisal(tokens, targets, noise=key).mean(dim=(1, 2))

    return loss


def _record(setting: CauseSetting, text: TextColumns, steps: Iterable[int]) -> Record:
    measure_model = partial(measure, text=text, half=setting.precision == "bf16")
    return Record(measure_model, at=steps, dims=DIMS, gradients=False)


def freeze_steps(
    group: Mapping[str, Arm], steps: int, context: Context, later_steps: Int[np.ndarray, " seed"] | None
) -> dict[str, Int[np.ndarray, " model"]]:
    """Return for each part that an arm of the group freezes the step from which each model's is frozen.

    Models are arms times seeds, in the order of `Arms`. A part that an arm does not freeze has its last step.
    """
    never, start = np.full(len(context.seeds), steps), np.zeros(len(context.seeds), dtype=int)
    by_part = {}
    for part in PARTS:
        if any(part in arm.frozen for arm in group.values()):
            by_arm = [
                never if part not in arm.frozen else start if not arm.later or later_steps is None else later_steps
                for arm in group.values()
            ]
            by_part[part] = np.concatenate(by_arm)
    return by_part


def freeze_schedules(steps: Mapping[str, Int[np.ndarray, " model"]], device: str) -> dict[str, Schedule]:
    """Return factors of the learning rate that freeze parts of each model after so many updates.

    >>> factor = freeze_schedules({"head": np.array([3, 0])}, "cpu")["head.*"]
    >>> factor(torch.tensor(2))
    tensor([1., 0.], dtype=torch.float64)
    """
    return {
        pattern: partial(is_before, torch.as_tensor(by_model, device=device))
        for part, by_model in steps.items()
        for pattern in PARTS[part]
    }


def measure(model: Decoder, step: int, *, text: TextColumns, half: bool) -> dict[str, Tensor]:
    """Measure loss and attention without dropout, on the validation text and on some of the training text."""
    del step
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=half and text.valid.is_cuda):
        validation = measure_windows(model, text.windows(model), text)
        training = measure_windows(model, train_batches(text), text)
    return {
        "valid_loss": validation["loss"],
        "entropy": validation["entropy"].mean(dim=-1),
        "position_entropy": validation["entropy"].mean(dim=(1, 2)),
        "distance": validation["distance"],
        "train_loss": training["loss"],
        "train_entropy": training["entropy"].mean(dim=-1),
    }


def train_batches(text: TextColumns) -> Iterable[tuple[Tensor, Tensor]]:
    """Return all batches of a training text of at most `WHOLE_BATCHES`, else `TRAIN_BATCHES`, evenly spaced."""
    count = text.epoch if text.epoch <= WHOLE_BATCHES else TRAIN_BATCHES
    for number in range(count):
        yield text.window(torch.tensor(number * text.epoch // count, device=text.train.device))


def measure_windows(
    model: Decoder, batches: Iterable[tuple[Tensor, Tensor]], text: TextColumns
) -> dict[str, Float[Tensor, "seed ..."]]:
    """Return the mean loss, and the mean of attention's entropy and distance over the full windows of some batches.

    Returns:
        `loss` [seed], `entropy` [seed, layer, head, position] in nats, and `distance` [seed, layer] in tokens.
    """
    losses, entropies, distances, tokens_read = [], [], [], 0
    for tokens, targets in batches:
        watched: dict[str, list[Tensor]] = {"attention": []}
        losses.append(model.surprisal(tokens, targets, watched=watched).double().sum(dim=(1, 2)))
        tokens_read += targets.numel()
        if tokens.shape[1] == text.length:
            weights = torch.stack(watched["attention"], dim=1)  # [seed, layer, window, head, query, key]
            entropies.append(shannon_entropy(weights, check=False).double().transpose(2, 3))  # softmaxes
            distances.append(_distance(weights))
    if not entropies:
        raise language_training.no_full_window(text)
    return {
        "loss": torch.stack(losses).sum(dim=0) / tokens_read,
        "entropy": torch.cat(entropies, dim=3).mean(dim=3),
        "distance": torch.cat(distances, dim=2).mean(dim=(2, 3, 4)),
    }


def _distance(weights: Float[Tensor, "seed layer window head query key"]) -> Tensor:
    """Return the mean distance between each query and the keys it attends to."""
    return summary_rows(AttentionCall(logits=weights.log()), ("distance",))["distance"].double()


def memorising_floor(text: TextColumns) -> float:
    """Return the least training loss of a model that sees the window up to each token: of a memorised text.

    −Σ ln (n(prefix, next) / n(prefix)) / N,    prefix: the tokens of the window up to and with the present one
    """
    prefixes: Counter[tuple[int, ...]] = Counter()
    continued: Counter[tuple[int, ...]] = Counter()
    for step in range(text.epoch):
        tokens, targets = text.window(torch.tensor(step, device=text.train.device))
        for window, following in zip(tokens.tolist(), targets[:, -1:].tolist(), strict=True):
            seen = (*window, *following)
            prefixes.update(seen[:end] for end in range(1, len(seen)))
            continued.update(seen[: end + 1] for end in range(1, len(seen)))
    nats = sum(count * np.log(prefixes[seen[:-1]] / count) for seen, count in continued.items())
    return float(nats / prefixes.total())


def _attention_training(setting: CauseSetting, context: Context, text: TextColumns, free: Decoder) -> LabelledTraining:
    """Return the training of W_Q and W_K alone, with all else frozen at the final values of the unchanged model."""
    labels, steps = Arms("start", STARTS), setting.attention_steps
    model = Decoder(free.config, generators=context.generators(f"{STREAM}, fresh attention", labels))
    with_final_weights(model, free, len(context.seeds))
    return LabelledTraining(
        model,
        _loss(context, text, labels, with_dropout=bool(free.config.sites)),
        label=f"bounce-cause, {UNCHANGED}, attention alone",
        optimiser=Optimiser(
            "adam", setting.attention_rate, clip=setting.clip, schedules={"*": partial(_falling, steps)}
        ),
        steps=steps,
        record=_record(setting, text, schedule.every(max(1, steps // ATTENTION_RECORDS), steps)),
        compute=Compute(setting.precision),
        arms=labels,
    )


def _falling(steps: int, step: Tensor) -> Tensor:
    return 1.0 - step.double() / steps


@torch.no_grad()
def with_final_weights(model: Decoder, trained: Decoder, seeds: int) -> None:
    """Give a model the weights of the first `seeds` seeds of a trained one, once for each of `STARTS`, and freeze them.

    W_Q and W_K stay trainable; those of the start `fresh` stay as they were drawn.
    """
    for name, parameter in model.named_parameters():
        final = trained.get_parameter(name)[:seeds].to(parameter.device)
        if any(part in name for part in QUERY_KEY):
            parameter[:seeds].copy_(final)
        else:
            parameter.copy_(final.repeat(len(STARTS), *(1,) * (final.ndim - 1)))
            parameter.requires_grad_(False)
