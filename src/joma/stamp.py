"""Provenance: what a stored result says of the versions, the machine and the time that it was computed with."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("joma", "numpy", "scipy", "torch", "xarray", "h5netcdf", "matplotlib")


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def provenance() -> dict[str, str]:
    """Return versions, platform, commit and time: the one place where provenance is stamped."""
    stamp = {"created": now(), "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            stamp[f"{package}_version"] = version(package)
        except PackageNotFoundError:
            stamp[f"{package}_version"] = "not installed"
    stamp["git_commit"] = _commit()
    return stamp


def _commit() -> str:
    """Return the commit of the source tree that this package runs from, or "unknown" for an installed package."""
    folder = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() or "unknown"
