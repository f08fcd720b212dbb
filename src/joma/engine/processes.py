"""A worker process as the local engine sees it: started, given units, listened to, and ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from joma.engine.messages import Decoder, GarbledError, Message, encode
from joma.engine.scheduling import Grant
from joma.engine.unit import Failure

START = "import sys; sys.path[:] = sys.argv[3:]; from joma.engine.worker import main; main(*map(int, sys.argv[1:3]))"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
MAX_LINES, MAX_WIDTH = 40, 2000  # of what a worker printed, for the details of a failure
MAX_PIECES = 16  # of 64 KiB of output that are read at once
EXIT_SECONDS = 0.3  # for a process to end after it closed its connection
KILL_SECONDS = 5.0  # for a process to end after it was killed
RESIDENT = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Binding:
    """What a process is bound to from its start, because libraries read it when they are loaded.

    Attributes:
        cores: the number of threads of BLAS and torch. If a process served units with other numbers, the last bits of
            a result would depend on which units it had served before.
        devices: the GPUs that it sees.
    """

    cores: int
    devices: tuple[str, ...] = ()


class WorkerProcess:
    """A process that performs one unit at a time, in its own session: the terminal's Ctrl-C does not reach it.

    Attributes:
        binding: what it is bound to.
        grant: the unit that it performs and what that was given, None if it is idle.
        end_reason: why the engine ends it, None if it does not.
        is_ready: whether it has started.
        is_closed: whether the connections to it are closed.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.grant: Grant | None = None
        self.end_reason: Failure | None = None
        self.is_ready = self.is_closed = False
        self._start_time = time.monotonic()
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._decoder, self._unsent = Decoder(), bytearray()
        self._printed: deque[str] = deque(maxlen=MAX_LINES)
        self._partial_line = b""
        with theirs:
            try:
                self.process = _start(theirs, binding)
            except OSError:
                self.connection.close()
                raise
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)

    def perform(self, grant: Grant, folder: str) -> None:
        """Send a unit, to be performed in the working folder `folder`."""
        self.grant, self._start_time = grant, time.monotonic()
        self._printed.clear()
        self._unsent += encode({"unit": grant.unit.as_json(), "cores": grant.cores, "folder": folder})
        self.send_rest()

    def send_rest(self) -> None:
        """Send what was not sent yet, as far as the process takes it."""
        with suppress(BlockingIOError, ConnectionError):  # a closed connection is noticed by who reads from it
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]

    @property
    def has_unsent(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    @property
    def seconds(self) -> float:
        """How long it has performed the present unit."""
        return time.monotonic() - self._start_time

    def receive(self) -> tuple[list[Message], bool]:
        """Return the messages that have come, and whether more may follow; raise `GarbledError` for what is none."""
        try:
            piece = self.connection.recv(2**16)
        except BlockingIOError:
            return [], True
        except ConnectionError:
            piece = b""
        if not piece and self._decoder.is_cut:
            raise GarbledError("a message that was cut")
        return self._decoder.feed(piece), bool(piece)

    def read_output(self) -> tuple[list[str], bool]:
        """Return the lines that it has printed, and whether more may follow."""
        text, is_open = self._partial_line, True
        with suppress(BlockingIOError):
            for _ in range(MAX_PIECES):
                piece = os.read(self.output, 2**16)
                text, is_open = text + piece, bool(piece)
                if not is_open:
                    break
        *lines, self._partial_line = text.split(b"\n")
        if self._partial_line and (not is_open or len(self._partial_line) > MAX_WIDTH):
            lines.append(self._partial_line)
            self._partial_line = b""
        texts = [line[:MAX_WIDTH].decode(errors="backslashreplace").rstrip("\r") for line in lines]
        self._printed += texts
        return texts, is_open

    @property
    def printed(self) -> str:
        """The last lines that it has printed while it performed the present unit."""
        return "\n".join(self._printed)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def interrupt(self) -> None:
        """Ask the unit to save what it can and to stop."""
        self.process.send_signal(signal.SIGINT)

    def ends_soon(self) -> bool:
        """Wait a moment for a process that has closed its connection; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        return self.has_ended

    def end(self) -> int:
        """End the process and its children if they run; return its exit code, negative for a signal."""
        with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, for a process that has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a call that the system cannot break off, such as to a lost disk
            return self.process.wait(KILL_SECONDS)
        return -signal.SIGKILL

    def close(self) -> None:
        """Close the connections to a process that has ended."""
        self.is_closed = True
        self.connection.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def resident_memory(self) -> int:
        """Return the bytes of memory that the process and its children use; 0 where the system does not tell."""
        return resident_memory(self.process.pid)


def _start(connection: socket.socket, binding: Binding) -> subprocess.Popen[bytes]:
    threads = dict.fromkeys(THREADS, str(binding.cores))
    handle, parent = connection.fileno(), os.getpid()
    folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    return subprocess.Popen(
        # -P: the working folder is not searched for modules, unless this process does so
        [sys.executable, "-P", "-c", START, str(handle), str(parent), *folders],
        env={**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ",".join(binding.devices)},
        pass_fds=(handle,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def describe_end(code: int) -> str:
    """Return how a process ended, from its exit code.

    >>> describe_end(-9), describe_end(3)
    ('was killed by SIGKILL', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def resident_memory(process: int) -> int:
    """Return the bytes of memory that a process and its children use; 0 where the system does not tell.

    Files that are mapped, such as weights, are left out: the system drops them when memory is needed.
    """
    return sum(map(_resident, _with_children(process)))


def _resident(process: int) -> int:
    try:
        return 1024 * sum(map(int, RESIDENT.findall(Path(f"/proc/{process}/status").read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return 0


def _with_children(process: int) -> list[int]:
    """Return a process, its children, and theirs."""
    processes = [process]
    for parent in processes:  # grows while it is read
        with suppress(OSError):
            for file in Path(f"/proc/{parent}/task").glob("*/children"):
                processes += map(int, file.read_text(encoding="ascii").split())
    return processes
