"""The manifest of a folder: which files it holds, their sizes and checksums, and what they belong to.

`manifest.json` is written last and names every file that a reader may trust. It guards against damage: a cut file, a
changed byte, a file of another run in the place of one's own. It does not guard against a person who changes a file
and the manifest with it.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from joma.files import MAX_JSON, DamagedFile, checksum, file_size, open_file, read_error, write_text

MANIFEST = "manifest.json"
FORMAT = 1
BLOCK = 1 << 24  # bytes that are in memory at once


@dataclass(frozen=True)
class Entry:
    """Size and SHA-256 of one file.

    Attributes:
        size, sha256: of the whole file.
        arrays: where large arrays lie in it, from byte to byte, in order. A reader of the file takes whatever is there
            for numbers, so that damage there can do no more than change numbers.
        structure: the SHA-256 of everything else.
        numbers: the XXH3 (128 bits) of the arrays, which is computed as fast as they are read; a SHA-256 takes several
            times as long.
    """

    size: int
    sha256: str
    arrays: Sequence[tuple[int, int]] = ()
    structure: str = ""
    numbers: str = ""


@dataclass(frozen=True)
class Manifest:
    """The files of a folder and what they belong to.

    Attributes:
        folder: where they are.
        identity: what they belong to, such as study, version, config and seeds of a run.
        complete: whether everything is there; if not, the work that writes the rest was interrupted.
        files: by name, relative to the folder.
        remedy: what to do if one is damaged, for errors; a function of the file if it depends on which one.
    """

    folder: Path
    identity: Mapping[str, Any]
    complete: bool
    files: Mapping[str, Entry]
    remedy: str | Callable[[Path], str] = "restore it"

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

        It is checked before it is read: on a damaged HDF5 file, HDF5 may run for ever. Only the numbers of large arrays
        are checked by another thread while they are read. If they are damaged, `DamagedFile` replaces any other error.
        """
        self._check_size(name)
        entry = self.files[name]
        if not entry.arrays:
            self.check([name])
            yield
            return
        if _structure(self.folder / name, entry.arrays) != entry.structure:
            raise self._damaged(name, "is altered since it was written")
        with ThreadPoolExecutor(1) as executor:
            numbers = executor.submit(_numbers, self.folder / name, entry.arrays)
            try:
                yield
            finally:
                if numbers.result() != entry.numbers:
                    raise self._damaged(name, "is altered since it was written")

    def _check_size(self, name: str) -> None:
        """Check that a name is that of a file of the size that was written."""
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

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.files[name].sha256:
            raise self._damaged(name, "is altered since it was written")

    def _damaged(self, name: str, problem: str) -> DamagedFile:
        return DamagedFile(self.folder / name, problem, _remedy(self.remedy, self.folder / name))


def _remedy(remedy: str | Callable[[Path], str], file: Path) -> str:
    return remedy if isinstance(remedy, str) else remedy(file)


def write_manifest(
    folder: Path,
    identity: Mapping[str, Any],
    names: Iterable[str],
    *,
    complete: bool = True,
    earlier: Manifest | None = None,
    arrays: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> None:
    """Write the manifest of the files `names`, which are all in place.

    Entries of an `earlier` manifest are copied: a file that was altered since then must not become a good one. `arrays`
    says where large arrays lie in a file (`Entry`).
    """
    places = arrays or {}
    known = {} if earlier is None else earlier.files
    content = {
        "format": FORMAT,
        "identity": dict(identity),
        "complete": complete,
        "files": {
            name: _fields(known[name] if name in known else _entry(folder / name, places.get(name, ())))
            for name in sorted(names)
        },
    }
    write_text(folder / MANIFEST, _serialised(content))


def _entry(path: Path, arrays: Sequence[tuple[int, int]]) -> Entry:
    structure, numbers = (_structure(path, arrays), _numbers(path, arrays)) if arrays else ("", "")
    try:
        return Entry(path.stat().st_size, checksum(path), arrays, structure, numbers)
    except OSError as cause:
        raise read_error(path, cause) from None


def _fields(entry: Entry) -> dict[str, Any]:
    """Return an entry as it is stored: without arrays if it has none."""
    fields = asdict(entry)
    return fields if entry.arrays else {name: fields[name] for name in ("size", "sha256")}


def _parsed_entry(*, arrays: Iterable[Iterable[int]] = (), **fields: Any) -> Entry:
    return Entry(arrays=[(start, stop) for start, stop in arrays], **fields)


def _structure(path: Path, arrays: Sequence[tuple[int, int]]) -> str:
    """Return the SHA-256 of everything in a file but its arrays."""
    ends = [0, *(stop for _, stop in arrays)]
    starts = [*(start for start, _ in arrays), file_size(path)]
    return _digest(hashlib.sha256(), path, zip(ends, starts, strict=True))


def _numbers(path: Path, arrays: Sequence[tuple[int, int]]) -> str:
    """Return the XXH3 of the arrays in a file."""
    import xxhash

    return _digest(xxhash.xxh3_128(), path, arrays)


def _digest(digest: Any, path: Path, spans: Iterable[tuple[int, int]]) -> str:
    """Return the digest, in hexadecimal, of some parts of a file, each from byte to byte."""
    buffer = memoryview(bytearray(BLOCK))
    try:
        with open_file(path) as file:
            for start, stop in spans:
                file.seek(start)
                left = stop - start
                while left > 0 and (count := file.readinto(buffer[: min(BLOCK, left)])):
                    digest.update(buffer[:count])
                    left -= count
    except OSError as cause:
        raise read_error(path, cause) from None
    return digest.hexdigest()


def read_manifest(folder: Path, *, remedy: str | Callable[[Path], str] = "restore it") -> Manifest | None:
    """Read the manifest of a folder, None if it has none; raise `DamagedFile` if it is not what was written."""
    try:
        with open_file(folder / MANIFEST) as file:
            content = file.read(MAX_JSON + 1)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise read_error(folder / MANIFEST, cause) from None
    return parse_manifest(folder, content, remedy=remedy)


def parse_manifest(folder: Path, serialised: bytes, *, remedy: str | Callable[[Path], str] = "restore it") -> Manifest:
    """Return the manifest of a folder from its bytes; raise `DamagedFile` if they are not what was written.

    Bytes that are far too many for a manifest are not parsed.
    """
    path = folder / MANIFEST
    damaged = DamagedFile(path, "is cut short or altered since it was written", _remedy(remedy, path))
    if len(serialised) > MAX_JSON:
        raise damaged
    try:
        text = serialised.decode("utf-8")
        content = json.loads(text)
        del content["sha256"]
        if text != _serialised(content):
            raise damaged
        if content["format"] != FORMAT:
            raise DamagedFile(path, f"has the format {content['format']}, not {FORMAT}", "update joma")
        files = {name: _parsed_entry(**entry) for name, entry in content["files"].items()}
        identity, complete = dict(content["identity"]), bool(content["complete"])
    except DamagedFile:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise damaged from None
    if not all(map(_is_inside, files)):
        raise damaged
    return Manifest(folder, identity, complete, files, remedy)


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
