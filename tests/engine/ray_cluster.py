"""A Ray cluster of two machines with one core each, on loopback, and units for it; everything is stopped at the end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from joma.engine import Needs, Output, Unit
from joma.engine.connecting import LOOPBACK, on_loopback
from joma.manifest import write_manifest

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine takes long to start one
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
}
FAST_DETECTION = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


@contextmanager
def environment(**further: str) -> Iterator[None]:
    """Set the variables of Ray; its processes find the modules that this one finds."""
    variables = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **further}
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def two_nodes() -> Iterator:
    """Start a head, where the driver is, and a second node; stop both, and check that nothing of them is left."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="joma-test-", dir="/tmp")
    Path(folder, "ray").mkdir()  # for the address of the newest cluster: a `Cluster` expects the folder to exist
    with environment(RAY_TMPDIR=folder), on_loopback(ray):
        options = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        head = {"node_ip_address": LOOPBACK, "temp_dir": folder, "_system_config": FAST_DETECTION, **options}
        cluster = None
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head)
            add_worker(cluster)
            yield cluster
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            left = wait_for_no_process(folder)
            shutil.rmtree(folder, ignore_errors=True)
            assert not left


def add_worker(cluster):
    return cluster.add_node(num_cpus=1, node_ip_address=LOOPBACK, object_store_memory=80 * 2**20)


def wait_for_no_process(word: str, seconds: float = 20) -> list[str]:
    """Wait until no process has `word` in its command line; return those that still have it."""
    deadline = time.monotonic() + seconds
    while (left := commands_with(word)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def commands_with(word: str) -> list[str]:
    commands = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit():
                commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in commands if word in command]


def unit(name, function, /, *, out=Path("runs"), needs=None, **arguments):
    return Unit(name, f"engine.ray_cluster:{function}", arguments, Path(out), needs or Needs())


def store(out, progress, *, name, number, counts="", seconds=0.0):
    """Write a folder with its manifest; leave a file in `counts` for every execution."""
    if counts:
        (Path(counts) / f"{name}.{uuid.uuid4().hex}").touch()
    with progress.task("numbers", total=10) as task:
        for _ in range(10):
            time.sleep(seconds / 10)
            task.advance()
    folder = Path(out) / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.txt").write_text(" ".join(str(number * power) for power in range(1000)))
    write_manifest(folder, {"name": name, "number": number}, ["numbers.txt"])
    return Output({"number": number, "path": str(folder)}, (name,))


def refuse(out, progress, *, text):
    """Raise an error that the unit does not handle."""
    del out, progress
    raise RuntimeError(text)


def die_at_first(out, progress, *, name, counts, times=1):
    """Kill the process that performs it, the first few times."""
    del out, progress
    (Path(counts) / f"{name}.{uuid.uuid4().hex}").touch()
    if executions(Path(counts))[name] <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return Output("survived")


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def executions(counts: Path) -> dict[str, int]:
    """How often each unit was executed."""
    names = [path.name.partition(".")[0] for path in counts.iterdir()]
    return {name: names.count(name) for name in sorted(set(names))}
