"""Where and when does a causal model without positional encoding come to know positions?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, whole
from joma.data.addition import CHARACTERS
from joma.models.transformer import INITS, Decoder, DecoderConfig
from joma.probes.position import adjacency, position_decodability
from joma.report.figure import COLOURS, band, canvas, letters, measured
from joma.studies.symmetry import addition_training
from joma.studies.symmetry.addition_training import FOLDS
from joma.studies.text import language_training
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most
from joma.train import Record

TASKS = ("addition", "text")
DIMS: dict[str, Sequence[str]] = {
    "decodability": ("level",),
    "by_position": ("level", "position"),
    "error": ("level",),
    "adjacency": ("level",),
    "null": ("level", "order"),
    "accuracy": (),
}
RANDOM = ("decodability", "error", "adjacency", "null")  # of models that are not trained; the greatest null
NOTHING = 0.03  # of a readout's accuracy, or of a score, above chance; the choice is ours
SURE = 3  # standard errors by which a readout must be better; ours as well
THEIRS = "small"  # the first weights of GPT-2, which arXiv 2501.00073 has too


@dataclass(frozen=True)
class Config(addition_training.Setting):
    """The setting of addition; the model of text has the same parts, rate and steps."""

    corpus: str = "python-reference"
    tokeniser: str = "basic_english"
    length: int = 64
    """Positions of a window of text."""
    windows: int = 16
    """Windows of text in a batch."""
    records: int = 14
    """Moments at which to record, denser early on."""
    asked: int = 2_000
    """Unseen sums that are asked."""
    probed: int = 256
    """Sequences whose hidden states are read."""
    compared: int = 64
    """Of these, how many whose neighbours are compared."""
    nulls: int = 50
    """Random orders of the positions that adjacency is compared with."""
    widths: tuple[int, ...] = (48, 96, 192, 384)
    """Of models with random weights, which are not trained."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train a model of addition and one of text, all seeds of each at once; and look at untrained ones."""
    check(config)
    steps = schedule.logarithmic(config.records, config.steps)
    pairs, text = addition_training.pairs(config, context), _read_text(config, context)
    shown = {
        "addition": addition_training.written(config, pairs.test[: config.asked]),
        "text": windows(text, config.probed),
    }
    found = [_addition(config, context, pairs.train, shown["addition"], steps), _text(config, context, text, steps)]
    types = {"addition": len(CHARACTERS), "text": text.types}
    read = {"addition": shown["addition"][: config.probed, :-1], "text": shown["text"]}
    random = [untrained(config, context, types[task], read[task]) for task in TASKS]
    made = xr.concat([own.merge(one) for own, one in zip(found, random, strict=True)], dim="task", join="outer")
    return made.assign_coords(task=list(TASKS))


def check(config: Config) -> None:
    """Refuse a config that cannot be run, by the name of the key that is wrong."""
    addition_training.check(config)
    lows = {"length": 3, "windows": 1, "records": 2, "asked": FOLDS, "probed": FOLDS, "compared": 1, "nulls": 1}
    for name, low in lows.items():
        whole(name, getattr(config, name), low=low)
    if not config.widths:
        raise InputError("widths", "at least one", "none", "name the widths of models with random weights")
    for width in config.widths:
        if whole("widths", width) % config.heads:
            raise InputError("widths", f"multiples of the {config.heads} heads", width, "change one of them")


def _read_text(config: Config, context: Context) -> language_training.Text:
    setting = language_training.Setting(config.corpus, config.tokeniser, length=config.length, batch=config.windows)
    return language_training.read_text(setting, context)


def windows(text: language_training.Text, count: int) -> Int[Tensor, "window position"]:
    """The first windows of the validation text, whole ones alone."""
    whole_ones = [tokens for tokens, _ in text.windows() if tokens.shape[1] == text.length]
    if (there := sum(map(len, whole_ones))) < FOLDS:
        expected = f"a text with at least {FOLDS} windows of {text.length} tokens to validate on"
        raise InputError("corpus", expected, there, "give a longer text or a smaller `length`")
    return torch.cat(whole_ones)[:count]


