"""Processes with fewer rights: another user, or mounts that nobody else sees and that end with the process."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from joma.cli import main

NOBODY = 65534
CLONE_NEWNS = 0x00020000  # of <sched.h>


class Answer(NamedTuple):
    """What a command answered."""

    code: int
    lines: list[str]  # on standard error


def become_nobody() -> None:
    """Give up all rights of this process, which cannot be taken back."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def joma(*arguments: Any) -> Answer:
    """Run a command in this process."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = main([str(argument) for argument in arguments])
    return Answer(code, errors.getvalue().splitlines())


def mount(place: Path, *options: str) -> bool:
    """Mount something at `place`, for this process alone; return whether that is permitted."""
    separated = ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
    if not separated or not _call("mount", "--make-rprivate", "/"):
        return False
    return _call("mount", *options, str(place))


def remount(place: Path, options: str) -> bool:
    """Change the options of a mount."""
    return _call("mount", "-o", f"remount,{options}", str(place))


def _call(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def snapshot(folder: Path) -> dict[str, Any]:
    """Return mode and content of everything below a folder."""
    paths: Iterable[Path] = (folder, *folder.rglob("*"))
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else None) for path in paths}
