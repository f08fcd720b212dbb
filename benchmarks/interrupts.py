"""`python benchmarks/interrupts.py --device cuda`: how soon a run answers Ctrl-C while it loads, compiles and trains.

The run is interrupted again and again, each time somewhat later after its start, and resumed by the same command. Where
it waits for a step or a save, every other time Ctrl-C is pressed a second time. Compiled code is stored nowhere between
the tries, so that each compiles anew. Exit code 1 means that a line was not there after 2 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
LAST = "joma: interrupted; "
TARGET_SECONDS = 2.0
PATIENCE_SECONDS = 2.0  # from the notice to the second Ctrl-C
MAX_WAIT_SECONDS = 60.0  # where it is pressed once: until it is pressed again nevertheless
STUDIES = {"cpu": "alignment", "cuda": "entropy-text"}
CHANGES = {"entropy-text": ("corpus=python-reference",)}  # the paper's text would have to be downloaded
DELAYS = {"cpu": (0.5, 2.0, 4.0, 8.0, 12.0, 18.0, 25.0), "cuda": (0.5, 2, 4, 6, 8, 10, 13, 16, 20, 25, 35, 50, 70)}


@dataclass
class Try:
    """One interrupted run.

    Attributes:
        delay: seconds from its start to Ctrl-C.
        until_line: seconds from Ctrl-C to the first line.
        until_exit: seconds from the last Ctrl-C to the end of the process.
        presses: how often Ctrl-C was pressed.
        code: the exit code.
        lines: what was printed.
        saved: the steps of all checkpoints that are stored.
    """

    delay: float
    until_line: float
    until_exit: float
    presses: int
    code: int
    lines: list[str]
    saved: list[int]

    @property
    def good(self) -> bool:
        """Whether the line was there in time and the run ended as promised."""
        last_lines = [line for line in self.lines if line.startswith(LAST)]
        return self.code == 130 and last_lines == self.lines[-1:] and self.until_line <= TARGET_SECONDS


class Lines:
    """The lines of a stream, each with the time at which it came."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self.process = process
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, count: int, seconds: float) -> bool:
        """Return whether there are more than `count` lines, or the process ends, before this many seconds are over."""
        deadline = time.monotonic() + seconds
        while len(self.lines) <= count and self.process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


def interrupted(command: list[str], out: Path, delay: float, again: float) -> Try:
    """Start the command, press Ctrl-C after `delay` seconds, and once more `again` seconds after a notice."""
    with tempfile.TemporaryDirectory() as caches:
        folders = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **folders, "PYTHONPATH": path},
            start_new_session=True,
        )
        lines = Lines(process)
        time.sleep(delay)
        before, presses = len(lines.lines), 1
        pressed = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: compilers get it too
        lines.wait(before, 120.0)
        until_line = (lines.lines[before][0] if len(lines.lines) > before else time.monotonic()) - pressed
        if not lines.wait(before + 1, again):
            presses, pressed = 2, time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
        code = process.wait(120)
        until_exit = time.monotonic() - pressed
        lines.thread.join(10)
    files = out.glob("*/*/checkpoints/*/[0-9]*.sha256")
    saved = sorted(int(file.name.split(".")[0]) for file in files)
    return Try(delay, until_line, until_exit, presses, code, [line for _, line in lines.lines], saved)


def main() -> int:
    """Print a row for each try, and return 1 if one was not answered in time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=sorted(STUDIES), default="cpu")
    parser.add_argument("--study", help="the study that is run, by default alignment on a CPU, entropy-text on CUDA")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--delays", help="seconds from the start to Ctrl-C, separated by commas")
    parser.add_argument("--again", type=float, default=PATIENCE_SECONDS, help="seconds to the second Ctrl-C")
    options = parser.parse_args()
    study = options.study or STUDIES[options.device]
    delays = [float(delay) for delay in options.delays.split(",")] if options.delays else DELAYS[options.device]
    late = 0
    print(f"joma run {study} --preset {options.preset} --device {options.device}")
    print("  delay  until line  until exit  Ctrl-C  code  saved steps")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "joma", "run", study, "--preset", options.preset]
        command += ["--device", options.device, "--out", folder]
        command += [word for change in CHANGES.get(study, ()) for word in ("--set", change)]
        for index, delay in enumerate(delays):
            again = options.again if index % 2 else MAX_WAIT_SECONDS
            result = interrupted(command, Path(folder), delay, again)
            late += not result.good
            times = f"{delay:>5.1f} s {result.until_line:>9.2f} s {result.until_exit:>9.2f} s"
            verdict = "" if result.good else "  MISSED"
            print(f"{times} {result.presses:>7} {result.code:>5}  {result.saved}{verdict}")
            print(*(f"         | {line}" for line in result.lines), sep="\n", flush=True)
    print(f"{len(delays)} interrupts, {late} missed")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
