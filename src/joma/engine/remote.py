"""What a worker of a cluster does with a unit, and what it tells the machine that submitted it while it runs.

A worker shares no file system with that machine unless it is told so. It performs a unit in a folder of its own, and
returns the files of the folders that the unit wrote as bytes. `Board` is where workers note their progress.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import joma
from joma import memory
from joma.engine.connecting import import_ray
from joma.engine.messages import Message
from joma.engine.performing import describe, perform
from joma.engine.processes import resident_memory
from joma.engine.unit import Failure, Unit
from joma.engine.worker import set_threads
from joma.files import StorageError, list_folder, lock, storage_error
from joma.progress import Progress, Task
from joma.transport import pack

UPDATE_SECONDS = 0.5  # between two notes on progress
ANSWER_SECONDS = 5.0  # to wait for the board, once, before a unit begins
WATCH_SECONDS = 0.5  # between two looks at the memory of the process
MARKER_SECONDS = 3.0  # for a file to appear on the other machines of a shared file system
ABANDONED_SECONDS = 60.0  # after which a folder that nobody has locked is abandoned
MAX_WARNINGS = 20  # that a unit passes on
EXCEEDED_CODE = 77  # the exit code of a worker whose unit took too much memory

_first_resident = 0  # bytes of this process before its first unit
_has_removed_abandoned = False


def versions() -> list[str]:
    """Return the versions that must be the same on all machines: those of joma and of Python, without its patch."""
    return [joma.__version__, ".".join(platform.python_version_tuple()[:2])]


def work(order: Mapping[str, Any], board: Any = None) -> dict[str, Any]:
    """Perform a unit on a worker, and return what became of it, with the files that it wrote.

    Args:
        order: "versions" of the machine that sends it; "unit" as JSON; "key", a number of this submission; "attempts",
            how often it may begin; "marker", a file in the unit's folder if machines share it, else None.
        board: the handle of a `Board`, or None.

    Returns:
        "value", "failure" (its fields, or None), "seconds", "host", "out" (the folder that the unit wrote into),
        "folders" (the files of each folder by name) and "warnings" (their texts).
    """
    failure = _check_versions(order["versions"])
    if failure is not None:
        return _answer(failure)
    unit, note = Unit.from_json(order["unit"]), Notes(board, order["key"])
    failure = _check_attempts(unit, note.begin(), order["attempts"]) or _check_marker(unit, order["marker"])
    if failure is not None:
        return _answer(failure)
    set_threads(unit.needs.cores)
    try:
        if order["marker"]:
            return _perform(unit, unit.out, note)
        with working_folder() as folder:
            return _perform(unit, folder, note, left_behind=folder)
    except StorageError as problem:
        return _answer(describe(problem))


def _perform(unit: Unit, out: Path, note: Notes, left_behind: Path | None = None) -> dict[str, Any]:
    """Perform a unit in the folder `out`; if it takes too much memory, remove what it would leave behind."""
    watch = watched_memory(unit.needs.memory, lambda size: note.exceed(size, left_behind))
    with watch, collected_warnings() as texts:
        result, output = perform(unit, out, BoardProgress(note))
        answer = _answer(result.failure) | {"seconds": result.seconds, "out": str(out), "warnings": texts}
        if result.failure is None:
            files = {} if left_behind is None else {name: pack(out / name) for name in output.folders}
            answer |= {"value": result.value, "folders": files}
    return answer


def _answer(failure: Failure | None) -> dict[str, Any]:
    fields = None if failure is None else asdict(failure)
    host = platform.node()
    return {"value": None, "failure": fields, "seconds": 0.0, "host": host, "out": "", "folders": {}, "warnings": []}


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Yield the list in which warnings of the block are collected, each text once, and not more than `MAX_WARNINGS`."""
    texts: list[str] = []

    def collect(message: Warning | str, *_: Any, **__: Any) -> None:
        if len(texts) < MAX_WARNINGS and str(message) not in texts:
            texts.append(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = collect  # type: ignore[assignment]
        yield texts


def _check_versions(expected: list[str]) -> Failure | None:
    """Return a failure if this machine has another version of joma or Python than the one that submits units."""
    present = versions()
    if present == list(expected):
        return None
    (joma_here, python_here), (joma_there, python_there) = present, expected
    return Failure(
        "input",
        f"the worker {platform.node()} has joma {joma_here} on Python {python_here}, the driver has joma {joma_there} "
        f"on Python {python_there}; install joma {joma_there} on Python {python_there} there.",
    )


def _check_attempts(unit: Unit, earlier: Mapping[str, int], attempts: int) -> Failure | None:
    """Return a failure if an earlier attempt took too much memory, or too many attempts were killed."""
    if earlier["exceeded"]:
        return exceeded_failure(earlier["exceeded"], unit.needs.memory)
    if earlier["begun"] > attempts:
        reason = "as Ray does where a machine is out of memory"
        return Failure("lost", f"its worker was ended {attempts} times, {reason}; run fewer units side by side.")
    return None


def exceeded_failure(size: int, limit: int) -> Failure:
    """Return the failure of a unit that took `size` bytes where it may take `limit`."""
    taken, allowed = memory.readable(size), memory.readable(limit)
    return Failure(
        "memory", f"it took {taken} of memory where it may take {allowed}; use smaller sizes, or allow more."
    )


def _check_marker(unit: Unit, marker: str | None) -> Failure | None:
    """Return a failure if the folder of the unit is not the one in which the driver wrote its marker."""
    if marker is None:
        return None
    deadline = time.monotonic() + MARKER_SECONDS
    while not any(path.name == marker for path in _listed(unit.out)):  # a listing is not answered from a cache
        if time.monotonic() > deadline:
            problem = f"the worker {platform.node()} does not see the driver's folder {unit.out}"
            return Failure("input", f"{problem}; mount it there, or run without a shared file system.")
        time.sleep(0.1)
    return None


def _listed(folder: Path) -> list[Path]:
    try:
        return list_folder(folder)
    except StorageError:
        return []


def relocated(value: Any, old: str, new: str) -> Any:
    """Return a value of JSON in which paths inside the folder `old` are those inside `new`.

    >>> relocated({"path": "/tmp/a/run", "claims": ["/tmp/abc"]}, "/tmp/a", "runs")
    {'path': 'runs/run', 'claims': ['/tmp/abc']}
    """
    if isinstance(value, str):
        return new + value[len(old) :] if value == old or value.startswith(old + os.sep) else value
    if isinstance(value, dict):
        return {name: relocated(item, old, new) for name, item in value.items()}
    return [relocated(item, old, new) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def working_folder() -> Iterator[Path]:
    """Make a folder for one unit and remove it afterwards; raise `StorageError` if there is no room for it.

    A folder is locked by the process that works in it. The first unit of a process removes those that are not locked:
    workers that were killed left them behind.
    """
    parent = Path(tempfile.gettempdir()) / f"joma-units-{os.getuid()}"
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(parent)
        folder = Path(tempfile.mkdtemp(dir=parent))
    except OSError as cause:
        raise storage_error(parent, cause) from None
    try:
        with lock(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders in which no process works, once in a process; new ones are about to be locked."""
    global _has_removed_abandoned  # noqa: PLW0603  (once in a process)
    if _has_removed_abandoned:
        return
    _has_removed_abandoned = True
    for folder in list_folder(parent):
        with suppress(OSError):  # another worker removes it, or works in it
            if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                with lock(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def watched_memory(limit: int, on_excess: Callable[[int], None]) -> Iterator[None]:
    """End this process if it takes more than `limit` bytes inside the block; 0 is no limit.

    What earlier units of the same process left behind is not counted. `on_excess` is called with the size first.
    """
    global _first_resident  # noqa: PLW0603  (one process, one first unit)
    start = resident_memory(os.getpid())
    _first_resident = _first_resident or start
    left_behind = start - _first_resident
    done = threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            size = resident_memory(os.getpid()) - left_behind
            if size > limit:
                on_excess(size)
                os._exit(EXCEEDED_CODE)

    if limit:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Board:
    """What workers tell the machine that submitted the units; Ray runs it as an actor.

    It holds one note for each unit that runs, whatever they report.
    """

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}
        self.exceeded: dict[int, int] = {}
        self.progress: dict[int, Message] = {}

    def begin(self, key: int) -> dict[str, int]:
        """Count one more attempt of a unit; return the attempts so far, and the bytes that one took too much of."""
        self.begun[key] = self.begun.get(key, 0) + 1
        return {"begun": self.begun[key], "exceeded": self.exceeded.get(key, 0)}

    def exceed(self, key: int, size: int) -> None:
        """Note that a unit took `size` bytes of memory, more than it may."""
        self.exceeded[key] = size

    def post(self, key: int, message: Message) -> None:
        """Note how far a unit is."""
        self.progress[key] = message

    def take(self, ended: Iterable[int]) -> dict[int, Message]:
        """Return what was noted since the last call, and forget the units that have ended."""
        for key in ended:
            for notes in (self.begun, self.exceeded, self.progress):
                notes.pop(key, None)
        progress, self.progress = self.progress, {}
        return progress


class Notes:
    """The notes of one unit on the board. A board that is slow, or gone, does not stop the unit."""

    def __init__(self, board: Any, key: int) -> None:
        self.board, self.key = board, key
        self.unanswered: Any = None

    def begin(self) -> Mapping[str, int]:
        """Note that the unit begins, and return what `Board.begin` does."""
        return self._ask("begin") or {"begun": 1, "exceeded": 0}

    def exceed(self, size: int, left_behind: Path | None) -> None:
        """Note that the unit took too much memory, and remove the folder that its process leaves behind."""
        if left_behind is not None:
            shutil.rmtree(left_behind, ignore_errors=True)
        self._ask("exceed", size)

    def send(self, message: Message) -> None:
        """Note how far the unit is, unless the board has not answered to the last note yet."""
        if self.board is None:
            return
        ray = import_ray()
        if self.unanswered is None or ray.wait([self.unanswered], timeout=0)[0]:
            self.unanswered = self.board.post.remote(self.key, message)

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self.board is None:
            return None
        ray = import_ray()
        try:
            return ray.get(getattr(self.board, method).remote(self.key, *arguments), timeout=ANSWER_SECONDS)
        except ray.exceptions.RayError:  # the work goes on without a display
            self.board = None
            return None


class BoardProgress(Progress):
    """Progress that is noted on the board, at most once in `UPDATE_SECONDS` for a task."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.numbers = notes, itertools.count()

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        """Announce `total` units of work and yield the `Task` that counts them."""
        yield _BoardTask(self.notes, {"number": next(self.numbers), "label": label, "total": int(total)})


class _BoardTask(Task):
    def __init__(self, notes: Notes, fields: Message) -> None:
        self.notes, self.fields = notes, fields
        self.done = self.skipped = 0
        self.note, self.last_time = "", time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.last_time >= UPDATE_SECONDS:
            self.last_time = now
            counts = {"done": int(self.done), "skipped": int(self.skipped), "note": self.note}
            self.notes.send({"kind": "task", **self.fields, **counts})

    def skip(self, amount: int) -> None:
        self.skipped += amount

    def say(self, note: str) -> None:
        self.note = str(note)
