"""Where and when a causal model without positional encoding comes to know positions, on addition and on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, whole
from joma.data.addition import CHARACTERS
from joma.drawing import COLOURS, band, canvas, letters, measured
from joma.models.transformer import INITS, Decoder, DecoderConfig
from joma.probes.position import adjacency, position_decodability
from joma.studies.symmetry import addition_training
from joma.studies.symmetry.addition_arms import BASELINE, select_arms
from joma.studies.symmetry.addition_training import FOLDS, AdditionSetting
from joma.studies.symmetry.levels import draw_levels, hidden_states
from joma.studies.text import language_training
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_most
from joma.train import Compute, Record

TASKS = {"addition": "sums", "text": "text"}  # and what is read in each
DIMS: dict[str, Sequence[str]] = {
    "decodability": ("level",),
    "by_position": ("level", "position"),
    "error": ("level",),
    "adjacency": ("level",),
    "null": ("level", "order"),
    "accuracy": (),
}
READOUTS = (
    "decodability",
    "error",
    "adjacency",
    "null",
)  # recorded of untrained models too; there of `null` only the greatest
MAX_ABOVE_CHANCE = 0.03  # of a readout's accuracy or an adjacency score that shows nothing; our own, of checks only
GPT2_INIT = "small"  # the initial weights of GPT-2, which arXiv 2501.00073 uses too


@dataclass(frozen=True)
class Config(AdditionSetting):
    """The setting of addition; the model of text has the same layers, learning rate and steps."""

    corpus: str = "python-reference"
    tokeniser: str = "basic_english"
    length: int = 64
    """Positions of a window of text."""
    windows: int = 16
    """Windows of text in a batch."""
    records: int = 14
    """Steps at which to record, denser early on."""
    asked: int = 2_000
    """Test pairs on which exact match is measured."""
    probed: int = 256
    """Sequences whose hidden states are probed."""
    compared: int = 64
    """Number of these on which adjacency is measured."""
    nulls: int = 50
    """Random orders of the positions that adjacency is compared with."""
    widths: tuple[int, ...] = (48, 96, 192, 384)
    """Of models with random weights, which are not trained."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train a model of addition and one of text, all seeds of each at once, and probe untrained models of both."""
    check_config(config)
    pairs, text = addition_training.split_pairs(config, context), _read_text(config, context)
    sums = addition_training.encode_pairs(config, pairs.test[: config.asked])
    windows = validation_windows(text, config.probed)
    trained = [_train_addition(config, context, pairs.train, sums), _train_text(config, context, text, windows)]
    untrained = [
        probe_untrained(config, context, len(CHARACTERS), sums[: config.probed, :-1]),
        probe_untrained(config, context, text.types, windows),
    ]
    tasks = [trajectory.merge(readouts) for trajectory, readouts in zip(trained, untrained, strict=True)]
    return xr.concat(tasks, dim="task", join="outer").assign_coords(task=list(TASKS))


def check_config(config: Config) -> None:
    """Raise `InputError`, naming the field, if a config cannot be run."""
    addition_training.check_setting(config)
    lows = {"length": 3, "windows": 1, "records": 2, "asked": FOLDS, "probed": FOLDS, "compared": 1, "nulls": 1}
    for name, low in lows.items():
        whole(name, getattr(config, name), low=low)
    if not config.widths:
        raise InputError("widths", "at least one number", "none", "name the widths of models with random weights")
    for width in config.widths:
        if whole("widths", width) % config.heads:
            raise InputError("widths", f"multiples of the {config.heads} heads", width, "change `widths` or `heads`")


def _read_text(config: Config, context: Context) -> language_training.TextColumns:
    setting = language_training.LanguageSetting(
        config.corpus, config.tokeniser, length=config.length, batch=config.windows
    )
    return language_training.read_text(setting, context)


def validation_windows(text: language_training.TextColumns, count: int) -> Int[Tensor, "window position"]:
    """Return the first `count` windows of the validation text that have the full length."""
    full = [tokens for tokens, _ in text.windows() if tokens.shape[1] == text.length]
    if (available := sum(map(len, full))) < FOLDS:
        expected = f"a text with at least {FOLDS} windows of {text.length} tokens to validate on"
        raise InputError("corpus", expected, available, "give a longer text or a smaller `length`")
    return torch.cat(full)[:count]


