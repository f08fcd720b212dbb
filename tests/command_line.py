"""The command line, called in this process."""

from __future__ import annotations

import pytest

from joma import cli


def joma(*args: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command; return its exit code and what it wrote on standard output and on standard error."""
    code = cli.main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
