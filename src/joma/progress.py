"""Progress bars with the time left, on standard error, for work that takes longer than two seconds.

A function that takes long has an argument `progress` and announces its work by `progress.task(label, total)`. Libraries
and tests pass `SILENT`, which shows nothing; the command line passes `Bars`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from joma.terminal import printable

if TYPE_CHECKING:
    from rich.progress import TaskID

PATIENCE = 2.0  # seconds before a bar appears


class Task:
    """One task without a display: `advance` counts the units that are done."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""

    def skip(self, amount: int) -> None:
        """Count `amount` units as done in an earlier run, such as one that is resumed; call it before `advance`.

        They are left out of the speed that the bar shows, as they took no time in this run.
        """

    def say(self, note: str) -> None:
        """Show a short note beside the bar, such as the loss."""


class Progress:
    """Progress that shows nothing, and the base of classes that show it."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:  # noqa: ARG002
        """Announce `total` units of work and yield the `Task` that counts them.

        >>> with SILENT.task("flow", total=3) as task:
        ...     task.advance()
        """
        yield Task()


SILENT = Progress()


class Bars(Progress):
    """Progress bars on the terminal, one for each task; nothing if standard error is not a terminal.

    Args:
        patience: seconds that a task must last before its bar appears.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        from rich.console import Console  # not needed to import the package
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.patience = patience
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]} {task.fields[note]}", markup=False),
        )
        self.display = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.open_tasks = 0
        self.started = False

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        """Announce `total` units of work; their bar appears when they have taken longer than `patience` seconds."""
        bar = _Bar(self, label, total)
        self.open_tasks += 1
        try:
            yield bar
        finally:
            bar.close()
            self.open_tasks -= 1
            if self.started and not self.open_tasks:
                self.display.stop()
                self.started = False

    def add(self, label: str, **fields: Any) -> TaskID:
        """Add a line to the display, and start the display with the first."""
        if not self.started:
            self.display.start()
            self.started = True
        return self.display.add_task(label, **fields)


class _Bar(Task):
    def __init__(self, bars: Bars, label: str, total: int) -> None:
        self.bars, self.label, self.total = bars, printable(label), total
        self.start_time, self.done, self.skipped = time.monotonic(), 0, 0
        self.line: TaskID | None = None
        self.note = ""

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        elapsed = time.monotonic() - self.start_time
        rate = f"{(self.done - self.skipped) / elapsed:.3g}/s" if elapsed > self.bars.patience else ""
        if self.line is not None:
            self.bars.display.update(self.line, completed=self.done, rate=rate)
        elif rate:
            fields = {"total": self.total, "completed": self.done, "rate": rate, "note": self.note}
            self.line = self.bars.add(self.label, **fields)

    def skip(self, amount: int) -> None:
        self.done += amount
        self.skipped += amount

    def say(self, note: str) -> None:
        self.note = printable(note)
        if self.line is not None:
            self.bars.display.update(self.line, note=self.note)

    def close(self) -> None:
        if self.line is not None:
            self.bars.display.remove_task(self.line)
