"""Where a text comes from: the pieces of files that make up each split, and their text in chunks of bounded size.

    python-reference   CPython's own language reference, `pydoc_data.topics`: always at hand, no download. It differs a
                       little between versions of Python. Topics come in sorted order; sections quote each other whole,
                       so a paragraph that stood before is left out. The last tenth of the lines of every topic
                       validates, the rest trains, nothing tests.
    a folder           with a file for each split: `train.txt`, `valid.txt`, `test.txt` (which may be absent), or the
                       like of `wiki.train.tokens`. Without such names its `.txt` files in sorted order are one text.
    a file             is one text: the first 80% of its lines train, the next 10% validate, the last 10% test. With
                       under five lines, of which none would validate, it is cut by bytes: after the next white space
                       or, if none is left, between characters.
    OWNER/NAME:CONFIG  a dataset of the Hugging Face hub with a column `text`, as "Salesforce/wikitext:wikitext-2-v1";
                       with nothing after the colon, its default configuration. It is streamed to the cache once and is
                       a folder from then on; without a split `validation` its split `train` is one text.

Text is UTF-8, with or without a byte order mark, and lines end in a line feed, a carriage return or both.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from jaxtyping import Int

from joma.arguments import InputError
from joma.files import StorageError, read_json, write_json, write_whole
from joma.progress import Progress, Task

SPLITS = ("train", "valid", "test")
EMBEDDED = "python-reference"
CHUNK = 2**22  # bytes of text held at once
_FEWEST = 5  # lines, with which one of them validates
LONGEST = 2**26  # bytes without white space, beyond which a file cannot be a text of words

_EXPECTED = f"{EMBEDDED!r}, a file or folder of text, or a dataset OWNER/NAME:CONFIG of the hub"
_SPLIT_FILE = re.compile(
    r"(?:.+\.)?(?:(?P<train>train)|(?P<valid>valid|validation|val)|(?P<test>test))\.(?:txt|tokens|raw)"
)
_RENAMED = {"wikitext": "Salesforce/wikitext"}  # the hub takes no name without an owner any more
_HUB_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
# A token ends at any white space, but for the space in `<br />`, possibly with quotation marks in it.
_SPACE = rb'(?:[\t\n\v\f\r]|(?<![rR"]) )'
_BORDER = re.compile(rb".*" + _SPACE, re.DOTALL)
_NEXT = re.compile(_SPACE)


class Piece(NamedTuple):
    """The bytes from `start` to `stop` of a file, or of bytes at hand."""

    where: Path | bytes
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """A text that was found.

    Attributes:
        name: what to call it.
        pieces: of each split, in order.
        digest: SHA-256 of the contents and of how they are split.
    """

    name: str
    pieces: Mapping[str, Sequence[Piece]]
    digest: str

    @property
    def size(self) -> int:
        """How many bytes there are in all splits."""
        return sum(piece.stop - piece.start for split in self.pieces.values() for piece in split)


class Chunk(NamedTuple):
    """Some of a text, as bytes and decoded; no token crosses its borders."""

    raw: bytes
    text: str


class _Survey(NamedTuple):
    path: Path
    digest: str
    first: int  # byte of text, after a byte order mark
    size: int
    lines: int


def find(source: Any, *, cache: Path, progress: Progress) -> Source:
    """Look a text up as this module describes; a dataset of the hub is fetched if `cache` does not have it."""
    found = find_here(source)
    if found is not None:
        return found
    if isinstance(source, str) and ":" in source:
        return _folder(source, _fetched(source, cache, progress))
    remedy = "check the path; a dataset's name has a colon after it, even without a configuration"
    raise InputError("corpus", _EXPECTED, f"{str(source)!r}, which is not there", remedy)


def find_here(source: Any) -> Source | None:
    """Look up the embedded text, a folder or a file; None for anything else, such as a dataset of the hub.

    >>> find_here("Salesforce/wikitext:wikitext-2-v1") is None
    True
    """
    if not isinstance(source, (str, Path)):
        raise InputError("corpus", _EXPECTED, repr(source), "give its name or path")
    if source == EMBEDDED:
        return _embedded()
    place = os.path.expanduser(source)  # what `os.path` cannot look at is not there; `Path` would raise
    if os.path.isdir(place):
        return _folder(Path(place).resolve().name, Path(place))
    if os.path.isfile(place):
        return _cut(Path(place).resolve().name, [Path(place)])
    return None


def chunks(pieces: Iterable[Piece], *, size: int = CHUNK) -> Iterator[Chunk]:
    """Read pieces in chunks of about `size` bytes that begin and end where a token cannot be cut.

    >>> [chunk.text for chunk in chunks([Piece(b"one two<br />three", 0, 18)], size=6)]
    ['one ', 'two<br />three']
    """
    for piece in pieces:
        with _opened(piece.where) as file:
            file.seek(piece.start)
            at, left, kept = piece.start, piece.stop - piece.start, b""
            while left:
                block = file.read(min(size, left))
                if not block:
                    raise InputError(
                        "corpus", "left alone while it is read", f"{_label(piece)}, now shorter", "try again"
                    )
                left -= len(block)
                kept += block
                border = _BORDER.match(kept)
                end = len(kept) if not left else border.end() if border else 0
                if end:
                    yield _decoded(kept[:end], piece, at)
                    at, kept = at + end, kept[end:]
                elif len(kept) > LONGEST:
                    got = f"{_label(piece)} with {len(kept) >> 20} MiB and no white space after byte {at}"
                    raise InputError("corpus", "a text of words", got, "give a text file, or break its lines")


def _decoded(raw: bytes, piece: Piece, at: int) -> Chunk:
    if (nul := raw.find(0)) >= 0:
        got = f"{_label(piece)} with a NUL at byte {at + nul}, as in binary files"
        raise InputError("corpus", "text in UTF-8", got, "give a text file, or convert it to UTF-8")
    try:
        return Chunk(raw, raw.decode())
    except UnicodeDecodeError as cause:
        got = f"{_label(piece)} with byte 0x{raw[cause.start]:02x} at {at + cause.start} ({cause.reason})"
        raise InputError("corpus", "text in UTF-8", got, "convert it to UTF-8, with iconv for example") from None


def _label(piece: Piece) -> str:
    return EMBEDDED if isinstance(piece.where, bytes) else str(piece.where)


@contextmanager
def _opened(where: Path | bytes) -> Iterator[IO[bytes]]:
    """Open for reading; what the operating system refuses is bad input."""
    try:
        file = io.BytesIO(where) if isinstance(where, bytes) else where.open("rb")
    except OSError as cause:
        reason = os.strerror(cause.errno) if cause.errno else cause
        raise InputError("corpus", "readable", f"{where} ({reason})", "check the path and its permissions") from None
    with file:
        yield file


def _embedded() -> Source:
    from pydoc_data.topics import topics  # half a megabyte that few callers need

    seen: set[str] = set()
    parts: dict[str, list[str]] = {"train": [], "valid": []}
    for name in sorted(topics):
        paragraphs = {text.strip(): text for text in re.split(r"\n\s*\n", topics[name])}
        lines = "\n\n".join(text for bare, text in paragraphs.items() if bare not in seen).rstrip().split("\n")
        seen |= paragraphs.keys()
        last = len(lines) - len(lines) // 10
        parts["train"] += lines[:last]
        parts["valid"] += lines[last:]
    raw = {split: "".join(f"{line}\n" for line in lines).encode() for split, lines in parts.items()}
    pieces = {split: [Piece(content, 0, len(content))] for split, content in raw.items()}
    digests = [(split, hashlib.sha256(content).hexdigest()) for split, content in raw.items()]
    return Source(EMBEDDED, {**pieces, "test": []}, _digest(digests))


def _folder(name: str, folder: Path) -> Source:
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as cause:
        raise InputError("corpus", "a folder that can be read", f"{folder} ({cause.strerror})", "check it") from None
    named: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in files:
        if match := _SPLIT_FILE.fullmatch(path.name):
            named[match.lastgroup or ""].append(path)
    if not named["train"] and not named["valid"]:
        return _cut(name, [path for path in files if path.suffix == ".txt"], folder)
    counts = [len(named[split]) for split in SPLITS]
    if counts not in ([1, 1, 1], [1, 1, 0]):
        got = f"{folder} with {', '.join(path.name for paths in named.values() for path in paths)}"
        remedy = "leave one file for each split, or name none of them after a split: one text is then cut"
        raise InputError("corpus", "a folder with one train, one valid and at most one test file", got, remedy)
    surveys = {split: [_survey(path) for path in paths] for split, paths in named.items()}
    pieces = {split: [Piece(file.path, file.first, file.size) for file in found] for split, found in surveys.items()}
    return Source(name, pieces, _digest((split, file.digest) for split, found in surveys.items() for file in found))


def _cut(name: str, paths: Sequence[Path], folder: Path | None = None) -> Source:
    """Cut files that are one text: the splits' first lines are 0, ⌈8n/10⌉ and ⌈9n/10⌉ of n, or bytes for lines."""
    if not paths:
        raise InputError("corpus", "a folder with text", f"{folder} without a .txt file", "add one, or name the file")
    surveys = [_survey(path) for path in paths]
    by_line = sum(file.lines for file in surveys) >= _FEWEST
    counts = [file.lines if by_line else file.size for file in surveys]
    ends = [-(-sum(counts) * tenths // 10) for tenths in (0, 8, 9, 10)]
    place = _offset if by_line else _border
    pieces = {split: _pieces(surveys, counts, place, *ends[at : at + 2]) for at, split in enumerate(SPLITS)}
    return Source(name, pieces, _digest(("cut", file.digest) for file in surveys))


def _pieces(
    surveys: Sequence[_Survey], counts: Sequence[int], place: Callable[[_Survey, int], int], first: int, last: int
) -> list[Piece]:
    """Return the pieces that hold the units from `first` up to `last`, counted through all files."""
    pieces, before = [], 0
    for file, count in zip(surveys, counts, strict=True):
        start, stop = (place(file, min(max(unit - before, 0), count)) for unit in (first, last))
        if start < stop:
            pieces.append(Piece(file.path, start, stop))
        before += count
    return pieces


def _survey(path: Path) -> _Survey:
    digest, size, lines, first, final = hashlib.sha256(), 0, 0, 0, b"\n"
    with _opened(path) as file:
        for block, ends in _blocks(file):
            digest.update(block)
            first = first if size else len(codecs.BOM_UTF8) * block.startswith(codecs.BOM_UTF8)
            size, lines, final = size + len(block), lines + len(ends), block[-1:]
    return _Survey(path, digest.hexdigest(), first, size, lines + (final not in b"\r\n"))


def _blocks(file: IO[bytes]) -> Iterator[tuple[bytes, Int[np.ndarray, " end"]]]:
    """Read a file in blocks, with where lines end in each: at every CR, and at every LF that follows none."""
    returned = False
    while block := file.read(CHUNK):
        raw = np.frombuffer(block, np.uint8)
        ends = raw == ord("\n")
        if returned or b"\r" in block:
            returns = np.concatenate([[returned], raw == ord("\r")])
            ends = returns[1:] | (ends & ~returns[:-1])
        yield block, np.flatnonzero(ends)
        returned = block.endswith(b"\r")


def _offset(survey: _Survey, line: int) -> int:
    """Return the byte at which a line begins, or the size for the line after the last."""
    if line in (0, survey.lines):
        return survey.size if line else survey.first
    at = 0
    with _opened(survey.path) as file:
        for block, ends in _blocks(file):
            if line <= len(ends):
                after = at + int(ends[line - 1]) + 1
                file.seek(after - 1)
                return after + (file.read(2) == b"\r\n")
            at, line = at + len(block), line - len(ends)
    return survey.size


def _border(survey: _Survey, at: int) -> int:
    """Return the first byte from `at` on before which no token is cut, or no character if white space is not left."""
    if at in (0, survey.size):
        return survey.size if at else survey.first
    begin = max(at - 2, 0)  # `_NEXT` looks at one byte before the white space
    with _opened(survey.path) as file:
        file.seek(begin)
        rest = file.read(LONGEST)
    if found := _NEXT.search(rest, at - 1 - begin):
        return begin + found.end()
    while at < survey.size and rest[at - begin] & 0xC0 == 0x80:  # not the first byte of a character
        at += 1
    return max(survey.first, at)


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def _fetched(source: str, cache: Path, progress: Progress) -> Path:
    """Return the folder of a dataset's text, streamed from the hub the first time or where a file of it is lost.

    `dataset.json` is written last.
    """
    folder = cache / "datasets" / quote(source, safe="")
    if _whole(folder):
        return folder
    found = _reach_hub(source)
    if "train" not in found:
        raise InputError(
            "corpus", "a dataset with a split `train`", f"{source!r} with {sorted(found)}", "choose another"
        )
    names = _HUB_SPLITS if "validation" in found else {"train": "text"}
    kept = {hub: name for hub, name in names.items() if hub in found}
    with progress.task(f"fetch {source}", total=sum(_rows(found[hub], hub) for hub in kept)) as work:
        for hub, name in kept.items():
            _keep(source, found[hub], folder / f"{name}.txt", work)
    write_json(folder / "dataset.json", {"dataset": source, "files": [f"{name}.txt" for name in kept.values()]})
    return folder


def _whole(folder: Path) -> bool:
    """Whether a dataset was fetched to the end, and all its files are still there."""
    try:
        return all((folder / name).is_file() for name in read_json(folder / "dataset.json")["files"])
    except (StorageError, KeyError, TypeError):
        return False


def _reach_hub(source: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        got = f"{source!r} without the `datasets` package"
        raise InputError("corpus", "a local text", got, "install it with `pip install 'joma[hf]'`") from None
    name, _, config = source.rpartition(":")
    with _hub_errors(source):
        return load_dataset(_RENAMED.get(name, name), config or None, streaming=True)


def _rows(stream: Any, split: str) -> int:
    """Return how many rows the hub announces, 0 if it does not say."""
    announced = stream.info.splits
    return announced[split].num_examples if announced and split in announced else 0


def _keep(source: str, stream: Any, path: Path, work: Task) -> None:
    def texts() -> Iterator[str]:
        with _hub_errors(source):  # here, as `write_whole` takes what the network refuses for the disk's refusal
            for row in stream:
                if not isinstance(row.get("text"), str):
                    got = f"{source!r} with {', '.join(row)}"
                    raise InputError("corpus", "a dataset with a column `text`", got, "choose another dataset")
                yield row["text"]

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            for text in texts():
                file.write(text if text.endswith("\n") else f"{text}\n")
                work.advance()

    write_whole(path, write)


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Turn what the hub or the way to it refuses into one line; its retries would be five more."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except InputError:
        raise
    except Exception as cause:  # half a dozen libraries lie on the way, each with errors of its own
        got = f"{source!r} ({' '.join(str(cause).split())[:200]})"
        remedy = "check the name, OWNER/NAME:CONFIG, and the network, or give a folder of text"
        raise InputError("corpus", "a dataset that the hub can deliver", got, remedy) from None
    finally:
        logger.setLevel(level)
