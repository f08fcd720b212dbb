"""The folders that are damaged: finished and interrupted runs, a probe's results, recordings, trained models, texts."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from safetensors.torch import save_file

import toy_study
from joma import cli, open_run
from joma.data.text import corpus
from joma.files import checksum, write_json
from joma.manifest import MANIFEST, read_manifest, write_manifest
from joma.report.html import _template, write_report
from joma.report.probe import save as save_probe
from joma.runs import check_run
from joma.stamp import provenance
from joma.studies import catalogue, pretrained
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, execute, judge
from joma.train import Optimiser, Record
from joma.watch import Checkpoints, Recorder
from joma.watch.probing import probe
from joma.watch.store import DamagedMeasurement, Store
from robustness.trials import Refused, Result, Stored


def draw(trajectory: xr.Dataset, name: str) -> Figure:
    """Draw the last value alone: axes and labels would take most of the time of all trials."""
    figure = Figure(figsize=(2, 2), layout="none")
    height = float(trajectory.value.isel(time=-1).mean()) / 4
    figure.add_artist(Line2D([0, 1], [height, height], color="black" if name == "line" else "blue"))
    return figure


TOY = replace(
    toy_study.STUDY,
    figures={name: Drawing(partial(draw, name=name), f"The end of the {name}.") for name in ("line", "again")},
)
STUDY = TOY  # what `joma run toy` loads, as this module is registered under that name
STEPS, INTERRUPTED_AT = 20, 13
interrupted = False  # whether trainings of `Config` are interrupted


@contextmanager
def steady() -> Iterator[None]:
    """Let readers show the same time, versions and commit every time, and let the command line know the toy study."""
    stamp, template = provenance(), _template()
    fixed = {
        "joma.report.html._template": template,
        "joma.report.html.now": "now",
        "joma.report.html.provenance": stamp,
        "joma.stamp._commit": "unknown",
    }
    with ExitStack() as stack:
        for function, value in fixed.items():
            stack.enter_context(mock.patch(function, return_value=value))
        stack.enter_context(mock.patch.object(catalogue, "STUDIES", {"toy": __name__}))
        stack.enter_context(mock.patch("joma.studies.STUDIES", {"toy": __name__}, create=True))
        yield


def contents(dataset: xr.Dataset) -> dict[str, Any]:
    """Return the variables of a Dataset, every bit of them."""
    return {
        str(name): (variable.dims, str(variable.dtype), variable.values.tolist(), variable.values.tobytes())
        if variable.dtype.kind != "O"
        else (variable.dims, "text", variable.values.tolist())
        for name, variable in dataset.variables.items()
    }


def read_trajectory(path: Path) -> Result:
    """Return the data and the attributes that `open_run` returns."""
    dataset = open_run(path)
    return {"data": contents(dataset), "attributes": dict(dataset.attrs)}


@dataclass(frozen=True)
class RunReaders:
    """The readers of a run in `out`: the library's and the command line's."""

    study: Study
    run: str  # the run's folder, relative to `out`
    config: Any = None

    def all(self) -> dict[str, Any]:
        return {
            "open_run": lambda out: read_trajectory(out / self.run),
            "run": lambda out: self._outcome(execute(self.study, out=out, config=self.config)),
            "judge": lambda out: self._outcome(judge(self.study, out / self.run)),
            "report": self._report,
            "joma run": lambda out: self._command("run", "toy", "--out", str(out)),
            "joma judge": lambda out: self._command("judge", str(out / self.run)),
            "joma report": self._report_command,
        }

    def _outcome(self, outcome: Any) -> Result:
        """Return what a run holds after it was run or judged; nothing of the time if it was run again."""
        check_run(outcome.path)
        dataset = open_run(outcome.path)
        figures = {
            f"figure {file.name}": file.read_bytes() for file in (outcome.path / "figures").glob("*") if file.is_file()
        }
        again = not outcome.reused
        return {
            "claims": outcome.claims,
            "preset": outcome.preset,
            "data": contents(dataset),
            **figures,  # one that is missing is no other result
            "attributes": None if again else dict(dataset.attrs),
            "wall time": None if again else outcome.wall_time,
        }

    def _report(self, out: Path) -> Result:
        report = write_report(out)
        page = (out / "report.html").read_text(encoding="utf-8")
        if report.left_out:
            for line in report.left_out:
                assert line in _unescaped(page), "the page does not name what is left out"
            raise Refused("\n".join(report.left_out))
        for name in re.findall(r"Not drawn: ([-\w]+)", page):
            raise Refused(
                "\n".join(f"{out / self.run / 'figures' / name}{suffix}" for suffix in (".svg", ".pdf", ".txt"))
            )
        return {"page": page}

    def _report_command(self, out: Path) -> Result:
        self._command("report", str(out))
        return self._report(out)

    def _command(self, *arguments: str) -> Result:
        """Return what a command prints as JSON, if its exit code is 0 or 1; raise `Refused` if it is 2."""
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = cli.main([*arguments, "--json"])
        lines = errors.getvalue().splitlines()
        assert all(line.startswith("joma: ") for line in lines), errors.getvalue()[-500:]
        if code == cli.BAD_INPUT:
            raise Refused(errors.getvalue())
        assert code in (cli.DONE, cli.CLAIM_FAILED), f"exit code {code}"
        shown = json.loads(output.getvalue())
        outcome = shown[0] if isinstance(shown, list) else {}
        again = outcome.get("reused") is False
        return {
            "exit code": code,
            "claims": outcome.get("claims"),
            "preset": outcome.get("preset"),
            "wall time": None if again else outcome.get("wall_time"),
        }


def _unescaped(page: str) -> str:
    import html

    return html.unescape(page)


def finished_runs(folder: Path) -> Iterator[Stored]:
    """Yield finished runs: of today, of version 0.1.0, and one that is trained but not judged yet.

    Another run is beside each, with other numbers, of which every file is put in the place of the first one's.
    """
    out = folder / "finished" / "out"
    first, second = execute(TOY, out=out), execute(TOY, out=out, config=toy_study.Config(slope=1.0))
    name, other = (str(outcome.path.relative_to(out)) for outcome in (first, second))
    readers = RunReaders(TOY, name).all()
    others = {
        **_files_of_another(out, name, other),
        f"{name}/figures/1-line.svg": _swapped(out, f"{name}/figures/1-line.svg", f"{name}/figures/2-again.svg"),
        f"{name}/figures/1-line.txt": _swapped(out, f"{name}/figures/1-line.txt", f"{name}/figures/2-again.txt"),
    }
    yield Stored("a finished run", out, readers, others, name)
    legacy = folder / "legacy" / "out"
    shutil.copytree(out, legacy)
    _as_version_010(legacy / name)
    yield Stored("a run of version 0.1.0", legacy, {key: readers[key] for key in ("run", "joma run")}, part=name)
    trained = folder / "trained" / "out"
    shutil.copytree(out, trained)
    with mock.patch("joma.study.execution.finish", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        judge(TOY, trained / name)
    manifests = {"of the finished run": {f"{name}/{MANIFEST}": (out / name / MANIFEST).read_bytes()}}
    not_yet = {key: reader for key, reader in readers.items() if "report" not in key}
    yield Stored("a trained run", trained, not_yet, {f"{name}/{MANIFEST}": manifests}, name)


def large_run(folder: Path) -> Stored:
    """Return a run whose arrays all count as large, so that they are read while they are checked."""
    out = folder / "large" / "out"
    with mock.patch("joma.runs.LARGE_ARRAY", 1):
        outcome = execute(TOY, out=out)
    manifest = read_manifest(outcome.path)
    assert manifest is not None
    assert len(manifest.files["trajectory.nc"].arrays) == 3, "value, seed and time"
    readers = RunReaders(TOY, str(outcome.path.relative_to(out))).all()
    return Stored("a large run", out, {"open_run": readers["open_run"]}, pattern="*.nc")


def _files_of_another(out: Path, name: str, other: str) -> dict[str, dict[str, dict[str, bytes]]]:
    """Return for each file of a run that of another run, alone and with the other's manifest."""
    contents: dict[str, dict[str, dict[str, bytes]]] = {}
    manifest = (out / other / MANIFEST).read_bytes()
    for path in (file for file in (out / other).rglob("*") if file.is_file()):
        file = f"{name}/{path.relative_to(out / other)}"
        alone = {file: path.read_bytes()}
        contents[file] = {"of another run": alone, "of another run, and its manifest": alone | {
            f"{name}/{MANIFEST}": manifest
        }}  # fmt: skip
    return contents


