"""Small training studies that commands in other processes, and their workers, find in the catalogue."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joma
from joma.study import Preset, Study
from robustness import interrupt_study
from robustness.torture_interrupts import Command, handles, obey_ctrl_c

NAMES = ("first", "second", "third")
# Python imports a module of this name when it starts, in every process that the command starts.
SITECUSTOMIZE = "import several_studies; several_studies.install({!r}, {!r}, {!r})\n"


def study(name: str, steps: int) -> Study:
    """Return a small training study of this name; the later ones say that they take longer."""
    presets = {"quick": Preset(interrupt_study.Config(steps=steps), seeds=2, seconds=1 + NAMES.index(name))}
    return dataclasses.replace(interrupt_study.STUDY, name=name, presets=presets, run=renamed_run(name))


def renamed_run(name: str) -> Any:
    """Return the function that runs a study, with the long call at the place "NAME"."""

    def run(config: interrupt_study.Config, context: Any) -> Any:
        interrupt_study.long_call.make(name)
        return interrupt_study.run(config, context)

    return run


def install(steps: int, place: str, folder: str) -> None:
    """Put the studies into the catalogue of this process, with an endless call of C in the one called `place`."""
    from joma.studies import catalogue

    for name in NAMES:
        sys.modules[f"study_{name}"] = SimpleNamespace(STUDY=study(name, steps))  # type: ignore[assignment]
    catalogue.STUDIES = {name: f"study_{name}" for name in NAMES}
    interrupt_study.long_call = interrupt_study.LongCall(place, interrupt_study.FOREVER, folder)


def start(folder: Path, *args: Any, steps: int = 600, place: str = "") -> Command:
    """Start a command in its own process that knows the studies, and return it when it answers Ctrl-C."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(steps, place, str(folder)))
    paths = (folder, Path(joma.__file__).parents[1], Path(__file__).parent)
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "joma", *map(str, args)],
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "120"},
            preexec_fn=obey_ctrl_c,  # noqa: PLW1509
        )
    command = Command(folder, process.pid, process.poll)
    command.wait_for(lambda: handles(process.pid, signal.SIGTERM))
    return command


def workers(command: Command) -> list[int]:
    """Return the processes that a command has started."""
    children: list[int] = []
    for file in Path(f"/proc/{command.pid}/task").glob("*/children"):
        children += map(int, file.read_text().split())
    return children


def alive(processes: Sequence[int]) -> list[int]:
    """Return those of the processes that have not ended."""
    return [process for process in processes if is_alive(process)]


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that has ended, and whose parent did not look, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
