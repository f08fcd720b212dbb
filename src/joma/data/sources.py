"""Where a text comes from: which parts of which files make up each split, and their text in chunks of bounded size.

    python-reference   CPython's own language reference, `pydoc_data.topics`: part of every Python, so nothing is
                       downloaded. It differs a little between versions of Python. Topics are in sorted order. They
                       quote each other, so a paragraph that occurred before is left out. The last tenth of the lines
                       of every topic is for validation, the rest for training; there is no test split.
    a folder           with a file for each split: `train.txt`, `valid.txt`, `test.txt` (which may be absent), or names
                       such as `wiki.train.tokens`. Without such names its `.txt` files in sorted order are one text.
    a file             is one text: the first 80% of its lines are for training, the next 10% for validation, the last
                       10% for the test. A text of fewer than five lines, none of which would be for validation, is cut
                       by bytes: after the next white space or, if there is none, between characters.
    OWNER/NAME:CONFIG  a dataset of the Hugging Face hub with a column `text`, such as
                       "Salesforce/wikitext:wikitext-2-v1"; with nothing after the colon, its default configuration. It
                       is streamed to the cache once and is a folder from then on. Without a split `validation` its
                       split `train` is one text.

Text is UTF-8, with or without a byte order mark, and lines end with a line feed, a carriage return or both.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from jaxtyping import Int

from joma.arguments import InputError
from joma.files import DamagedFile, StorageError, read_json, remove_leftovers, write_whole
from joma.manifest import read_manifest, write_manifest
from joma.progress import Progress, Task

SPLITS = ("train", "valid", "test")
EMBEDDED = "python-reference"
CHUNK = 2**22  # bytes of text that are in memory at once
MAX_WORD = 2**26  # bytes without white space: a file that has more is not a text of words
_MIN_LINES = 5  # of a text that is cut by lines: with fewer, no line would be for validation

_EXPECTED = f"{EMBEDDED!r}, a file or folder of text, or a dataset OWNER/NAME:CONFIG of the hub"
_SPLIT_FILE = re.compile(
    r"(?:.+\.)?(?:(?P<train>train)|(?P<valid>valid|validation|val)|(?P<test>test))\.(?:txt|tokens|raw)"
)
_RENAMED = {"wikitext": "Salesforce/wikitext"}  # the hub no longer accepts names without an owner
_HUB_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
# A token ends at any white space except for the space in `<br />`, which may have quotation marks in it.
_SPACE = rb'(?:[\t\n\v\f\r]|(?<![rR"]) )'
_UP_TO_LAST_SPACE = re.compile(rb".*" + _SPACE, re.DOTALL)
_NEXT_SPACE = re.compile(_SPACE)


class DamagedDownload(UserWarning):
    """A file of a downloaded dataset was altered or is missing; the dataset is downloaded again."""


class Piece(NamedTuple):
    """The bytes from `start` to `stop` of a file, or of bytes in memory."""

    content: Path | bytes
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """A text that exists, and how it is split.

    Attributes:
        name: name of the text, for messages and figures.
        pieces: the pieces of each split, in order.
        digest: SHA-256 of the contents and of how they are split.
    """

    name: str
    pieces: Mapping[str, Sequence[Piece]]
    digest: str

    @property
    def size(self) -> int:
        """Number of bytes of all splits."""
        return sum(piece.stop - piece.start for split in self.pieces.values() for piece in split)


class Chunk(NamedTuple):
    """A part of a text, as bytes and decoded; it begins and ends between tokens."""

    raw: bytes
    text: str


class _TextFile(NamedTuple):
    path: Path
    digest: str
    first: int  # byte at which the text begins, after a byte order mark
    size: int
    lines: int


def find(source: Any, *, cache: Path, progress: Progress) -> Source:
    """Find a text by its name or path; a dataset of the hub is downloaded if it is not in `cache`."""
    local = find_local(source)
    if local is not None:
        return local
    if isinstance(source, str) and ":" in source:
        return _from_folder(source, _download(source, cache, progress))
    remedy = "check the path; a dataset's name has a colon after it, even without a configuration"
    raise InputError("corpus", _EXPECTED, f"{str(source)!r}, which does not exist", remedy)


def find_local(source: Any) -> Source | None:
    """Find the embedded text, a folder or a file; return None for anything else, such as a dataset of the hub.

    >>> find_local("Salesforce/wikitext:wikitext-2-v1") is None
    True
    """
    if not isinstance(source, (str, Path)):
        raise InputError("corpus", _EXPECTED, repr(source), "give its name or path")
    if source == EMBEDDED:
        return _embedded()
    path = os.path.expanduser(source)  # `os.path` returns False for a path that is not valid; `Path` would raise
    if os.path.isdir(path):
        return _from_folder(Path(path).resolve().name, Path(path))
    if os.path.isfile(path):
        return _cut(Path(path).resolve().name, [Path(path)])
    return None


def chunks(pieces: Iterable[Piece], *, size: int = CHUNK) -> Iterator[Chunk]:
    """Read pieces in chunks of about `size` bytes that begin and end between tokens.

    >>> [chunk.text for chunk in chunks([Piece(b"one two<br />three", 0, 18)], size=6)]
    ['one ', 'two<br />three']
    """
    for piece in pieces:
        with _opened(piece.content) as file:
            file.seek(piece.start)
            offset, remaining, pending = piece.start, piece.stop - piece.start, b""
            while remaining:
                block = file.read(min(size, remaining))
                if not block:
                    got = f"{_label(piece)}, now shorter"
                    raise InputError("corpus", "left unchanged while it is read", got, "try again")
                remaining -= len(block)
                pending += block
                complete = _UP_TO_LAST_SPACE.match(pending)
                end = len(pending) if not remaining else complete.end() if complete else 0
                if end:
                    yield _decode(pending[:end], piece, offset)
                    offset, pending = offset + end, pending[end:]
                elif len(pending) > MAX_WORD:
                    got = f"{_label(piece)} with {len(pending) >> 20} MiB and no white space after byte {offset}"
                    raise InputError("corpus", "a text of words", got, "give a text file, or break its lines")


def _decode(raw: bytes, piece: Piece, offset: int) -> Chunk:
    """Decode bytes that begin at byte `offset` of a piece's file."""
    if (nul := raw.find(0)) >= 0:
        got = f"{_label(piece)} with a NUL at byte {offset + nul}, as in binary files"
        raise InputError("corpus", "text in UTF-8", got, "give a text file, or convert it to UTF-8")
    try:
        return Chunk(raw, raw.decode())
    except UnicodeDecodeError as cause:
        got = f"{_label(piece)} with byte 0x{raw[cause.start]:02x} at {offset + cause.start} ({cause.reason})"
        raise InputError("corpus", "text in UTF-8", got, "convert it to UTF-8, with iconv for example") from None


