"""Attention entropy and stable rank over the checkpoints of pretrained models, as in the figures on OPT and Pythia."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.arguments import InputError, distinct, scalar, whole
from joma.data.text import corpus
from joma.drawing import band, canvas, evenly_spaced, letters, measured
from joma.files import DamagedFile
from joma.manifest import read_manifest, write_manifest
from joma.progress import SILENT, Progress, Task
from joma.studies.pretrained_measures import (
    TINY_MODEL,
    embedding_excess,
    entropy_fall,
    entropy_recovery,
    last_value,
    least_certain_recovery,
    public_models,
    rank_left,
    toy_models,
)
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most
from joma.watch.configs import quiet, transformers
from joma.watch.evaluation import preserve_random_state
from joma.watch.probing import ProbeResult, probe
from joma.watch.series import Checkpoints
from joma.watch.store import Store

SUITE = "EleutherAI/pythia-"
PYTHIA = tuple(f"{SUITE}{size}" for size in ("70m", "160m", "410m"))
OPT = tuple(f"facebook/opt-{size}" for size in ("125m", "350m", "1.3b"))
STEPS = (0, *(2**k for k in range(10)), 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000, 143_000)  # Pythia's
MEASURES = ("entropy", "stable_rank", "embedding_cosine", "embedding_random", "hidden_cosine")
SHOWN = 4  # layers drawn, evenly spaced


@dataclass(frozen=True)
class Config:
    """Models on the hub, or a tiny GPT-NeoX that is trained here."""

    models: tuple[str, ...] = ()
    """Repositories or folders of checkpoints; if empty, a tiny GPT-NeoX is trained on the bytes of the corpus."""
    revisions: tuple[str, ...] | None = None
    """Of each of `models`; empty for all. By default a few of Pythia's on the hub, and all of any other series."""
    corpus: str = "python-reference"
    layers: int = 3
    heads: int = 4
    width: int = 64
    length: int = 64
    batch: int = 8
    steps: int = 300
    every: int = 50
    """Checkpoints are saved at steps 0, 1, 2, 4 … like Pythia's, and at multiples of this number."""
    rate: float = 3e-3


QUICK = Config(steps=150)


def run(config: Config, context: Context) -> xr.Dataset:
    """Probe the series of each model, or train a series for each seed and probe those."""
    with _folder(context) as folder:
        store = Store(folder / "measures")
        if config.models:
            series = [
                _probe_series(name, _series(name, config), store, context.progress)
                for name in distinct("models", config.models)
            ]
            data = _concatenate(series, "model").assign_coords(model=list(config.models))
            return data.expand_dims(seed=list(context.seeds[:1]))
        _check(config)
        with context.progress.task(f"train a {TINY_MODEL}", total=config.steps * len(context.seeds)) as task:
            for seed in context.seeds:
                train(config, seed, folder / f"seed{seed}", task, run=context.run)
        names = [f"seed{seed}" for seed in context.seeds]
        series = [_probe_series(name, Checkpoints(folder / name), store, SILENT) for name in names]
    return _concatenate(series, "seed").assign_coords(seed=list(context.seeds)).expand_dims(model=[TINY_MODEL])


def _probe_series(name: str, series: Checkpoints, store: Store, progress: Progress) -> xr.Dataset:
    """Probe a series; its faults become an attribute, and those that lose data also a warning."""
    result = probe(series, measures=["entropy"], store=store, progress=progress)
    for fault in result.audit.faults:
        if fault.loses_data:
            warnings.warn(f"{name}: {fault}", stacklevel=3)
    faults = [{"series": name, **asdict(fault)} for fault in result.audit.faults]
    return _with_numbered_layers(result).assign_attrs(faults=json.dumps(faults, ensure_ascii=False))


def _concatenate(series: Sequence[xr.Dataset], dim: str) -> xr.Dataset:
    """Concatenate all series along a new axis, and their faults to one list."""
    faults = [fault for data in series for fault in json.loads(data.attrs["faults"])]
    combined = xr.concat(series, dim, join="outer", data_vars="all", combine_attrs="drop")
    return combined.assign_attrs(faults=json.dumps(faults, ensure_ascii=False))


@contextmanager
def _folder(context: Context) -> Iterator[Path]:
    """Yield the run's folder for checkpoints and measurements, or a temporary one if the run has none."""
    if context.checkpoints is not None:
        yield context.checkpoints
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _series(name: str, config: Config) -> Checkpoints:
    """Return the checkpoints of a model, those in `config.revisions` if it has more than one."""
    revisions = config.revisions
    if revisions is None and name.startswith(SUITE) and not Path(name).is_dir():
        revisions = tuple(f"step{step}" for step in STEPS)
    series = Checkpoints(name)
    return Checkpoints(name, revisions=revisions) if revisions and len(series) > 1 else series


