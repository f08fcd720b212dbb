"""A corpus of text as one stream of token numbers for each split, tokenised once and then memory-mapped from a cache.

`joma.data.sources` lists what a corpus may be made of. The tokenisers are those of `TOKENISERS`:

    basic_english   the rules of torchtext: lower case; `"` is dropped; `<br />`, `;` and `:` become spaces; each of
                    ' . , ( ) ! ? is a token; the rest is split at white space. The vocabulary is `<unk>`, then the
                    types of the training split by falling frequency; types of equal frequency are in the order of
                    their characters. Empty lines give no tokens, and there is no token for the end of a line.
    bytes           the 256 bytes.

The cache is the user's cache folder, or the one that the environment variable `JOMA_CACHE` names; it may be deleted at
any time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt
from platformdirs import user_cache_dir
from torch import Tensor

from joma.arguments import InputError, choice, whole
from joma.data.sources import EMBEDDED, SPLITS, Chunk, Source, chunks, find
from joma.files import StorageError, as_path, parse_json, remove_leftovers, write_json, write_whole
from joma.manifest import read_manifest, write_manifest
from joma.progress import SILENT, Progress, Task

VERSION = 3  # of the cache: raise it when the format of the files or the output of a tokeniser changes
UNKNOWN = "<unk>"
TYPES = "types.json"  # the vocabulary, in the cache
BLOCK = 2**20  # tokens that are in memory at once


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token numbers of each split, memory-mapped: they are read from the disk when they are used.

    Attributes:
        train, valid, test: token numbers of each split; `valid` and `test` may be empty.
        types: the vocabulary: the text of each token number.
        name: name of the text, for messages and figures.
        digest: SHA-256 of the text, its splits and the tokeniser.
    """

    train: UInt[np.ndarray, " time"]
    valid: UInt[np.ndarray, " _"]
    test: UInt[np.ndarray, " _"]
    types: tuple[str, ...]
    name: str
    digest: str

    def columns(self, split: str, count: int, *, least: int = 2, name: str = "count") -> Int[Tensor, "{count} time"]:
        """Cut the N tokens of a split into `count` columns of equal length T = ⌊N/count⌋ and drop the rest.

            column_c(t) = stream(c T + t)

        `batchify` of PyTorch's word language model returns the transpose.

        Args:
            split: train, valid or test.
            count: number of columns, which is the batch size.
            least: number of tokens that a column must have; by default two, an input and its target.
            name: name of `count` in error messages, if the caller's users know it by another name.

        Returns:
            Token numbers [column, time], int64.

        >>> corpus().columns("valid", 10).shape
        torch.Size([10, ...])
        """
        stream = choice("split", split, {split: getattr(self, split) for split in SPLITS})
        count, least = whole(name, count), whole("least", least)
        length = len(stream) // count
        if length < least:
            got = f"{len(stream)} in the {split} split of {self.name}"
            remedy = f"give a longer text or a smaller `{name}` than {count}"
            expected = f"at least {count * least} tokens, {least} for each column"
            raise InputError("corpus", expected, got, remedy, must="have")
        return torch.from_numpy(stream[: count * length].astype(np.int64)).reshape(count, length)

    def frequencies(self) -> Int[np.ndarray, " type"]:
        """Return how often each type occurs in the training split.

        >>> counts = corpus(tokeniser="bytes").frequencies()
        >>> counts.shape, chr(counts.argmax())
        ((256,), ' ')
        """
        counts = np.zeros(len(self.types), np.int64)
        for block in _blocks(self.train):
            counts += np.bincount(block, minlength=len(counts))
        return counts


