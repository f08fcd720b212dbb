"""Ctrl-C at random moments of commands: while modules load, in calculations, steps, saves and figures.

Every command is a process that is forked from a server, in which everything is imported already; those that test the
loading of modules are started anew. After each Ctrl-C the same command is given again, until the run is finished. It
must then be the same, bit by bit, as one that was never interrupted.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import joma
from joma.train.interrupt import EXIT_CODE, LAST_LINE

NOTICE = "joma: interrupted: waiting for "
MAX_SECONDS = 5.0  # until a line is there; the promise is 2 s, on a machine that does nothing else
POLL_SECONDS = 0.005
SECOND = 1_600_000  # iterations of a call of C that lasts about a second

PRELOADED = [  # what a run imports, but for this folder, which the server does not know
    *("joma.cli", "joma.verify", "joma.study.execution", "joma.train.loop", "joma.drawing", "joma.report.table"),
    *(f"matplotlib.backends.backend_{kind}" for kind in ("agg", "pdf", "svg")),
    *("h5netcdf.core", "safetensors.torch", "scipy.integrate", "rich.progress"),
]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


@cache
def all_folders() -> tempfile.TemporaryDirectory[str]:
    """Return the folder for the output of all commands, which is removed at the end of this process."""
    return tempfile.TemporaryDirectory(prefix="interrupts-")


def new_folder() -> Path:
    """Return a new folder for the output of a command."""
    return Path(tempfile.mkdtemp(dir=all_folders().name))


def serve(args: list[str], folder: str, long_call: tuple[str, int, str]) -> None:
    """Run one command in this process, with its output in `folder`; the file `begun` says that Ctrl-C is answered."""
    from joma import cli, studies
    from joma.studies import catalogue
    from joma.train import interrupt
    from robustness import interrupt_study

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, handle in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), handle)
    catalogue.STUDIES = studies.STUDIES = {"interrupted": "robustness.interrupt_study"}  # type: ignore[attr-defined]
    interrupt_study.long_call = interrupt_study.LongCall(*long_call)
    with interrupt.answering():
        (Path(folder) / "begun").touch()
        code = cli.main(args)
    os._exit(code)


def obey_ctrl_c() -> None:
    """Let Ctrl-C have its usual effect in this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Command:
    """A command that runs in another process.

    Attributes:
        folder: where its output is, and the files that its long call writes.
        pid: the number of the process.
        poll: returns its exit code, or None while it runs.
    """

    folder: Path
    pid: int
    poll: Callable[[], int | None]

    @classmethod
    def fork(cls, args: Sequence[Any], place: str = "", iterations: int = 0) -> Command:
        """Start a command from the server, with a long call at `place`, and wait until it answers Ctrl-C."""
        folder = new_folder()
        call = (place, iterations, str(folder))
        process = _server.Process(target=serve, args=([str(arg) for arg in args], str(folder), call))
        process.start()
        command = cls(folder, process.pid or 0, lambda: process.exitcode)
        command.wait_for((folder / "begun").exists)
        return command

    @classmethod
    def start(cls, *args: Any) -> Command:
        """Start a command anew, as a user does, and wait until it answers Ctrl-C."""
        folder = new_folder()
        path = {"PYTHONPATH": str(Path(joma.__file__).parents[1])}
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            words = [sys.executable, "-m", "joma", *map(str, args)]
            # A shell starts what runs in the background with Ctrl-C ignored, and the tests may be run so.
            process = subprocess.Popen(
                words,
                stdout=out,
                stderr=err,
                env={**os.environ, **path},
                preexec_fn=obey_ctrl_c,  # noqa: PLW1509
            )
        command = cls(folder, process.pid, process.poll)
        command.wait_for(lambda: handles(process.pid, signal.SIGTERM))  # which Python itself does not
        return command

    @property
    def errors(self) -> str:
        """Its standard error so far."""
        file = self.folder / "err"
        return file.read_text() if file.exists() else ""

    @property
    def call_began(self) -> bool:
        """Whether its long call has begun."""
        return (self.folder / "call-began").exists()

    @property
    def call_ended(self) -> bool:
        """Whether its long call has ended."""
        return (self.folder / "call-ended").exists()

    def interrupt(self) -> float:
        """Press Ctrl-C and return the seconds until a line more is there, or the command has ended."""
        lines, start = self.errors.count("\n"), time.monotonic()
        self.send(signal.SIGINT)
        self.wait_for(lambda: self.errors.count("\n") > lines)
        return time.monotonic() - start

    def send(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit code, once it has ended."""
        self.wait_for(lambda: False)
        code = self.poll()
        assert code is not None
        return code

    def wait_for(self, happened: Callable[[], bool], seconds: float = 120.0) -> None:
        """Return once something has happened, or the command has ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and not happened():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"nothing happened for {seconds:g} s; standard error: {self.errors!r}")
            time.sleep(POLL_SECONDS)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