def _train_addition(
    config: Config, context: Context, train_pairs: Int[Tensor, "pair 2"], tokens: Int[Tensor, "sample position"]
) -> xr.Dataset:
    def measure(model: Decoder, step: int) -> dict[str, Tensor]:
        del step
        accuracy = addition_training.exact_match(model, tokens, config.digits)
        return {"accuracy": accuracy, **_probe(config, model, tokens[: config.probed, :-1])}

    trajectory = addition_training.train(
        config,
        context,
        train_pairs,
        select_arms([BASELINE], config.layers),
        label="position-emergence, addition",
        record=_record(config, measure),
    )
    return _with_positions(trajectory.isel(arm=0, drop=True), tokens.shape[1] - 1)


def _train_text(
    config: Config, context: Context, text: language_training.TextColumns, windows: Int[Tensor, "window position"]
) -> xr.Dataset:
    model = Decoder(
        _decoder_config(config, text.types, config.width, config.init), generators=context.seed_generators()
    )

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        return model.surprisal(*text.window(step)).mean(dim=(1, 2))

    def measure(model: Decoder, step: int) -> dict[str, Tensor]:
        del step
        return _probe(config, model, windows)

    trajectory = context.fit(
        model,
        loss,
        label="position-emergence, text",
        optimiser=addition_training.optimiser(config),
        steps=config.steps,
        record=_record(config, measure),
        compute=Compute(config.precision),
    )
    return _with_positions(trajectory, config.length)


def _record(config: Config, measure: Callable[[Decoder, int], dict[str, Tensor]]) -> Record:
    return Record(measure, at=schedule.logarithmic(config.records, config.steps), dims=DIMS, gradients=False)


def _decoder_config(config: Config, vocabulary: int, width: int, init: str) -> DecoderConfig:
    return DecoderConfig(vocabulary, width, config.layers, config.heads, activation="gelu", init=init)


def _probe(config: Config, model: Decoder, tokens: Int[Tensor, "sample position"]) -> dict[str, Tensor]:
    """Measure what the hidden states of each level know of their position."""
    states = hidden_states(model, tokens)
    readout = position_decodability(states, folds=FOLDS)
    neighbours = adjacency(states[:, :, : config.compared], nulls=config.nulls)
    return {
        "decodability": readout.accuracy,
        "error": readout.spread / FOLDS**0.5,
        "by_position": readout.by_position,
        "adjacency": neighbours.score,
        "null": neighbours.null,
    }


def _with_positions(trajectory: xr.Dataset, positions: int) -> xr.Dataset:
    """Number the positions, of which the tasks have different numbers, and add the accuracy by chance."""
    return trajectory.assign(chance=1 / positions).assign_coords(position=range(positions))


def probe_untrained(
    config: Config, context: Context, vocabulary: int, tokens: Int[Tensor, "sample position"]
) -> xr.Dataset:
    """Probe models with random weights: `random_<name>` [init, width, seed, level] for each name of `READOUTS`."""
    readouts, widths = [], sorted({*config.widths})
    for init in INITS:
        for width in widths:
            decoder_config = _decoder_config(config, vocabulary, width, init)
            model = Decoder(decoder_config, generators=context.seed_generators()).to(context.device)
            measures = _probe(config, model, tokens)
            measures["null"] = measures["null"].amax(dim=-1)
            readouts.append(torch.stack([measures[name] for name in READOUTS]).cpu())
    arrays = torch.stack(readouts, dim=1).unflatten(1, (len(INITS), -1)).numpy()
    dims, coordinates = ("init", "width", "seed", "level"), {"init": list(INITS), "width": widths}
    variables = {f"random_{name}": (dims, values) for name, values in zip(READOUTS, arrays, strict=True)}
    return xr.Dataset(variables, coords={**coordinates, "seed": list(context.seeds)})


def readout_gain(readouts: xr.Dataset) -> xr.DataArray:
    """Return how much better the position is decoded from the last layer than from the embeddings [seed]."""
    return readouts.decodability.isel(level=-1) - readouts.decodability.isel(level=0)


def untrained_readouts(run: xr.Dataset, task: str) -> xr.Dataset:
    """Return the `READOUTS` [seed, level] of the widest untrained model with the initial weights of GPT-2."""
    names = {f"random_{name}": name for name in READOUTS}
    return run[list(names)].sel(task=task, init=GPT2_INIT, drop=True).isel(width=-1, drop=True).rename(names)


def trained_readouts(run: xr.Dataset, task: str) -> xr.Dataset:
    """Return the `READOUTS` [seed, level] of the trained model."""
    readouts = run[list(READOUTS)].sel(task=task, drop=True).isel(step=-1, drop=True)
    return readouts.assign(null=readouts.null.max("order", skipna=False))


def adjacency_above_null(readouts: xr.Dataset) -> xr.DataArray:
    """Return the adjacency score less the greatest over random orders, for each layer."""
    return (readouts.adjacency - readouts.null).isel(level=slice(1, None))


