"""Engines: what a unit costs beside its work, the driver's memory, how soon all stops, and a sweep on two cores."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks import Row
from joma.engine import Engine, LocalEngine, Output, RayEngine, Unit
from joma.engine.connecting import LOOPBACK, on_loopback
from joma.memory import readable
from joma.progress import Progress

UNITS = 1000
SWEEP_UNITS, STEPS = 64, 500
PAGE = os.sysconf("SC_PAGE_SIZE")
DRIVER = "from benchmarks.engine import wait_in_engine; import sys; wait_in_engine(sys.argv[1])"


def nothing(out: Path, progress: Progress, *, number: int) -> Output:
    """Do no work."""
    del out, progress
    return Output(number)


def wait(out: Path, progress: Progress, *, number: int) -> Output:
    """Wait for a minute, one of two without regard to Ctrl-C; tell that it has begun, and in which process."""
    del progress
    if number == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    (out / f"{number}.part").write_text(str(os.getpid()))
    (out / f"{number}.part").rename(out / f"{number}.begun")
    time.sleep(60)
    return Output()


def wait_in_engine(folder: str) -> None:
    """Run two units that wait."""
    with LocalEngine(2) as engine:
        list(engine.run([Unit(str(n), "benchmarks.engine:wait", {"number": n}, Path(folder)) for n in range(2)]))


def seconds_a_unit(engine: Engine, count: int = UNITS) -> float:
    """Return the time of units without work, over their number; the start of processes is counted."""
    start = time.perf_counter()
    with engine:
        values = [result.value for result in engine.run(_units_without_work(count))]
    assert sorted(values) == list(range(count)), "every unit has one result"
    return (time.perf_counter() - start) / count


def memory_growth(engine: Engine, count: int) -> int:
    """Return by how many bytes this process grows at most while units without work run."""
    with engine:
        list(engine.run(_units_without_work(10)))  # what every use loads
        before = most = _resident_memory()
        for number, _ in enumerate(engine.run(_units_without_work(count))):
            if number % 50 == 0:
                most = max(most, _resident_memory())
    return most - before


def seconds_to_stop(number: signal.Signals) -> float:
    """Return the time from a signal to a driver, to its process group as a terminal does, to the end of its workers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", DRIVER, folder]
        driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        while len(files := list(Path(folder).glob("*.begun"))) < 2:
            time.sleep(0.01)
        workers = [int(file.read_text()) for file in files]
        start = time.perf_counter()
        os.killpg(driver.pid, number)
        while any(map(_is_running, workers)):
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        driver.wait()
    return seconds


def sweep_seconds(engine: Engine, count: int = SWEEP_UNITS) -> float:
    """Return the time of a sweep of `winner` in a fresh folder, without the start of the engine."""
    from joma.studies import load

    preset = load("winner").presets["quick"]
    with tempfile.TemporaryDirectory() as folder, engine:
        units = []
        for number in range(count):
            config = dataclasses.replace(preset.config, until=0.9 + 0.0014 * number, steps=STEPS, figure_3_steps=STEPS)
            fields = dataclasses.asdict(config)
            arguments = {"study": "winner", "preset": "quick", "config": fields, "seeds": preset.seeds}
            units.append(Unit(f"winner-{number}", "joma.units:run_study", arguments, Path(folder)))
        start = time.perf_counter()
        failures = [result.failure for result in engine.run(units) if result.failure is not None]
        seconds = time.perf_counter() - start
    assert not failures, failures[0].message
    return seconds


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    yield from local_rows()
    yield from ray_rows()


def local_rows() -> Iterator[Row]:
    """Yield the rows of the local engine."""
    overhead = 1000 * seconds_a_unit(LocalEngine(1))
    yield f"local engine: overhead a unit, {UNITS:,} units, one worker", "≤ 20 ms", f"{overhead:.2f} ms", overhead <= 20
    for count in (UNITS, 10 * UNITS):
        growth = memory_growth(LocalEngine(1), count)
        met = growth <= 20_000_000
        yield f"local engine: growth of the driver over {count:,} units", "≤ 20 MB", readable(growth), met
    for number, name, limit in ((signal.SIGINT, "Ctrl-C", 2), (signal.SIGKILL, "the driver is killed", 1)):
        seconds = seconds_to_stop(number)
        yield f"local engine: {name}, until all workers are gone", f"≤ {limit} s", f"{seconds:.2f} s", seconds <= limit
    speed_up = sweep_seconds(LocalEngine(1)) / sweep_seconds(LocalEngine(2))
    what = f"local engine: a sweep of {SWEEP_UNITS} units of `winner`, one worker over two"
    yield what, "≥ 1.8 x", f"{speed_up:.2f} x", speed_up >= 1.8


def ray_rows() -> Iterator[Row]:
    """Yield the rows of the Ray engine, on a cluster of two nodes with one core each; none where Ray is missing."""
    if find_spec("ray") is None:
        return
    with two_nodes() as address:
        overhead = 1000 * seconds_a_unit(RayEngine(address))
        yield f"Ray: overhead a unit, {UNITS:,} units, two nodes", "≤ 50 ms", f"{overhead:.2f} ms", overhead <= 50
        growth = memory_growth(RayEngine(address), 3 * UNITS)
        met = growth <= 50_000_000
        yield f"Ray: growth of the driver over {3 * UNITS:,} units", "≤ 50 MB", readable(growth), met
        speed_up = sweep_seconds(LocalEngine(1)) / sweep_seconds(RayEngine(address))
        what = f"Ray: a sweep of {SWEEP_UNITS} units of `winner`, one local worker over two nodes"
        yield what, "≥ 1.6 x", f"{speed_up:.2f} x", speed_up >= 1.6


@contextmanager
def two_nodes() -> Iterator[str]:
    """Start a Ray cluster of two nodes with one core each on loopback, yield its address, and stop it."""
    # Ray's processes find the modules that this one finds; nothing is sent to Ray's makers.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    folder = tempfile.mkdtemp(prefix="joma-ray-", dir="/tmp")
    Path(folder, "ray").mkdir()  # for the address of the newest cluster: a `Cluster` expects the folder to exist
    os.environ |= {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ["RAY_TMPDIR"] = folder
    ray, cluster_utils = import_module("ray"), import_module("ray.cluster_utils")
    options = {"num_cpus": 1, "object_store_memory": 200_000_000, "include_dashboard": False}
    with on_loopback(ray):
        head = {"node_ip_address": LOOPBACK, "temp_dir": folder, **options}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(node_ip_address=LOOPBACK, **options)
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _units_without_work(count: int) -> Iterator[Unit]:
    return (Unit(str(number), "benchmarks.engine:nothing", {"number": number}) for number in range(count))


def _is_running(process: int) -> bool:
    """Return whether a process runs; one that has ended is listed until its parent takes notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _resident_memory() -> int:
    return PAGE * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
