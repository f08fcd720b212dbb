"""The toy study without its figure, and an engine that runs units in this process: sweeps are tested with both."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import xarray as xr

import toy_study
from joma.engine import Engine, Output, Result, Unit
from joma.engine.performing import perform
from joma.progress import Progress
from joma.studies import catalogue
from joma.sweep_execution import SweepRun, plan_sweep
from joma.sweeps import Draws, Grid, Sweep, open_sweep
from joma.units import run_study

GRID = Grid({"slope": [float(number) for number in range(24)]})
STUDY = dataclasses.replace(toy_study.STUDY, figures={})


class InlineEngine(Engine):
    """Runs units in this process, one after another, when their results are read."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.performed: list[str] = []

    def submit(self, unit: Unit) -> None:
        self.units.append(Unit.from_json(unit.as_json()))

    def results(self) -> Iterator[Result]:
        while self.units:
            unit = self.units.pop(0)
            self.performed.append(unit.name)
            result, _ = perform(unit)
            yield result

    def cancel(self) -> None:
        self.units.clear()

    def close(self) -> None:
        self.cancel()


def plan(out: Path, points: Grid | Draws, *, seeds: int = 2, **changes: Any) -> Sweep:
    """Return a sweep of the toy study."""
    config = dataclasses.replace(STUDY.presets["quick"].config, **changes)
    return plan_sweep(STUDY, config, points, seeds=seeds, out=out)


def sweep(out: Path, points: Grid | Draws, **options: Any) -> Sweep:
    """Run a sweep of the toy study in this process."""
    return SweepRun(plan(out, points, **options), STUDY).run(InlineEngine())


def run_toy(out: Path, progress: Progress, *, counts: str, seconds: float, **arguments: Any) -> Output:
    """Run the toy study in a process that does not know it; leave a file in `counts` for every execution."""
    (Path(counts) / f"{arguments['config']['slope']} {uuid.uuid4().hex}").touch()
    time.sleep(seconds)
    with mock.patch.dict(catalogue.STUDIES, {"toy": "sweep_study"}):
        return run_study(out, progress, **arguments)


@dataclasses.dataclass(frozen=True)
class ToyConduct(SweepRun):
    """A sweep of the toy study in other processes, which counts how often each unit is executed."""

    counts: str = ""
    seconds: float = 0.0

    def engine_units(self) -> Iterator[Unit]:
        for unit in super().engine_units():
            arguments = {**unit.arguments, "counts": self.counts, "seconds": self.seconds}
            yield dataclasses.replace(unit, function="sweep_study:run_toy", arguments=arguments)


def executions(counts: Path) -> dict[float, int]:
    """How often the unit of each slope was executed."""
    slopes = [float(path.name.partition(" ")[0]) for path in counts.iterdir()]
    return {slope: slopes.count(slope) for slope in sorted(set(slopes))}


DRIVER = """
import sys
from pathlib import Path
from joma.engine import LocalEngine, RayEngine
from sweep_study import GRID, STUDY, ToyConduct, plan
address, out, counts = sys.argv[1:]
sweep_run = ToyConduct(plan(Path(out), GRID), STUDY, counts=counts, seconds=0.1)
with LocalEngine(2) if address == "local" else RayEngine(address) as engine:
    sweep_run.run(engine, ended=lambda result: print(result.unit.name, result.failure, flush=True))
"""


def assert_equal(path, expected):
    """Check that a stored sweep has the numbers and verdicts of another; only the folders of the runs differ."""
    data = open_sweep(path)
    assert set(data.state.values.tolist()) == {"finished"}
    xr.testing.assert_identical(data.drop_vars("run"), expected.drop_vars("run"))


def kill_and_repeat(address, out, counts):
    """Kill the driver of a sweep after some units, repeat the command; return which units were finished before."""
    path = os.pathsep.join([str(Path(__file__).parent), *(entry for entry in sys.path if entry)])
    options = {"env": {**os.environ, "PYTHONPATH": path}, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", DRIVER, address, str(out), str(counts)]
    with subprocess.Popen(command, **options) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(4)]
        first.send_signal(signal.SIGKILL)
    assert [line.split()[-1:] for line in lines] == [["None"]] * 4
    planned = plan(out, GRID)
    finished = [unit.point["slope"] for unit in planned.units if planned.state(unit) == "finished"]
    assert 4 <= len(finished) < 24
    again = subprocess.run(command, check=True, timeout=100, **options)
    assert len(again.stdout.splitlines()) == 24 - len(finished)
    return finished
