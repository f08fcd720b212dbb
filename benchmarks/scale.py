"""`python -m benchmarks.scale`: measure what the model of `docs/scale.md` is fitted to, and write `docs/scale.json`.

Then `python docs/make_scale.py` writes the page. Nothing here has a target; the rows of `engine` and `probing` do.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.probing import COUNT, LAYERS, VOCABULARY, WIDTH, times_by_workers, write_series
from joma.engine import Engine, LocalEngine, Output, Unit
from joma.progress import Progress

FILE = Path(__file__).parents[1] / "docs" / "scale.json"
EMPTY_COUNTS = (100, 400, 1000)  # units without work, by which the start and the overhead of a unit are told apart
WINNER_COUNT = 24
WORKERS = (1, 2)


def nothing(out: Path, progress: Progress) -> Output:  # noqa: ARG001 (the signature of a unit)
    """Do no work."""
    return Output(0)


@contextmanager
def local_engine(workers: int) -> Iterator[Engine]:
    """Yield a local engine."""
    with LocalEngine(workers) as engine:
        yield engine


@contextmanager
def ray_engine(workers: int) -> Iterator[Engine]:
    """Yield an engine on a Ray cluster of one node with as many cores as workers, on loopback."""
    from joma.engine import RayEngine
    from joma.engine.connecting import LOOPBACK, import_ray, on_loopback

    ray = import_ray()
    with tempfile.TemporaryDirectory(prefix="joma-", dir="/tmp") as folder:  # the names of sockets must be short
        options: dict[str, Any] = {"_node_ip_address": LOOPBACK, "_temp_dir": folder, "include_dashboard": False}
        with on_loopback(ray):
            ray.init("local", num_cpus=workers, log_to_driver=False, logging_level=logging.ERROR, **options)
        try:
            with RayEngine() as engine:
                yield engine
        finally:
            ray.shutdown()


def time_units(open_engine: Callable[[int], Any], workers: int, units: list[Unit]) -> dict[str, float]:
    """Run units, and return the time with and without the engine's start, and the driver's processor time."""
    with open_engine(workers) as engine:
        start, before = time.perf_counter(), time.process_time()
        results = list(engine.run(units))
        seconds, driver = time.perf_counter() - start, time.process_time() - before
    failures = [result.failure.message for result in results if result.failure is not None]
    assert not failures, failures[0]
    work = sum(result.seconds for result in results) / len(units)
    return {"units": len(units), "workers": workers, "seconds": seconds, "driver_seconds": driver, "work_seconds": work}


def empty_units(count: int) -> list[Unit]:
    """Return units without work."""
    return [Unit(f"empty-{number}", "benchmarks.scale:nothing") for number in range(count)]


def winner_units(folder: Path, count: int = WINNER_COUNT) -> list[Unit]:
    """Return units of the study `winner` that differ in one field of its config."""
    from joma.studies import load

    preset = load("winner").presets["quick"]
    units = []
    for number in range(count):
        config = dataclasses.asdict(dataclasses.replace(preset.config, until=0.9 + 0.0014 * number))
        arguments = {"study": "winner", "preset": "quick", "config": config, "seeds": preset.seeds}
        units.append(Unit(f"winner-{number}", "joma.units:run_study", arguments, folder))
    return units


def measure_engine(open_engine: Callable[[int], Any]) -> dict[str, list[dict[str, float]]]:
    """Return the times of units without work and of units of `winner`, for one and two workers."""
    empty = [time_units(open_engine, workers, empty_units(count)) for workers in WORKERS for count in EMPTY_COUNTS]
    winner = []
    for workers in WORKERS:
        with tempfile.TemporaryDirectory() as folder:
            winner.append(time_units(open_engine, workers, winner_units(Path(folder))))
    return {"empty": empty, "winner": winner}


def measure_transfer() -> dict[str, float]:
    """Return the size of a result, and the times to read and check it, and to check and write it elsewhere."""
    from joma.transport import pack, unpack

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        with local_engine(1) as engine:
            (result,) = engine.run(winner_units(Path(folder), count=1))
        path, packing, unpacking, size = Path(result.value["path"]), [], [], 0
        for number in range(5):
            start = time.perf_counter()
            files = pack(path)
            packed = time.perf_counter()
            unpack(files, Path(other) / str(number))
            packing.append(packed - start)
            unpacking.append(time.perf_counter() - packed)
            size = sum(map(len, files.values()))
    return {"bytes": size, "pack_seconds": min(packing), "unpack_seconds": min(unpacking)}


def measure_checkpoint() -> dict[str, float]:
    """Return the size of a checkpoint, the times to measure it on one thread, and the size of the measurements."""
    import torch

    from joma.progress import SILENT
    from joma.watch import Checkpoints
    from joma.watch.checkpoint_units import measure_checkpoint

    torch.set_num_threads(1)
    tokens = (torch.arange(8 * 256) % 256).reshape(8, 256).tolist()
    requests: dict[str, dict[str, Any]] = {
        "audit": {"name": "audit"},
        "weights": {"name": "weights"},
        "attention": {"name": "attention", "tokens": tokens, "measures": ["entropy", "sink_mass"]},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_series(Path(folder), count=1)
        series = Checkpoints(folder)
        address, measured = series.address(series[0]), {"bytes": float(series[0].size), "result_bytes": 0.0}
        for name, request in requests.items():
            seconds, outputs = [], []
            for _ in range(3):
                start = time.perf_counter()
                outputs.append(measure_checkpoint(Path(), SILENT, address=address, measures=[request]))
                seconds.append(time.perf_counter() - start)
            measured[f"{name}_seconds"] = min(seconds)
            measured["result_bytes"] += len(json.dumps(outputs[0].value))
    return {**measured, "layers": LAYERS, "width": WIDTH, "vocabulary": VOCABULARY}


def machine() -> dict[str, Any]:
    """Return what was measured on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    names = {"processor": model, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    return {**names, "python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}


def rounded(value: Any) -> Any:
    """Return numbers with four significant digits, in whatever structure."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    """Measure everything and write the file; without Ray its numbers are left as they are."""
    numbers = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    numbers["machine"] = machine()
    engines = {"local": local_engine}
    if importlib.util.find_spec("ray"):
        engines["ray"] = ray_engine
    else:
        print("Ray is not installed; its numbers are kept", file=sys.stderr)
    for name, open_engine in engines.items():
        numbers[name] = measure_engine(open_engine)
        print(f"{name}: done", file=sys.stderr, flush=True)
    numbers["transfer"] = measure_transfer()
    numbers["checkpoint"] = measure_checkpoint()
    numbers["probing"] = [
        {"units": COUNT, "workers": workers, "seconds": seconds} for workers, seconds in times_by_workers().items()
    ]
    FILE.write_text(json.dumps(rounded(numbers), indent=2) + "\n", encoding="utf-8")
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
