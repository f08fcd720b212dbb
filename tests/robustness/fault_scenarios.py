"""What is disturbed by `torture_faults`: everything that joma writes, on the smallest input."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import nn

import toy_study
from joma.data.text import corpus
from joma.files import StorageError
from joma.report.html import write_report
from joma.report.probe import save
from joma.runs import Run, check_run, open_run, read_claims
from joma.study import Claim, Drawing, at_least, execute, judge
from joma.train import Optimiser, Saving, fit
from joma.watch.probing import probe
from joma.watch.recorder import Recorder
from joma.watch.series import Checkpoints
from joma.watch.store import Store

Digest = str


@dataclass(frozen=True)
class Scenario:
    """Something that writes files.

    Attributes:
        prepare: makes what it needs in a folder.
        act: does it and returns what must have the same bits after any disturbance.
        observe: what a reader sees in between: the same as what `act` returned before or returns afterwards, or None
            if the reader refuses by a `StorageError`.
        strict: whether a reader may never refuse: there is always the old or the new file.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], Any]
    observe: Callable[[Path], Any]
    strict: bool = False


def digest(dataset: xr.Dataset) -> Digest:
    """Return a checksum of all variables and coordinates, without the attributes, some of which are times."""
    names = sorted(map(str, dataset.variables))
    arrays = [(name, dataset[name].dims, dataset[name].values) for name in names]
    parts = [(name, dims, array.dtype.str, array.shape, array.tobytes()) for name, dims, array in arrays]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def nothing(_: Path) -> None:
    pass


# A toy study, with its claims and a figure, which is empty: drawing would take most of the time.

BLANK = Drawing(lambda _: Figure(figsize=(1, 1)), "Nothing.")
STUDY = dataclasses.replace(toy_study.STUDY, figures={"line": BLANK})


def run_study(folder: Path) -> Any:
    outcome = execute(STUDY, out=folder)
    check_run(outcome.path)
    return digest(open_run(outcome.path)), outcome.claims, outcome.preset


def observe_runs(folder: Path) -> Any:
    """Read the one run by every reader: all agree that it is finished, or one refuses."""
    for path in folder.glob("toy/*"):
        with suppress(StorageError):
            trajectory = digest(open_run(path))
            check_run(path)
            write_report(folder)
            (folder / "report.html").unlink()
            return trajectory, read_claims(path).claims, "quick"
    return None


# The same study after its claims and figures have changed.

CHANGED = dataclasses.replace(
    STUDY,
    claims=(Claim("higher", "Every seed ends above 1.", toy_study.end, at_least(1.0), "check"),),
    figures={"other": BLANK, "line": BLANK},
)


def prepare_run(folder: Path) -> None:
    execute(CHANGED, out=folder)


def judge_run(folder: Path) -> Any:
    path = Run(folder, STUDY.name, STUDY.version, dataclasses.asdict(toy_study.Config()), range(3)).path
    outcome = judge(STUDY, path)
    check_run(path)
    return digest(open_run(path)), outcome.claims, outcome.preset


# Training with checkpoints.


def train(folder: Path) -> Any:
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(2, 5, generator=generator))
    target = torch.randn(7, 5, generator=generator)

    def loss(model: Any, step: Any) -> torch.Tensor:
        return (model.weight - target[int(step) % 7]).square().sum(-1)

    saving = Saving(folder / "checkpoints", at=range(0, 12, 3), identity={"run": "toy"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checkpoints without a checksum, whose writer was killed
        record = fit(model, loss, optimiser=Optimiser("adam", 0.1), steps=12, saving=saving)
    return digest(record), model.weight.detach().numpy().tobytes()


# A probe of a series, with its store and its result. The series lies beside the folder that is disturbed and copied:
# a copy would have another identity.


def prepare_series(folder: Path) -> None:
    series = folder.parent / "series"
    for step in (0, 10):
        generator = torch.Generator().manual_seed(step)
        names = ("embed_in.weight", "layers.0.mlp.fc1.weight", "layers.1.mlp.fc1.weight")
        (series / f"step{step}").mkdir(parents=True)
        tensors = {name: torch.randn(6, 4, generator=generator) for name in names}
        save_file(tensors, series / f"step{step}" / "model.safetensors")


def probe_series(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of measurements that are damaged: they are measured again
        result = probe(Checkpoints(str(folder.parent / "series")), store=Store(folder / "out" / "measures"))
    with mock.patch("joma.report.probe.draw", BLANK.draw):
        save(result.data, result.audit.faults, folder / "out")
    return digest(open_run(folder / "out"))


def observe_probe(folder: Path) -> Any:
    with suppress(StorageError):
        return digest(open_run(folder / "out"))
    return None


# The report.


def report(folder: Path) -> Any:
    page = write_report(folder)
    text = page.path.read_text(encoding="utf-8").replace(str(folder), "")
    return page.runs, page.left_out, re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ|[\d.]+ s\b|wall_time_s.*", "", text)


def observe_report(folder: Path) -> Any:
    file = folder / "report.html"
    return None if not file.exists() else file.read_text(encoding="utf-8").rstrip().endswith("</html>")


# A recording that replaces an earlier one.


@cache
def recorders() -> tuple[Recorder, Recorder]:
    """Return an early and a late recording of the same model."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
        pair = tuple(Recorder(block, torch.randn(1, 5, 8), at=1, ranks=False) for _ in range(2))
        for recorder, steps in zip(pair, (1, 3), strict=True):
            for step in range(steps):
                recorder(step)
    return pair


def save_recording(folder: Path) -> Any:
    recorders()[1].save(folder / "recording.nc")
    return digest(open_run(folder / "recording.nc"))


def observe_recording(folder: Path) -> Any:
    return digest(open_run(folder / "recording.nc"))


# A text in the cache.


def prepare_text(folder: Path) -> None:
    (folder.parent / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(50)))


def tokenise(folder: Path) -> Any:
    text = corpus(folder.parent / "text.txt", cache=folder / "cache")
    streams = [np.asarray(stream).tobytes() for stream in (text.train, text.valid, text.test)]
    return text.types, streams, text.digest


SCENARIOS = {
    "study": Scenario(nothing, run_study, observe_runs),
    "judge": Scenario(prepare_run, judge_run, observe_runs),
    "training": Scenario(nothing, train, nothing),
    "probe": Scenario(prepare_series, probe_series, observe_probe),
    "probe again": Scenario(lambda folder: (prepare_series(folder), probe_series(folder)), probe_series, observe_probe),
    "report": Scenario(prepare_run, report, observe_report),
    "recording": Scenario(
        lambda folder: recorders()[0].save(folder / "recording.nc"), save_recording, observe_recording, strict=True
    ),
    "new recording": Scenario(nothing, save_recording, nothing),
    "text": Scenario(prepare_text, tokenise, nothing),
}


def names(folder: Path) -> set[str]:
    """Return the names of all files and folders below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def comparable(value: Any) -> str:
    """Return a value as text, in which NaN equals NaN."""
    return json.dumps(value, default=_as_text, sort_keys=True)


def _as_text(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, (bytes, str)):
        return list(value)
    return repr(value)
