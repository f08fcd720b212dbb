"""What a study is, and the one function that executes it.

A study module holds a frozen `Config`, `run(config, context) -> Dataset`, its claims, `draw` functions from a Dataset
to a Figure, and `STUDY = Study(...)`. It has no training loop, no argument parsing and no file handling.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from joma.arguments import InputError, choice, short_reason, whole
from joma.files import StorageError, lock
from joma.progress import SILENT, Progress
from joma.runs import Run, log, open_run, read_claims, read_config, write_claims
from joma.study.claim import Claim
from joma.study.context import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Preset:
    """A config with the number of seeds it is run at and what it costs, in seconds on 2 cores."""

    config: Any
    seeds: int
    seconds: float


@dataclass(frozen=True)
class Study:
    """One figure, table or claim of a paper, declared.

    Attributes:
        name: as on the command line.
        title: one line for the report.
        source: theorem, figure and arXiv number.
        about: a paragraph for the report: what is compared with what.
        version: raised whenever `run` changes its result; part of the run's hash.
        presets: `quick` (2 cores, seconds) and `paper`.
        run: from a config and a `Context` to a Dataset, with seeds as the axis `seed`.
        claims: what is said and how it is measured.
        figures: drawings by name, each from the Dataset alone: drawing never recomputes.
        threads: torch's threads while it runs, None for as many as torch likes; 1 where tensors are so small that
            threads would spend their time waiting for each other.
        inputs: from a config to what else decides the result, by name, such as the checksum of a text that it names;
            part of the run's hash as the config is.
    """

    name: str
    title: str
    source: str
    about: str
    version: int
    presets: Mapping[str, Preset]
    run: Callable[[Any, Context], xr.Dataset]
    claims: tuple[Claim, ...]
    figures: Mapping[str, Drawing] = field(default_factory=dict)
    threads: int | None = None
    inputs: Callable[[Any], Mapping[str, str]] = lambda _: {}


@dataclass(frozen=True)
class Drawing:
    """A figure of a study: how it is drawn, and the caption that says what is seen."""

    draw: Callable[[xr.Dataset], Figure]
    caption: str


@dataclass(frozen=True)
class Outcome:
    """A finished run: where it lies, what its claims came to, how long it took, whether it was already there."""

    study: str
    preset: str
    path: Path
    claims: list[dict[str, Any]]
    wall_time: float
    reused: bool

    @property
    def failed(self) -> int:
        """How many tested claims do not hold."""
        return sum(claim["verdict"] == "does not hold" for claim in self.claims)


def execute(
    study: Study,
    *,
    preset: str = "quick",
    out: Path | str = "runs",
    seeds: int | None = None,
    config: Any = None,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> Outcome:
    """Run `study` unless that very run is finished already, judge its claims, draw its figures, and store it all.

    A finished run whose claims were others is judged anew, from its trajectory.
    """
    chosen = choice("preset", preset, study.presets)
    config = chosen.config if config is None else config
    count = chosen.seeds if seeds is None else whole("seeds", seeds)
    fields = dataclasses.asdict(config)
    for name, value in fields.items():
        _numbers(name, value)
    run = Run(Path(out), study.name, study.version, {**fields, **study.inputs(config)}, tuple(range(count)))
    with run.hold():
        if run.finished:
            return _stored(study, run.path, anew=False)
        run.begin(preset)
        begun = time.perf_counter()
        with _threads(study.threads):
            result = study.run(config, Context(tuple(run.seeds), device, progress, run.path / "checkpoints"))
        _tell_lost(result, run)
        trajectory = run.save(result, device=device, wall_time=time.perf_counter() - begun)
        claims = _judge(study, trajectory, preset, run.path)
        wall_time = time.perf_counter() - begun
        run.finish(claims, wall_time=wall_time)
    return Outcome(study.name, preset, run.path, claims, wall_time, reused=False)


def judge(study: Study, path: Path | str) -> Outcome:
    """Judge a finished run's claims anew and draw its figures again, from its trajectory: nothing is trained.

    A run that another version of the study stored is refused: what lies there is not what the claims are about.
    """
    path = Path(path)
    there = read_config(path)
    if (there["study"], there["version"]) != (study.name, study.version):
        stored, present = f"{there['study']}, version {there['version']}", f"{study.name}, version {study.version}"
        raise StorageError(f"{path} holds a run of {stored}, where {present} is judged; run it again with `joma run`.")
    with lock(path):
        return _stored(study, path, anew=True)


def _stored(study: Study, path: Path, *, anew: bool) -> Outcome:
    """Return a finished run, its claims judged anew if that is asked for or if they were others, word for word."""
    record, preset = read_claims(path), read_config(path)["preset"]
    claims = record["claims"]
    words = [{name: value for name, value in own.items() if name not in {"measured", "verdict"}} for own in claims]
    if anew or words != [claim.words for claim in study.claims]:
        claims = _judge_stored(study, path, preset)
        write_claims(path, claims, wall_time=record["wall_time_s"])
        log(path, "judged anew")
    return Outcome(study.name, preset, path, claims, record["wall_time_s"], reused=True)


def _judge_stored(study: Study, path: Path, preset: str) -> list[dict[str, Any]]:
    try:
        return _judge(study, open_run(path), preset, path)
    except (KeyError, AttributeError) as cause:  # xarray's words for a variable or a label that is not there
        reason = short_reason(cause)
        raise StorageError(
            f"{path} lacks what {study.name} is judged by ({reason}); delete it to run it again."
        ) from None


def _judge(study: Study, trajectory: xr.Dataset, preset: str, path: Path) -> list[dict[str, Any]]:
    """Return the records of a trajectory's claims, once its figures are drawn."""
    claims = [claim.judge(trajectory, preset) for claim in study.claims]
    _draw(study, trajectory, path)
    return claims


def _tell_lost(result: xr.Dataset, run: Run) -> None:
    """Say which seeds were lost, if any: what is measured of them is NaN from then on."""
    if "diverged" not in result:
        return
    lost = (result.diverged >= 0).any([dim for dim in result.diverged.dims if dim != "seed"])
    seeds = result.seed.values[lost.values]
    if len(seeds):
        line = f"the loss of seeds {', '.join(map(str, seeds))} was not finite from some step on; they were held there"
        run.log(line)
        warnings.warn(f"{run.study}: {line}.", stacklevel=3)


def _numbers(name: str, value: Any) -> None:
    """Refuse NaN and infinities anywhere in a config: they are no JSON, and no study means them."""
    if isinstance(value, (tuple, list)):
        for one in value:
            _numbers(name, one)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(name, "finite", value, "give a finite number")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    if count is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _draw(study: Study, trajectory: xr.Dataset, path: Path) -> None:
    from joma.report.figure import clear, save, style

    stems = [f"{place}-{name}" for place, name in enumerate(study.figures, start=1)]
    for stem, drawing in zip(stems, study.figures.values(), strict=True):
        with style():
            figure = drawing.draw(trajectory)
        save(figure, path / "figures" / stem, caption=drawing.caption)
    clear(path / "figures", keep=stems)
