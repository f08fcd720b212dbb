"""What a study is, and the one function that executes it.

A study module holds a frozen `Config`, `run(config, context) -> Dataset`, its claims, `draw` functions from a Dataset
to a Figure, and `STUDY = Study(...)`. It has no training loop, no argument parsing and no file handling.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from joma import memory
from joma.arguments import MAX_WHOLE, InputError, choice, plain_text, short_reason, whole
from joma.files import StorageError, as_path, exists, list_folder, lock, remove_leftovers
from joma.progress import SILENT, Progress
from joma.runs import (
    HIGHLIGHT,
    OF_SEEDS,
    SHARDS,
    Description,
    Run,
    StoredClaims,
    adopt,
    check_run,
    earlier_figures,
    finish,
    log,
    open_run,
    read_claims,
    read_config,
    reopen,
)
from joma.study.claim import Claim, NotInRun
from joma.study.context import Context
from joma.theory.integration import IntegrationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAX_SEEDS = 10**6
QUICK = "quick"  # the preset whose figures are for the report alone: it draws no PDF


@dataclass(frozen=True)
class Preset:
    """A config with the number of seeds it is run at and what it costs, in seconds on 2 cores.

    A preset that is about something else than the study, such as a toy in place of a public model, has its own `title`.
    """

    config: Any
    seeds: int
    seconds: float
    title: str = ""


@dataclass(frozen=True)
class Drawing:
    """A figure of a study: the function that draws it, and the caption that says what to see."""

    draw: Callable[[xr.Dataset], Figure]
    caption: str


@dataclass(frozen=True)
class Highlight:
    """The small picture of a study on the report's first screen: one panel, legible at a width of 6 cm.

    Attributes:
        label: what it shows, such as "Figure 4".
        draw: draws it from the run's Dataset.
        alt: what a reader who cannot see it has to know.
    """

    label: str
    draw: Callable[[xr.Dataset], Figure]
    alt: str


@dataclass(frozen=True)
class Study:
    """One figure, table or claim of a paper, declared.

    Attributes:
        name: as on the command line.
        title: one line for the report.
        source: theorem, figure and arXiv number.
        statement: what the paper says, in our own plain words.
        about: a paragraph for the report: what was done, and what is compared with what.
        version: raised whenever `run` changes its result; part of the run's hash.
        presets: `quick` (2 cores, seconds) and `paper`.
        run: a function of a config and a `Context` that returns a Dataset, with seeds as the axis `seed`.
        claims: what is claimed and how it is measured.
        outcome: a function of the Dataset that returns what came out, in one sentence with its numbers.
        highlight: the small picture on the report's first screen, of the few studies that have one.
        figures: drawings by name, each from the Dataset alone: drawing never recomputes.
        threads: number of torch's threads while it runs; None for torch's default, 1 if tensors are so small that
            threads would mostly wait for each other.
        inputs: a function of a config that returns what else decides the result, by name, such as the checksum of a
            text that the config names; like the config, part of the run's hash.
        exact_shards: whether on the CPU the bits of a seed are the same whatever seeds are trained beside it. If not,
            seeds are split into shards on CUDA only, where the last bits depend on the batch in every study.
    """

    name: str
    title: str
    source: str
    about: str
    version: int
    presets: Mapping[str, Preset]
    run: Callable[[Any, Context], xr.Dataset]
    claims: tuple[Claim, ...]
    statement: str = ""
    outcome: Callable[[xr.Dataset], str] | None = None
    highlight: Highlight | None = None
    figures: Mapping[str, Drawing] = field(default_factory=dict)
    threads: int | None = None
    inputs: Callable[[Any], Mapping[str, str]] = lambda _: {}
    exact_shards: bool = True

    def description(self, preset: str, outcome: str = "") -> Description:
        """Return what is stored with a run of `preset` for its readers."""
        return Description(
            title=choice("preset", preset, self.presets).title or self.title,
            source=self.source,
            statement=self.statement,
            about=self.about,
            outcome=outcome,
            highlight=self.highlight.label if self.highlight else "",
            figures=[f"{index}-{name}" for index, name in enumerate(self.figures, start=1)],
        )


@dataclass(frozen=True)
class Outcome:
    """A finished run: its folder, the records of its claims, how long it took, and whether it existed already."""

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
    preset: str = QUICK,
    out: Path | str = "runs",
    seeds: int | None = None,
    config: Any = None,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> Outcome:
    """Run `study`, judge its claims, draw its figures and store everything, unless this run is finished already.

    A finished run is not run again. If its stored claims or description differ from the study's, it is judged again
    from its trajectory.
    """
    chosen = choice("preset", preset, study.presets)
    config = chosen.config if config is None else config
    count = chosen.seeds if seeds is None else whole("seeds", seeds, high=MAX_SEEDS)
    run = planned_run(study, config, seeds=count, out=as_path("out", out))

    def train() -> None:
        context = Context(tuple(run.seeds), device, progress, run.path / "checkpoints", run.label)
        run.begin(preset)
        result, wall_time = compute(study, config, context)
        warn_of_diverged_seeds(result, run)
        run.save(result, device=device_name(device), wall_time=wall_time)

    return complete(study, run, preset, train)


def planned_run(study: Study, config: Any, *, seeds: int, out: Path) -> Run:
    """Return the run of a config with seeds 0 to `seeds` − 1, begun or not; raise `InputError` for a bad value."""
    fields = dataclasses.asdict(config)
    for name, value in fields.items():
        _check_value(name, value)
    return Run(out, study.name, study.version, {**fields, **study.inputs(config)}, tuple(range(seeds)))


def complete(study: Study, run: Run, preset: str, train: Callable[[], None]) -> Outcome:
    """Lock a run, let `train` begin it and save its trajectory unless that is stored, judge it and finish it.

    Shards of the run are removed at the end: nobody needs them any more.
    """
    with run.locked():
        adopt(run.path, preset)
        stage = run.stage
        if stage == "finished":
            outcome = _finished(study, run.path)
        else:
            if stage == "begun":
                train()
            claims, wall_time = _judge_and_finish(study, run.path)
            run.log(f"finished after {wall_time:.1f} s")
            stored_preset = read_config(run.path)["preset"]
            outcome = Outcome(study.name, stored_preset, run.path, claims, wall_time, reused=stage != "begun")
        _remove_shards(run.path)
    return outcome


def _remove_shards(path: Path) -> None:
    """Remove the shards of a run, except those that another process has locked; what remains does no harm."""
    for folder in list_folder(path / SHARDS):
        with suppress(StorageError), lock(folder):
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # there is none, or another process is in it
        (path / SHARDS).rmdir()


def compute(study: Study, config: Any, context: Context) -> tuple[xr.Dataset, float]:
    """Call a study's `run`, and return its result and how many seconds it took."""
    start = time.perf_counter()
    with _threads(study.threads), _refusing_extremes(study, config):
        result = study.run(config, context)
    return result, time.perf_counter() - start