def _swapped(out: Path, first: str, second: str) -> dict[str, dict[str, bytes]]:
    return {
        "the other figure's": {first: (out / second).read_bytes()},
        "swapped": {first: (out / second).read_bytes(), second: (out / first).read_bytes()},
    }


def _as_version_010(run: Path) -> None:
    """Change a finished run to what version 0.1.0 wrote: no manifest, and the trajectory's checksum in the claims."""
    (run / MANIFEST).unlink()
    claims = json.loads((run / "claims.json").read_text())
    write_json(run / "claims.json", {**claims, "trajectory_sha256": checksum(run / "trajectory.nc")})


@dataclass(frozen=True)
class Config:
    """A study of two trainings, which take a few milliseconds."""

    target: float = 1.0


class Point(torch.nn.Module):
    """A point for each seed, which is drawn to a target."""

    def __init__(self, seeds: int) -> None:
        super().__init__()
        self.place = torch.nn.Parameter(torch.arange(seeds * 3.0, dtype=torch.float64).reshape(seeds, 3))


def train(config: Config, context: Context) -> xr.Dataset:
    """Train two points one after the other; the second training is interrupted if `interrupted` is set."""

    def loss(model: Point, step: torch.Tensor) -> torch.Tensor:
        if interrupted and label == "second" and int(step) == INTERRUPTED_AT:
            raise KeyboardInterrupt
        return ((model.place - config.target) ** 2).sum(-1)

    trajectories = []
    for label in ("first", "second"):
        record = Record(lambda model, _: {"place": model.place}, dims={"place": ("axis",)})
        options = {"optimiser": Optimiser("adam", 0.1), "steps": STEPS, "record": record, "label": label}
        trajectories.append(context.fit(Point(len(context.seeds)), loss, **options).expand_dims(training=[label]))
    return xr.concat(trajectories, "training")


