"""The manifest of a folder: which files it holds, their sizes and checksums, and what they belong to.

`manifest.json` is written last and names every file that a reader may trust. It guards against damage: a cut file, a
changed byte, a file of another run in the place of one's own. It does not guard against a person who changes a file
and the manifest with it.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from joma.files import MAX_JSON, DamagedFile, checksum, read_error, write_text

MANIFEST = "manifest.json"
FORMAT = 1
CHECKED_FIRST = 1 << 24  # bytes; a larger file is read while its checksum is computed, not after it


@dataclass(frozen=True)
class Entry:
    """Size and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a folder and what they belong to.

    Attributes:
        folder: where they are.
        identity: what they belong to, such as study, version, config and seeds of a run.
        complete: whether everything is there; if not, the work that writes the rest was interrupted.
        files: by name, relative to the folder.
        remedy: what to do if one is damaged, for errors.
    """

    folder: Path
    identity: Mapping[str, Any]
    complete: bool
    files: Mapping[str, Entry]
    remedy: str = "restore it"

    def check(self, names: Iterable[str] | None = None) -> None:
        """Check the named files, all if None; raise `DamagedFile` for the first that is not what was written."""
        for name in self.files if names is None else names:
            self._check_size(name)
            self._compare(name, file_checksum(self.folder / name))

    def read(self, name: str) -> bytes:
        """Return the content of a file; the bytes that are returned are those that are checked."""
        self._check_size(name)
        try:
            content = (self.folder / name).read_bytes()
        except OSError as cause:
            raise read_error(self.folder / name, cause) from None
        self._compare(name, hashlib.sha256(content).hexdigest())
        return content

    @contextmanager
    def checking(self, name: str) -> Iterator[None]:
        """Check a file that is read inside the block.

        A small file is checked before it is read. A large one is checked by another thread while it is read, and an
        error that its damage causes is replaced by `DamagedFile`.
        """
        if self._check_size(name) <= CHECKED_FIRST:
            self.check([name])
            yield
            return
        with ThreadPoolExecutor(1) as executor:
            digest = executor.submit(file_checksum, self.folder / name)
            try:
                yield
            finally:
                self._compare(name, digest.result())

    def _check_size(self, name: str) -> int:
        """Return the size of a file, after checking that it is a file of the size that was written."""
        if name not in self.files and not self.complete:
            problem = "was being written when its writer was stopped, or is being written now"
            raise DamagedFile(self.folder / name, problem, "run the command that writes it again")
        if name not in self.files:
            raise self._damaged(name, f"is not listed in {MANIFEST}")
        try:
            status = (self.folder / name).stat()
        except FileNotFoundError:
            raise self._damaged(name, "is missing") from None
        except OSError as cause:
            raise read_error(self.folder / name, cause) from None
        if not stat.S_ISREG(status.st_mode):
            raise self._damaged(name, "is not a file")
        if status.st_size != self.files[name].size:
            raise self._damaged(name, "is cut short or altered since it was written")
        return status.st_size

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.files[name].sha256:
            raise self._damaged(name, "is altered since it was written")

    def _damaged(self, name: str, problem: str) -> DamagedFile:
        return DamagedFile(self.folder / name, problem, self.remedy)


def write_manifest(
    folder: Path,
    identity: Mapping[str, Any],
    names: Iterable[str],
    *,
    complete: bool = True,
    earlier: Manifest | None = None,
) -> None:
    """Write the manifest of the files `names`, which are all in place.

    Entries of an `earlier` manifest are copied: a file that was altered since then must not become a good one.
    """
    known = {} if earlier is None else earlier.files
    content = {
        "format": FORMAT,
        "identity": dict(identity),
        "complete": complete,
        "files": {name: asdict(known[name] if name in known else _entry(folder / name)) for name in sorted(names)},
    }
    write_text(folder / MANIFEST, _serialised(content))


def _entry(path: Path) -> Entry:
    try:
        return Entry(path.stat().st_size, checksum(path))
    except OSError as cause:
        raise read_error(path, cause) from None


def read_manifest(folder: Path, *, remedy: str = "restore it") -> Manifest | None:
    """Read the manifest of a folder, None if it has none; raise `DamagedFile` if it is not what was written."""
    path = folder / MANIFEST
    try:
        text = _read_text(path)
        content = json.loads(text)
        del content["sha256"]
        files = {name: Entry(**entry) for name, entry in content["files"].items()}
        identity, complete, number = dict(content["identity"]), bool(content["complete"]), content["format"]
        intact = text == _serialised(content) and all(map(_is_inside, files))
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise read_error(path, cause) from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise DamagedFile(path, "is cut short or altered since it was written", remedy) from None
    if not intact:
        raise DamagedFile(path, "is cut short or altered since it was written", remedy)
    if number != FORMAT:
        raise DamagedFile(path, f"has the format {number}, not {FORMAT}", "update joma")
    return Manifest(folder, identity, complete, files, remedy)


def _read_text(path: Path) -> str:
    """Return the text of a manifest; a file that is far too long for one is not read."""
    with path.open("rb") as file:
        content = file.read(MAX_JSON + 1)
    if len(content) > MAX_JSON:
        raise ValueError("too long")
    return content.decode("utf-8")


def _serialised(content: Mapping[str, Any]) -> str:
    """Return the text of a manifest: `content` and, as its last field, the checksum of `content`."""
    plain = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1, ensure_ascii=False) + "\n"


def _is_inside(name: str) -> bool:
    """Return whether a name stays inside its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; a file that cannot be read is named."""
    try:
        return checksum(path)
    except OSError as cause:
        raise read_error(path, cause) from None
