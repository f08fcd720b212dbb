"""Write files whole or not at all, lock folders by the operating system, and check what is read.

A file that stands alone has its SHA-256 beside it, `<name>.sha256`, as `sha256sum` writes it. Files of a folder that
belong together are listed in a manifest instead (`joma.manifest`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from joma.arguments import InputError, described

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # no space is left on the disk, in the quota or in the file
MODE = 0o644  # of every file that is written: a temporary file starts as 0o600, which nobody else could read
MAX_JSON = 1 << 28  # bytes; the largest file of ours has some thousands of them
TEMPORARY = ".joma-"  # how the names of temporary files begin
MAX_STEM, MAX_SUFFIX = 40, 20  # characters of a file's name in that of its temporary file, which must not be too long
CHECKSUM_BYTES = 4096  # no checksum file is longer
CHECKSUM_DIGITS = 64  # of a SHA-256 in hexadecimal


class StorageError(OSError):
    """The file system refused, or a file is not what was written; the message has the path and the remedy."""


class FolderLocked(StorageError):
    """Another process has locked the folder."""


class DamagedFile(StorageError):
    """A stored file is missing, altered since it was written, or belongs to something else.

    Attributes:
        file: which.
    """

    def __init__(self, file: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{file} {problem}; {remedy}.")
        self.file, self.problem, self.remedy = file, problem, remedy


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`; its mode becomes 0o644.

    A reader sees the old file or the new one, never a part. The temporary file is locked while it is written: one that
    nobody holds was left by a process that died (`remove_leftovers`).
    """
    temporary: Path | None = None
    handle = -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _locked_temporary(path)
        write(temporary)
        temporary.chmod(MODE)
        _flush(temporary)
        os.replace(temporary, path)
        temporary = None
        _flush(path.parent)
    except StorageError:
        raise
    except OSError as cause:
        raise storage_error(path, cause) from None
    finally:
        # Nothing was written through the handle, and the error that brought us here is the one to report.
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        if handle >= 0:
            with suppress(OSError):
                os.close(handle)


def _locked_temporary(path: Path) -> tuple[int, Path]:
    """Make a temporary file beside `path` and lock it; return the handle that holds the lock, and the file."""
    while True:
        suffix = path.suffix if len(path.suffix) <= MAX_SUFFIX else ""
        handle, name = tempfile.mkstemp(prefix=f"{TEMPORARY}{path.stem[:MAX_STEM]}-", suffix=suffix, dir=path.parent)
        with suppress(OSError):  # a file system without locks: `remove_leftovers` cannot lock either, and spares it
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(name):
            return handle, Path(name)
        # Another process's `remove_leftovers` came before the lock and took the file for a leftover.
        with suppress(OSError):  # there is one all the same if the file system refused to say so
            os.unlink(name)
        os.close(handle)


def remove_leftovers(folder: Path, *, deep: bool = False) -> None:
    """Remove the temporary files of processes that died while they wrote to `folder`, or with `deep` below it.

    A file that a living process is writing is locked, and stays. What cannot be removed stays too: it does no harm.
    """
    for place, subfolders, names in os.walk(folder):  # ignores folders that cannot be read
        for name in names:
            if name.startswith(TEMPORARY):
                with suppress(OSError):
                    _remove_unlocked(Path(place, name))
        if not deep:
            subfolders.clear()


def _remove_unlocked(file: Path) -> None:
    """Remove a file, or raise `OSError` if its writer has locked it."""
    # Never waits, whatever the file is; network file systems lock files only for those who may write to them.
    handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file if it exists; raise `StorageError` if the file system refuses."""
    try:
        path.unlink(missing_ok=True)
    except OSError as cause:
        reason = os.strerror(cause.errno) if cause.errno else cause
        raise StorageError(f"cannot remove {path}: {reason}; remove it by hand.") from None


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
        remedy = "free some space or choose a folder on another disk"
    elif cause.errno == errno.ENOENT:
        remedy = "check the path"
    else:
        remedy = "choose a folder that you may write to"
    number = errno.ENOTDIR if cause.errno == errno.EEXIST else cause.errno  # what mkdir reports if a file has that name
    return StorageError(f"cannot write {path}: {os.strerror(number) if number else cause}; {remedy}.")


def _exists(path: Path) -> bool:
    """Return whether there is something at `path`; raise `OSError` if it leads nowhere, in circles or is refused."""
    try:
        path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return False
    return True


def check_writable(folder: Path) -> None:
    """Raise `StorageError` if the folder cannot be made or written to, before any work is done for it."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if _exists(path))
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "refused")
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, "refused")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "refused")
    except OSError as cause:
        raise storage_error(folder, cause) from None


