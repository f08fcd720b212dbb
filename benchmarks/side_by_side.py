"""Studies side by side: the wall time of `joma run --jobs 2` over that of `--jobs 1`, on two cores that are free."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from benchmarks import Row

TARGET = 0.6


def seconds(jobs: int, studies: Sequence[str] = ()) -> float:
    """Return the wall time of quick studies, `jobs` at a time, from the start of the command to its end.

    No names mean all studies.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "joma", "run", *studies, "--jobs", str(jobs), "--out", out, "--json"]
        start = time.perf_counter()
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)
        elapsed = time.perf_counter() - start
    assert done.returncode < 2, f"joma run ended with exit code {done.returncode}"
    return elapsed


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    sequential, parallel = seconds(1), seconds(2)
    what = "all quick studies, two at a time, over one at a time"
    yield what, f"≤ {TARGET:.0%}", f"{parallel / sequential:.0%} of {sequential:.0f} s", parallel / sequential <= TARGET
