"""`make torture`: run the long part of every harness in this folder and print one table of what was tried.

A harness is a module here with a function `torture(scale) -> dict[str, int]`: what was tried and how often, at `scale`
times the usual number. It fails by raising an error, or by a count above zero whose name contains the word "failed" or
"failures". Every harness runs in a process of its own, so that none can spoil or end another.

    python -m robustness [--scale 0.1] [--jobs 2] [NAME ...]      (with tests/ on the path)
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

FOLDER = Path(__file__).parent
FAILURE = re.compile(r"\b(failed|failures)\b")


@dataclass(frozen=True)
class Result:
    """What a harness has counted, the error that ended it if one did, and how long it took."""

    name: str
    counts: dict[str, int]
    error: str
    seconds: float

    @property
    def failures(self) -> int:
        return bool(self.error) + sum(count for what, count in self.counts.items() if FAILURE.search(what))


def harnesses() -> Iterator[str]:
    """Yield the names of the modules that define `torture`; nothing is imported."""
    for file in sorted(FOLDER.glob("*.py")):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        if any(isinstance(node, ast.FunctionDef) and node.name == "torture" for node in body):
            yield file.stem


def run(name: str, scale: float) -> Result:
    """Run one harness in this process."""
    start, counts, error = time.perf_counter(), {}, ""
    try:
        counts = {what: int(count) for what, count in import_module(f"robustness.{name}").torture(scale).items()}
    except Exception:
        error = traceback.format_exc()
    return Result(name, counts, error, time.perf_counter() - start)


def run_apart(name: str, scale: float) -> Result:
    """Run one harness in a new process; a process that dies is a failure too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        try:
            return executor.submit(run, name, scale).result()
        except Exception as cause:
            return Result(name, {}, f"{type(cause).__name__}: {cause}\n", 0.0)


def describe(result: Result) -> str:
    """Return the counts of a harness as lines of text."""
    lines = [f"{result.name}: {result.failures} failures, {result.seconds:.0f} s"]
    lines += [f"    {what}: {count:,}" for what, count in result.counts.items()]
    return "\n".join([*lines, result.error]) if result.error else "\n".join(lines)


def table(results: list[Result]) -> str:
    """Return the table of all counts."""
    rows = [(result.name, what, f"{count:,}") for result in results for what, count in result.counts.items()]
    rows += [(result.name, "failures", f"{result.failures:,}") for result in results]
    rows.sort(key=lambda row: row[0])
    heading = ("harness", "what was tried", "count")
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(3)]
    lines = [f"| {a:<{widths[0]}} | {b:<{widths[1]}} | {c:>{widths[2]}} |" for a, b, c in [heading, *rows]]
    lines.insert(1, f"| {'-' * widths[0]} | {'-' * widths[1]} | {'-' * (widths[2] - 1)}: |")
    return "\n".join(lines)


def main() -> int:
    """Run the chosen harnesses, all if none is named, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="robustness", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(harnesses())}")
    parser.add_argument("--scale", type=float, default=1.0, help="how much is tried, 1 as usual")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many harnesses run at a time")
    options = parser.parse_args()
    if unknown := set(options.names) - set(harnesses()):
        parser.error(f"unknown harness {', '.join(sorted(unknown))}; known are {', '.join(harnesses())}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MPLBACKEND", "agg")
    results: list[Result] = []
    with ThreadPoolExecutor(options.jobs) as threads:
        pending: list[Future[Result]] = [
            threads.submit(run_apart, name, options.scale) for name in options.names or harnesses()
        ]
        for future in as_completed(pending):
            results.append(future.result())
            print(describe(results[-1]), flush=True)  # noqa: T201
    failures = sum(result.failures for result in results)
    print(f"\n{table(results)}\n\n{failures} failures", flush=True)  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    from robustness.__main__ import main as start  # new processes can import this name, and not `__main__`

    sys.exit(start())
