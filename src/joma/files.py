"""Write files whole or not at all, lock folders by the operating system, and compute checksums."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # no space is left on the disk, in the quota or in the file
MODE = 0o644  # of every file that is written: a temporary file starts as 0o600, which nobody else could read


class StorageError(OSError):
    """The file system refused, or a file is not what was written; the message has the path and the remedy."""


class FolderLocked(StorageError):
    """Another process has locked the folder."""


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`; its mode becomes 0o644.

    A reader sees the old file or the new one, never a part; after an error the old one is untouched.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        temporary = Path(name)
        os.close(handle)
        write(temporary)
        temporary.chmod(MODE)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except OSError as cause:
        raise storage_error(path, cause) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Return once `path` is on the disk, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage_error(path: Path, cause: OSError) -> StorageError:
    """Return an error that says in one line what the file system refused and what to do."""
    if cause.errno in FULL:
        remedy = "free some space or choose another folder with `--out`"
    elif cause.errno == errno.ENOENT:
        remedy = "check the path"
    else:
        remedy = "choose a folder that you may write to with `--out`"
    number = errno.ENOTDIR if cause.errno == errno.EEXIST else cause.errno  # what mkdir reports if a file has that name
    return StorageError(f"cannot write {path}: {os.strerror(number) if number else cause}; {remedy}.")


def check_writable(folder: Path) -> None:
    """Raise `StorageError` if the folder cannot be made or written to, before any work is done for it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise storage_error(folder, OSError(errno.EACCES if existing.is_dir() else errno.ENOTDIR, "refused"))


def write_bytes(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write `content` to `path`, whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, whole. NaN and infinities are refused: JSON has neither."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON from `path`; a missing or broken file is a `StorageError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        reason = os.strerror(cause.errno) if cause.errno else cause
        raise StorageError(f"cannot read {path}: {reason}; check the path.") from None
    except ValueError as cause:
        raise StorageError(f"{path} is not valid JSON ({cause}); delete its folder to run it again.") from None


def short_hash(text: str, letters: int) -> str:
    """Return the first `letters` hexadecimal digits of a text's SHA-256, as a short name that differs between texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process, or raise `FolderLocked` at once if another process has locked it.

    The lock is the kernel's, on the folder itself: it ends with the process, however that ends, and leaves no file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as cause:
        raise storage_error(folder, cause) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderLocked(
                f"{folder} is locked by another process; wait for it or choose another folder."
            ) from None
        yield
    finally:
        os.close(handle)