def _with_numbered_layers(result: ProbeResult) -> xr.Dataset:
    """Return the data with layers and matrices by number, as models name them differently, and with `left_out`.

    `left_out` is the number of checkpoints that the audit has left out.
    """
    data, faults = result.data, result.audit.faults
    missing = [name for name in MEASURES if name not in data]
    if missing:
        reasons = (fault.message for fault in faults if fault.kind in ("not run", "not measured"))
        got = next(reasons, None) if "entropy" in missing else None
        got = got or f"{data.attrs['source']} without {', '.join(missing)}"
        remedy = "leave it out, and measure the rest with `joma probe`"
        raise InputError("models", "models of which all measures can be taken", got, remedy)
    data = data.drop_vars(["layer", "weight", "checkpoint", "entropy_sd"], errors="ignore").rename(weight="matrix")
    if "bounce_depth" not in data:
        data = data.assign(bounce_depth=("layer", np.full(data.sizes["layer"], np.nan)))
        data = data.assign(bounce_recovery=data.bounce_depth, bounce_p_value=data.bounce_depth)
    data = data[[*MEASURES, "bounce_depth", "bounce_recovery", "bounce_p_value"]]
    data = data.assign_coords({dim: np.arange(data.sizes[dim]) for dim in ("layer", "head", "matrix", "depth")})
    return data.assign(left_out=len(result.audit.left_out)).drop_attrs()


def train(config: Config, seed: int, folder: Path, task: Task, *, run: Mapping[str, str] | None = None) -> None:
    """Train the tiny GPT-NeoX with the Trainer and save its checkpoints in `folder`, named like Pythia's.

    A training that was killed starts again and ends with the same bits. One that is finished has a manifest, which says
    what it was trained with, and what identifies its `run`: checkpoints of another one, or damaged ones, are refused.
    """
    identity = json.loads(json.dumps({"training": asdict(config), "seed": seed, "run": dict(run or {})}))
    if folder.exists():
        _check_trained(folder, identity)
        return
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    hf = transformers()
    with preserve_random_state(), quiet():
        trainer = hf.Trainer(
            model_init=lambda: hf.GPTNeoXForCausalLM(_architecture(config)),
            args=_training_arguments(config, seed, unfinished),
            train_dataset=_windows(config),
            callbacks=[_saver(config, unfinished, task)],
        )
        trainer.remove_callback(hf.trainer_callback.PrinterCallback)
        trainer.train()
    files = (file for file in unfinished.rglob("*") if file.is_file())
    write_manifest(unfinished, identity, [str(file.relative_to(unfinished)) for file in files])
    unfinished.rename(folder)


def _check_trained(folder: Path, identity: Mapping[str, Any]) -> None:
    """Refuse checkpoints that another training wrote, or that are damaged."""
    remedy = f"delete {folder} to train it again"
    manifest = read_manifest(folder, remedy=remedy)
    if manifest is None or manifest.identity != identity:
        raise DamagedFile(folder, "holds checkpoints of another training", remedy)
    manifest.check()


def _training_arguments(config: Config, seed: int, folder: Path) -> Any:
    return transformers().TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        learning_rate=config.rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=max(1, config.steps // 100),
        adam_beta2=0.95,
        weight_decay=0.01,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )


def _check(config: Config) -> None:
    """Raise an error for a config that cannot be trained, before anything is done."""
    if config.revisions:
        remedy = "give `models` as well, or leave it out"
        raise InputError("revisions", "left out where a model is trained here", config.revisions, remedy)
    for name in ("layers", "heads", "width", "batch", "steps", "every"):
        whole(name, getattr(config, name))
    whole("length", config.length, low=2)
    scalar("rate", config.rate, above=0.0)
    if config.width % (2 * config.heads):
        got = f"{config.heads} for a width of {config.width}"
        raise InputError("heads", "such that each has an even share of the width", got, "change one of the two")


