"""The thread that looks after the worker processes of the local engine.

All of the state here belongs to that thread. Other threads give it commands, and read the events that it queues.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from joma import memory
from joma.arguments import short_reason
from joma.engine.display import Report
from joma.engine.messages import GarbledError, Message
from joma.engine.performing import INTERRUPTED
from joma.engine.processes import Binding, WorkerProcess, describe_end
from joma.engine.scheduling import Grant, Machine, Schedule
from joma.engine.unit import Failure, Result, Unit
from joma.terminal import printable

LOOK_SECONDS = 0.5  # between two looks at the memory of workers, and whether they live
SAVE_SECONDS = 1.4  # for a cancelled unit to save what it can; it is ended then
MAX_UNREAD = 1000  # events; while more are unread, no unit starts and no progress is passed on


Event = Result | Report | BaseException


class WorkerPool:
    """Worker processes, the schedule of their units, and the thread that looks after them.

    Args:
        machine: what the units share.
        folder: the working folder of the units.
    """

    def __init__(self, machine: Machine, folder: str) -> None:
        self.folder = folder
        self._submitted = self._ended = 0  # units; one number a thread, as threads share no lock
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._schedule = Schedule(machine)
        self._workers: list[WorkerProcess] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._awake)
        self._deadline: float | None = None  # when units that were cancelled are ended
        self._cancelled: list[threading.Event] = []  # to be set when they have ended
        self._look_time = 0.0
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="worker pool", daemon=True)
        self._thread.start()

    def use(self, machine: Machine) -> None:
        """Let the units share this machine from now on."""
        self._command(lambda: setattr(self._schedule, "machine", machine))

    def submit(self, unit: Unit) -> None:
        """Queue a unit."""
        self._submitted += 1
        self._command(lambda: self._schedule.submit(unit))

    def cancel(self) -> None:
        """Cancel all units, and return when none runs any more."""
        cancelled = threading.Event()
        self._command(lambda: self._cancel(cancelled))
        while not cancelled.wait(0.1) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """End all processes and the thread."""
        self._command(self._stop)
        self._thread.join()

    def read(self) -> Iterator[Event]:
        """Yield events until all units have ended.

        They are not counted here: Ctrl-C may come between two instructions, and an event be lost by it.
        """
        # The queue is looked at last: what is put into it is there before its unit counts as ended.
        while (self._submitted > self._ended and self._thread.is_alive()) or not self.events.empty():
            with suppress(queue.Empty):
                event = self.events.get(timeout=LOOK_SECONDS)
                if self.events.qsize() == MAX_UNREAD - 1:
                    self._command(lambda: None)  # units may start again
                yield event

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with suppress(BlockingIOError, OSError):  # full: it will wake up anyway; closed: it has ended
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        try:
            while self._is_open:
                for key, _ in self._selector.select(self._timeout()):
                    key.data()
                while self._commands:
                    self._commands.popleft()()
                self._look_after_workers(time.monotonic())
                self._start_units()
        except BaseException as problem:
            self.events.put(problem)
        finally:
            self._release()

    def _timeout(self) -> float | None:
        busy = any(worker.grant is not None for worker in self._workers)
        return None if not busy else 0.05 if self._deadline is not None else LOOK_SECONDS

    def _awake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_reader.recv(2**16)

    def _start_units(self) -> None:
        while self._deadline is None and self.events.qsize() < MAX_UNREAD:
            grant = self._schedule.start()
            if grant is None:
                return
            try:
                worker = self._worker_for(grant)
            except OSError as problem:  # no memory, or too many processes or files
                self._end_unit(grant, Result(grant.unit, failure=_cannot_start(short_reason(problem))))
            else:
                worker.perform(grant, self.folder)
                self._listen(worker)

    def _worker_for(self, grant: Grant) -> WorkerProcess:
        """Return an idle worker that is bound to what was granted, or a new one in place of an idle one."""
        binding = Binding(grant.cores, grant.devices)
        idle = [worker for worker in self._workers if worker.grant is None]
        for worker in idle:
            if worker.binding == binding and not worker.has_ended:
                return worker
        if idle and len(self._workers) >= self._schedule.machine.jobs:
            self._remove(idle[0])
        worker = WorkerProcess(binding)
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, lambda: self._serve(worker))
        self._selector.register(worker.output, selectors.EVENT_READ, lambda: self._read_output(worker))
        return worker

    def _listen(self, worker: WorkerProcess) -> None:
        """Wait until the worker sends something or, if something is left to send, takes it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.has_unsent else 0)
        key = self._selector.get_key(worker.connection)
        if key.events != events:
            self._selector.modify(worker.connection, events, key.data)

    def _serve(self, worker: WorkerProcess) -> None:
        """Send what is left to send to a worker, and take what it has sent; replace it if it has ended."""
        if worker not in self._workers:  # removed by an event of the same moment
            return
        worker.send_rest()
        self._listen(worker)
        self._read_output(worker)  # what the unit has printed comes before its result
        try:
            messages, is_open = worker.receive()
            for message in messages:
                self._take(worker, message)
        except GarbledError as problem:
            reason = f"its process sent something that is no message ({short_reason(problem)}); run it again."
            worker.end_reason = worker.end_reason or Failure("lost", reason)
            is_open = False
        if not is_open:
            self._lose(worker)

    def _take(self, worker: WorkerProcess, message: Message) -> None:
        grant, kind = worker.grant, message.get("kind")
        if kind == "ready":
            worker.is_ready = True
        elif kind == "result" and grant is not None:
            result = _result(grant.unit, message)
            worker.grant = None
            if worker.end_reason is not None or result.failure == INTERRUPTED:
                self._lose(worker)  # an interrupt may still be under way to it, or it ends by itself
            self._end_unit(grant, result)
        elif kind == "warning" or (kind == "task" and self.events.qsize() < MAX_UNREAD):
            self.events.put(Report(grant and grant.unit, message))
        elif kind != "task":
            raise GarbledError(f"no message of the kind {kind!r} is expected")

    def _read_output(self, worker: WorkerProcess) -> None:
        """Pass on what a worker has printed."""
        if worker.is_closed:  # by an event of the same moment
            return
        lines, is_open = worker.read_output()
        for line in lines:
            if self.events.qsize() < MAX_UNREAD:
                self.events.put(Report(worker.grant and worker.grant.unit, {"kind": "line", "text": line}))
        if not is_open:
            self._forget(worker.output)

    def _forget(self, handle: socket.socket | int) -> None:
        with suppress(KeyError):
            self._selector.unregister(handle)

    def _lose(self, worker: WorkerProcess) -> None:
        """Remove a worker that has ended, or must be ended; the unit that it performs has failed."""
        if worker not in self._workers:
            return
        failure, grant = worker.end_reason, worker.grant
        if failure is None and grant is not None and not worker.ends_soon():
            failure = Failure("lost", "its process closed its connection; run it again.")
        code = self._remove(worker)
        if grant is not None:
            details = worker.printed
            if failure is None:
                failure = _lost(code) if worker.is_ready else _cannot_start(describe_end(code), details)
            failure = failure if failure == INTERRUPTED else replace(failure, details=details)
            self._end_unit(grant, Result(grant.unit, failure=failure, seconds=worker.seconds))

    def _remove(self, worker: WorkerProcess) -> int:
        """End a worker's process and forget it; return its exit code."""
        self._workers.remove(worker)
        code = worker.end()
        self._read_output(worker)  # the last lines before its end
        self._forget(worker.connection)
        self._forget(worker.output)
        worker.close()
        return code

    def _end_unit(self, grant: Grant, result: Result) -> None:
        self._schedule.end(grant)
        self._put(result)
        self._finish_cancelling()

    def _put(self, result: Result) -> None:
        self.events.put(result)
        self._ended += 1

    def _look_after_workers(self, now: float) -> None:
        """Replace workers that have ended, and end units that exceed their memory or the time to save."""
        if self._deadline is not None and now >= self._deadline:
            for worker in [worker for worker in self._workers if worker.grant is not None]:
                self._lose(worker)
        if now - self._look_time < LOOK_SECONDS:
            return
        self._look_time = now
        for worker in list(self._workers):
            if worker.has_ended:  # without closing its connection, if children of it hold that open
                self._serve(worker)
                self._lose(worker)
            elif worker.grant is not None and worker.grant.unit.needs.memory:
                self._check_memory(worker, worker.grant.unit.needs.memory)

    def _check_memory(self, worker: WorkerProcess, limit: int) -> None:
        used = worker.resident_memory()
        if used > limit:
            sizes = f"it took {memory.readable(used)} of memory, where it may take {memory.readable(limit)}"
            worker.end_reason = Failure("memory", f"{sizes}; choose smaller sizes or fewer seeds, or allow it more.")
            self._lose(worker)

    def _cancel(self, cancelled: threading.Event) -> None:
        self._cancelled.append(cancelled)
        for unit in self._schedule.clear():
            self._put(Result(unit, failure=INTERRUPTED))
        if self._deadline is None:
            self._deadline = time.monotonic() + SAVE_SECONDS
            for worker in self._workers:
                if worker.grant is not None:
                    worker.end_reason = INTERRUPTED
                    worker.interrupt()
        self._finish_cancelling()

    def _finish_cancelling(self) -> None:
        if self._deadline is not None and not self._schedule.running:
            self._deadline = None
            while self._cancelled:
                self._cancelled.pop().set()

    def _stop(self) -> None:
        self._is_open = False

    def _release(self) -> None:
        """End all processes, and let those go on who wait for units to end."""
        for worker in list(self._workers):
            worker.end_reason = worker.end_reason or INTERRUPTED
            self._lose(worker)
        self._finish_cancelling()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()


def _result(unit: Unit, message: Message) -> Result:
    try:
        failure = None if message["failure"] is None else Failure(**message["failure"])
        return Result(unit, message["value"], failure, float(message["seconds"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise GarbledError(f"no result: {short_reason(problem)}") from None


def _lost(code: int) -> Failure:
    cause = ", most likely because memory ran out" if code == -9 else ""
    end = f"its process {describe_end(code)}{cause}"
    return Failure("lost", f"{end}; run it again, with fewer units at once if it happens again.")


def _cannot_start(reason: str, details: str = "") -> Failure:
    last_line = f" ({printable(details.splitlines()[-1])})" if details.strip() else ""
    return Failure("lost", f"its process cannot start: {reason}{last_line}; run fewer units at once.", details)
