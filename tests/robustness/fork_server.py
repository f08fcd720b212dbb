"""Run command lines of `joma` in forked processes: the imports are paid once, and a line costs milliseconds.

Each runs in a folder of its own, with limits on memory and time. At the time limit it gets a Ctrl-C (SIGINT); if it
does not end then, it is killed, and its exit code is None.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import re
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from matplotlib.figure import Figure

import joma

GIGABYTE = 10**9
CAPABILITIES_VERSION = 0x20080522  # of the structures that capset takes
TICKS = os.sysconf("SC_CLK_TCK")
NOT_PRELOADED = re.compile(r"triton|__main__|lightning")


@dataclass(frozen=True)
class Ending:
    """How a command line ended: its exit code (None if it was killed), what it printed, and whether it got a Ctrl-C."""

    code: int | None
    out: str
    err: str
    interrupted: bool
    seconds: float


@dataclass(frozen=True)
class Limits:
    """When a process gets a Ctrl-C, when it is killed, and how much memory it may use.

    Attributes:
        seconds: of the processor until Ctrl-C; on a busy machine that takes longer.
        wait: seconds on the clock until Ctrl-C, for a process that waits for something.
        patience: seconds on the clock from Ctrl-C until it is killed.
        memory: bytes beyond those of the parent.
    """

    seconds: float = 0.7
    wait: float = 15.0
    patience: float = 60.0
    memory: int = 2 * GIGABYTE


@dataclass(frozen=True)
class Streams:
    """Where standard output and standard error go: a file, /dev/full, a pipe that nobody reads, or nowhere."""

    out: str = "file"
    err: str = "file"


def preload() -> None:
    """Import everything that a command line may need, so that the forked processes have it."""
    for module in pkgutil.walk_packages(joma.__path__, "joma."):
        if not NOT_PRELOADED.search(module.name):
            importlib.import_module(module.name)


def run_forked(
    args: Sequence[str],
    folder: Path,
    *,
    limits: Limits | None = None,
    streams: Streams | None = None,
    pictures: bool = True,
    unprivileged: bool = False,
) -> Ending:
    """Run `joma` with these arguments in `folder`; its output is read from files beside that folder.

    Args:
        args: the arguments.
        folder: the working directory, which exists.
        limits: of time and memory.
        streams: where the output goes.
        pictures: draw figures into files; otherwise they are drawn, but empty files are written, which is much faster.
        unprivileged: give up what root may do beyond other users, such as reading any file.
    """
    limits, streams = limits or Limits(), streams or Streams()
    captured = [folder.with_name(f"{folder.name}.{name}") for name in ("out", "err")]
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        if not pictures:
            Figure.savefig = lambda _, file, **__: Path(file).write_bytes(b"<svg/>")
        _be_the_child(args, folder, limits, [(streams.out, captured[0]), (streams.err, captured[1])], unprivileged)
    code, interrupted = _wait(child, limits)
    seconds = time.perf_counter() - start
    texts = [file.read_bytes().decode("utf-8", "surrogateescape") if file.exists() else "" for file in captured]
    for file in captured:
        file.unlink(missing_ok=True)
    return Ending(code, *texts, interrupted, seconds)


def _wait(child: int, limits: Limits) -> tuple[int | None, bool]:
    """Wait for a child; return its exit code, negative for a signal, and whether it got a Ctrl-C."""
    handle, start = os.pidfd_open(child), time.monotonic()
    interrupted_at = None
    try:
        while not select.select([handle], [], [], 0.05)[0]:
            now = time.monotonic()
            if interrupted_at is None and (_processor_time(child) > limits.seconds or now - start > limits.wait):
                os.kill(child, signal.SIGINT)
                interrupted_at = now
            elif interrupted_at is not None and now - interrupted_at > limits.patience:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None, True
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), interrupted_at is not None
    finally:
        os.close(handle)


def _processor_time(process: int) -> float:
    """Return the seconds of the processor that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _drop_capabilities() -> None:
    """Give up all capabilities of this process: root is then bound by the permissions of files like anybody else."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


def _be_the_child(
    args: Sequence[str], folder: Path, limits: Limits, streams: list[tuple[str, Path]], unprivileged: bool
) -> NoReturn:
    """Set up the process, run the command line, and exit with its code."""
    code: object = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        for number, (kind, file) in enumerate(streams, start=1):
            _redirect(number, kind, file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        closed = [kind == "closed" for kind, _ in streams]
        sys.stdout = None if closed[0] else open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = (
            None if closed[1] else open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        )
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, used + limits.memory))
        if unprivileged:
            _drop_capabilities()
        from joma.__main__ import run

        warnings.resetwarnings()  # pytest turns them into errors
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)  # as the interpreter does
        sys.argv = ["joma", *args]
        code = run()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):  # as the interpreter does at its end
            if stream is not None:
                stream.flush()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 99)


def _redirect(number: int, kind: str, file: Path) -> None:
    """Make the standard stream `number` a file, a full disk, a pipe that nobody reads, or closed."""
    if kind == "closed":
        os.close(number)
        return
    if kind == "pipe":
        reading, handle = os.pipe()
        os.close(reading)
    elif kind == "full":
        handle = os.open("/dev/full", os.O_WRONLY)
    else:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(handle, number)
    os.close(handle)
