"""The files of a finished folder as bytes, for a worker that shares no file system with whoever asked for the work.

A folder is what its manifest lists: a run, a shard of one, or a probed model. The worker calls `pack`, the bytes
travel by whatever carries them, and `unpack` checks them against the manifest before anything is written.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joma.files import DamagedFile, StorageError, as_path, exists, lock, open_file, read_error, remove, write_bytes
from joma.manifest import MANIFEST, Manifest, parse_manifest, read_manifest

LOG = "log.txt"  # the only file that travels and is not listed: nothing reads it
REMEDY = "send it again, or compute it again"


def pack(path: Path | str) -> dict[str, bytes]:
    """Return the files of a folder by name: those that its manifest lists, the manifest, and the log if there is one.

    Every file is checked while it is read. Checkpoints are not listed in the manifest of a run, and stay behind.

    Raises:
        DamagedFile: a listed file is missing or altered.
        StorageError: the folder has no manifest, as its work is not finished.
    """
    path = as_path("path", path)
    manifest = read_manifest(path)
    if manifest is None:
        raise StorageError(f"{path} has no {MANIFEST}: nothing in it is finished; complete it before it is sent.")
    files = {name: manifest.read(name) for name in manifest.files}
    if exists(path / LOG):
        files[LOG] = _content(path / LOG)
    files[MANIFEST] = _content(path / MANIFEST)
    _check_arrival(parse_manifest(path, files[MANIFEST]), files)  # it may have been judged again while it was read
    return files


def unpack(files: Mapping[str, bytes], path: Path | str) -> bool:
    """Write the files that `pack` returned elsewhere into the folder `path`, the manifest last.

    All files are checked against the manifest before the first is written, so that damage leaves nothing behind. If the
    process dies while it writes, the folder has no manifest, and counts as not finished. A folder that already holds
    the same work, intact and finished as far, stays as it is: a unit that was computed twice is stored once.

    Args:
        files: contents by name.
        path: the folder, which is locked meanwhile. For a run it must be `Run.path` of that run.

    Returns:
        Whether the files were written; False if the same work was there already.

    Raises:
        DamagedFile: a file did not arrive, or not as it was sent.
        FolderLocked: another process works in the folder.
        StorageError: the folder holds other work.
    """
    path = as_path("path", path)
    if MANIFEST not in files:
        raise DamagedFile(path / MANIFEST, "did not arrive", REMEDY)
    manifest = parse_manifest(path, files[MANIFEST], remedy=REMEDY)
    _check_arrival(manifest, files)
    is_new = not exists(path)
    with lock(path):
        if _holds(path, manifest):
            return False
        try:
            remove(path / MANIFEST)
            for name in sorted({*files} - {MANIFEST}):
                write_bytes(path / name, files[name])
            write_bytes(path / MANIFEST, files[MANIFEST])
        except StorageError:
            if is_new:
                shutil.rmtree(path, ignore_errors=True)  # the refused write is what to report
            raise
    return True


def _check_arrival(manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Raise `DamagedFile` unless the files are those of the manifest, and the log at most."""
    for name, entry in manifest.files.items():
        if name not in files:
            raise DamagedFile(manifest.folder / name, "did not arrive", REMEDY)
        if hashlib.sha256(files[name]).hexdigest() != entry.sha256:
            raise DamagedFile(manifest.folder / name, "did not arrive as it was sent", REMEDY)
    for name in files:
        if name not in (MANIFEST, LOG, *manifest.files):
            raise DamagedFile(manifest.folder / name, f"arrived, but is not listed in {MANIFEST}", REMEDY)


def _holds(path: Path, arrived: Manifest) -> bool:
    """Return whether a folder holds the work of a manifest that arrived; refuse a folder that holds other work."""
    try:
        stored = read_manifest(path)
        if stored is None:
            return False
        if _work(stored) == _work(arrived):
            stored.check()
            return stored.complete or not arrived.complete
    except DamagedFile:  # what arrived takes its place
        return False
    raise StorageError(f"{path} holds other work than what arrived; move it away or choose another folder.")


def _work(manifest: Manifest) -> dict[str, Any]:
    """Return what a folder's files belong to; presets of the same config and seeds share a run."""
    return {name: value for name, value in manifest.identity.items() if name != "preset"}


def _content(file: Path) -> bytes:
    try:
        with open_file(file) as opened:
            return opened.read()
    except OSError as cause:
        raise read_error(file, cause) from None
