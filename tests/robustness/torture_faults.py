"""Everything that joma writes, disturbed at every operation on its files: it fails by name, and resumes.

Each case runs in a forked process. An error of the file system comes out as one line, as `StorageError`, or does no
harm. After an error or a kill, readers see the old or the new result or refuse by name; then the same is run again
without a fault, and must end with the same bits and the same names of files as a run that was never disturbed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from robustness.fault_scenarios import SCENARIOS, Scenario, comparable, names
from robustness.faulty_files import ERRORS, KILLS, READS, Fault, Operation, run_apart

CASES = 40  # of each scenario at scale 1


@dataclass(frozen=True)
class Reference:
    """A scenario that was not disturbed: the folder before it, what it returned, its files and its operations."""

    start: Path
    before: Any
    result: str
    files: set[str]
    operations: list[Operation]


def undisturbed(scenario: Scenario, folder: Path) -> Reference:
    """Prepare a scenario in `folder / "start"` and run it once in a copy."""
    start, work = folder / "start", folder / "work"
    start.mkdir(parents=True)
    scenario.prepare(start)
    before = _observe(scenario, start)
    shutil.copytree(start, work)
    _act(scenario, work)  # in this process, so that the forked ones need not import and warm up everything again
    shutil.rmtree(work)
    shutil.copytree(start, work)
    end = run_apart(work, lambda: _act(scenario, work))
    if end.how != "done":
        raise AssertionError(f"fails without a fault: {end.value}")
    reference = Reference(start, before, comparable(end.value), names(work), end.operations)
    shutil.rmtree(work)
    return reference


def disturb(scenario: Scenario, reference: Reference, fault: Fault) -> Iterator[str]:
    """Run a scenario with a fault, look at what is there, run it again; yield what is wrong."""
    work = reference.start.with_name("work")
    shutil.copytree(reference.start, work, copy_function=shutil.copy2)
    try:
        end = run_apart(work, lambda: _act(scenario, work), fault)
        if end.how == "failed":
            yield f"ended with another error than StorageError:\n{end.value}"
        elif end.how == "killed" and fault.kind not in KILLS:
            yield "was killed"
        elif end.how == "refused" and (str(work) not in end.value or "\n" in end.value):
            yield f"the message is not one line that names the file: {end.value!r}"
        elif end.how == "done" and comparable(end.value) != reference.result:
            yield "the error was passed over, and the result is another"
        again = run_apart(work, lambda: (_observe(scenario, work), _act(scenario, work)))
        if again.how != "done":
            yield f"cannot be read or run again: {again.value}"
            return
        view, result = again.value
        if view is None and scenario.strict:
            yield "a reader refuses, though the old or the new file is there"
        elif view not in (None, reference.before, reference.result, "true"):
            yield f"a reader sees something else: {view}"
        if comparable(result) != reference.result:
            yield "ends with other bits"
        if differ := names(work) ^ reference.files:
            yield f"other files than without the fault: {sorted(differ)}"
    finally:
        shutil.rmtree(work)


def _observe(scenario: Scenario, folder: Path) -> str | None:
    value = scenario.observe(folder)
    return None if value is None else comparable(value)


def _act(scenario: Scenario, folder: Path) -> Any:
    with mock.patch("joma.stamp._commit", return_value="unknown"):  # instead of a call of git in every case
        return scenario.act(folder)


def chosen(operations: list[Operation], count: int) -> list[Fault]:
    """Return at most `count` faults at operations drawn at random, of each kind in turn.

    A torn write is one of a write only; otherwise it would be a kill after the operation.
    """
    reads = [number for number, operation in enumerate(operations) if operation.call in READS]
    writes = [number for number, operation in enumerate(operations) if operation.call == "write"]
    changes = sorted({*range(len(operations))} - {*reads})
    random, rows = Random(0), []
    for kinds, numbers in (((*KILLS[:2], *ERRORS), changes), (("tear",), writes), (("EIO", "EACCES"), reads)):
        rows += [[Fault(number, kind) for number in random.sample(numbers, len(numbers))] for kind in kinds]
    return [fault for faults in zip_longest(*rows) for fault in faults if fault is not None][:count]


def torture(scale: float) -> dict[str, int]:
    """Disturb every scenario; raise `AssertionError` with all that went wrong."""
    torch.set_num_threads(1)  # before any fork
    counts: Counter[str] = Counter()
    problems: list[str] = []
    shared = Path("/dev/shm")  # no disk that would have to turn: what is flushed is not under test, but when
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        for name, scenario in SCENARIOS.items():
            reference = undisturbed(scenario, Path(folder).resolve() / name.replace(" ", "-"))
            counts["operations on files"] += len(reference.operations)
            for fault in chosen(reference.operations, max(1, round(CASES * scale))):
                counts["kills" if fault.kind in KILLS else "errors of the file system"] += 1
                place = f"{name}: {fault.kind} at {' of '.join(reference.operations[fault.operation])}"
                wrong = [f"{place}: {problem}" for problem in disturb(scenario, reference, fault)]
                problems += wrong
    if problems:
        raise AssertionError(f"{len(problems)} failures after {dict(counts)}\n" + "\n".join(problems))
    return dict(counts)
