"""A file layer that fails, or kills its process, at the n-th operation on the files below one folder.

The few calls through which everything is written and read are replaced in a forked process: opening, writing,
flushing, renaming, removing, making folders, changing modes, locking, looking at files and listing folders. Operations
elsewhere go through unchanged, and so does what HDF5 reads by itself.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

SECONDS = 120  # after which a process that hangs is killed
LASTING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})  # these fail again and again: a disk stays full
FREEING = frozenset({"unlink", "flock", "rmdir"})  # what a full disk does not refuse
ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT", "EACCES")
KILLS = ("kill before", "kill after", "tear")
READS = frozenset({"read", "stat", "list"})  # operations that change nothing: they fail one by one


@dataclass(frozen=True)
class Fault:
    """What happens at which operation, counted from 0: the name of an error, or one of `KILLS`."""

    operation: int
    kind: str


class Operation(NamedTuple):
    """One operation: what was done to which file, relative to the folder."""

    call: str
    file: str


@dataclass
class FaultyFiles:
    """Counts the operations below `folder`, and lets `fault` happen."""

    folder: Path
    fault: Fault | None = None
    operations: list[Operation] = field(default_factory=list)
    broken: int | None = None  # the error that lasts

    def operate(self, call: str, path: Any, act: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Count an operation and do it, or let the fault happen; `half` does half of it."""
        file = self._relative(path)
        if file is None:
            return act()
        number = len(self.operations)
        self.operations.append(Operation(call, file))
        if self.broken is not None and call not in READS and (self.broken == errno.EROFS or call not in FREEING):
            raise OSError(self.broken, os.strerror(self.broken), str(path))
        if self.fault is None or number != self.fault.operation:
            return act()
        if self.fault.kind not in KILLS:
            return self._refuse(getattr(errno, self.fault.kind), path, half)
        if self.fault.kind == "tear" and half is not None:
            half()
        elif self.fault.kind != "kill before":
            act()
        return os.kill(os.getpid(), signal.SIGKILL)

    def _refuse(self, number: int, path: Any, half: Callable[[], Any] | None) -> Any:
        """Raise the error; a disk that becomes full while a file is written takes a part of it first."""
        if number in LASTING:
            self.broken = number
            if half is not None and number != errno.EROFS:
                return half()
        raise OSError(number, os.strerror(number), str(path))

    def _relative(self, path: Any) -> str | None:
        """Return the path inside the folder of a path or handle, None if it is elsewhere."""
        try:
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
        except (OSError, TypeError):
            return None
        name = os.path.abspath(name).removesuffix(" (deleted)")
        folder = str(self.folder)
        return os.path.relpath(name, folder) if name == folder or name.startswith(f"{folder}/") else None

    def _replaced(self, function: Callable[..., Any], call: str, *, where: int = 0) -> Callable[..., Any]:
        """Return a function that counts its calls; its argument number `where` is the path or handle."""
        return lambda *args, **options: self.operate(call, args[where], lambda: function(*args, **options))

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `open` with files for writing that count their writes."""

        def faulty_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return self.operate("read", file, lambda: original(file, mode, buffering, *args, **options))
            if self._relative(file) is None:
                return original(file, mode, buffering, *args, **options)
            if "+" in mode:  # a temporary file without a name
                return self.operate("open", file, lambda: original(file, mode, buffering, *args, **options))
            opener, plain = options.pop("opener", None), mode.replace("b", "").replace("t", "")
            raw = self.operate("open", file, lambda: _FaultyFile(self, file, plain, opener))
            buffer = io.BufferedWriter(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, *args, **options)

        return faulty_open

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def faulty_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
            def act() -> int:
                return original(path, flags, *args, **options)

            return self.operate("create", path, act) if flags & os.O_CREAT else act()

        return faulty_open

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the calls inside the block."""
        opened = self._open(io.open)
        with (
            mock.patch.object(io, "open", opened),
            mock.patch.object(builtins, "open", opened),
            mock.patch.object(os, "open", self._os_open(os.open)),
            mock.patch.object(os, "replace", self._replaced(os.replace, "rename")),
            mock.patch.object(os, "rename", self._replaced(os.rename, "rename")),
            mock.patch.object(os, "unlink", self._replaced(os.unlink, "unlink")),
            mock.patch.object(os, "rmdir", self._replaced(os.rmdir, "rmdir")),
            mock.patch.object(os, "mkdir", self._replaced(os.mkdir, "mkdir")),
            mock.patch.object(os, "chmod", self._replaced(os.chmod, "chmod")),
            mock.patch.object(os, "fsync", self._replaced(os.fsync, "fsync")),
            mock.patch.object(os, "stat", self._replaced(os.stat, "stat")),
            mock.patch.object(os, "scandir", self._replaced(os.scandir, "list")),
            mock.patch.object(os, "listdir", self._replaced(os.listdir, "list")),
            mock.patch.object(fcntl, "flock", self._replaced(fcntl.flock, "flock")),
        ):
            yield


class _FaultyFile(io.FileIO):
    """A file whose writes are operations of the layer."""

    def __init__(self, files: FaultyFiles, file: Any, mode: str, opener: Any) -> None:
        super().__init__(os.fspath(file), mode, opener=opener)
        self.files, self.file = files, file

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        half = len(content) // 2
        return self.files.operate(
            "write",
            self.file,
            lambda: super(_FaultyFile, self).write(content),
            (lambda: super(_FaultyFile, self).write(content[:half])) if half else None,
        )


class End(NamedTuple):
    """How a process ended: "done", "refused" (with the message), "killed", or "failed" (with the traceback)."""

    how: str
    value: Any
    operations: list[Operation]


def run_apart(folder: Path, act: Callable[[], Any], fault: Fault | None = None) -> End:
    """Run `act` in a forked process whose files below `folder` are faulty; what it returns must be picklable."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(SECONDS)
        end = _run(FaultyFiles(folder, fault), act)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(end, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return End("killed", None, [])
    return pickle.loads(content) if content else End("failed", f"the process ended with status {status}", [])


def _run(files: FaultyFiles, act: Callable[[], Any]) -> End:
    """Run `act` in this process."""
    from joma.files import StorageError

    try:
        with files.installed():
            return End("done", act(), files.operations)
    except StorageError as problem:
        return End("refused", str(problem), files.operations)
    except BaseException:
        return End("failed", traceback.format_exc(), files.operations)