def device_name(device: str) -> str:
    """Return the device for the provenance of a run, on CUDA with the name of the card."""
    if not device.startswith("cuda"):
        return device
    import torch

    return f"{device}: {torch.cuda.get_device_name(device)}"


def judge(study: Study, path: Path | str) -> Outcome:
    """Judge a finished run by the study's present claims and draw its figures again; nothing is trained.

    A run of another version of the study is refused: its trajectory is not what the claims are about.
    """
    path = as_path("path", path)
    if not exists(path):
        raise StorageError(f"no run at {path}; give the folder of a run, `OUT/<study>/<hash>`.")
    with lock(path):
        remove_leftovers(path, deep=True)
        adopt(path)
        config = read_config(path)
        if OF_SEEDS in config:
            raise StorageError(f"{path} holds some seeds of a run; run `joma run` with the same options to join them.")
        if (config["study"], config["version"]) != (study.name, study.version):
            stored = f"{config['study']}, version {config['version']}"
            present, remedy = f"{study.name}, version {study.version}", "run it again with `joma run`"
            raise StorageError(f"{path} holds a run of {stored}, where {present} is judged; {remedy}.")
        claims, wall_time = _judge_again(study, path)
    return Outcome(study.name, config["preset"], path, claims, wall_time, reused=True)


def _finished(study: Study, path: Path) -> Outcome:
    """Return a finished run; judge it again if its claims or description are not the study's."""
    check_run(path)
    stored, preset = read_claims(path), read_config(path)["preset"]
    claims, wall_time = stored.claims, stored.wall_time
    results = {"measured", "verdict", "reason"}
    declared = [{name: value for name, value in claim.items() if name not in results} for claim in claims]
    description = study.description(preset, stored.description.outcome)
    if declared != [claim.declaration for claim in study.claims] or stored.description != description:
        claims, wall_time = _judge_again(study, path)
    return Outcome(study.name, preset, path, claims, wall_time, reused=True)


