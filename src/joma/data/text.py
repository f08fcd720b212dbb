"""A corpus of text as one stream of token numbers for each split, tokenised once and then mapped from the cache.

`joma.data.sources` says what a corpus may be made of. The tokenisers are those of `TOKENISERS`:

    basic_english   the rules of torchtext: lower case; `"` is dropped; `<br />`, `;` and `:` are spaces; each of
                    ' . , ( ) ! ? is a token; the rest is split at white space. The vocabulary is `<unk>`, then the
                    types of the training split by falling frequency, equals in the order of their characters. Empty
                    lines give nothing, and there is no token for the end of a line.
    bytes           the 256 bytes.

The cache is the user's cache folder, or that of the environment variable `JOMA_CACHE`; it may be deleted at any time.
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
from joma.files import StorageError, checksum, read_json, write_json, write_whole
from joma.progress import SILENT, Progress, Task

VERSION = 2  # of the cache: raise it when the files or what a tokeniser returns change
UNKNOWN = "<unk>"
BLOCK = 2**20  # tokens handled at once where an array is gone through


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token numbers of each split, read from the disk as they are used.

    Attributes:
        train: the training split; `valid` and `test` likewise, which may be empty.
        types: the token of each number.
        name: what the text is called.
        digest: SHA-256 of the text, its splits and the tokeniser.
    """

    train: UInt[np.ndarray, " time"]
    valid: UInt[np.ndarray, " _"]
    test: UInt[np.ndarray, " _"]
    types: tuple[str, ...]
    name: str
    digest: str

    def columns(self, split: str, count: int, *, least: int = 2, name: str = "count") -> Int[Tensor, "{count} time"]:
        """Cut a split's stream into `count` columns of equal length T = ⌊N/count⌋; what remains is dropped.

            column_c(t) = stream(c T + t)

        as PyTorch's word language model does with `batchify`, whose result is the transpose.

        Args:
            split: train, valid or test.
            count: how many columns, the batch size.
            least: how many tokens a column needs: an input and its target, unless told otherwise.
            name: what the caller's user knows `count` by, for the error.

        Returns:
            Token numbers [column, time], int64.

        >>> corpus().columns("valid", 10).shape
        torch.Size([10, ...])
        """
        stream = choice("split", split, {name: getattr(self, name) for name in SPLITS})
        count, least = whole(name, count), whole("least", least)
        length = len(stream) // count
        if length < least:
            got = f"{len(stream)} in the {split} split of {self.name}"
            remedy = f"give a longer text or a smaller `{name}` than {count}"
            raise InputError("corpus", f"of at least {count * least} tokens, {least} a column", got, remedy)
        return torch.from_numpy(stream[: count * length].astype(np.int64)).reshape(count, length)

    def frequencies(self) -> Int[np.ndarray, " type"]:
        """Count each type in the training split.

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
    """Numbers the tokens of the training split as they come, then settles their order, then reads the other splits."""

    provisional: np.dtype

    def learn(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Return provisional numbers of a chunk's tokens, counting them."""
        ...

    def settle(self) -> tuple[list[str], UInt[np.ndarray, " provisional"]]:
        """Return the vocabulary, and the number in it of each provisional number."""
        ...

    def encode(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Return the vocabulary's numbers of a chunk's tokens."""
        ...


class BasicEnglish:
    """The `basic_english` of torchtext with the vocabulary of its `build_vocab_from_iterator`."""

    provisional = np.dtype(np.uint32)

    def __init__(self) -> None:
        self.numbers = _Numbers()
        self.counts = np.zeros(0, np.int64)

    def learn(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Number each token by when its type was first seen."""
        tokens = words(chunk.text)
        numbers = np.fromiter(map(self.numbers.__getitem__, tokens), self.provisional, len(tokens))
        self.counts = np.pad(self.counts, (0, len(self.numbers) - len(self.counts)))
        self.counts += np.bincount(numbers, minlength=len(self.counts))
        return numbers

    def settle(self) -> tuple[list[str], UInt[np.ndarray, " provisional"]]:
        """Sort the types by falling frequency, then by their characters; `<unk>` is first wherever it stood."""
        counts = self.counts.tolist()
        by_rank = sorted(self.numbers, key=lambda token: (-counts[self.numbers[token]], token))
        types = [UNKNOWN, *(token for token in by_rank if token != UNKNOWN)]
        self.final = {token: number for number, token in enumerate(types)}
        return types, np.fromiter(map(self.final.__getitem__, self.numbers), np.uint32, len(self.numbers))

    def encode(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Number each token; a type that the training split does not have is `<unk>`."""
        tokens = words(chunk.text)
        return np.fromiter(map(self.final.get, tokens, repeat(0)), np.uint32, len(tokens))


class Bytes:
    """Each byte is its own number; its type is the character of that number."""

    provisional = np.dtype(np.uint8)

    def learn(self, chunk: Chunk) -> UInt[np.ndarray, " time"]:
        """Return the bytes."""
        return np.frombuffer(chunk.raw, self.provisional)

    def settle(self) -> tuple[list[str], UInt[np.ndarray, " provisional"]]:
        """Return the 256 characters in order."""
        return [chr(byte) for byte in range(256)], np.arange(256, dtype=np.uint32)

    encode = learn


TOKENISERS: Mapping[str, Callable[[], Tokeniser]] = {"basic_english": BasicEnglish, "bytes": Bytes}


def corpus(
    source: Any = EMBEDDED,
    *,
    tokeniser: str = "basic_english",
    cache: str | Path | None = None,
    progress: Progress = SILENT,
) -> Corpus:
    """Return a text as token numbers: from the cache if it is there, else tokenised in bounded memory and kept.

    Args:
        source: name or path: `python-reference`, a folder, a file, or a dataset OWNER/NAME:CONFIG of the Hugging Face
            hub: see `joma.data.sources` for what the splits of each are.
        tokeniser: one of `TOKENISERS`.
        cache: folder to keep the tokens in; `JOMA_CACHE` or the user's cache folder if not given.
        progress: shows how many bytes are done.

    Returns:
        `Corpus`. A cache that is damaged or of another version is built again.

    >>> text = corpus()
    >>> text.types[:2], text.train.dtype, len(text.test)
    (('<unk>', '.'), dtype('uint16'), 0)
    """
    choice("tokeniser", tokeniser, TOKENISERS)
    root = Path(os.path.expanduser(cache or os.environ.get("JOMA_CACHE") or user_cache_dir("joma")))
    with _cache_errors(root):
        found = find(source, cache=root, progress=progress)
        digest = hashlib.sha256(f"{tokeniser} {found.digest}".encode()).hexdigest()
        folder = root / "text" / f"v{VERSION}" / digest
        kept = _mapped(folder, found.name, digest)
        if kept is None:
            with progress.task(f"tokenise {found.name}", total=found.size) as work:
                _build(found, TOKENISERS[tokeniser](), folder, work)
            kept = _mapped(folder, found.name, digest)
    if kept is None:
        raise StorageError(f"{folder} changes while it is read; set JOMA_CACHE to a folder of your own.")
    return kept


def words(text: str) -> list[str]:
    """Split text by torchtext's `basic_english` rules.

    >>> words('"Don\\'t," she said; well (sort of)<br />')
    ['don', "'", 't', ',', 'she', 'said', 'well', '(', 'sort', 'of', ')']
    """
    text = text.lower().replace('"', "").replace("<br />", " ")  # in this order: a quotation mark may stand in `<br />`
    for mark in "'.,()!?":
        text = text.replace(mark, f" {mark} ")
    return text.replace(";", " ").replace(":", " ").split()


class _Numbers(dict[str, int]):
    """Numbers each key by when it was first asked for."""

    def __missing__(self, key: str) -> int:
        self[key] = number = len(self)
        return number


def _blocks(stream: Shaped[np.ndarray, " time"]) -> Iterator[Shaped[np.ndarray, " _"]]:
    return (stream[start : start + BLOCK] for start in range(0, len(stream), BLOCK))


def _build(source: Source, tokeniser: Tokeniser, folder: Path, work: Task) -> None:
    """Write a file for each split, the types, and last `corpus.json`.

    The training split is tokenised once: provisional numbers go to a draft, and to their place once all are counted.
    The same text gives the same bytes, so that two processes that do this at once do no harm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as draft:
        for chunk in chunks(source.pieces["train"]):
            draft.write(tokeniser.learn(chunk).data)
            work.advance(len(chunk.raw))
        types, table = tokeniser.settle()
        dtype = np.dtype("<u2" if len(types) <= 2**16 else "<u4")
        if not draft.tell():
            raise InputError("corpus", "a text with tokens to train on", f"none in {source.name}", "give a longer text")
        for split in ("valid", "test"):
            blocks = (_encoded(chunk, tokeniser, work) for chunk in chunks(source.pieces[split]))
            _write(folder / f"{split}.bin", blocks, dtype)
        draft.seek(0)
        _write(folder / "train.bin", (table[block] for block in _draft(draft, tokeniser.provisional)), dtype)
    write_json(folder / "types.json", types)
    sums = {name: checksum(folder / name) for name in (*(f"{split}.bin" for split in SPLITS), "types.json")}
    write_json(folder / "corpus.json", {"version": VERSION, "dtype": dtype.str, "sha256": sums})


def _encoded(chunk: Chunk, tokeniser: Tokeniser, work: Task) -> UInt[np.ndarray, " time"]:
    work.advance(len(chunk.raw))
    return tokeniser.encode(chunk)


def _draft(file: IO[bytes], dtype: np.dtype) -> Iterator[UInt[np.ndarray, " _"]]:
    while raw := file.read(BLOCK * dtype.itemsize):
        yield np.frombuffer(raw, dtype)


def _write(path: Path, blocks: Iterator[UInt[np.ndarray, " _"]], dtype: np.dtype) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block.astype(dtype).data)

    write_whole(path, write)


def _mapped(folder: Path, name: str, digest: str) -> Corpus | None:
    """Map what `_build` wrote, or return None if a part is missing, damaged or of another version."""
    try:
        about = read_json(folder / "corpus.json")
        if about["version"] != VERSION or any(checksum(folder / file) != own for file, own in about["sha256"].items()):
            return None
        dtype, types = np.dtype(about["dtype"]), tuple(read_json(folder / "types.json"))
        streams = {split: _map(folder / f"{split}.bin", dtype) for split in SPLITS}
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return Corpus(**streams, types=types, name=name, digest=digest)


def _map(path: Path, dtype: np.dtype) -> UInt[np.ndarray, " time"]:
    """Map a file of numbers; an empty one, which the operating system does not map, is an empty array."""
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


@contextmanager
def _cache_errors(root: Path) -> Iterator[None]:
    """Say in one line what the file system refused, with the remedy for a cache."""
    try:
        yield
    except OSError as cause:
        reason = os.strerror(cause.errno) if cause.errno else str(cause).partition(";")[0]
        remedy = "free some space, or set JOMA_CACHE to a folder that you may write to"
        raise StorageError(f"cannot keep text in {root}: {reason}; {remedy}.") from None