def _architecture(config: Config) -> Any:
    return transformers().GPTNeoXConfig(
        vocab_size=256,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        max_position_embeddings=config.length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def _windows(config: Config) -> list[dict[str, torch.Tensor]]:
    """Return the training text in windows of `length` bytes, each both input and target."""
    text = corpus(config.corpus, tokeniser="bytes").train
    count = len(text) // config.length
    if not count:
        got = f"{len(text)} to train on in {config.corpus}"
        raise InputError("corpus", f"of at least {config.length} bytes, one window", got, "give a longer text")
    windows = torch.from_numpy(text[: count * config.length].astype(np.int64)).reshape(count, config.length)
    return [{"input_ids": window, "labels": window} for window in windows]


def _saver(config: Config, folder: Path, task: Task) -> Any:
    """Return a callback that saves the model, weights and config only, at Pythia's steps."""

    class Saver(transformers().TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, state, control
            self.save(kwargs["model"], 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, control
            step = state.global_step
            if step & (step - 1) == 0 or step % config.every == 0 or step == config.steps:
                self.save(kwargs["model"], step)
            task.advance()

        def save(self, model: Any, step: int) -> None:
            model.save_pretrained(folder / f"step{step}")

    return Saver()


_FALL = "fall of the lowest layer's entropy from its start to its minimum, in nats"
_RANK = "smallest stable rank of the MLP's lower matrix relative to the start, mean over layers"
_COSINE = "root mean square cosine of the token embeddings at the end, relative to random directions"
PUBLIC_MODELS = ("paper",)  # the presets that probe models of others: quick has a toy
_OURS = "The threshold is ours; it was set before any public model was probed"

CLAIMS = (
    Claim(
        "falls",
        "In pretrained models attention gets sparser at first.",
        lambda run: entropy_fall(public_models(run)),
        at_least(0.3),
        kind="reading",
        presets=PUBLIC_MODELS,
        quantity=f"{_FALL}, mean over models. {_OURS}",
    ),
    Claim(
        "bounces",
        "In pretrained models attention gets denser again.",
        lambda run: entropy_recovery(public_models(run)),
        at_least(0.1),
        kind="reading",
        presets=PUBLIC_MODELS,
        quantity=f"rise of the lowest layer's entropy from its minimum to the end, in nats, mean over models. {_OURS}",
    ),
    Claim(
        "not-noise",
        "In every pretrained model the rise of attention entropy is more than noise.",
        lambda run: least_certain_recovery(public_models(run)),
        at_most(0.05),
        kind="reading",
        presets=PUBLIC_MODELS,
        quantity="how often noise around the best curve that never rises looks as clear; the largest of all models",
    ),
    Claim(
        "stable-rank",
        "In pretrained models the lower matrix of the MLP loses rank.",
        lambda run: rank_left(public_models(run)),
        at_most(0.8),
        kind="reading",
        presets=PUBLIC_MODELS,
        quantity=f"{_RANK} and models. {_OURS}",
    ),
    Claim(
        "orthogonal",
        "In pretrained models token embeddings are nearly orthogonal.",
        lambda run: embedding_excess(public_models(run)),
        at_most(1.5),
        kind="reading",
        presets=PUBLIC_MODELS,
        quantity=f"{_COSINE}, mean over models. {_OURS}",
    ),
    Claim(
        "toy-falls",
        "The toy's attention gets sparser.",
        lambda run: entropy_fall(toy_models(run)),
        at_least(0.3),
        kind="check",
        quantity=_FALL,
    ),
    Claim(
        "toy-stable-rank",
        "The lower matrix of the toy's MLPs loses rank.",
        lambda run: rank_left(toy_models(run)),
        at_most(0.8),
        kind="check",
        quantity=_RANK,
    ),
    Claim(
        "toy-orthogonal",
        "The toy's token embeddings stay nearly orthogonal.",
        lambda run: embedding_excess(toy_models(run)),
        at_most(1.5),
        kind="check",
        quantity=_COSINE,
    ),
    Claim(
        "sound",
        "The series of checkpoints are complete and in order.",
        lambda run: run.left_out.sum("model"),
        at_most(0),
        kind="check",
        quantity="checkpoints that the audit has to leave out",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Return what came out: how entropy, stable rank and embeddings change over the series of the run."""
    toy = TINY_MODEL in run.model.values
    fall, recovery, rank, excess = (
        float(measure(run).mean()) for measure in (entropy_fall, entropy_recovery, rank_left, embedding_excess)
    )
    sentence = (
        f"{'In the toy' if toy else 'On average over models'}, entropy of the lowest layer falls by {fall:.2f} nats "
        f"and comes back by {recovery:.2f}, the stable rank falls to {100 * rank:.0f} % of its start, and embeddings "
        f"end with {excess:.1f} times the cosines of random directions"
    )
    return sentence + ("; no public model was probed." if toy else ".")


def draw(run: xr.Dataset) -> Figure:
    """Draw a row for each series, and one for all models with a single checkpoint."""
    several = [name for name in run.model.values if _measured_steps(run.sel(model=name)).size > 1]
    single = [name for name in run.model.values if name not in several]
    figure, axes = canvas(len(several) + bool(single), 3, width=3.4, height=2.7)
    for row, name in zip(axes, several, strict=False):
        _draw_series(row, run.sel(model=name), str(name))
    if single:
        _draw_single(axes[-1], run.sel(model=single))
    letters(axes)
    return figure


def _measured_steps(model: xr.Dataset) -> np.ndarray:
    """Return the indices of the steps that a model has."""
    return np.flatnonzero(model.entropy.notnull().any(("seed", "layer", "head")))


def _shown(values: xr.DataArray, dim: str) -> list[int]:
    """Return the indices along `dim` that are drawn, evenly spaced over those that the model has."""
    count = int(values.notnull().any([other for other in values.dims if other != dim]).sum())
    return evenly_spaced(count, SHOWN)


def _draw_series(axes: np.ndarray, model: xr.Dataset, name: str) -> None:
    """Draw one series over its steps: entropy, stable rank and cosines."""
    model = model.isel(step=_measured_steps(model))
    at = model.step + 1
    panels: tuple[tuple[str, xr.DataArray, str, str], ...] = (
        ("layer", model.entropy.mean("head"), "entropy / nats", f"{name}: entropy of attention"),
        ("matrix", model.stable_rank, "stable rank", "Stable rank of the MLP's lower matrix"),
        ("depth", model.hidden_cosine, "root mean square cosine", "Are vectors orthogonal? (0: yes)"),
    )
    for panel, (dim, values, ylabel, title) in zip(axes, panels, strict=True):
        for colour, index in enumerate(_shown(values, dim)):
            label = f"hidden, depth {index}" if dim == "depth" else f"layer {index}"
            band(panel, at, values.isel({dim: index}), colour, label)
        panel.set(xscale="log", xlabel="step + 1", ylabel=ylabel, title=title)
    band(axes[2], at, model.embedding_cosine, 4, "embeddings")
    axes[2].axhline(float(model.embedding_random.max()), color="grey", linestyle=":", linewidth=1)
    for panel in axes:
        panel.margins(y=0.15)
        panel.legend()
    axes[2].set(ylim=(0, 1.7 * axes[2].get_ylim()[1]), yticks=np.linspace(0, 1, 6))


def _draw_single(axes: np.ndarray, models: xr.Dataset) -> None:
    """Draw models with one checkpoint each over their relative depth."""
    panels: tuple[tuple[Axes, str, xr.DataArray, str, str], ...] = (
        (axes[0], "layer", models.entropy.mean("head"), "entropy / nats", "Last checkpoint: entropy of attention"),
        (axes[1], "matrix", models.stable_rank, "stable rank", "Last checkpoint: stable rank"),
        (axes[2], "depth", models.hidden_cosine, "root mean square cosine", "Last checkpoint: orthogonality"),
    )
    for panel, dim, values, ylabel, title in panels:
        for colour, name in enumerate(models.model.values):
            curve = last_value(values.sel(model=name).isel(seed=0)).dropna(dim)
            measured(panel, np.linspace(0, 1, curve.size), curve, colour, str(name), linestyle="-")
        panel.set(xlabel="relative depth", ylabel=ylabel, title=title)
    axes[0].legend()


STUDY = Study(
    name="pretrained",
    title="OPT and Pythia: does attention turn sparse and then dense again?",
    source="JoMA, the figures on OPT and Pythia (arXiv 2310.00535)",
    statement=(
        "In the pretraining of OPT and Pythia, attention entropy of the layers first falls and then rises again, and "
        "the stable rank of the MLP's lower matrix falls (JoMA, arXiv 2310.00535). The theory also assumes that "
        "embeddings are nearly orthogonal."
    ),
    about=(
        "Series of checkpoints are audited and probed: entropy of attention on the beginning of the embedded text, "
        "stable rank of each MLP's lower matrix, cosines between embeddings and between hidden vectors. The preset "
        "paper takes public checkpoints of Pythia and the final models of OPT from the hub. The preset quick needs no "
        f"network: it trains a tiny GPT-NeoX on bytes for {QUICK.steps} steps and saves it under Pythia's names. That "
        "is a toy, which tests our tools and says nothing about OPT or Pythia."
    ),
    version=3,
    presets={
        "quick": Preset(
            QUICK,
            seeds=3,
            seconds=25,
            title="A toy in place of OPT and Pythia: our probes on its checkpoints",
        ),
        "paper": Preset(Config(models=(*PYTHIA, *OPT)), seeds=1, seconds=3600),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    figures={
        "series": Drawing(
            draw,
            "Lines: mean over seeds, for layers evenly spaced from the first to the last. Bands: smallest to largest "
            "seed. Step 0 is drawn at 1. Dotted: cosine of random directions. A last row, if there is one, shows "
            "models with a single checkpoint over their relative depth.",
        )
    },
)