def _addition(
    config: Config, context: Context, train: Tensor, tokens: Int[Tensor, "sample position"], steps: Sequence[int]
) -> xr.Dataset:
    def record(model: Decoder, step: int) -> dict[str, Tensor]:
        del step
        known = addition_training.exact_match(model, tokens, config.digits)
        return {"accuracy": known, **_read(config, model, tokens[: config.probed, :-1])}

    label, arm = "position-emergence, addition", addition_training.pick([addition_training.BASE], config.layers)
    found = addition_training.train(config, context, train, arm, label=label, record=record, dims=DIMS, at=steps)
    return _numbered(found.isel(arm=0, drop=True), tokens.shape[1] - 1)


def _text(config: Config, context: Context, text: language_training.Text, steps: Sequence[int]) -> xr.Dataset:
    shown = windows(text, config.probed)
    model = Decoder(_parts(config, text.types, config.width, config.init), generators=context.seed_generators())

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        return model.surprisal(*text.window(step)).mean(dim=(1, 2))

    def record(model: Decoder, step: int) -> dict[str, Tensor]:
        del step
        return _read(config, model, shown)

    measures, options = Record(record, at=steps, dims=DIMS, gradients=False), addition_training.options(config)
    found = context.fit(model, loss, record=measures, label="position-emergence, text", **options)
    return _numbered(found, config.length)


def _parts(config: Config, types: int, width: int, init: str) -> DecoderConfig:
    return DecoderConfig(types, width, config.layers, config.heads, activation="gelu", init=init)


def _read(config: Config, model: Decoder, tokens: Int[Tensor, "sample position"]) -> dict[str, Tensor]:
    """Measure what the hidden states of each level know of their position."""
    states = addition_training.levels(model, tokens)
    readout = position_decodability(states, folds=FOLDS)
    near = adjacency(states[:, :, : config.compared], nulls=config.nulls)
    return {
        "decodability": readout.accuracy,
        "error": readout.spread / FOLDS**0.5,
        "by_position": readout.by_position,
        "adjacency": near.score,
        "null": near.null,
    }


def _numbered(found: xr.Dataset, positions: int) -> xr.Dataset:
    """Number the positions, of which one task has more than the other, and note what guessing would give."""
    return found.assign(chance=1 / positions).assign_coords(position=range(positions))


def untrained(config: Config, context: Context, types: int, tokens: Int[Tensor, "sample position"]) -> xr.Dataset:
    """Read the hidden states of models with random weights, by the law of the weights and the model's width."""
    found, widths = [], sorted({*config.widths})
    for init in INITS:
        for width in widths:
            model = Decoder(_parts(config, types, width, init), generators=context.seed_generators()).to(context.device)
            read = _read(config, model, tokens)
            read["null"] = read["null"].amax(dim=-1)
            found.append(torch.stack([read[name] for name in RANDOM]).cpu())
    values = torch.stack(found, dim=1).unflatten(1, (len(INITS), -1)).numpy()
    dims, coordinates = ("init", "width", "seed", "level"), {"init": list(INITS), "width": widths}
    variables = {f"random_{name}": (dims, own) for name, own in zip(RANDOM, values, strict=True)}
    return xr.Dataset(variables, coords={**coordinates, "seed": list(context.seeds)})


def surely(found: xr.Dataset) -> xr.DataArray:
    """How much better positions are read off the last layer than off the embeddings, in standard errors over folds."""
    low, high = found.isel(level=0), found.isel(level=-1)
    return (high.decodability - low.decodability) / np.hypot(low.error, high.error)


def at_random(run: xr.Dataset, task: str) -> xr.Dataset:
    """What was read in the widest model with random weights as in GPT-2: names of `RANDOM`, by seed and level."""
    found = run[[f"random_{name}" for name in RANDOM]].sel(task=task, init=THEIRS, drop=True).isel(width=-1, drop=True)
    return found.rename({f"random_{name}": name for name in RANDOM})