def outcome(run: xr.Dataset) -> str:
    """Return what came out: how often the position is decoded, in sums and in text."""
    sums, text = (
        [
            f"{100 * float(values.mean()):.0f} %"
            for values in (
                untrained_readouts(run, task).decodability.isel(level=-1),
                trained_readouts(run, task).decodability.isel(level=-1),
                trained_readouts(run, task).decodability.isel(level=0),
                run.chance.sel(task=task),
            )
        ]
        for task in TASKS
    )
    return (
        f"In sums a readout of the last layer finds the position in {sums[0]} of cases with the random weights of the "
        f"widest model, and in {sums[1]} after training (embeddings: {sums[2]}, chance: {sums[3]}); in text in "
        f"{text[0]} and {text[1]} (embeddings: {text[2]}, chance: {text[3]})."
    )


def _claim_for_each_task(
    name: str, statement: str, measure: Callable[..., xr.DataArray], **options: Any
) -> list[Claim]:
    """Return a claim for each task: `measure(run, task=...)` must be above 0; the statement names what is read."""
    return [
        Claim(f"{name}-{task}", statement.format(words), partial(measure, task=task), above(0.0), **options)
        for task, words in TASKS.items()
    ]


_GAIN = "accuracy of a linear readout of the position, the last layer's less the embeddings'"
_SCORE = "how often neighbours are more similar than others, less the largest such score of 50 random orders"

CLAIMS = (
    *_claim_for_each_task(
        "adjacency-random",
        "With random weights, hidden vectors of nearby positions are more similar, in every layer ({}).",
        lambda run, task: adjacency_above_null(untrained_readouts(run, task)).min("level", skipna=False),
        kind="reading",
        quantity=f"{_SCORE}; the lowest layer score of the widest model with GPT-2's weights (arXiv 2501.00073)",
    ),
    *_claim_for_each_task(
        "adjacency-trained",
        "In our trained models, hidden vectors of nearby positions are more similar, in some layer ({}).",
        lambda run, task: adjacency_above_null(trained_readouts(run, task)).max("level", skipna=False),
        kind="control",
        quantity=f"{_SCORE}; the largest of all layers. Our models are smaller, with larger embeddings than GPT-2's",
    ),
    *_claim_for_each_task(
        "random",
        "Before any training, the causal mask puts positions into hidden states ({}).",
        lambda run, task: readout_gain(untrained_readouts(run, task)),
        kind="control",
        quantity=f"{_GAIN}, in the widest model with GPT-2's random weights",
        across="interval",
    ),
    *_claim_for_each_task(
        "trained",
        "In a trained model, positions can be read from hidden states ({}).",
        lambda run, task: readout_gain(trained_readouts(run, task)),
        kind="control",
        quantity=f"{_GAIN}, at the end of training",
        across="interval",
    ),
    Claim(
        "embeddings-text",
        "The embeddings of text say nothing about positions.",
        lambda run: (run.decodability.isel(level=0, step=-1) - run.chance).sel(task="text", drop=True),
        at_most(MAX_ABOVE_CHANCE),
        kind="check",
        quantity="accuracy of a linear readout of the position at the end, less chance; the threshold is ours",
    ),
    Claim(
        "adjacency-embeddings-text",
        "Embeddings of nearby positions of text are no more similar than others.",
        lambda run: run.adjacency.sel(task="text", drop=True).isel(level=0, step=0) - 0.5,
        at_most(MAX_ABOVE_CHANCE),
        kind="check",
        quantity="how often neighbours are more similar than others, less ½, at the start; the threshold is ours",
    ),
)


