"""Small language models on real text, as the paper trains them: the setting that the studies of text share.

The setting of the WikiText-2 figure of arXiv 2310.00535, as in the authors' public code: post-norm, sinusoidal
positions, embeddings times √width, layers that start as copies of one, dropout everywhere (on attention weights too),
an output head that is not tied to the embeddings. The text is laid out in `batch` continuous columns, which are cut
into windows of `length` tokens; every seed reads the same windows in order, epoch after epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from joma import noise, schedule
from joma.arguments import InputError, whole
from joma.data.sources import find_local
from joma.data.text import corpus
from joma.models.clamped import ClampedEntropyDecoder
from joma.models.config import SITES
from joma.models.steady import FrozenAttentionDecoder
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.entropy import shannon_entropy
from joma.probes.rank import stable_rank
from joma.study import Arms, Context, LabelledTraining
from joma.train import Compute, Optimiser, Record
from joma.train.optimiser import Schedule

PROBE_SHARE = 0.04  # of the training time, spent on probes if `every` is None
FORWARD_SHARE = 1 / 2  # of the time of a training step, taken by its forward pass, at most, on the CPU
# Validation tokens, and attention weights on them, of all models in a pass on CUDA; on the CPU it is a training batch.
CUDA_PASS_TOKENS, CUDA_PASS_WEIGHTS = 1 << 18, 1 << 28
AUTHORS_WINDOW = 100  # the window of the first validation column whose attention the authors' code saves
QUICK_RATE = 3e-3  # learning rate of quick presets, at which attention changes within their few steps
DIMS = {"entropy": ("layer", "head"), "window_entropy": ("layer", "head"), "stable_rank": ("layer",)}


@dataclass(frozen=True)
class LanguageSetting:
    """What every study of text has: the text, the sizes of the model, the training and the probes."""

    corpus: str = "python-reference"
    """A folder or file of text, a Hugging Face dataset as Salesforce/wikitext:wikitext-2-v1, or python-reference."""
    tokeniser: str = "basic_english"
    width: int = 200
    hidden: int = 200
    heads: int = 1
    length: int = 35
    dropout: float = 0.2
    batch: int = 20
    columns: int = 10
    """Columns of the validation text."""
    steps: int = 58_560
    clip: float = 0.5
    restart: bool = True
    """Whether Adam starts afresh at every epoch, as in the authors' code; False for one Adam throughout."""
    every: int | None = None
    """Steps between probes (logarithmic before the first); None: as often as takes less than 5 % of the time."""
    glance: int | None = None
    """How many tokens of each validation column a probe reads; None for all."""
    precision: str = "bf16"
    """Of matrix products on CUDA: highest, high (TF32) or bf16."""


@dataclass(frozen=True)
class LayeredSetting(LanguageSetting):
    """The setting of a study whose models may have several layers."""

    alike: bool = True
    """Whether all layers start as copies of one, as in the authors' code; False to draw each by itself."""


@dataclass(frozen=True)
class Variant:
    """What may differ between the models of one setting; all but depth and activation are as in the authors' code.

    Attributes:
        layers, activation, norm: as of `DecoderConfig`.
        alike: whether all layers start as copies of one.
        sites: where dropout is applied.
    """

    layers: int = 1
    activation: str = "relu"
    alike: bool = True
    norm: str = "post"
    sites: tuple[str, ...] = SITES


@dataclass(frozen=True)
class Freezing:
    """What is frozen while the rest of the model trains.

    Attributes:
        schedules: factors of the learning rate, as of `Optimiser`; a parameter is frozen while its factor is 0.
        attention_steps: the step from which each seed's attention weights are frozen, as of `FrozenAttentionDecoder`;
            None for weights that are never frozen. Only for a training at one learning rate.
        entropy_steps: the step after which the entropy of each layer, on windows of the validation text, is clamped,
            as of `ClampedEntropyDecoder`; None for entropy that is never clamped. Only for a training at one learning
            rate, and without `attention_steps`.
    """

    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    attention_steps: Int[np.ndarray, " seed"] | None = None
    entropy_steps: Int[np.ndarray, "seed layer"] | None = None


@dataclass(frozen=True)
class FurtherMeasures:
    """Measures that a study records in addition to those that all studies of text record.

    Attributes:
        measure: takes the model and returns tensors [seed, ...] by name.
        dims: names of the axes after the seed's, by name of the measure.
    """

    measure: Callable[[Decoder], Mapping[str, Tensor]]
    dims: Mapping[str, Sequence[str]]


