"""What a study is: a config, a run, claims and figures, all declared; and the one function that executes it.

A study module holds a frozen `Config`, `run(config, context) -> Dataset`, its claims, `draw` functions from a Dataset
to a Figure, and `STUDY = Study(...)`. It has no training loop, no argument parsing and no file handling.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import xarray as xr

from joma import schedule
from joma.arguments import InputError, choice, whole
from joma.files import StorageError, lock
from joma.progress import SILENT, Progress
from joma.runs import Run, log, open_run, read_claims, read_config, write_claims

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

Values = TypeVar("Values", xr.Dataset, xr.DataArray)
SPARE = 300.0  # seconds between saves on CUDA, which redoes many steps sooner than it saves one
Verdict = Literal["holds", "does not hold", "not tested at this preset"]


class Absent(Exception):
    """A run has not what a claim is about: an arm that was left out, a size that was not trained."""


def only(values: Values, **labels: Any) -> Values:
    """Select by label; `Absent` where the run has no such label.

    >>> only(xr.DataArray([1.0, 2.0], {"depth": [1, 5]}, ("depth",)), depth=5).item()
    2.0
    """
    for dim, label in labels.items():
        if label not in values[dim].values:
            raise Absent(f"{dim} {label}")
    return values.sel(labels, drop=True)


@dataclass(frozen=True)
class Expected:
    """The interval that a measured value must lie in, and the words for it."""

    low: float
    high: float
    text: str

    def __contains__(self, value: float) -> bool:
        return bool(self.low <= value <= self.high)


def at_most(high: float) -> Expected:
    """The measured value must not exceed `high`.

    >>> 3.0 in at_most(2.0)
    False
    """
    return Expected(-math.inf, high, f"≤ {high:g}")


def at_least(low: float) -> Expected:
    """The measured value must reach `low`.

    >>> at_least(0.9).text
    '≥ 0.9'
    """
    return Expected(low, math.inf, f"≥ {low:g}")


def above(low: float) -> Expected:
    """The measured value must be greater than `low`.

    >>> 0.0 in above(0.0), 1e-300 in above(0.0), above(0.0).text
    (False, True, '> 0')
    """
    return Expected(math.nextafter(low, math.inf), math.inf, f"> {low:g}")


def below(high: float) -> Expected:
    """The measured value must be less than `high`.

    >>> 0.0 in below(0.0), -1e-300 in below(0.0), below(0.0).text
    (False, True, '< 0')
    """
    return Expected(-math.inf, math.nextafter(high, -math.inf), f"< {high:g}")


def between(low: float, high: float) -> Expected:
    """The measured value must lie in [low, high].

    >>> 0.5 in between(0, 1)
    True
    """
    return Expected(low, high, f"{low:g} to {high:g}")


def near(value: float, tolerance: float) -> Expected:
    """The measured value must lie within `tolerance` of `value`.

    >>> near(0.4278, 1e-3).text
    '0.4278 ± 0.001'
    """
    return Expected(value - tolerance, value + tolerance, f"{value:g} ± {tolerance:g}")


@dataclass(frozen=True)
class Claim:
    """What is said, as data.

    Attributes:
        name: a short name, unique within the study.
        said: the sentence, with its source.
        measure: from the run's Dataset to one number, or to an array over `seed`; `Absent` where the run has not what
            the claim is about, which is then not tested.
        expected: where the number must lie: `at_most`, `at_least`, `between` or `near`.
        across: whether `every` seed must lie there, or the `mean` over seeds.
        presets: the presets at which the claim can be decided; elsewhere it is measured but not judged.
        seeds: the fewest seeds with which it can be decided; a bound over seeds needs two.
    """

    name: str
    said: str
    measure: Callable[[xr.Dataset], xr.DataArray | float]
    expected: Expected
    across: Literal["every", "mean"] = "every"
    presets: tuple[str, ...] = ("quick", "paper")
    seeds: int = 1

    @property
    def words(self) -> dict[str, Any]:
        """The claim as it is stored and listed: all but how it is measured."""
        return {
            "name": self.name,
            "said": self.said,
            "expected": self.expected.text,
            "across": self.across,
            "presets": list(self.presets),
            "seeds": self.seeds,
        }

    def judge(self, trajectory: xr.Dataset, preset: str) -> dict[str, Any]:
        """Measure the claim on a run: a record for `claims.json`, with the spread over seeds and the verdict."""
        there = preset in self.presets and trajectory.sizes.get("seed", 1) >= self.seeds
        try:
            values = np.atleast_1d(np.asarray(self.measure(trajectory), dtype=np.float64))
        except Absent:
            values, there = np.array([np.nan]), False
        if values.ndim != 1:
            raise TypeError(f"claim {self.name!r}: `measure` must return a number or one value a seed")
        judged = values if self.across == "every" else values.mean(keepdims=True)
        verdict: Verdict = "holds" if all(value in self.expected for value in judged) else "does not hold"
        if not there:
            verdict = "not tested at this preset"
        return {**self.words, "measured": summary(values), "verdict": verdict}


def summary(values: np.ndarray) -> dict[str, Any]:
    """Mean, standard deviation, least and greatest over seeds; what is not finite becomes None, as JSON has no NaN."""
    spread = values.std(ddof=1) if values.size > 1 and np.isfinite(values).all() else 0.0
    figures = {"mean": values.mean(), "sd": spread, "min": values.min(), "max": values.max()}
    return {key: _finite(value) for key, value in figures.items()} | {"values": [_finite(value) for value in values]}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Preset:
    """A config with the number of seeds it is run at and what it costs, in seconds on 2 cores."""

    config: Any
    seeds: int
    seconds: float


@dataclass(frozen=True)
class Context:
    """What a run is given beside its config: seeds, device, where to report progress and where to keep checkpoints."""

    seeds: tuple[int, ...]
    device: str = "cpu"
    progress: Progress = SILENT
    checkpoints: Path | None = None

    def generators(self) -> list[torch.Generator]:
        """Fresh random streams, one for each seed, on the CPU."""
        import torch

        return [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def fit(self, model: Any, loss: Callable[[Any, torch.Tensor], torch.Tensor], *, label: str, **options: Any) -> Any:
        """`joma.train.fit` with this run's seeds and progress; with `save`, checkpoints in a folder of that label."""
        from joma.train import fit

        folder = None
        if self.checkpoints is not None and "save" in options:
            folder = self.checkpoints / re.sub(r"[^a-z0-9.]+", "-", label.lower())
        fixed = {"seeds": self.seeds, "progress": self.progress, "label": label, "checkpoints": folder}
        fixed["spare"] = 0.0 if self.device == "cpu" else SPARE
        return fit(model.to(self.device), loss, **{**fixed, **options})

    def saves(self, steps: int) -> tuple[int, ...]:
        """When a training of `steps` steps is saved on its way."""
        return schedule.every(max(1, steps // (5 if self.device == "cpu" else 50)), steps)

    def folded(self, found: xr.Dataset, axis: str, labels: Sequence[Any]) -> xr.Dataset:
        """Fold a leading axis of many models, the seeds of one label after those of another, into `axis` and seed."""
        count = len(self.seeds)
        parts = [found.isel(seed=slice(place * count, (place + 1) * count)) for place in range(len(labels))]
        whole_run = xr.concat([part.assign_coords(seed=list(self.seeds)) for part in parts], dim=axis)
        return whole_run.assign_coords({axis: list(labels)})


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
        reason = str(cause).splitlines()[0]
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
