"""What it costs to check a run while it is opened.

A run of 1 GB is opened with and without the check of its checksums, and its file is read once in blocks, all from the
page cache. The three take turns, and medians are compared. Before each, as much memory is used and freed: memory that
the machine first has to provide can take longer than everything that is measured here.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import xarray as xr

from joma.runs import TRAJECTORY, Description, Run, StoredClaims, finish, open_run

GIGABYTE = 10**9
BLOCK = 1 << 24
REPEATS = 9
TARGET = 0.05


def rows() -> Iterator[tuple[str, str, str, bool]]:
    """Yield what the check adds to opening a run of 1 GB, beyond reading the file once and in all."""
    with tempfile.TemporaryDirectory(prefix="joma-benchmark-") as out:
        path = store_run(Path(out), GIGABYTE)
        times = measure(path)
    unchecked, checked, reading = (median(times[name]) for name in ("unchecked", "checked", "reading"))
    beyond, added = (checked - unchecked - reading) / unchecked, (checked - unchecked) / unchecked
    what = f"checking a run of 1 GB while opening it ({unchecked:.2f} s), beyond reading it once ({reading:.2f} s)"
    yield what, f"< {TARGET:.0%}", f"{beyond:+.1%}", beyond < TARGET
    yield "  the same, in all", "none", f"{added:+.1%}", True


def store_run(out: Path, size: int) -> Path:
    """Write a finished run of about `size` bytes in two arrays of float64, and return its folder."""
    seeds, length = 5, size // (2 * 5 * 8)
    generator = np.random.default_rng(0)
    arrays = {name: (("seed", "step"), generator.standard_normal((seeds, length))) for name in ("entropy", "loss")}
    run = Run(out, "storage", 1, {"steps": length}, range(seeds))
    run.begin("quick")
    run.save(xr.Dataset(arrays, {"seed": range(seeds)}), device="cpu", wall_time=1.0)
    finish(run.path, StoredClaims([], Description("Storage", "none", "A large run."), 1.0))
    return run.path


def measure(path: Path) -> dict[str, list[float]]:
    """Return the times of each way to read the run, `REPEATS` of each after one that is not counted."""
    ways: dict[str, Callable[[], object]] = {
        "unchecked": lambda: open_run(path, check=False),
        "checked": lambda: open_run(path),
        "reading": lambda: read_once(path / TRAJECTORY),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, read in ways.items():
            gc.collect()
            np.ones(GIGABYTE // 8)
            start = time.perf_counter()
            read()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def read_once(file: Path) -> None:
    """Read a file in blocks into the same memory."""
    block = bytearray(BLOCK)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(block):
            pass
