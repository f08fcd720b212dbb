"""Perform a unit in the process that was chosen for it, and turn whatever goes wrong into a `Failure`."""

from __future__ import annotations

import importlib
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from joma import memory
from joma.arguments import InputError, short_reason
from joma.engine.unit import Failure, Output, Result, Unit
from joma.files import StorageError
from joma.progress import SILENT, Progress

INTERRUPTED = Failure("interrupted", "interrupted; the same command resumes it.")


def perform(unit: Unit, out: Path | None = None, progress: Progress = SILENT) -> tuple[Result, Output]:
    """Call the function of a unit, and return its result and its output.

    Args:
        unit: what to do.
        out: the folder to write into, if it is another than the unit's, as on a machine without its file system.
        progress: where progress is reported.
    """
    start = time.perf_counter()
    output, failure = Output(), None
    try:
        output = find_function(unit.function)(unit.out if out is None else out, progress, **unit.arguments)
        json.dumps(output.value)
    except KeyboardInterrupt:
        failure = INTERRUPTED
    except Exception as problem:
        failure = describe(problem)
    return Result(unit, output.value, failure, time.perf_counter() - start), output


def find_function(name: str) -> Callable[..., Output]:
    """Return the function that `module:name` names; raise `InputError` if there is none."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as cause:
        got, remedy = f"{name!r} ({short_reason(cause)})", "check the spelling, and that all machines have it installed"
        raise InputError("function", "module:name of a function", got, remedy) from None


def describe(problem: Exception) -> Failure:
    """Return the failure that an error of a unit is."""
    message = str(problem)
    if isinstance(problem, memory.OutOfMemory):
        return Failure("memory", message)
    if isinstance(problem, InputError):
        return Failure("input", message)
    if isinstance(problem, StorageError):
        return Failure("storage", message)
    if memory.is_exhausted(problem):
        size: Any = memory.requested_size(problem)
        return Failure("memory", f"the memory of the machine does not suffice for {size}; use smaller sizes.")
    details = "".join(traceback.format_exception(problem))
    return Failure("error", f"internal error ({type(problem).__name__}): {short_reason(problem)}", details)