def at_end(run: xr.Dataset, task: str) -> xr.Dataset:
    """What was read of a trained model: names of `RANDOM`, by seed and level."""
    found = run[list(RANDOM)].sel(task=task, drop=True).isel(step=-1, drop=True)
    return found.assign(null=found.null.max("order", skipna=False))


def neighbours(found: xr.Dataset) -> xr.DataArray:
    """The adjacency score less the greatest over random orders, for each layer."""
    return (found.adjacency - found.null).isel(level=slice(1, None))


def _for_each(
    name: str,
    said: str,
    measure: Callable[..., xr.DataArray],
    level: float,
) -> tuple[Claim, ...]:
    """The claim for either task."""
    return tuple(
        Claim(
            f"{name}-{task}",
            f"{task.capitalize()}: {said}",
            partial(measure, task=task),
            at_least(level),
        )
        for task in TASKS
    )


CLAIMS = (
    Claim(
        "embeddings-text",
        "Text: the embeddings know nothing of positions (accuracy of the readout at the end less chance; the threshold "
        "is ours).",
        lambda run: (run.decodability.isel(level=0, step=-1) - run.chance).sel(task="text", drop=True),
        at_most(NOTHING),
    ),
    *_for_each(
        "random",
        "before any training, the causal mask alone puts positions into hidden states (accuracy of the readout in the "
        "widest model, weights as in GPT-2, the last layer's less the embeddings', in standard errors; that "
        f"{SURE} will do is our choice).",
        lambda run, task: surely(at_random(run, task)),
        SURE,
    ),
    *_for_each(
        "trained",
        "a trained model's hidden states know positions (accuracy of the readout at the end of training, the last "
        "layer's less the embeddings', in standard errors).",
        lambda run, task: surely(at_end(run, task)),
        SURE,
    ),
    *_for_each(
        "adjacency-random",
        "with random weights nearby hidden vectors are already more similar than distant ones, in every layer (score "
        "of the widest model, weights as in GPT-2, less the greatest over random orders; arXiv 2501.00073).",
        lambda run, task: neighbours(at_random(run, task)).min("level"),
        0.0,
    ),
    *_for_each(
        "adjacency-trained",
        "nearby hidden vectors are more similar than distant ones in a trained model, in one layer at least (score "
        "less the greatest over random orders).",
        lambda run, task: neighbours(at_end(run, task)).max("level", skipna=False),
        0.0,
    ),
    Claim(
        "adjacency-embeddings-text",
        "Text: embeddings of nearby positions are no more similar than those of distant ones (their score less ½, at "
        "the start; the threshold is ours).",
        lambda run: run.adjacency.sel(task="text", drop=True).isel(level=0, step=0) - 0.5,
        at_most(NOTHING),
    ),
)


def _draw_levels(panel: Axes, run: xr.Dataset, task: str, name: str) -> None:
    for level in range(run.sizes["level"]):
        label = "embeddings" if level == 0 else f"layer {level - 1}"
        band(panel, run.step + 1, run[name].sel(task=task).isel(level=level), level, label)
    panel.set(xscale="log", xlabel="step + 1", title=task)


