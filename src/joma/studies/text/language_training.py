"""Small language models on real text, as the paper trains them: what the studies of text share.

Setting of arXiv 2310.00535's WikiText-2 figure, as its public code has it: post-norm, sinusoidal positions, embeddings
times √width, layers that start as copies of one, dropout everywhere (on attention weights too), an untied head; the
text in `batch` continuous columns, cut into windows of `length` that are read in order, epoch after epoch, by every
seed alike.
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
from matplotlib.axes import Axes
from torch import Tensor

from joma import noise, schedule
from joma.arguments import InputError, whole
from joma.data.sources import find_local
from joma.data.text import Corpus, corpus
from joma.models.steady import FrozenAttentionDecoder
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.bounce import measure_bounce
from joma.probes.entropy import shannon_entropy
from joma.probes.rank import stable_rank
from joma.report.figure import COLOURS, MARKERS
from joma.study import Arms, Context
from joma.train import Compute, Optimiser, Record
from joma.train.optimiser import Schedule

Probe = Callable[[Decoder], Mapping[str, Tensor]]
PROBING = 0.04  # share of the training time that probing may take where nothing else is said
FORWARD = 1 / 2  # of a training step, what its forward pass takes at most on the CPU
SURE = 0.01  # the chance of a rise by noise alone up to which a curve is said to rise
LEAST = 0.05  # of its start, by which entropy must fall and come back for a bounce; the choice is ours
AT_ONCE = 1 << 15  # validation tokens of one seed in a pass, on CUDA; the CPU takes a training batch's at a time
DIMS = {"entropy": ("layer", "head"), "window_entropy": ("layer", "head"), "stable_rank": ("layer",)}
WINDOW = 100  # of the first validation column: the one whose attention the authors' code saves


@dataclass(frozen=True)
class Setting:
    """What is read, by which model, how it is trained and when it is probed."""

    corpus: str = "python-reference"
    """A folder or file of text, a Hugging Face dataset as Salesforce/wikitext:wikitext-2-v1, or python-reference."""
    tokeniser: str = "basic_english"
    width: int = 200
    hidden: int = 200
    heads: int = 1
    length: int = 35
    dropout: float = 0.2
    activation: str = "relu"
    alike: bool = True
    """Whether all layers start as copies of one, as in the authors' code; False to draw each by itself."""
    batch: int = 20
    columns: int = 10
    """Columns of the validation text."""
    steps: int = 58_560
    rate: float = 1e-4
    clip: float = 0.5
    restart: bool = True
    """Whether Adam starts afresh at every epoch, as in the authors' code; False for one Adam throughout."""
    every: int | None = None
    """Probe so often, and at logarithmic steps before; None: so often that it takes less than 5 % of the time."""
    glance: int | None = None
    """How many tokens of each validation column a probe reads; None for all."""
    precision: str = "bf16"
    """Of matrix products on CUDA: highest, high (TF32) or bf16."""


def wikitext(**changes: Any) -> dict[str, Any]:
    """The `paper` preset's fields: WikiText-2, probed every 1,000 steps; with what a study changes."""
    return {"corpus": "Salesforce/wikitext:wikitext-2-v1", "every": 1_000, **changes}


def small(**changes: Any) -> dict[str, Any]:
    """The `quick` presets' one model: narrow, on the embedded text, at a rate at which attention moves within seconds.

    It reads its text less than twice in 500 steps, where the paper reads its own twenty times.
    """
    fields = {"width": 32, "hidden": 32, "batch": 10, "length": 16, "rate": 3e-3, "steps": 500}
    return {**fields, "every": 25, "glance": 128, **changes}


