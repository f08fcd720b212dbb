"""A unit of work, what becomes of it, and the interface of the engines that run units.

A unit is the name of a function and its arguments as JSON, so that any process on any machine can run it. It is
idempotent: it writes its result with a manifest into a folder, and a unit whose result is there does no work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

FailureKind = Literal["input", "storage", "memory", "lost", "interrupted", "error"]


@dataclass(frozen=True)
class Needs:
    """What a unit needs while it runs.

    Attributes:
        cores: processor cores; also the number of torch's threads.
        gpus: GPUs, also parts of one; 0 for a unit that uses none.
        memory: bytes of memory; 0 if unknown. A unit that takes more is ended, and fails.
    """

    cores: int = 1
    gpus: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class Unit:
    """One piece of work that some process of an engine performs.

    Attributes:
        name: unique among the units of an engine, and shown to the user.
        function: `module:name` of a function of `out`, `progress` and the arguments that returns an `Output`.
        arguments: keyword arguments of the function; values are what JSON has.
        out: the folder that the function writes into, on the machine that submits the unit.
        needs: what it needs while it runs.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    out: Path = Path("runs")
    needs: Needs = Needs()

    def as_json(self) -> dict[str, Any]:
        """Return the unit as JSON has it, for a process that performs it."""
        return {**asdict(self), "arguments": dict(self.arguments), "out": str(self.out)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Unit:
        """Return the unit that `as_json` described."""
        return cls(**{**fields, "out": Path(fields["out"]), "needs": Needs(**fields["needs"])})


@dataclass(frozen=True)
class Output:
    """What the function of a unit returns.

    Attributes:
        value: the result, as JSON has it, small: it is kept in memory.
        folders: the folders that were written, relative to `out`, each with a manifest. An engine whose machines share
            no file system sends them to the machine that submitted the unit, where they are checked.
    """

    value: Any = None
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why a unit has no result.

    Attributes:
        kind: "input" and "storage" are the user's to mend; "memory": it took more than it may; "lost": its process or
            machine died; "interrupted": it was cancelled, and can be resumed; "error": a defect of the program.
        message: one line.
        details: the traceback of a defect.
    """

    kind: FailureKind
    message: str
    details: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a unit: a value, or a failure.

    Attributes:
        unit: the unit.
        value: what its function returned as the value of its `Output`.
        failure: why there is no value, None if there is one.
        seconds: how long it ran, without waiting.
        host: the machine that ran it, empty for this one.
    """

    unit: Unit
    value: Any = None
    failure: Failure | None = None
    seconds: float = 0.0
    host: str = ""


class Engine(ABC):
    """Where units run: `with engine: engine.submit(unit) …; for result in engine.results(): …`.

    Leaving the block stops everything that still runs.
    """

    @abstractmethod
    def submit(self, unit: Unit) -> None:
        """Queue a unit; it starts when there is room for what it needs. Units start in the order of submission."""

    @abstractmethod
    def results(self) -> Iterator[Result]:
        """Yield what became of each unit that was submitted, in the order in which they end, until none is left."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop all units: those that run save what they can and can be resumed; each has a result "interrupted"."""

    @abstractmethod
    def close(self) -> None:
        """Stop all units and give back processes and connections."""

    def run(self, units: Iterable[Unit]) -> Iterator[Result]:
        """Submit units and yield their results."""
        for unit in units:
            self.submit(unit)
        yield from self.results()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