def run_command(out: Path, **config: int) -> list[Any]:
    """Return the arguments that run the study of these tests."""
    changes = [word for name, value in config.items() for word in ("--set", f"{name}={value}")]
    return ["run", "interrupted", "--out", out, *changes]


def content(out: Path) -> dict[str, Any]:
    """Return what must not depend on interrupts: the trajectory without attributes, and the final checkpoint."""
    (run,) = (out / "interrupted").iterdir()
    leftovers = [file for file in run.rglob(".*") if file.is_file()]
    assert not leftovers, leftovers
    files = {file.name: file.read_bytes() for file in run.rglob("checkpoints/*/*")}
    trajectory = joma.open_run(run)
    return {**files, **{str(name): values.values.tobytes() for name, values in trajectory.variables.items()}}


@dataclass
class Tally:
    """What was tried: how often by kind, how long it took until a line was there, and what went wrong."""

    kinds: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def judge(self, kind: str, command: Command, latency: float) -> None:
        """Count one interrupted command, which must have ended with one last line, or before Ctrl-C could reach it."""
        code, errors = command.wait(), command.errors
        if code == 0 and not errors:
            self.kinds["Ctrl-C after the end"] += 1
            return
        *notices, last = errors.splitlines(keepends=True) or [""]
        self.kinds[kind] += 1
        self.latencies.append(latency)
        good = code == EXIT_CODE and last == LAST_LINE and len(notices) < 2
        if not good or not all(line.startswith(NOTICE) for line in notices) or latency > MAX_SECONDS:
            self.failures.append(f"{kind}: exit code {code} after {latency:.2f} s, standard error {errors!r}")


@dataclass(frozen=True)
class Scenario:
    """A run that is interrupted at random moments: its config, its long call, and how often Ctrl-C is pressed twice."""

    kind: str
    config: dict[str, int]
    place: str = ""
    iterations: int = 0
    twice: float = 0.0

    def command(self, out: Path) -> Command:
        return Command.fork(run_command(out, **self.config), self.place, self.iterations)


SCENARIOS = (
    Scenario("Ctrl-C in a run of short steps", {"steps": 150}, twice=0.2),
    Scenario("Ctrl-C in a run with one long step", {}, "step", SECOND, twice=0.5),
    Scenario("Ctrl-C in a run with a long save", {}, "save", SECOND, twice=0.5),
    Scenario("Ctrl-C in a run with large checkpoints", {"width": 1200}, twice=0.2),
    Scenario("Ctrl-C in a run with a long calculation", {}, "run", SECOND),
    Scenario("Ctrl-C in a run with a long drawing", {}, "draw", SECOND),
)


def torment(scenario: Scenario, count: int, out: Path, chance: random.Random, tally: Tally) -> None:
    """Interrupt runs `count` times, let each finish, and compare them with a run that was never interrupted."""
    command, start = scenario.command(out / "whole"), time.monotonic()
    assert command.wait() == 0
    length, whole = time.monotonic() - start, content(out / "whole")
    for number in range(2 * count):  # some end before Ctrl-C is pressed
        if tally.kinds[scenario.kind] >= count:
            break
        torn = out / f"torn{number}"
        for part in (1, 2):  # the second time half of it is done
            command = scenario.command(torn)
            time.sleep(chance.uniform(0.0, 0.9 * length / part))
            latency = command.interrupt()
            if chance.random() < scenario.twice:
                command.interrupt()
            tally.judge(scenario.kind, command, latency)
        if scenario.command(torn).wait() != 0 or content(torn) != whole:
            tally.failures.append(f"{scenario.kind}: run {number} does not end as one that was never interrupted")
        tally.kinds["interrupted runs compared bit by bit"] += 1


def torture(scale: float) -> dict[str, int]:
    """Press Ctrl-C about 70 times `scale` at random moments."""
    chance, tally = random.Random(), Tally()
    for _ in range(round(8 * scale)):
        command = Command.start("list")
        time.sleep(chance.uniform(0.0, 2.0))
        tally.judge("Ctrl-C while modules load", command, command.interrupt())
        command = Command.fork(["verify"])
        time.sleep(chance.uniform(0.0, 3.0))
        tally.judge("Ctrl-C in joma verify", command, command.interrupt())
    with tempfile.TemporaryDirectory() as folder:
        for index, scenario in enumerate(SCENARIOS):
            torment(scenario, round(9 * scale), Path(folder) / str(index), chance, tally)
    for failure in tally.failures:
        print(failure, file=sys.stderr)  # noqa: T201
    milliseconds = [round(1000 * seconds) for seconds in tally.latencies] or [0]
    figures = {"ms until the line, median": round(median(milliseconds)), "ms until the line, most": max(milliseconds)}
    return {**tally.kinds, **figures, "Ctrl-C failed": len(tally.failures)}
