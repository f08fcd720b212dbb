"""The report of a folder that grows while studies are run into it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from joma.commands.printing import print_error, write_line


class GrowingReport:
    """The report of a folder that studies are run into, written after every study.

    Its path is printed after the first of several studies and at the end. A folder that may not be written does not
    stop the studies; the reason is printed at the end.
    """

    def __init__(self, out: Path, studies: int, *, quiet: bool) -> None:
        self._out, self._studies, self._quiet = out, studies, quiet
        self._seen: dict[Path, dict[str, Any]] = {}
        self._problem: Exception | None = None
        self._written = False

    def update(self, run: Path) -> None:
        """Write the report after a study has stored `run`, which is read; runs that were read before are not."""
        is_first = not self._written
        self._seen.pop(run, None)
        self._write(self._seen)
        if is_first and self._written and self._studies > 1 and not self._quiet:
            write_line(f"The report grows with every study: {os.path.abspath(self._out / 'report.html')}")

    def finish(self) -> None:
        """Write the report of all runs, each read again, and print its path, or the reason why it was not written."""
        if self._written:
            self._write(None)
        if self._problem is not None:
            print_error(f"the report was not written: {self._problem}")
        elif self._written and not self._quiet:
            write_line(f"The report: {os.path.abspath(self._out / 'report.html')}")

    def _write(self, seen: dict[Path, dict[str, Any]] | None) -> None:
        from joma.files import StorageError
        from joma.report.html import write_report
        from joma.studies import STUDIES

        try:
            write_report(self._out, list(STUDIES), seen)
        except StorageError as problem:
            self._problem = problem
        else:
            self._problem, self._written = None, True
