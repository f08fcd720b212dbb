"""Fresh draws of every property test, in bounded time; what fails is printed as code to paste into a test.

In `make check` the examples of property tests are always the same. Here the test files that use hypothesis run with new
ones, in an order drawn anew, until the time is used up. The plugin below, active in these runs alone, ends a test that
takes too long, and the whole run when its time is over.

    python -m robustness.torture_draws [SECONDS]      (with tests/ on the path)
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 1200.0  # of the whole run at scale 1: enough for all files on an idle machine
TEST_SECONDS = 60.0  # of processor time for one test
TEST_SECONDS_VARIABLE = "JOMA_TORTURE_TEST_SECONDS"  # the environment variable that overrides it
COLLECTION_SECONDS = 120  # of processor time to import a file
# How hypothesis writes a failing draw; older versions call it a falsifying example.
FAILING_DRAW = re.compile(
    r"^\s*(?:Failing test case|Falsifying example): (?P<test>[^\s(]+)\((?P<arguments>.*?)^\s*\)\s*$",
    re.MULTILINE | re.DOTALL,
)
ENDS = "JOMA_TORTURE_ENDS"  # the environment variable with the time at which no new test starts


class SlowTestError(BaseException):
    """A property test has used up its processor time; not an `Exception`, which hypothesis would try to reproduce."""


def _draw(item: Any, frame: FrameType | None) -> str:
    """Return the arguments that hypothesis has drawn for a running test, as code, from its stack frame."""
    test = item.obj.hypothesis.inner_test
    while frame is not None and frame.f_code is not test.__code__:
        frame = frame.f_back
    if frame is None:
        return ""
    names = test.__code__.co_varnames[: test.__code__.co_argcount + test.__code__.co_kwonlyargcount]
    return ", ".join(f"{name}={frame.f_locals[name]!r}" for name in names if name not in item.fixturenames)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Bound the processor time of a test; when the time of the run is over, let this test be the last."""
    if time.time() > float(os.environ.get(ENDS, "inf")):
        item.session.shouldstop = "the time of the run is over"
    limit = float(os.environ.get(TEST_SECONDS_VARIABLE, TEST_SECONDS))

    def give_up(_number: int, frame: FrameType | None) -> None:
        draw = f"Failing test case: {item.name}(\n{_draw(item, frame)}\n)\n"
        raise SlowTestError(f"slower than {limit:g} s\n{draw}")

    previous = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        outcome = yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    if isinstance(outcome.exception, SlowTestError):
        outcome.force_exception(pytest.fail.Exception(str(outcome.exception)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the property tests alone."""
    items[:] = [item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]


def property_tests() -> list[Path]:
    """Return the test files that use hypothesis."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if re.search(r"^from hypothesis import", file.read_text("utf-8"), re.MULTILINE)]


def examples(output: str) -> list[str]:
    """Return the failing draws in pytest's output, each as a decorator to put on its test.

    >>> examples("E   Failing test case: test_a(\\nE       x=0.5,  # or any other value\\nE   )\\nE   You can ...")
    ['@example(x=0.5)  # for test_a']
    """
    text = re.sub(r"^E ?", "", output, flags=re.MULTILINE)
    draws = []
    for match in FAILING_DRAW.finditer(text):
        lines = (line.partition("  # ")[0].strip() for line in match["arguments"].splitlines())
        arguments = " ".join(line for line in lines if line).removesuffix(",")
        draws.append(f"@example({arguments})  # for {match['test']}")
    return draws + re.findall(r"@reproduce_failure\('[^']*', b'[^']*'\)", text)


def run(file: Path, ends: float) -> tuple[Counter[str], str]:
    """Run the property tests of one file with fresh draws; return the counts of outcomes and the output."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, ENDS: str(ends), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "robustness.torture_draws"]
    command += ["--hypothesis-profile=fresh", "--tb=short", "-rN", str(file)]
    with tempfile.TemporaryDirectory() as folder:
        environment["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        limit = max(60.0, ends - time.time() + COLLECTION_SECONDS)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as cause:
            return Counter(errors=1), f"{file.name} did not end: {cause}"
    summary = done.stdout.rstrip().rpartition("\n")[2]
    counts = Counter({word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", summary)})
    if done.returncode not in (0, 1, 2, 5) or (
        done.returncode == 2 and not counts and "time of the run" not in done.stdout
    ):
        counts["error"] += 1
    return counts, done.stdout + done.stderr


def torture(scale: float) -> dict[str, int]:
    """Draw anew for the property tests of all files, or of as many as fit into twenty minutes at scale 1."""
    files, ends, counts, ran = property_tests(), time.time() + SECONDS * scale, Counter(), 0
    random.Random().shuffle(files)
    for file in files:
        if time.time() > ends:
            break
        outcome, output = run(file, ends)
        counts, ran = counts + outcome, ran + 1
        if outcome["failed"] or outcome["error"] or outcome["errors"]:
            print(f"# {file.relative_to(ROOT)}\n{output[-6000:]}", flush=True)  # noqa: T201
            print("\n".join(f"paste this: {line}" for line in examples(output)), flush=True)  # noqa: T201
    return {
        "files of property tests": ran,
        "files left for another time": len(files) - ran,
        "property tests with fresh draws": counts["passed"] + counts["failed"],
        "failed": counts["failed"] + counts["error"] + counts["errors"],
    }


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    print(torture(seconds / SECONDS))  # noqa: T201