TRAINED = Study(
    name="points",
    title="Two points",
    source="none",
    about="Two trainings.",
    version=1,
    presets={"quick": Preset(Config(), seeds=2, seconds=1)},
    run=train,
    claims=(
        Claim(
            "end",
            "The point moves.",
            lambda run: run.place.isel(step=-1).max(("axis", "training")),
            at_least(0),
            "check",
        ),
    ),
)


def interrupted_run(folder: Path) -> Stored:
    """Return a run that was interrupted in its second training, and the checkpoints of another run and training."""
    outs = {name: folder / "interrupted" / name for name in ("whole", "out", "other")}
    global interrupted  # noqa: PLW0603  (not in the config: it would be part of the run's identity)
    whole = execute(TRAINED, out=outs["whole"])
    interrupted = True
    for name, target in {"out": 1.0, "other": 2.0}.items():
        try:
            execute(TRAINED, out=outs[name], config=Config(target))
        except KeyboardInterrupt:
            continue
        raise AssertionError("the training was not interrupted")
    interrupted = False
    out, run = outs["out"], str(whole.path.relative_to(outs["whole"]))
    (other,) = (path for path in (outs["other"] / "points").iterdir())
    readers = RunReaders(TRAINED, run)
    reader = {"run": readers.all()["run"]}
    stored = Stored("an interrupted training", out, reader, _other_checkpoints(out, out / run, other))
    expected = execute(TRAINED, out=outs["whole"])
    assert contents(open_run(expected.path)) == contents(open_run(whole.path))
    return stored


def _other_checkpoints(out: Path, run: Path, other: Path) -> dict[str, dict[str, dict[str, bytes]]]:
    """Return for each checkpoint those of another step, training and run, each alone and with its checksum."""
    checkpoints = sorted((run / "checkpoints").rglob("*.safetensors"))
    contents: dict[str, dict[str, dict[str, bytes]]] = {}
    for checkpoint in checkpoints:
        name = str(checkpoint.relative_to(out))
        candidates = [path for path in checkpoints if path != checkpoint]
        candidates += [other / checkpoint.relative_to(run)]
        for candidate in candidates:
            which = str(candidate.relative_to(run if candidate.is_relative_to(run) else other.parent))
            alone = {name: candidate.read_bytes()}
            digest = f"{checksum(candidate)}  {checkpoint.name}\n".encode()
            contents.setdefault(name, {})[f"of {which}"] = alone
            contents[name][f"of {which}, with its checksum"] = alone | {f"{name}.sha256": digest}
    return contents


