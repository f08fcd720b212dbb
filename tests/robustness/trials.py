"""Damage one file of a folder, read the folder in every way, and judge what each reader makes of it.

A reader passes if its result is the same as that of the undamaged folder, or if it refuses with one of our errors that
names the damaged file. Everything else is a failure: another result, another error, an error without the name, a wait.
"""

from __future__ import annotations

import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joma.arguments import InputError
from joma.files import StorageError
from joma.manifest import MANIFEST
from robustness.damage import Damage, copy_folder

SECONDS = 10  # a reader that takes longer waits for something
Result = Mapping[str, Any]
Reader = Callable[[Path], Result]


class Refused(StorageError):
    """A reader that reports a problem in another way than by an error: on standard error, or as a warning."""


@dataclass(frozen=True)
class Stored:
    """A folder that was stored, its readers, and what else may be in the place of its files.

    Attributes:
        name: what is stored.
        folder: where; it is never changed.
        readers: functions of a copy of the folder that return what it holds. A part of the result that cannot be
            compared, such as the time of a run that was run again, is None.
        others: for a file, named contents of this and further files, such as those of another run.
        part: the subfolder of which files are damaged; "" for the whole folder.
        pattern: of the names of the files that are damaged.
    """

    name: str
    folder: Path
    readers: Mapping[str, Reader]
    others: Mapping[str, Mapping[str, Mapping[str, bytes]]] = field(default_factory=dict)
    part: str = ""
    pattern: str = "*"

    @property
    def files(self) -> list[str]:
        """The names of the files to damage, relative to the folder."""
        files = (file for file in (self.folder / self.part).rglob(self.pattern) if file.is_file())
        return sorted(str(file.relative_to(self.folder)) for file in files)


@dataclass
class Tally:
    """What was tried, by name, and what failed."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, failure: str) -> None:
        """Count a failure and print it at once."""
        self.failures.append(failure)
        print(failure, flush=True)  # noqa: T201  (what to mend)

    def table(self) -> dict[str, int]:
        """Return the counts, that of the failures last."""
        return {**dict(sorted(self.counts.items())), "damages failed": len(self.failures)}


class Trials:
    """Trials on copies of one stored folder, all in the same place, so that paths in the results are the same."""

    def __init__(self, stored: Stored, tally: Tally, workspace: Path) -> None:
        self.stored, self.tally, self.copy = stored, tally, workspace / "copy"
        self.expected: dict[str, Result] = {}

    def run(self, file: str, damages: Iterable[Damage], readers: Iterable[str] | None = None) -> None:
        """Try every damage of one file with the named readers, all of them if None."""
        names = list(self.stored.readers if readers is None else readers)
        for damage in damages:
            self.tally.counts["damages"] += 1
            self.tally.counts[f"damages of {self.stored.name}"] += 1
            for reader in names:
                self.tally.counts["readings of a damaged folder"] += 1
                problem = self._problem(file, damage, reader)
                if problem:
                    self.tally.fail(f"{self.stored.name}, {file}, {damage.name}, {reader}: {problem}")

    def _problem(self, file: str, damage: Damage, reader: str) -> str:
        """Return what is wrong with the way in which `reader` takes the damage, "" if nothing is."""
        expected = self._expected(reader)
        copy_folder(self.stored.folder, self.copy)
        damage.apply(self.copy, file)
        try:
            result = self._read(reader)
        except (StorageError, InputError) as refusal:
            self.tally.counts["refused by name"] += 1
            named = any(name in str(refusal) for name in self._names((file, *damage.also)))
            return "" if named else f"refused without its name: {refusal}"
        except Exception as defect:
            return f"{type(defect).__name__}: {str(defect)[:300]}"
        self.tally.counts["the same result"] += 1
        changed = [key for key, value in result.items() if value is not None and value != expected[key]]
        return f"silently another result: {', '.join(changed)}" if changed else ""

    def _names(self, files: Iterable[str]) -> Iterator[str]:
        """Yield the paths that a message may name: a manifest or a checkpoint stands for its folder."""
        for file in files:
            path = self.copy / file
            yield str(path.parent if path.name == MANIFEST or "checkpoints" in path.parts else path)
            yield str(path).removesuffix(".sha256")

    def _expected(self, reader: str) -> Result:
        if reader not in self.expected:
            copy_folder(self.stored.folder, self.copy)
            self.expected[reader] = self._read(reader)
        return self.expected[reader]

    def _read(self, reader: str) -> Result:
        with warnings.catch_warnings(), _limited(reader):
            warnings.simplefilter("ignore")
            return self.stored.readers[reader](self.copy)


@contextmanager
def _limited(what: str) -> Iterator[None]:
    """Raise an error if the block takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{what} waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def workspace() -> Iterator[Path]:
    """Yield a temporary folder, as a path without links."""
    with tempfile.TemporaryDirectory(prefix="joma-damage-") as folder:
        yield Path(folder).resolve()