def _judge_again(study: Study, path: Path) -> tuple[list[dict[str, Any]], float]:
    """Judge and draw a run that an earlier version of the study's code may have written."""
    try:
        result = _judge_and_finish(study, path)
    except (KeyError, AttributeError) as cause:  # what xarray raises for a missing variable or label
        reason = short_reason(cause)
        raise StorageError(
            f"{path} lacks what {study.name} is judged by ({reason}); delete it to run it again."
        ) from None
    log(path, "judged again")
    return result


def _judge_and_finish(study: Study, path: Path) -> tuple[list[dict[str, Any]], float]:
    """Judge the stored trajectory, draw its figures and finish the run; return the claims and the run's wall time."""
    trajectory, preset = open_run(path), read_config(path)["preset"]
    choice("preset", preset, study.presets)
    claims = [claim.judge(trajectory, preset) for claim in study.claims]
    reopen(path)
    description = study.description(preset, _outcome(study, trajectory))
    _draw(study, trajectory, path, description.figures or (), pdf=preset != QUICK)
    wall_time = float(trajectory.attrs["wall_time_s"])
    finish(path, StoredClaims(claims, description, wall_time))
    return claims, wall_time


def _outcome(study: Study, trajectory: xr.Dataset) -> str:
    """Return what came out of a run in one sentence, or an empty text if the run lacks what the sentence is about.

    A sentence with a number that is NaN, of seeds that diverged, says nothing either.
    """
    try:
        sentence = study.outcome(trajectory) if study.outcome else ""
    except NotInRun:
        return ""
    return "" if re.search(r"\bnan\b", sentence) else sentence


def _draw(study: Study, trajectory: xr.Dataset, path: Path, names: Sequence[str], *, pdf: bool) -> None:
    """Draw and write all figures of a study under these names, and remove those that it no longer has."""
    from joma.drawing import clear, save, style

    drawings = [(name, figure.draw, figure.caption) for name, figure in zip(names, study.figures.values(), strict=True)]
    if study.highlight is not None:
        drawings.append((HIGHLIGHT, study.highlight.draw, study.highlight.alt))
    earlier = earlier_figures(path)
    for name, draw, caption in drawings:
        try:
            with style():
                figure = draw(trajectory)
            save(figure, path / "figures" / name, caption=caption, pdf=pdf)
        except ValueError as cause:
            if not _has_diverged(trajectory):
                raise
            warnings.warn(f"{study.name}: figure {name} is not drawn, seeds diverged ({cause}).", stacklevel=3)
    clear(path / "figures", keep=[name for name, _, _ in drawings], earlier=earlier)


def _has_diverged(trajectory: xr.Dataset) -> bool:
    return "diverged" in trajectory and bool((trajectory.diverged >= 0).any())


def warn_of_diverged_seeds(result: xr.Dataset, run: Run) -> None:
    """Warn of seeds that diverged, and note it in the run's log: their measurements are NaN from that step on."""
    if line := describe_diverged_seeds(result):
        run.log(line)
        warnings.warn(f"{run.study}: {line}.", stacklevel=3)


def describe_diverged_seeds(result: xr.Dataset) -> str:
    """Return a line that names the seeds that diverged, or an empty one."""
    if "diverged" not in result:
        return ""
    diverged = (result.diverged >= 0).any([dim for dim in result.diverged.dims if dim != "seed"])
    seeds = ", ".join(map(str, result.seed.values[diverged.values]))
    return f"seeds {seeds} diverged: their loss was not finite, and they were frozen there" if seeds else ""


def _check_value(name: str, value: Any) -> None:
    """Refuse what no study accepts anywhere in a config: NaN, infinities, numbers beyond 64 bits, text with a NUL."""
    if isinstance(value, (tuple, list)):
        for member in value:
            _check_value(name, member)
    elif isinstance(value, str):
        plain_text(name, value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(name, "finite", value, "give a finite number")
    elif isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise InputError(name, "a number that 64 bits hold", f"{float(value):.3g}", "give a smaller number")


@contextmanager
def _refusing_extremes(study: Study, config: Any) -> Iterator[None]:
    """Raise `InputError` if a changed config asks for more memory, or larger numbers, than there are.

    The same in a preset's own config is a defect of the study, and raised as it is.
    """
    name = f"config of {study.name}"
    try:
        with memory.refusing(name, "choose smaller sizes or fewer seeds"):
            yield
    except (ArithmeticError, IntegrationError) as cause:
        if config in [preset.config for preset in study.presets.values()]:
            raise
        expected, remedy = "numbers that can be computed with", "choose numbers nearer to those of the preset"
        raise InputError(name, expected, short_reason(cause), remedy, must="have") from None


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of torch's threads for the duration of the block."""
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