@runtime_checkable
class Tokeniser(Protocol):
    """A tokeniser that builds its vocabulary from the training split in one pass.

    The order of the vocabulary is known only after the training split has been read. Until then its tokens have
    provisional numbers, of dtype `provisional`; `build_vocabulary` returns their final numbers.
    """

    provisional: np.dtype

    def learn(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Count the tokens of a chunk of the training split and return their provisional numbers."""
        ...

    def build_vocabulary(self) -> tuple[list[str], UInt[np.ndarray, " provisional"]]:
        """Return the vocabulary, and the token number of each provisional number."""
        ...

    def encode(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Return the token numbers of a chunk, once the vocabulary is built."""
        ...


class BasicEnglish:
    """The tokeniser `basic_english` of torchtext with the vocabulary of its `build_vocab_from_iterator`."""

    provisional = np.dtype(np.uint32)

    def __init__(self) -> None:
        self.provisional_numbers = _OrderOfAppearance()
        self.counts = np.zeros(0, np.int64)

    def learn(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Count the tokens and number each type by the order in which it first appears."""
        tokens = words(chunk.text)
        numbers = np.fromiter(map(self.provisional_numbers.__getitem__, tokens), self.provisional, len(tokens))
        self.counts = np.pad(self.counts, (0, len(self.provisional_numbers) - len(self.counts)))
        self.counts += np.bincount(numbers, minlength=len(self.counts))
        return numbers

    def build_vocabulary(self) -> tuple[list[str], UInt[np.ndarray, " provisional"]]:
        """Sort the types by falling frequency, then by their characters; `<unk>` always comes first."""
        numbers, counts = self.provisional_numbers, self.counts.tolist()
        by_rank = sorted(numbers, key=lambda token: (-counts[numbers[token]], token))
        types = [UNKNOWN, *(token for token in by_rank if token != UNKNOWN)]
        self.numbers = {token: number for number, token in enumerate(types)}
        return types, np.fromiter(map(self.numbers.__getitem__, numbers), np.uint32, len(numbers))

    def encode(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Return the token numbers of a chunk; a type that is not in the training split becomes `<unk>`."""
        tokens = words(chunk.text)
        return np.fromiter(map(self.numbers.get, tokens, repeat(0)), np.uint32, len(tokens))


class ByteTokeniser:
    """The tokeniser whose tokens are the bytes: the number of a token is the byte, its type the character chr(byte)."""

    provisional = np.dtype(np.uint8)

    def learn(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Return the bytes of a chunk."""
        return np.frombuffer(chunk.raw, self.provisional)

    def build_vocabulary(self) -> tuple[list[str], UInt[np.ndarray, " provisional"]]:
        """Return the 256 characters in order."""
        return [chr(byte) for byte in range(256)], np.arange(256, dtype=np.uint32)

    encode = learn


TOKENISERS: Mapping[str, Callable[[], Tokeniser]] = {"basic_english": BasicEnglish, "bytes": ByteTokeniser}


def corpus(
    source: Any = EMBEDDED,
    *,
    tokeniser: str = "basic_english",
    cache: str | Path | None = None,
    progress: Progress = SILENT,
) -> Corpus:
    """Return a text as token numbers, from the cache or, the first time, tokenised and stored there.

    A text is tokenised in bounded memory, however long it is. If its files in the cache are damaged or of another
    version, it is tokenised again.

    Args:
        source: name or path: `python-reference`, a folder, a file, or a dataset OWNER/NAME:CONFIG of the Hugging Face
            hub. `joma.data.sources` says how each is split.
        tokeniser: one of `TOKENISERS`.
        cache: folder for the tokens; by default `JOMA_CACHE` or the user's cache folder.
        progress: shows how many bytes are done.

    Returns:
        `Corpus`.

    >>> text = corpus()
    >>> text.types[:2], text.train.dtype, len(text.test)
    (('<unk>', '.'), dtype('uint16'), 0)
    """
    choice("tokeniser", tokeniser, TOKENISERS)
    home = as_path("cache", cache or os.environ.get("JOMA_CACHE") or user_cache_dir("joma"))
    root = Path(os.path.expanduser(home))
    with _cache_errors(root):
        text = find(source, cache=root, progress=progress)
        digest = hashlib.sha256(f"{tokeniser} {text.digest}".encode()).hexdigest()
        folder = root / "text" / f"v{VERSION}" / digest
        cached = _open_cached(folder, text.name, digest)
        if cached is None:
            with progress.task(f"tokenise {text.name}", total=text.size) as task:
                _build(text, TOKENISERS[tokeniser](), folder, task)
            cached = _open_cached(folder, text.name, digest)
    if cached is None:
        raise StorageError(f"{folder} changes while it is read; set JOMA_CACHE to a folder of your own.")
    return cached


def words(text: str) -> list[str]:
    """Split text by torchtext's `basic_english` rules.

    >>> words('"Don\\'t," she said; well (sort of)<br />')
    ['don', "'", 't', ',', 'she', 'said', 'well', '(', 'sort', 'of', ')']
    """
    text = text.lower().replace('"', "").replace("<br />", " ")  # in this order: `<br" />` is a break too
    for mark in "'.,()!?":
        text = text.replace(mark, f" {mark} ")
    return text.replace(";", " ").replace(":", " ").split()


class _OrderOfAppearance(dict[str, int]):
    """A dictionary that numbers each key when it is first looked up."""

    def __missing__(self, key: str) -> int:
        self[key] = number = len(self)
        return number


def _blocks(stream: Shaped[np.ndarray, " time"]) -> Iterator[Shaped[np.ndarray, " _"]]:
    return (stream[start : start + BLOCK] for start in range(0, len(stream), BLOCK))


def _build(source: Source, tokeniser: Tokeniser, folder: Path, task: Task) -> None:
    """Tokenise a text and write a file for each split, then the types, and last the manifest, to `folder`.

    The training split is tokenised once: its provisional numbers go to a temporary file, and are translated when the
    vocabulary is known. The same text gives the same bytes, so two processes may do this at the same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    with tempfile.TemporaryFile(dir=folder) as provisional:
        for chunk in chunks(source.pieces["train"]):
            provisional.write(tokeniser.learn(chunk).data)
            task.advance(len(chunk.raw))
        types, number_of = tokeniser.build_vocabulary()
        dtype = np.dtype("<u2" if len(types) <= 2**16 else "<u4")
        if not provisional.tell():
            raise InputError("corpus", "a text with tokens to train on", f"none in {source.name}", "give a longer text")
        for split in ("valid", "test"):
            _write(folder / f"{split}.bin", _encode_split(source, split, tokeniser, task), dtype)
        provisional.seek(0)
        blocks = _read_blocks(provisional, tokeniser.provisional)
        _write(folder / "train.bin", (number_of[block] for block in blocks), dtype)
    write_json(folder / TYPES, types)
    names = [TYPES, *(f"{split}.bin" for split in SPLITS)]
    write_manifest(folder, {"version": VERSION, "dtype": dtype.str, "digest": folder.name}, names)


def _encode_split(source: Source, split: str, tokeniser: Tokeniser, task: Task) -> Iterator[UInt[np.ndarray, " _"]]:
    for chunk in chunks(source.pieces[split]):
        task.advance(len(chunk.raw))
        yield tokeniser.encode(chunk)


def _read_blocks(file: IO[bytes], dtype: np.dtype) -> Iterator[UInt[np.ndarray, " _"]]:
    while raw := file.read(BLOCK * dtype.itemsize):
        yield np.frombuffer(raw, dtype)


def _write(path: Path, blocks: Iterator[UInt[np.ndarray, " _"]], dtype: np.dtype) -> None:
    """Write blocks of token numbers to `path`, one after another and in the given type."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block.astype(dtype).data)

    write_whole(path, write)


def _open_cached(folder: Path, name: str, digest: str) -> Corpus | None:
    """Map the files that `_build` wrote, or return None if one is missing, damaged or of another version."""
    try:
        manifest = read_manifest(folder)
        if manifest is None or (manifest.identity["version"], manifest.identity["digest"]) != (VERSION, digest):
            return None
        manifest.check(f"{split}.bin" for split in SPLITS)
        dtype, types = np.dtype(manifest.identity["dtype"]), parse_json(folder / TYPES, manifest.read(TYPES))
        streams = {split: _map(folder / f"{split}.bin", dtype) for split in SPLITS}
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return Corpus(**streams, types=tuple(types), name=name, digest=digest)


def _map(path: Path, dtype: np.dtype) -> UInt[np.ndarray, " time"]:
    """Map a file of numbers; an empty file, which the operating system refuses to map, gives an empty array."""
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


@contextmanager
def _cache_errors(root: Path) -> Iterator[None]:
    """Turn an error of the file system into one line with the remedy for a cache."""
    try:
        yield
    except OSError as cause:
        reason = os.strerror(cause.errno) if cause.errno else str(cause).partition(";")[0]
        remedy = "free some space, or set JOMA_CACHE to a folder that you may write to"
        raise StorageError(f"cannot keep text in {root}: {reason}; {remedy}.") from None