def draw_decodability(run: xr.Dataset) -> Figure:
    """Draw how well positions are read off each level: over training, and by position at the end."""
    figure, axes = canvas(1, 4, width=2.7, height=2.8)
    for place, task in enumerate(TASKS):
        _draw_levels(axes[0, place], run, task, "decodability")
        for level in range(run.sizes["level"]):
            known = run.by_position.sel(task=task).isel(level=level, step=-1).dropna("position")
            band(axes[0, 2 + place], known.position, known.transpose("seed", "position"), level)
        axes[0, 2 + place].set(xlabel="position", title=f"{task}, at the end")
        for panel in axes[0, place::2]:
            panel.axhline(float(run.chance.sel(task=task)), color="grey", linewidth=0.9, label="chance")
    axes[0, 0].set_ylabel("position read off")
    for panel in axes[0]:
        panel.set_ylim(bottom=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    letters(axes)
    return figure


def draw_adjacency(run: xr.Dataset) -> Figure:
    """Draw the adjacency score over training with its null, and with random weights by width and by their law."""
    figure, axes = canvas(1, 4, width=2.7, height=2.8, sharey=True)
    for place, task in enumerate(TASKS):
        panel = axes[0, place]
        _draw_levels(panel, run, task, "adjacency")
        null = run.null.sel(task=task).stack(one=("seed", "level", "order"))
        low, high = null.quantile([0.025, 0.975], "one").values
        panel.fill_between(run.step + 1, low, high, color="grey", alpha=0.25, linewidth=0, label="random orders, 95 %")
        _draw_random(axes[0, 2 + place], run, task)
    axes[0, 0].set(ylabel="share: neighbour more similar", ylim=(0.25, 1.12))
    axes[0, 2].legend(loc="upper left", ncols=3, columnspacing=0.8, handlelength=1.2)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=9)
    letters(axes)
    return figure


def _draw_random(panel: Axes, run: xr.Dataset, task: str) -> None:
    """Draw the last layer's score with random weights against the width; dotted, the greatest over random orders."""
    last = run.sel(task=task).isel(level=-1)
    for place, init in enumerate(INITS, start=1):
        measured(
            panel,
            run.width,
            last.random_adjacency.sel(init=init).transpose("width", "seed"),
            place,
            init,
            linestyle="-",
        )
        greatest = last.random_null.sel(init=init).mean("seed")
        panel.plot(run.width, greatest, color=COLOURS[place], linestyle=":", linewidth=1)
    panel.set(xscale="log", xlabel="width", title=f"{task}, random weights")
    panel.set_xticks(run.width.values, [str(width) for width in run.width.values])
    panel.minorticks_off()


_QUICK = Config(
    digits=2, layers=3, heads=2, width=32, batch=64, steps=500, rate=1e-2, warm_up=50,
    tokeniser="bytes", length=24, windows=16, records=9, asked=400, probed=128, compared=32, widths=(32, 64, 128),
)  # fmt: skip

STUDY = Study(
    name="position-emergence",
    title="Where and when a model without positional encoding comes to know positions",
    source="Breaking Symmetry (arXiv 2402.05969); adjacency after arXiv 2501.00073",
    about=(
        "Two causal decoders without positional encoding, one that learns sums and one that reads text. At each level, "
        "the embeddings and what leaves each layer, a linear readout is asked for the position of a hidden state of a "
        "sequence that it was not fitted to; and neighbouring hidden vectors are compared with others, beside the same "
        "after random orders of the positions. In a sum the token itself says much of its position, as + and = have "
        "one each and the digits of the sum their own laws: compare with the embeddings. In text it says nothing. "
        "How alike neighbours are with random weights depends on how large embeddings are beside what attention adds "
        "to them, and so on the law of the first weights and the width: models that are not trained show it."
    ),
    version=1,
    presets={
        "quick": Preset(_QUICK, seeds=3, seconds=30),
        "paper": Preset(Config(), seeds=5, seconds=100_000),  # an estimate
    },
    run=run,
    inputs=language_training.inputs,
    claims=CLAIMS,
    figures={
        "decodability": Drawing(
            draw_decodability,
            "Accuracy of a linear readout of the position from hidden states, mean and range over seeds: (a, b) over "
            "training, (c, d) by position at the end.",
        ),
        "adjacency": Drawing(
            draw_adjacency,
            "(a, b) How often a neighbour's hidden vector is more similar, by cosine, than that of a position further "
            "away, mean and range over seeds; grey, where 95 % of the scores lie after random orders of the positions. "
            "(c, d) The same of the last layer with random weights, by the model's width and the law of its weights: "
            "as torch draws them for its layers (linear, embeddings of deviation 1) and its encoder (embeddings within "
            "±0.1), and as GPT-2 does (small, all of deviation 0.02); dotted, the greatest over random orders.",
        ),
    },
    threads=1,
)
