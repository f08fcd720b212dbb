"""Provenance: what a stored result says of the versions, the machine and the time that it was computed with.

The code is named twice: by the commit of the checkout that it runs from, and by `source_tree`, git's name for the
contents of the package. The second needs no checkout, and says of a commit whether it is the code that ran:

    git rev-parse COMMIT:src/joma
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from joma import __version__

PACKAGES = ("joma", "numpy", "scipy", "torch", "xarray", "h5netcdf", "matplotlib")
STAMP = ("created", "python", "platform", *(f"{package}_version" for package in PACKAGES), "git_commit", "source_tree")
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
    return stamp | code_identity()


def code_identity() -> dict[str, str]:
    """Return the commit and the source tree of the code of this process: those at the first call.

    A run asks when it begins. Until it ends, hours later, somebody may have changed or committed files; a run says so
    then, since a module that was imported late may have been a changed one (`has_changed`).
    """
    return dict(_code(Path(__file__).resolve()))


@cache
def _code(file: Path) -> dict[str, str]:
    return {"git_commit": _commit(file), "source_tree": source_tree(file.parent)}


def has_changed() -> bool:
    """Return whether the package's files are others now than at the first call of `code_identity`."""
    return source_tree(Path(__file__).resolve().parent) != code_identity()["source_tree"]


def source_tree(folder: Path) -> str:
    """Return git's name for the contents of a folder, without what Python compiles and without hidden files.

    It is "unknown" if a file cannot be read, such as in a zipped package.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     source_tree(Path(empty))
    '4b825dc642cb6eb9a060e54bf8d69288fbee4904'
    """
    try:
        return _tree(folder).hex()
    except OSError:
        return "unknown"


def _tree(folder: Path) -> bytes:
    """Return the hash by which git names a folder: of the modes, names and hashes of what is in it, in order."""
    entries: dict[bytes, bytes] = {}
    for path in folder.iterdir():
        name = os.fsencode(path.name)
        if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if not path.is_dir():
            entries[name] = b"100644 %s\0%s" % (name, _object(b"blob", path.read_bytes()))
        elif (subtree := _tree(path)) != EMPTY_TREE:  # git knows no empty folders
            entries[name + b"/"] = b"40000 %s\0%s" % (name, subtree)
    return _object(b"tree", b"".join(entries[name] for name in sorted(entries)))


def _object(kind: bytes, content: bytes) -> bytes:
    """Return the hash by which git names an object."""
    return hashlib.sha1(b"%s %d\0%s" % (kind, len(content), content), usedforsecurity=False).digest()


EMPTY_TREE = _object(b"tree", b"")


def _commit(file: Path) -> str:
    """Return the commit of the source tree that this package runs from, or "unknown" for an installed package."""
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
