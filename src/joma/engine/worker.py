"""The process that performs units for the local engine, one after the other, until the engine is gone.

Signals reach the main thread, which performs units; a second thread reads from the engine. When the connection closes
or the engine's process is gone, that thread ends this process and its children at once, whatever the main thread does:
files are written whole, so that does no damage.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

from joma.engine.messages import Decoder, GarbledError, Message, encode
from joma.engine.performing import INTERRUPTED, describe, perform
from joma.engine.unit import Result, Unit
from joma.progress import Progress, Task

PARENT_SECONDS = 0.5  # between two looks whether the engine's process is there
REPORT_SECONDS = 0.1  # between two reports of a task's progress
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(handle: int, parent: int) -> NoReturn:
    """Perform the units that arrive at the socket `handle` from the process `parent`."""
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    worker = Worker(socket.socket(fileno=handle), parent)
    for number in SIGNALS:
        signal.signal(number, worker.interrupt)
    warnings.showwarning = worker.warn  # type: ignore[assignment]
    threading.Thread(target=worker.listen, name="listener", daemon=True).start()
    worker.send({"kind": "ready"})
    worker.work()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Worker:
    """Performs units, and reports to the engine.

    Args:
        connection: the socket to the engine.
        parent: the process of the engine.
    """

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self.connection, self.parent = connection, parent
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.in_send = self.interrupted_in_send = False
        self.is_performing = self.was_interrupted = False

    def work(self) -> None:
        """Perform units until one is interrupted: what that has left behind in this process is unknown."""
        while True:
            order = self.orders.get()
            result = self.carry_out(order)
            outcome = {"value": result.value, "seconds": result.seconds}
            self.send({"kind": "result", **outcome, "failure": result.failure and asdict(result.failure)})
            if result.failure == INTERRUPTED:
                return

    def carry_out(self, order: Message) -> Result:
        """Perform the unit of an order with its working folder and its number of threads."""
        unit, start = Unit.from_json(order["unit"]), time.perf_counter()
        try:
            self.is_performing = True
            if self.was_interrupted:  # before the order came
                raise KeyboardInterrupt
            os.chdir(order["folder"])
            set_threads(order["cores"])
            result, _ = perform(unit, progress=SentProgress(self))
        except KeyboardInterrupt:
            result = Result(unit, failure=INTERRUPTED, seconds=time.perf_counter() - start)
        except OSError as problem:  # the working folder is gone
            result = Result(unit, failure=describe(problem))
        finally:
            self.is_performing = False
        sys.stdout.flush()
        return result

    def interrupt(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (the signature of a handler)
        """Raise KeyboardInterrupt in the unit that runs, but not in the midst of a message."""
        self.was_interrupted = True
        if self.in_send:
            self.interrupted_in_send = True
        elif self.is_performing:
            self.is_performing = False
            raise KeyboardInterrupt

    def send(self, message: Message) -> None:
        """Send a message to the engine; end this process if it is gone."""
        line, main_thread = encode(message), threading.current_thread() is threading.main_thread()
        with self.sending:
            self.in_send = main_thread
            try:
                self.connection.sendall(line)
            except OSError:
                leave()
            finally:
                self.in_send = False
        if main_thread and self.interrupted_in_send:
            self.interrupted_in_send = False
            self.interrupt(signal.SIGINT, None)

    def warn(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        """Send a warning; the signature is that of `warnings.showwarning`."""
        self.send({"kind": "warning", "message": str(message), "category": category.__name__})

    def listen(self) -> None:
        """Queue what the engine sends; end this process when the engine is gone."""
        decoder = Decoder()
        while True:
            if not select.select([self.connection], [], [], PARENT_SECONDS)[0]:
                if os.getppid() != self.parent:
                    leave()
                continue
            try:
                piece = self.connection.recv(2**16)
                orders = decoder.feed(piece)
            except (OSError, GarbledError):
                leave()
            if not piece:
                leave()
            for order in orders:
                self.orders.put(order)


class SentProgress(Progress):
    """Progress that is sent to the engine, which shows it."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.numbers = worker, itertools.count()

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        """Announce `total` units of work to the engine."""
        task = SentTask(self.worker, next(self.numbers))
        task.report(label=label, total=int(total))
        try:
            yield task
        finally:
            task.report(ended=True)


class SentTask(Task):
    """A task whose counts are sent to the engine, not more often than every `REPORT_SECONDS`."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number
        self.done = self.skipped = 0
        self.note = ""
        self.report_time = 0.0

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        self.report_if_due()

    def skip(self, amount: int) -> None:
        self.skipped += amount
        self.report_if_due()

    def say(self, note: str) -> None:
        self.note = str(note)
        self.report_if_due()

    def report_if_due(self) -> None:
        """Send the counts if the last ones were sent long enough ago."""
        if time.monotonic() - self.report_time >= REPORT_SECONDS:
            self.report()

    def report(self, **fields: Any) -> None:
        """Send the counts, and other fields beside them."""
        self.report_time = time.monotonic()
        counts = {"done": int(self.done), "skipped": int(self.skipped), "note": self.note}
        self.worker.send({"kind": "task", "number": self.number, **counts, **fields})


def set_threads(cores: int) -> None:
    """Give torch as many threads as a unit has cores, if it is imported.

    The environment variables that the engine started this process with do the same if it is imported later.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != cores:
        torch.set_num_threads(cores)


def leave() -> NoReturn:
    """End this process and its children at once."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