def write_bytes(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write `content` to `path`, whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_checked(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write `content` to `path` and its checksum beside it, each whole, so that `read_checked` can read it.

    The checksum comes first, and if a file is replaced, that of the old one stays beside it until the new one is in
    place: whenever the process dies, the file that exists has its checksum.
    """
    file, digest = checksum_file(path), hashlib.sha256(content).hexdigest()
    line, old = _checksum_line(digest, path.name), _intact_checksum(path)
    try:
        write_bytes(file, line if old in (None, digest) else _checksum_line(old, path.name) + line)
        write_bytes(path, content)
    except StorageError:
        with suppress(OSError):  # what remains is right in any case, but for the checksum of a file that does not exist
            if not path.exists():
                file.unlink(missing_ok=True)
        raise
    if old not in (None, digest):
        write_bytes(file, line)


def _intact_checksum(path: Path) -> str | None:
    """Return the checksum of a file, None if it does not exist or is not what was written."""
    try:
        digest = checksum(path)
        return digest if digest in stored_checksums(path, "") else None
    except OSError:
        return None


def read_checked(path: Path, remedy: str) -> bytes:
    """Return the content of a file that `write_checked` wrote; raise `DamagedFile` if it is not what was written."""
    digest = None
    while True:
        try:
            content = _content(path)
        except (OSError, MemoryError) as cause:
            raise read_error(path, cause) from None
        previous, digest = digest, hashlib.sha256(content).hexdigest()
        if digest in stored_checksums(path, remedy):
            return content
        if digest == previous:  # otherwise it may have been replaced between the reading of file and checksum
            raise DamagedFile(path, "is cut short or altered since it was written", remedy)


def stored_checksums(path: Path, remedy: str) -> list[str]:
    """Return the checksums that are stored beside a file: one, or two if it was being replaced."""
    file = checksum_file(path)
    try:
        with open_file(file) as opened:
            lines = opened.read(CHECKSUM_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        raise DamagedFile(path, f"has no checksum file {file.name}", remedy) from None
    except OSError:
        raise DamagedFile(file, "cannot be read", remedy) from None
    digests = [line.removeprefix(b"\\")[:CHECKSUM_DIGITS].decode("ascii", "surrogateescape") for line in lines]
    return [digest for line, digest in zip(lines, digests, strict=True) if line == _checksum_line(digest, path.name)]


def _checksum_line(digest: str, name: str) -> bytes:
    """Return a line of a checksum file as `sha256sum` writes it: a name may hold line breaks, or not be UTF-8."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "" if escaped == name else "\\"  # says that the name is escaped
    return os.fsencode(f"{mark}{digest}  {escaped}\n")


def checksum_file(path: Path) -> Path:
    """Return where the checksum of `path` is stored."""
    return path.with_name(path.name + ".sha256")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, whole. NaN and infinities are refused: JSON has neither."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON from `path`; a missing or broken file is a `StorageError` that names it."""
    try:
        with open_file(path) as file:
            content = file.read(MAX_JSON + 1)
    except OSError as cause:
        raise read_error(path, cause) from None
    if len(content) > MAX_JSON:
        raise StorageError(f"{path} is no JSON of ours: it has more than {MAX_JSON:,} bytes; check the path.")
    return parse_json(path, content)


def parse_json(path: Path, content: bytes) -> Any:
    """Return the value of JSON that was read from `path`, which is named if it is broken."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as cause:
        reason = "it is nested too deeply" if isinstance(cause, RecursionError) else cause
        raise StorageError(f"{path} is not valid JSON ({reason}); delete its folder to run it again.") from None


def as_path(name: str, value: Any) -> Path:
    """Return the path that a user gave as text or as a path, or raise `InputError` by the argument's name.

    >>> as_path("out", None)
    Traceback (most recent call last):
    joma.arguments.InputError: `out` must be the path of a file or folder, got None; give text or a `pathlib.Path`.
    """
    try:
        return Path(value)
    except TypeError:
        expected, remedy = "the path of a file or folder", "give text or a `pathlib.Path`"
        raise InputError(name, expected, described(value), remedy) from None


def exists(path: Path) -> bool:
    """Return whether a file or folder exists; raise `StorageError` if that may not be known."""
    return _status(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether a path is that of a folder; raise `StorageError` if that may not be known."""
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file or folder, None if there is none; `Path.exists` hides errors from Python 3.14 on."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a `ValueError` for a name with NUL
        return None
    except OSError as cause:
        raise read_error(path, cause) from None


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading; raise `OSError` at once for anything else, such as a pipe, which has no end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a file")
    return file


def _content(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def list_folder(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted by name; nothing if there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise read_error(folder, cause) from None


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; a file that may not be looked at is named."""
    try:
        return path.stat().st_size
    except OSError as cause:
        raise read_error(path, cause) from None


def read_error(path: Path, cause: OSError | MemoryError) -> StorageError:
    """Return an error that says in one line why `path` cannot be read."""
    if isinstance(cause, MemoryError):
        reason = "it does not fit into memory"
    else:
        reason = os.strerror(cause.errno) if cause.errno else cause
    return StorageError(f"cannot read {path}: {reason}; check the path.")


def short_hash(text: str, letters: int) -> str:
    """Return the first `letters` hexadecimal digits of a text's SHA-256, as a short name that differs between texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process, or raise `FolderLocked` at once if another process has locked it.

    The lock is the kernel's, on the folder itself: it ends with the process, however that ends, and leaves no file.
    """
    handle = _locked_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # closed all the same, and the lock with it
            os.close(handle)


def _locked_folder(folder: Path) -> int:
    """Make the folder if there is none and lock it; return the handle that holds the lock."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as cause:
            raise storage_error(folder, cause) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                return handle
        except FileNotFoundError:  # whoever had locked it has removed it, and perhaps made another one
            pass
        except OSError as cause:
            os.close(handle)
            raise _lock_error(folder, cause) from None
        os.close(handle)


def _lock_error(folder: Path, cause: OSError) -> StorageError:
    if isinstance(cause, BlockingIOError):
        return FolderLocked(f"{folder} is locked by another process; wait for it or choose another folder.")
    reason = os.strerror(cause.errno) if cause.errno else cause
    return StorageError(f"cannot lock {folder}: {reason}; choose a folder on another disk.")