def _label(piece: Piece) -> str:
    return EMBEDDED if isinstance(piece.content, bytes) else str(piece.content)


@contextmanager
def _opened(content: Path | bytes) -> Iterator[IO[bytes]]:
    """Open a file or bytes in memory for reading; a file that cannot be opened is bad input."""
    try:
        file = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
    except OSError as cause:
        reason = os.strerror(cause.errno) if cause.errno else cause
        raise InputError("corpus", "readable", f"{content} ({reason})", "check the path and its permissions") from None
    with file:
        yield file


def _embedded() -> Source:
    """Return CPython's language reference, each paragraph once."""
    from pydoc_data.topics import topics  # half a megabyte that few callers need

    seen: set[str] = set()
    split_lines: dict[str, list[str]] = {"train": [], "valid": []}
    for name in sorted(topics):
        paragraphs = {text.strip(): text for text in re.split(r"\n\s*\n", topics[name])}
        lines = "\n\n".join(text for stripped, text in paragraphs.items() if stripped not in seen).rstrip().split("\n")
        seen |= paragraphs.keys()
        train_count = len(lines) - len(lines) // 10
        split_lines["train"] += lines[:train_count]
        split_lines["valid"] += lines[train_count:]
    raw = {split: "".join(f"{line}\n" for line in lines).encode() for split, lines in split_lines.items()}
    pieces = {split: [Piece(content, 0, len(content))] for split, content in raw.items()}
    digests = [(split, hashlib.sha256(content).hexdigest()) for split, content in raw.items()]
    return Source(EMBEDDED, {**pieces, "test": []}, _digest(digests))


