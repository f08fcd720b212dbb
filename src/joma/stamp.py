"""Provenance: what a stored result says of the versions, the machine and the time that it was computed with."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from joma import __version__

PACKAGES = ("joma", "numpy", "scipy", "torch", "xarray", "h5netcdf", "matplotlib")
STAMP = ("created", "python", "platform", *(f"{package}_version" for package in PACKAGES), "git_commit")
"""The names of what `provenance` returns."""


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def provenance() -> dict[str, str]:
    """Return versions, platform, commit and time: the one place where provenance is stamped."""
    stamp = {"created": now(), "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            # The code that runs, not the metadata: those of an editable install are as old as the install.
            stamp[f"{package}_version"] = __version__ if package == "joma" else version(package)
        except PackageNotFoundError:
            stamp[f"{package}_version"] = "not installed"
    stamp["git_commit"] = _commit()
    return stamp


def _commit() -> str:
    """Return the commit of the source tree that this package runs from, or "unknown" for an installed package."""
    file = Path(__file__).resolve()
    # An environment may lie inside the repository of another project, which does not track its files.
    if not _git(file.parent, "ls-files", "--", file.name):
        return "unknown"
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or "unknown"


def _git(folder: Path, *arguments: str) -> str:
    """Return what a command of git prints in a folder; nothing if it fails or there is no git."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()