def probed_series(folder: Path) -> Stored:
    """Return the results of a probe and its measurements of three checkpoints, weights only."""
    series = folder / "series"
    generator = torch.Generator().manual_seed(0)
    for step in (0, 10, 20):
        (series / f"step{step}").mkdir(parents=True)
        tensors = {f"layers.{layer}.mlp.fc1.weight": torch.randn(6, 4, generator=generator) for layer in range(2)}
        tensors["embed_tokens.weight"] = torch.randn(9, 4, generator=generator)
        save_file(tensors, series / f"step{step}" / "model.safetensors")
    out = folder / "probed"

    def measure(copy: Path) -> Result:
        store = Store(copy / "measures")
        data = probe(Checkpoints(series), store=store).data
        files = {file.name: file.read_bytes() for file in sorted((copy / "measures").glob("*.safetensors"))}
        return {"data": contents(data), "attributes": dict(data.attrs), "measurements": files}

    def results(copy: Path) -> Result:
        return read_trajectory(copy)

    result = probe(Checkpoints(series), store=Store(out / "measures"))
    save_probe(result.data, result.audit.faults, out)
    readers = {"open_run": results, "probe": measure, "Store.get": lambda copy: _measurements(copy, series)}
    files = sorted((out / "measures").glob("*.safetensors"))
    others = {
        f"measures/{file.name}": {
            f"of {other.name}{note}": {f"measures/{file.name}": other.read_bytes(), **_checksum_of(file, other, digest)}
            for other in files
            if other != file
            for note, digest in (("", False), (", with its checksum", True))
        }
        for file in files
    }
    return Stored("a probe's results", out, readers, others)


def _checksum_of(file: Path, other: Path, wanted: bool) -> Mapping[str, bytes]:
    return {f"measures/{file.name}.sha256": f"{checksum(other)}  {file.name}\n".encode()} if wanted else {}


def _measurements(copy: Path, series: Path) -> Result:
    """Return all measurements that the store has; a warning of one counts as a refusal."""
    import warnings

    from joma.watch.audit import SKETCH
    from joma.watch.probing import WEIGHTS

    store, values = Store(copy / "measures"), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DamagedMeasurement)
        for checkpoint in Checkpoints(series):
            for measure in (SKETCH, WEIGHTS):
                arrays = store.get(checkpoint, measure)
                values[f"{checkpoint.name} {measure.name}"] = arrays and {
                    name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()
                }
    if caught:
        raise Refused("\n".join(str(warning.message) for warning in caught))
    return values


def recordings(folder: Path) -> Iterator[Stored]:
    """Yield recordings of `Recorder.save`: under any name, and under the name that trajectories of runs have."""
    model = torch.nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True).eval()
    for name in ("recording.nc", "trajectory.nc"):
        out = folder / f"recording-{name}"
        recorder = Recorder(model, torch.zeros(1, 5, 8), at=1, ranks="linear1")
        older = None
        for step in range(3):
            recorder(step)
            recorder.save(out / name)
            older = older or {name: (out / name).read_bytes()}
        others = {name: {"an older version": older or {}}}
        yield Stored(
            f"a recording ({name})", out, {"open_run": lambda copy, name=name: read_trajectory(copy / name)}, others
        )


def trained_model(folder: Path) -> Stored:
    """Return a series of checkpoints as the study `pretrained` trains it."""
    out = folder / "model"
    for step in (0, 1):
        (out / f"step{step}").mkdir(parents=True)
        write_json(out / f"step{step}" / "config.json", {"hidden_size": 4, "step": step})
        save_file({"weight": torch.full((4, 4), float(step))}, out / f"step{step}" / "model.safetensors")
    identity = json.loads(json.dumps({"training": asdict(pretrained.Config()), "seed": 0}))
    names = [str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()]
    write_manifest(out, identity, names)

    def read(copy: Path) -> Result:
        pretrained._check_trained(copy, identity)
        return {name: (copy / name).read_bytes() for name in names}

    others = {
        f"step0/{name}": {"of another step": {f"step0/{name}": (out / "step1" / name).read_bytes()}}
        for name in ("config.json", "model.safetensors")
    }
    return Stored("a trained model", out, {"pretrained": read}, others)


def cached_text(folder: Path) -> Stored:
    """Return the tokens of a text in the cache."""
    sources = {name: folder / f"{name}.txt" for name in ("text", "other")}
    for name, source in sources.items():
        source.write_text("\n".join(f"this is line {line} of a {name}" for line in range(40)), encoding="utf-8")
        corpus(source, cache=folder / name)
    out, other = folder / "text", folder / "other"

    def read(copy: Path) -> Result:
        text = corpus(sources["text"], cache=copy)
        splits = {
            name: (str(getattr(text, name).dtype), getattr(text, name).tolist()) for name in ("train", "valid", "test")
        }
        return {**splits, "types": text.types, "digest": text.digest}

    (cached,), (original,) = ([*(cache / "text").glob("*/*")] for cache in (out, other))
    place = cached.relative_to(out)
    every = {f"{place}/{file.name}": file.read_bytes() for file in sorted(original.iterdir())}
    others = {name: {"of another text": {name: every[name]}, "all of another text": every} for name in every}
    return Stored("a text in the cache", out, {"corpus": read}, others)