def _from_folder(name: str, folder: Path) -> Source:
    """Return the text of a folder: a file for each split, or `.txt` files that are cut as one text."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as cause:
        got = f"{folder} ({cause.strerror})"
        raise InputError("corpus", "a folder that can be read", got, "check its permissions") from None
    paths_of: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in files:
        if match := _SPLIT_FILE.fullmatch(path.name):
            paths_of[match.lastgroup or ""].append(path)
    if not paths_of["train"] and not paths_of["valid"]:
        return _cut(name, [path for path in files if path.suffix == ".txt"], folder)
    counts = [len(paths_of[split]) for split in SPLITS]
    if counts not in ([1, 1, 1], [1, 1, 0]):
        got = f"{folder} with {', '.join(path.name for paths in paths_of.values() for path in paths)}"
        remedy = "leave one file for each split, or name none of them after a split: one text is then cut"
        raise InputError("corpus", "a folder with one train, one valid and at most one test file", got, remedy)
    texts = {split: [_scan(path) for path in paths] for split, paths in paths_of.items()}
    pieces = {split: [Piece(file.path, file.first, file.size) for file in files] for split, files in texts.items()}
    return Source(name, pieces, _digest((split, file.digest) for split, files in texts.items() for file in files))


def _cut(name: str, paths: Sequence[Path], folder: Path | None = None) -> Source:
    """Split files that are one text: of n lines (or bytes) the splits begin at number 0, ⌈8n/10⌉ and ⌈9n/10⌉."""
    if not paths:
        raise InputError("corpus", "a folder with text", f"{folder} without a .txt file", "add one, or name the file")
    files = [_scan(path) for path in paths]
    by_line = sum(file.lines for file in files) >= _MIN_LINES
    counts = [file.lines if by_line else file.size for file in files]
    bounds = [-(-sum(counts) * tenths // 10) for tenths in (0, 8, 9, 10)]
    offset_of = _line_offset if by_line else _token_offset
    pieces = {
        split: _pieces(files, counts, offset_of, first, last)
        for split, (first, last) in zip(SPLITS, pairwise(bounds), strict=True)
    }
    return Source(name, pieces, _digest(("cut", file.digest) for file in files))


def _pieces(
    files: Sequence[_TextFile],
    counts: Sequence[int],
    offset_of: Callable[[_TextFile, int], int],
    first: int,
    last: int,
) -> list[Piece]:
    """Return the pieces from line (or byte) `first` up to `last`, numbered through all files.

    Args:
        files: the files of one text, in order.
        counts: number of lines (or bytes) of each file.
        offset_of: returns the byte of a file at which its line (or byte) of a given number begins.
        first, last: numbers of the first line (or byte), and of the one after the last.
    """
    pieces, before = [], 0
    for file, count in zip(files, counts, strict=True):
        start, stop = (offset_of(file, min(max(number - before, 0), count)) for number in (first, last))
        if start < stop:
            pieces.append(Piece(file.path, start, stop))
        before += count
    return pieces


def _scan(path: Path) -> _TextFile:
    """Read a file once for its digest, its size and its number of lines."""
    digest, size, lines, first, last_byte = hashlib.sha256(), 0, 0, 0, b"\n"
    with _opened(path) as file:
        for block, ends in _blocks(file):
            digest.update(block)
            first = first if size else len(codecs.BOM_UTF8) * block.startswith(codecs.BOM_UTF8)
            size, lines, last_byte = size + len(block), lines + len(ends), block[-1:]
    return _TextFile(path, digest.hexdigest(), first, size, lines + (last_byte not in b"\r\n"))


def _blocks(file: IO[bytes]) -> Iterator[tuple[bytes, Int[np.ndarray, " end"]]]:
    """Read a file in blocks and find the ends of lines in each: every CR, and every LF that does not follow a CR."""
    after_return = False
    while block := file.read(CHUNK):
        raw = np.frombuffer(block, np.uint8)
        ends = raw == ord("\n")
        if after_return or b"\r" in block:
            returns = np.concatenate([[after_return], raw == ord("\r")])
            ends = returns[1:] | (ends & ~returns[:-1])
        yield block, np.flatnonzero(ends)
        after_return = block.endswith(b"\r")


def _line_offset(text: _TextFile, line: int) -> int:
    """Return the byte at which a line begins, or the size of the file for the line after the last."""
    if line in (0, text.lines):
        return text.size if line else text.first
    offset = 0
    with _opened(text.path) as file:
        for block, ends in _blocks(file):
            if line <= len(ends):
                after = offset + int(ends[line - 1]) + 1
                file.seek(after - 1)
                return after + (file.read(2) == b"\r\n")
            offset, line = offset + len(block), line - len(ends)
    return text.size


def _token_offset(text: _TextFile, byte: int) -> int:
    """Return the first byte from `byte` on that lies between tokens or, without white space, between characters."""
    if byte in (0, text.size):
        return text.size if byte else text.first
    start = max(byte - 2, 0)  # `_NEXT_SPACE` looks at one byte before the white space
    with _opened(text.path) as file:
        file.seek(start)
        rest = file.read(MAX_WORD)
    if space := _NEXT_SPACE.search(rest, byte - 1 - start):
        return start + space.end()
    while byte < text.size and rest[byte - start] & 0xC0 == 0x80:  # not the first byte of a character
        byte += 1
    return max(text.first, byte)


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def _download(source: str, cache: Path, progress: Progress) -> Path:
    """Return the folder of a dataset's text; it is streamed from the hub the first time, or if a file is damaged.

    The manifest is written last, so that a download that was interrupted starts again.
    """
    folder = cache / "datasets" / quote(source, safe="")
    if _is_intact(folder, source):
        return folder
    remove_leftovers(folder)
    dataset = _open_dataset(source)
    if "train" not in dataset:
        got = f"{source!r} with {sorted(dataset)}"
        raise InputError("corpus", "a dataset with a split `train`", got, "choose another")
    names = _HUB_SPLITS if "validation" in dataset else {"train": "text"}
    names = {split: name for split, name in names.items() if split in dataset}
    with progress.task(f"fetch {source}", total=sum(_row_count(dataset[split], split) for split in names)) as task:
        for split, name in names.items():
            _store(source, dataset[split], folder / f"{name}.txt", task)
    write_manifest(folder, {"dataset": source}, [f"{name}.txt" for name in names.values()])
    return folder


def _is_intact(folder: Path, source: str) -> bool:
    """Return whether a dataset was downloaded to the end and all its files are as they were; warn of damage."""
    try:
        manifest = read_manifest(folder, remedy="it is downloaded again")
        if manifest is None:
            return _adopt(folder, source)
        manifest.check()
    except DamagedFile as problem:
        warnings.warn(str(problem), DamagedDownload, stacklevel=2)
        return False
    return manifest.identity == {"dataset": source}


def _adopt(folder: Path, source: str) -> bool:
    """Write the manifest of a dataset that version 0.1.0 downloaded to the end; return whether this is one."""
    try:
        names = read_json(folder / "dataset.json")["files"]
        if not all((folder / name).is_file() for name in names):
            return False
    except (StorageError, KeyError, TypeError):
        return False
    write_manifest(folder, {"dataset": source}, names)
    return True


def _open_dataset(source: str) -> Any:
    """Return the splits of a dataset of the hub as streams of rows."""
    try:
        from datasets import load_dataset
    except ImportError:
        got = f"{source!r} without the `datasets` package"
        raise InputError("corpus", "a local text", got, "install it with `pip install 'joma[hf]'`") from None
    name, _, config = source.rpartition(":")
    with _hub_errors(source):
        return load_dataset(_RENAMED.get(name, name), config or None, streaming=True)


def _row_count(stream: Any, split: str) -> int:
    """Return how many rows the hub announces, or 0 if it announces nothing."""
    announced = stream.info.splits
    return announced[split].num_examples if announced and split in announced else 0


def _store(source: str, stream: Any, path: Path, task: Task) -> None:
    """Write the column `text` of a split to `path`, one line or more for each row."""

    def texts() -> Iterator[str]:
        with _hub_errors(source):  # here, because `write_whole` would report a network error as a disk error
            for row in stream:
                if not isinstance(row.get("text"), str):
                    got = f"{source!r} with {', '.join(row)}"
                    raise InputError("corpus", "a dataset with a column `text`", got, "choose another dataset")
                yield row["text"]

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            for text in texts():
                file.write(text if text.endswith("\n") else f"{text}\n")
                task.advance()

    write_whole(path, write)


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Turn an error of the hub or the network into one line, and silence the hub's own warnings about its retries."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except InputError:
        raise
    except Exception as cause:  # half a dozen libraries are involved, each with its own kinds of errors
        got = f"{source!r} ({' '.join(str(cause).split())[:200]})"
        remedy = "check the name, OWNER/NAME:CONFIG, and the network, or give a folder of text"
        raise InputError("corpus", "a dataset that the hub can deliver", got, remedy) from None
    finally:
        logger.setLevel(level)