def paper_fields(**changes: Any) -> dict[str, Any]:
    """Return the fields of a `paper` preset: WikiText-2, probed every 1,000 steps; with what a study changes."""
    return {"corpus": "Salesforce/wikitext:wikitext-2-v1", "every": 1_000, **changes}


def quick_fields(**changes: Any) -> dict[str, Any]:
    """Return the fields of a `quick` preset: a narrow model on the embedded text; with what a study changes.

    In its 500 steps it reads its text less than twice; the paper's model reads its own twenty times.
    """
    fields = {"width": 32, "hidden": 32, "batch": 10, "length": 16, "steps": 500}
    return {**fields, "every": 25, "glance": 128, **changes}


@dataclass(frozen=True)
class TextColumns:
    """A corpus on a device, laid out in columns that are read in windows.

    Attributes:
        types: the number of token types.
        train, valid: the training and the validation text, tokens in the order of the text within each column.
        length: tokens of a window.
        names: the token types.
        counts: how often each type occurs in the training text.
    """

    types: int
    train: Int[Tensor, "batch time"]
    valid: Int[Tensor, "column later"]
    length: int
    names: tuple[str, ...] = field(repr=False)
    counts: Int[np.ndarray, " type"] = field(repr=False)

    @property
    def epoch(self) -> int:
        """The number of full windows of the training text."""
        return (self.train.shape[1] - 1) // self.length

    def window(self, step: Tensor) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
        """Return the training tokens of a step and the token that follows each of them.

        The step is not moved to the CPU, so that a training step can be captured on CUDA.
        """
        first = step % self.epoch * self.length
        times = first + torch.arange(self.length + 1, device=self.train.device)
        tokens = self.train.index_select(1, times)
        return tokens[:, :-1], tokens[:, 1:]

    def windows(
        self, model: Decoder | None = None
    ) -> Iterable[tuple[Int[Tensor, "sample length"], Int[Tensor, "sample length"]]]:
        """Return the validation text in batches of windows, the shorter last window of each column at the end.

        On CUDA the batches are large, since so few kernels would take less time than their launches, but no larger than
        there is memory for, with all seeds of the model and the attention weights of all its layers.
        """
        count = self.valid.shape[1] - 1
        full_windows = count // self.length
        tokens, targets = self.valid[:, :count], self.valid[:, 1:]
        end = full_windows * self.length
        if full_windows:
            windows = [part[:, :end].reshape(-1, self.length) for part in (tokens, targets)]
            pass_tokens = self._cuda_tokens(model) if self.valid.is_cuda else self.train.shape[0] * self.length
            yield from zip(*(part.split(max(1, pass_tokens // self.length)) for part in windows), strict=True)
        if count % self.length:
            yield tokens[:, end:], targets[:, end:]

    def _cuda_tokens(self, model: Decoder | None) -> int:
        """Return the number of tokens in a batch of windows on CUDA."""
        if model is None:
            return CUDA_PASS_TOKENS
        maps = model.config.layers * model.config.heads
        return min(CUDA_PASS_TOKENS, CUDA_PASS_WEIGHTS // (maps * self.length)) // len(model.embedding)

    def sample_windows(self, count: int) -> Int[Tensor, "sample length"]:
        """Return at most `count` full windows of the validation text, evenly spaced; none if there is no full one."""
        full_windows = self.valid.shape[1] // self.length
        windows = self.valid[:, : full_windows * self.length].reshape(-1, self.length)
        count = min(count, len(windows))
        return windows[[number * len(windows) // count for number in range(count)]]


@torch.no_grad()
def layer_entropy(model: Decoder, tokens: Int[Tensor, "sample length"]) -> tuple[Tensor, Tensor]:
    """Return entropy and Var(ln p) of each layer's attention, means over rows and heads without dropout [seed, layer].

    Var(ln p) = Σ p (ln p)² − H² is what entropy falls by for each unit by which the logarithm of a factor of all scores
    rises.
    """
    means = []
    for weights in model.activations(tokens, ["attention"])["attention"]:
        entropy = shannon_entropy(weights, check=False)  # softmaxes, and the step is captured
        square = (weights * weights.clamp_min(torch.finfo(weights.dtype).tiny).log().square()).sum(dim=-1)
        means.append(torch.stack([entropy, square - entropy.square()]).mean(dim=(2, 3, 4)))
    entropy, slope = torch.stack(means, dim=2)
    return entropy, slope


def inputs(setting: Any) -> dict[str, str]:
    """Return the checksum of a config's text, which decides a run together with the config.

    A dataset on the hub has no checksum: its run would count as another one after the download. Nor has a text that
    cannot be read: the run itself raises the error.

    >>> inputs(LanguageSetting(corpus="Salesforce/wikitext:wikitext-2-v1"))
    {}
    """
    with suppress(InputError, OSError):
        local = find_local(setting.corpus)
        return {} if local is None else {"text_sha256": local.digest}
    return {}


def read_text(setting: LanguageSetting, context: Context) -> TextColumns:
    """Tokenise the corpus, or read its tokens from the cache, and lay them out in columns on the run's device."""
    tokenised = corpus(setting.corpus, tokeniser=setting.tokeniser, progress=context.progress)
    length = whole("length", setting.length)
    train = tokenised.columns("train", setting.batch, least=length + 1, name="batch")
    valid = tokenised.columns("valid", setting.columns, name="columns")
    valid = valid if setting.glance is None else valid[:, : whole("glance", setting.glance, low=2)]
    return TextColumns(
        types=len(tokenised.types),
        train=train.to(context.device),
        valid=valid.to(context.device),
        length=length,
        names=tokenised.types,
        counts=tokenised.frequencies(),
    )


def decoder_config(setting: LanguageSetting, variant: Variant, types: int) -> DecoderConfig:
    """Return the language model of a setting for a text with `types` token types."""
    return DecoderConfig(
        vocabulary=types,
        width=setting.width,
        layers=variant.layers,
        heads=setting.heads,
        hidden=setting.hidden,
        length=setting.length,
        norm=variant.norm,
        positions="sinusoidal",
        activation=variant.activation,
        init="encoder",
        alike=variant.alike,
        scale_embedding=True,
        dropout=setting.dropout,
        sites=variant.sites,
    )


def record_steps(setting: LanguageSetting, text: TextColumns) -> list[int]:
    """Return the steps at which to probe: multiples of `every` and, before the first, logarithmic steps."""
    steps = whole("steps", setting.steps, low=1)
    if setting.every is not None:
        every = whole("every", setting.every)
        early = schedule.logarithmic(10, min(every, steps))
        return sorted({*early, *schedule.every(every, steps), steps})
    probe_cost = FORWARD_SHARE * text.valid.numel() / (setting.batch * setting.length)  # in training steps
    return sorted(schedule.logarithmic(max(2, int(PROBE_SHARE * steps / probe_cost)), steps))


def train(
    setting: LanguageSetting,
    context: Context,
    text: TextColumns,
    variant: Variant,
    *,
    rate: float | Sequence[float],
    label: str,
    freezing: Freezing | None = None,
    further: FurtherMeasures | None = None,
) -> xr.Dataset:
    """Train all seeds of a language model at once and return its trajectory.

    Args:
        setting, context, text: the setting, the run and `read_text` of them.
        variant: the model.
        rate: the learning rate; or several, each for all seeds, which adds the axis `rate`.
        label: names the progress bar and the folder of checkpoints.
        freezing: what is frozen, and when; nothing if None.
        further: what to record in addition to the measures below.

    Returns:
        Over `seed` and `step`: `loss` of the training batch, `valid_loss`, `entropy` by layer and head (nats, mean over
        the rows of every full validation window), `stable_rank` of each MLP's lower weights, and, where the validation
        text is long enough, `window_entropy`, of the one window that the authors' figures show.
    """
    changes = {"freezing": Freezing() if freezing is None else freezing, "further": further}
    training = _training(setting, context, text, variant, rate=rate, label=label, **changes)
    return _labelled(context.fit_together([training])[0], setting, variant)


def train_variants(
    setting: LanguageSetting,
    context: Context,
    text: TextColumns,
    variants: Mapping[str, Variant],
    *,
    rate: float,
    freezings: Mapping[str, Freezing] | None = None,
) -> list[xr.Dataset]:
    """Train several models, given by label, and return their trajectories, as `train` does; on CUDA side by side.

    Args:
        setting, context, text, rate: as for `train`.
        variants: the models, by label.
        freezings: what is frozen in each, by label; nothing if None.
    """
    freezings = dict.fromkeys(variants, Freezing()) if freezings is None else freezings
    trainings = [
        _training(setting, context, text, variant, rate=rate, label=label, freezing=freezings[label], further=None)
        for label, variant in variants.items()
    ]
    pairs = zip(context.fit_together(trainings), variants.values(), strict=True)
    return [_labelled(trajectory, setting, variant) for trajectory, variant in pairs]


def _labelled(trajectory: xr.Dataset, setting: LanguageSetting, variant: Variant) -> xr.Dataset:
    return trajectory.assign_coords(layer=np.arange(variant.layers), head=np.arange(setting.heads))


def _training(
    setting: LanguageSetting,
    context: Context,
    text: TextColumns,
    variant: Variant,
    *,
    rate: float | Sequence[float],
    label: str,
    freezing: Freezing,
    further: FurtherMeasures | None,
) -> LabelledTraining:
    arms = Arms("rate", rate) if isinstance(rate, Sequence) else None
    seeds = torch.tensor(context.models(arms), device=context.device)
    clamp_windows = text.sample_windows(setting.batch)

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        if isinstance(model, FrozenAttentionDecoder):
            model.set_step(step)
        if isinstance(model, ClampedEntropyDecoder):
            model.adapt(step, *layer_entropy(model, clamp_windows))
        tokens, targets = text.window(step)
        return model.surprisal(tokens, targets, noise=noise.key(seeds, step)).mean(dim=(1, 2))

    return LabelledTraining(
        _model(decoder_config(setting, variant, text.types), context.seed_generators(arms), freezing),
        loss,
        optimiser=Optimiser(
            "adam",
            context.per_model(rate) if isinstance(rate, Sequence) else rate,
            clip=setting.clip,
            restart=text.epoch if setting.restart else None,
            schedules=freezing.schedules,
        ),
        steps=setting.steps,
        record=Record(
            partial(_measure, text=text, further=further, half=setting.precision == "bf16"),
            at=record_steps(setting, text),
            dims=DIMS if further is None else {**DIMS, **further.dims},
            gradients=False,
        ),
        compute=Compute(setting.precision),
        arms=arms,
        label=label,
    )


def _model(config: DecoderConfig, generators: list[torch.Generator], freezing: Freezing) -> Decoder:
    if freezing.entropy_steps is not None:
        return ClampedEntropyDecoder(config, generators=generators, clamp_steps=freezing.entropy_steps)
    if freezing.attention_steps is None:
        return Decoder(config, generators=generators)
    return FrozenAttentionDecoder(config, generators=generators, freeze_steps=freezing.attention_steps)


def _measure(
    model: Decoder, step: int, *, text: TextColumns, further: FurtherMeasures | None, half: bool
) -> dict[str, Tensor]:
    del step
    with torch.no_grad():
        with torch.autocast("cuda", torch.bfloat16, enabled=half and text.valid.is_cuda):
            measures = validate(model, text)
        lower = [model.get_parameter(f"layers.{number}.lower.weight") for number in range(len(model.layers))]
        measures["stable_rank"] = torch.stack([stable_rank(weight) for weight in lower], dim=1)
        return measures if further is None else {**measures, **further.measure(model)}


def validate(model: Decoder, text: TextColumns) -> dict[str, Tensor]:
    """Return the validation loss of each seed, mean over tokens, and the entropy of attention by layer and head.

    Entropy is the mean over the rows of full windows: shorter windows have less entropy to begin with.
    """
    loss = entropy_sum = windows = predicted = 0
    authors_window: dict[str, Tensor] = {}
    for tokens, targets in text.windows(model):
        watched: dict[str, list[Tensor]] = {"attention": []}
        loss = loss + model.surprisal(tokens, targets, watched=watched).double().sum(dim=(1, 2))
        predicted += targets.numel()
        if tokens.shape[1] == text.length:
            softmaxes = watched["attention"]  # a check of their sums would wait for the device
            by_layer = [shannon_entropy(weights, check=False).double().mean(dim=3) for weights in softmaxes]
            entropy = torch.stack(by_layer, dim=2)  # [seed, window, layer, head]
            in_first_column = (text.valid.shape[1] - 1) // text.length > AUTHORS_WINDOW
            if windows <= AUTHORS_WINDOW < windows + len(tokens) and in_first_column:
                authors_window["window_entropy"] = entropy[:, AUTHORS_WINDOW - windows]
            entropy_sum, windows = entropy_sum + entropy.sum(dim=1), windows + len(tokens)
    if not windows:
        raise no_full_window(text)
    mean_loss, entropy = torch.as_tensor(loss / predicted), torch.as_tensor(entropy_sum / windows)
    return {"valid_loss": mean_loss, "entropy": entropy, **authors_window}


def no_full_window(text: TextColumns) -> InputError:
    """Return the error of a validation text that is shorter than a window."""
    remedy = "give a longer text, fewer `columns`, a smaller `length` or, where it is set, a greater `glance`"
    expected = f"validation columns of more than {text.length} tokens"
    return InputError("corpus", expected, text.valid.shape[1], remedy, must="have")
