"""What units report while they run, shown on the display of the process that submitted them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from joma.engine.messages import Message
from joma.engine.unit import Unit
from joma.progress import Progress, Task
from joma.terminal import printable


@dataclass(frozen=True)
class Report:
    """What a worker reports of a unit: the progress of a task, a warning, or a line that it has printed."""

    unit: Unit | None
    message: Message


def warn_here(message: str) -> None:
    """Pass on a warning of a unit as a warning of this process."""
    warnings.warn(message, stacklevel=2)


class Display:
    """Shows what units report: the progress of their tasks, warnings, and lines that they have printed.

    Args:
        progress: where progress is shown.
        warn: called with every warning, once for each text.
        several: whether several units run at once, so that labels need the unit's name.
    """

    def __init__(self, progress: Progress, warn: Callable[[str], None], *, several: bool) -> None:
        self.progress, self.warn, self.several = progress, warn, several
        self.warnings: set[str] = set()
        self.tasks: dict[tuple[str, int], ShownTask] = {}

    def show(self, report: Report) -> None:
        """Show one report."""
        name, message = "a worker" if report.unit is None else report.unit.name, report.message
        if message["kind"] == "task":
            self._show_task(name, message)
        elif message["kind"] == "line":
            sys.stderr.write(f"{printable(name)}: {printable(message['text'])}\n")
        elif message["message"] not in self.warnings:
            self.warnings.add(message["message"])
            self.warn(message["message"])

    def end(self, unit: Unit) -> None:
        """Remove the tasks of a unit that has ended."""
        for key in [key for key in self.tasks if key[0] == unit.name]:
            self.tasks.pop(key).close()

    def close(self) -> None:
        """Remove all tasks."""
        while self.tasks:
            self.tasks.popitem()[1].close()

    def _show_task(self, name: str, message: Message) -> None:
        key = name, message["number"]
        if "label" in message:
            label = message["label"]
            prefixed = f"{name}: {label}" if self.several and not label.startswith(name) else label
            self.tasks[key] = ShownTask(self.progress.task(prefixed, message["total"]))
        task = self.tasks.get(key)
        if task is not None:
            task.update(message)
        if "ended" in message and task is not None:
            self.tasks.pop(key).close()


class ShownTask:
    """A task of a unit, shown by a task of this process."""

    def __init__(self, context: AbstractContextManager[Task]) -> None:
        self.context, self.task = context, context.__enter__()
        self.done = self.skipped = 0
        self.note = ""

    def update(self, counts: Message) -> None:
        """Show what has changed since the last update."""
        if counts["skipped"] > self.skipped:
            self.task.skip(counts["skipped"] - self.skipped)
        if counts["note"] != self.note:
            self.task.say(counts["note"])
        if counts["done"] > self.done:
            self.task.advance(counts["done"] - self.done)
        self.done, self.skipped, self.note = counts["done"], counts["skipped"], counts["note"]

    def close(self) -> None:
        """End the task."""
        self.context.__exit__(None, None, None)
