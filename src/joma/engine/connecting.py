"""Connect to a Ray cluster, or start Ray on this machine; a cluster that does not answer is named within seconds."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from joma.arguments import InputError, short_reason

ANSWER_SECONDS = 5.0
LOOPBACK = "127.0.0.1"  # with any other address, 127.0.0.2 too, Ray listens on all interfaces of the machine
# What a client of HTTP/2, which gRPC and Ray speak, sends first: the preface and an empty frame of settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_FRAME = 4
# A cluster that answers but refuses, such as one that asks for a token, is tried a few times only.
FAST_REFUSAL = {"RAY_gcs_server_port_wait_time_s": "4"}
MAX_FOLDER = 24  # characters of the temporary folder, as the names of sockets have 107 at most


@dataclass
class Connection:
    """A connection to Ray.

    Attributes:
        started: whether Ray was started for it, on this machine.
        close: ends it; what was started is stopped, and a cluster or a connection that was there before stays.
    """

    started: bool
    close: Callable[[], None]


def import_ray() -> ModuleType:
    """Return the module of Ray; raise `InputError` if it is not installed."""
    try:
        import ray
    except ImportError as cause:
        remedy = "pip install 'joma[ray]', or choose the local engine"
        raise InputError(
            "engine", "local, or ray where it is installed", f"ray ({short_reason(cause)})", remedy
        ) from None
    return ray


def connect(ray: ModuleType, address: str | None) -> Connection:
    """Connect to the cluster at `address`; without one, use the connection that is there, or start Ray here."""
    if ray.is_initialized():
        if address not in (None, "auto", ray.get_runtime_context().gcs_address):
            present = ray.get_runtime_context().gcs_address
            remedy = "call `ray.shutdown()` first"
            raise InputError("--address", f"{present}, which this process is connected to", address, remedy)
        return Connection(False, lambda: None)
    with _signals_unchanged():
        connection = _start(ray) if address is None else _join(ray, address)
    _silence(ray)
    return connection


def start_actor(ray: ModuleType, kind: type) -> Any:
    """Start an actor that takes no core, on the machine of this process if it may choose, and return its handle."""
    return ray.remote(num_cpus=0, max_restarts=-1)(kind).remote()


def _silence(ray: ModuleType) -> None:
    """Keep Ray from printing on standard output, where results are, what went wrong on workers: results say that.

    `log_to_driver=False` covers what workers print, but not what Ray itself says of them.
    """
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _start(ray: ModuleType) -> Connection:
    """Start Ray on this machine, where nobody else can reach it."""
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="joma-ray-", dir=parent if len(parent) <= MAX_FOLDER else "/tmp")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False, "_temp_dir": folder}

    def close() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        with on_loopback(ray):
            options["_node_ip_address"] = LOOPBACK
            ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as cause:
        close()
        raise InputError(
            "engine", "one that starts here", f"ray ({short_reason(cause)})", "use --engine local"
        ) from None
    return Connection(True, close)


@contextmanager
def on_loopback(ray: ModuleType) -> Iterator[None]:
    """Let Ray be started at `LOOPBACK`, which `ray.init` would replace by an address that other machines reach."""
    services = ray._private.services
    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolve


def _join(ray: ModuleType, address: str) -> Connection:
    """Connect to the cluster at `address`."""
    try:
        with on_loopback(ray) if _only_on_loopback(ray, address) else nullcontext():
            host, port = _place(ray, address)
            problem = "" if _speaks_http2(host, port) else f"no Ray at {host}:{port}"
            if not problem:
                with _environment(FAST_REFUSAL):
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as cause:
        ray.shutdown()
        problem = short_reason(cause)
    if problem:
        expected, remedy = "the address of a Ray cluster that answers", "check it with `ray status`, or start one with"
        remedy = f"{remedy} `ray start --head`; if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        raise InputError("--address", expected, f"{address!r} ({problem})", remedy)
    return Connection(False, ray.shutdown)


def _only_on_loopback(ray: ModuleType, address: str) -> bool:
    """Return whether a cluster is at `LOOPBACK` alone, where Ray would look for it at this machine's other address."""
    host, _, port = address.rpartition(":")
    if host != LOOPBACK or not port.isdigit():
        return False
    other, _ = _place(ray, address)
    with suppress(OSError), socket.create_connection((other, int(port)), ANSWER_SECONDS):
        return False
    return other != LOOPBACK


def _place(ray: ModuleType, address: str) -> tuple[str, int]:
    """Return the host and the port that an address means; raise `ConnectionError` if there is none, as for "auto"."""
    if address.startswith("ray://"):
        place = address.removeprefix("ray://").partition("/")[0]
    else:
        place = ray._private.services.canonicalize_bootstrap_address(address)
        if place is None:
            raise ConnectionError("no cluster was found on this machine")
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def _speaks_http2(host: str, port: int) -> bool:
    """Return whether a server answers as gRPC does; Ray itself tries for minutes."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        with socket.create_connection((host, port), ANSWER_SECONDS):
            return True
    with socket.create_connection((host, port), ANSWER_SECONDS) as connection:
        connection.sendall(PREFACE)
        frame = connection.recv(9)
    return len(frame) > 3 and frame[3] == SETTINGS_FRAME


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment that are not set, for the time of the block."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= new
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextmanager
def _signals_unchanged() -> Iterator[None]:
    """Restore what SIGTERM does, which `ray.init` changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