@dataclass(frozen=True)
class Text:
    """A corpus on a device, in columns, and what follows from its size."""

    types: int
    train: Int[Tensor, "batch time"]
    valid: Int[Tensor, "column later"]
    length: int
    names: tuple[str, ...] = field(repr=False)
    counts: Int[np.ndarray, " type"] = field(repr=False)

    @property
    def epoch(self) -> int:
        """Full windows of the training text."""
        return (self.train.shape[1] - 1) // self.length

    def window(self, step: Tensor) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
        """Return the tokens of a step and what follows each of them; the step stays on its device."""
        first = step % self.epoch * self.length
        places = first + torch.arange(self.length + 1, device=self.train.device)
        read = self.train.index_select(1, places)
        return read[:, :-1], read[:, 1:]

    def windows(self) -> Iterable[tuple[Int[Tensor, "sample length"], Int[Tensor, "sample length"]]]:
        """Return the validation text in batches of windows, the shorter last window of each column at the end."""
        read = self.valid.shape[1] - 1
        full = read // self.length
        tokens, target = self.valid[:, :read], self.valid[:, 1:]
        if full:
            cut = full * self.length
            whole_windows = [part[:, :cut].reshape(-1, self.length) for part in (tokens, target)]
            at_once = max(1, (AT_ONCE if self.valid.is_cuda else self.train.shape[0] * self.length) // self.length)
            yield from zip(*(part.split(at_once) for part in whole_windows), strict=True)
        if read % self.length:
            yield tokens[:, full * self.length :], target[:, full * self.length :]


def inputs(setting: Any) -> dict[str, str]:
    """What decides a run beside its setting, a `Setting` or any other with a `corpus`: the content of its text.

    A dataset of the hub goes by its name, or its run would be another one once it is fetched. Of a text that cannot be
    read nothing is said here: the run itself will.

    >>> inputs(Setting(corpus="Salesforce/wikitext:wikitext-2-v1"))
    {}
    """
    with suppress(InputError, OSError):
        found = find_local(setting.corpus)
        return {} if found is None else {"text_sha256": found.digest}
    return {}


def read_text(setting: Setting, context: Context) -> Text:
    """Tokenise the corpus, or take it from the cache, and lay it out in columns on the run's device."""
    found: Corpus = corpus(setting.corpus, tokeniser=setting.tokeniser, progress=context.progress)
    length = whole("length", setting.length)
    train = found.columns("train", setting.batch, least=length + 1, name="batch")
    valid = found.columns("valid", setting.columns, name="columns")
    valid = valid if setting.glance is None else valid[:, : whole("glance", setting.glance, low=2)]
    return Text(len(found.types), train.to(context.device), valid.to(context.device), length, found.types,
                found.frequencies())  # fmt: skip


def decoder(setting: Setting, types: int, layers: int) -> DecoderConfig:
    """The language model of a setting."""
    return DecoderConfig(
        vocabulary=types,
        width=setting.width,
        layers=layers,
        heads=setting.heads,
        hidden=setting.hidden,
        length=setting.length,
        norm="post",
        positions="sinusoidal",
        activation=setting.activation,
        init="encoder",
        alike=setting.alike,
        scale_embedding=True,
        dropout=setting.dropout,
    )


def moments(setting: Setting, text: Text) -> list[int]:
    """The steps at which to probe: every so many and, before the first, at logarithmic ones."""
    steps = whole("steps", setting.steps, low=1)
    if setting.every is not None:
        every = whole("every", setting.every)
        early = schedule.logarithmic(10, min(every, steps))
        return sorted({*early, *schedule.every(every, steps), steps})
    one = FORWARD * text.valid.numel() / (setting.batch * setting.length)  # the cost of a probe, in training steps
    return sorted(schedule.logarithmic(max(2, int(PROBING * steps / one)), steps))


def train(
    setting: Setting,
    context: Context,
    text: Text,
    *,
    layers: int,
    label: str,
    rates: Sequence[float] = (),
    schedules: Mapping[str, Schedule] | None = None,
    hold: Int[np.ndarray, " seed"] | None = None,
    probe: Probe | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> xr.Dataset:
    """Train all seeds of a language model at once and return its trajectory.

    Args:
        setting, context, text: the setting, the run and `read_text` of them.
        layers: of the model.
        label: under which progress is reported and checkpoints are kept.
        rates: learning rates, each of which is given to all seeds; one axis more, `rate`, if there is any.
        schedules: factors of the rate, as of `Optimiser`; one for each seed, and for each rate before that.
        hold: the step from which each seed's attention is frozen, as of `FrozenAttentionDecoder`; not with `rates`.
        probe: from the model to further measures [seed, ...], named by `dims`.
        dims: names of the axes of the further measures, after the seed's.

    Returns:
        Over `seed` and `step`: `loss` of the training batch, `valid_loss`, `entropy` by layer and head (nats, mean over
        the rows of every full validation window), `stable_rank` of each MLP's lower weights, and, where the validation
        text is long enough, `window_entropy`, of the one window that the authors' figures show.
    """
    arms = Arms("rate", rates) if rates else None
    seeds = torch.tensor(context.models(arms), device=context.device)
    generators = context.seed_generators(arms)  # a seed starts alike at every rate
    config = decoder(setting, text.types, layers)
    if hold is None:
        model = Decoder(config, generators=generators)
    else:
        model = FrozenAttentionDecoder(config, generators=generators, freeze_steps=hold)

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        if isinstance(model, FrozenAttentionDecoder):
            model.set_step(step)
        tokens, target = text.window(step)
        return model.surprisal(tokens, target, noise=noise.key(seeds, step)).mean(dim=(1, 2))

    rate = context.per_model(rates) or setting.rate
    restart = text.epoch if setting.restart else None
    rule = Optimiser("adam", rate, clip=setting.clip, restart=restart, schedules=schedules or {})
    found = context.fit(
        model,
        loss,
        optimiser=rule,
        steps=setting.steps,
        record=Record(
            partial(_record, text=text, probe=probe, half=setting.precision == "bf16"),
            at=moments(setting, text),
            dims={**DIMS, **(dims or {})},
            gradients=False,
        ),
        compute=Compute(setting.precision),
        arms=arms,
        label=label,
    )
    return found.assign_coords(layer=np.arange(layers), head=np.arange(setting.heads))


def _record(model: Decoder, step: int, *, text: Text, probe: Probe | None, half: bool) -> dict[str, Tensor]:
    del step
    with torch.no_grad():
        with torch.autocast("cuda", torch.bfloat16, enabled=half and text.valid.is_cuda):
            measured = validation(model, text)
        lower = [model.get_parameter(f"layers.{number}.lower.weight") for number in range(len(model.layers))]
        measured["stable_rank"] = torch.stack([stable_rank(weight) for weight in lower], dim=1)
        return measured if probe is None else {**measured, **probe(model)}


def validation(model: Decoder, text: Text) -> dict[str, Tensor]:
    """Return the mean loss a token over the validation text that is read, and entropy by layer and head, per seed."""
    loss = rows = told = attended = 0
    shown: dict[str, Tensor] = {}
    for tokens, target in text.windows():
        watched: dict[str, list[Tensor]] = {"attention": []}
        loss = loss + model.surprisal(tokens, target, watched=watched).double().sum(dim=(1, 2))
        told += target.numel()
        if tokens.shape[1] == text.length:  # shorter rows have less entropy to begin with
            own = torch.stack([shannon_entropy(layer).double().mean(dim=3) for layer in watched["attention"]], dim=2)
            if rows <= WINDOW < rows + len(tokens) and (text.valid.shape[1] - 1) // text.length > WINDOW:
                shown["window_entropy"] = own[:, WINDOW - rows]
            attended, rows = attended + own.sum(dim=1), rows + len(tokens)
    if not rows:
        remedy = "give a longer text, fewer `columns`, a smaller `length` or, where it is set, a greater `glance`"
        expected = f"validation columns of more than {text.length} tokens"
        raise InputError("corpus", expected, text.valid.shape[1], remedy)
    return {"valid_loss": torch.as_tensor(loss / told), "entropy": torch.as_tensor(attended / rows), **shown}


def bounces(entropy: xr.DataArray, *, each_layer: bool = False) -> xr.Dataset:
    """Measure the bounce of the mean over layers and heads of entropy [..., step, layer, head], or of each layer.

        bounce = min(start − least, end − least − chance) / start,   0 unless p ≤ `SURE`

    Where each of n layers is asked p must not exceed `SURE`/n, so that one in a hundred models has one by noise.

    Returns:
        `bounce`, `least`, `turn` (the step of the minimum), `fall`, `recovery`, `chance` (the recovery of noise on a
        curve that never rises) and `p_value`, each over the axes left.
    """
    sure = SURE / entropy.sizes["layer"] if each_layer else SURE
    curve = entropy.mean("head" if each_layer else ("layer", "head")).transpose(..., "step")
    found = measure_bounce(curve.step, curve)
    size = np.minimum(found.depth, found.recovery - found.chance) / found.start
    fields = {
        "bounce": np.where(found.p_value <= sure, np.maximum(size, 0.0), 0.0),
        "least": found.least,
        "turn": found.step,
        "fall": found.depth,
        "recovery": found.recovery,
        "chance": found.chance,
        "p_value": found.p_value,
    }
    at = curve.isel(step=0, drop=True)
    return xr.Dataset({name: at.copy(data=values) for name, values in fields.items()})


def chance(entropy: xr.DataArray) -> xr.DataArray:
    """How often noise on a curve that never rises would rise as clearly, the mean over layers and heads; [...].

    1 where there is no fall to come back from, of `LEAST` of the start, or where the recovery from the least value is
    no more than noise makes: a curve that only rises is no bounce, nor is one that rises first and then falls.
    """
    found = bounces(entropy)
    none = (found.fall < LEAST * (found.least + found.fall)) | (found.recovery <= found.chance)
    return found.p_value.where(~none, 1.0)


def mark_least(panel: Axes, curve: xr.DataArray, place: int) -> None:
    """Mark where the mean over seeds is least, if it falls at all."""
    mean = curve.mean("seed")
    if not mean.min() < (1 - LEAST) * mean.isel(step=0):
        return
    at = mean.idxmin("step")
    colour, shape = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    panel.plot(float(at) + 1, float(mean.sel(step=at)), shape, color=colour, markersize=6, zorder=3)