def draw_decodability(run: xr.Dataset) -> Figure:
    """Draw how well positions are decoded from each level: over training, and by position at the end."""
    figure, axes = canvas(1, 4, width=2.7, height=2.8)
    for column, task in enumerate(TASKS):
        over_training, by_position = axes[0, column], axes[0, 2 + column]
        draw_levels(over_training, run.decodability.sel(task=task))
        over_training.set_title(f"{TASKS[task].capitalize()}, during training")
        for level in range(run.sizes["level"]):
            accuracy = run.by_position.sel(task=task).isel(level=level, step=-1).dropna("position")
            band(by_position, accuracy.position, accuracy.transpose("seed", "position"), level)
        by_position.set(xlabel="position", title=f"{TASKS[task].capitalize()}, at the end")
        for panel in (over_training, by_position):
            panel.axhline(float(run.chance.sel(task=task)), color="grey", linewidth=0.9, label="chance")
    axes[0, 0].set_ylabel("accuracy of the readout")
    figure.suptitle("How well a readout finds the position of a hidden state", fontsize=10)
    for panel in axes[0]:
        panel.set_ylim(bottom=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    letters(axes)
    return figure


def draw_adjacency(run: xr.Dataset) -> Figure:
    """Draw the adjacency score over training with its null, and with random weights by width and initialisation."""
    figure, axes = canvas(1, 4, width=2.7, height=2.8, sharey=True)
    for column, task in enumerate(TASKS):
        panel = axes[0, column]
        draw_levels(panel, run.adjacency.sel(task=task))
        panel.set_title(f"{TASKS[task].capitalize()}, during training")
        null = run.null.sel(task=task).stack(score=("seed", "level", "order"))
        low, high = null.quantile([0.025, 0.975], "score").values
        panel.fill_between(run.step + 1, low, high, color="grey", alpha=0.25, linewidth=0, label="random orders, 95 %")
        _draw_untrained(axes[0, 2 + column], run, task)
    axes[0, 0].set(ylabel="neighbours more similar", ylim=(0.25, 1.12))
    figure.suptitle("Are nearby hidden vectors more similar than distant ones? (0.5: no)", fontsize=10)
    axes[0, 2].legend(loc="upper left", ncols=3, columnspacing=0.8, handlelength=1.2)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=9)
    letters(axes)
    return figure


def _draw_untrained(panel: Axes, run: xr.Dataset, task: str) -> None:
    """Draw the last layer's score with random weights against the width; dotted, the greatest over random orders."""
    last = run.sel(task=task).isel(level=-1)
    for index, init in enumerate(INITS, start=1):
        scores = last.random_adjacency.sel(init=init).transpose("width", "seed")
        measured(panel, run.width, scores, index, init, linestyle="-")
        greatest = last.random_null.sel(init=init).mean("seed")
        panel.plot(run.width, greatest, color=COLOURS[index], linestyle=":", linewidth=1)
    panel.set(xscale="log", xlabel="width", title=f"{TASKS[task].capitalize()}, random weights")
    panel.set_xticks(run.width.values, [str(width) for width in run.width.values])
    panel.minorticks_off()


_QUICK = Config(
    digits=2, layers=3, heads=2, width=32, batch=64, steps=350, rate=1e-2, warm_up=50,
    tokeniser="bytes", length=24, windows=16, records=9, asked=400, probed=128, compared=32, widths=(32, 64, 128),
)  # fmt: skip

STUDY = Study(
    name="position-emergence",
    title="The causal mask puts positions into hidden states, before any training",
    source="Breaking Symmetry (arXiv 2402.05969v2); adjacency after arXiv 2501.00073",
    statement=(
        "A Transformer without positional encodings must get the positions of its tokens from the causal mask (Zuo and "
        "Guerzhoy, arXiv 2402.05969). A later paper of theirs (arXiv 2501.00073) observes that hidden vectors of "
        "nearby positions are more similar than those of distant ones, with random weights as well as after training."
    ),
    about=(
        "Two causal decoders without positional encodings learn sums and read text. At the embeddings and after each "
        "layer we fit a linear readout of the position, and test it on other sequences. We also ask how often "
        "neighbouring hidden vectors are more similar than others, and compare this with random orders of the "
        "positions. Models with random weights are measured at several widths and with three ways to draw the weights. "
        "In sums the token itself says much about its position (+ and = have one each); in text it says nothing."
    ),
    version=1,
    presets={
        "quick": Preset(_QUICK, seeds=3, seconds=22),
        "paper": Preset(Config(), seeds=5, seconds=100_000),  # an estimate
    },
    run=run,
    inputs=language_training.inputs,
    claims=CLAIMS,
    outcome=outcome,
    figures={
        "decodability": Drawing(
            draw_decodability,
            "How often a linear readout finds the position of a hidden state. Lines: mean over seeds. Bands: smallest "
            "to largest seed. (a, b) During training. (c, d) By position, at the end of training.",
        ),
        "adjacency": Drawing(
            draw_adjacency,
            "How often the hidden vectors of neighbours have a larger cosine than those of positions further apart. "
            "(a, b) During training; lines: mean over seeds, bands: smallest to largest seed, grey: 95 % of the scores "
            "after random orders. (c, d) Last layer with random weights, by width, bars from smallest to largest seed; "
            "dotted: the largest score of random orders. Weights are drawn as in torch's layers (linear), as in its "
            "encoder (encoder), and as in GPT-2 (small).",
        ),
    },
    threads=1,
    exact_shards=False,
)
