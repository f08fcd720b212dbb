"""Read the tensors of weight files on disk or on the hub, one tensor at a time.

A safetensors file consists of 8 bytes with the length of its header, a JSON header that says where each tensor lies,
and the tensors. The header is read first and then only the byte ranges that are needed, so that the same reader serves
local files and HTTP, and a series of any length. `.bin` files are opened without running pickled code.
"""

from __future__ import annotations

import json
import math
import pickle
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma.arguments import InputError, short_reason

FIRST_READ = 1 << 16  # bytes; most headers fit into the first read
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format
FETCH_BYTES = 1 << 24  # bytes fetched by one request
CONVERT_VALUES = 1 << 20  # values converted to another dtype at once
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Unreadable(InputError):
    """Weights that cannot be read: which file, what it must be, what it is instead, and what to do."""


@dataclass(frozen=True)
class ByteSource:
    """A file that is read by byte ranges.

    Attributes:
        name: the file's name in error messages.
        size: its length in bytes.
        fetch: returns the bytes from a start to a stop position.
    """

    name: str
    size: int
    fetch: Callable[[int, int], bytes]

    def read(self, start: int, stop: int) -> bytearray:
        """Return the bytes `start` to `stop`, or raise `Unreadable` if there are fewer.

        They are fetched in chunks, so that memory never holds two copies of the whole range.
        """
        content = bytearray(stop - start)
        for first in range(start, stop, FETCH_BYTES):
            last = min(stop, first + FETCH_BYTES)
            chunk = self.fetch(first, last)
            if len(chunk) != last - first:
                got = f"{len(chunk):,} bytes where {last - first:,} were requested"
                raise Unreadable(self.name, "a complete file", got, "download it again")
            content[first - start : last - start] = chunk
        return content


def local_file(path: Path, name: str) -> ByteSource:
    """Return a byte source for a local file.

    The file is not memory-mapped, so that the pages that were read do not stay resident.
    """

    def fetch(start: int, stop: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except OSError as cause:
            raise Unreadable(name, "a readable file", cause.strerror, "check its permissions") from None

    return ByteSource(name, path.stat().st_size, fetch)


@dataclass
class ByteCounter:
    """The number of bytes of weights that have been read from a series."""

    total: int = 0


class WeightFile(ABC):
    """A file of named tensors; `counter` counts the bytes that are read from it."""

    def __init__(self, counter: ByteCounter) -> None:
        self.counter = counter

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor is stored in."""

    @abstractmethod
    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return the values `start` to `stop` of a flattened tensor."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor as it is stored, or converted to `dtype`.

        It is converted block by block, so that memory never holds the whole tensor in both dtypes.
        """
        shape, count = self.shape(name), math.prod(self.shape(name))
        if dtype is None or dtype == self.dtype(name):
            return self.part(name, 0, count).reshape(shape)
        values = torch.empty(count, dtype=dtype, device="cpu")
        for start in range(0, count, CONVERT_VALUES):
            stop = min(count, start + CONVERT_VALUES)
            values[start:stop] = self.part(name, start, stop)
        return values.reshape(shape)


class SafetensorsFile(WeightFile):
    """A safetensors file, local or remote."""

    def __init__(self, source: ByteSource, counter: ByteCounter) -> None:
        super().__init__(counter)
        self.source = source

    @cached_property
    def header(self) -> Mapping[str, Any]:
        """The dtype, shape and position of each tensor, by name; a file shorter than they require is refused."""
        length, text = self._header_text()
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            unknown = {entry["dtype"]: name for name, entry in header.items() if entry["dtype"] not in DTYPES}
            ends = [] if unknown else [_tensor_end(entry) for entry in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._incomplete("a header that is not a table of tensors") from None
        for dtype, name in unknown.items():
            remedy = "convert it to one of them, or leave it out"
            raise Unreadable(
                self.source.name, f"tensors in {', '.join(DTYPES)}", f"{dtype} for {name}", remedy, must="contain"
            )
        self.origin = 8 + length
        required = self.origin + max(ends, default=0)
        if self.source.size < required:
            raise self._incomplete(f"{self.source.size:,} of {required:,} bytes")
        return header

    def _header_text(self) -> tuple[int, bytearray]:
        """Read the length of the header, and the header."""
        size = self.source.size
        start = self._read(0, min(FIRST_READ, size))
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= MAX_HEADER:
            raise self._incomplete("a file whose first 8 bytes are not the length of a header")
        if size < 8 + length:
            raise self._incomplete(f"{size:,} bytes, which end inside the header")
        text = start[8 : 8 + length]
        text += self._read(8 + len(text), 8 + length) if len(text) < length else b""
        return length, text

    def _incomplete(self, got: str) -> Unreadable:
        return Unreadable(self.source.name, "a complete safetensors file", got, "download it again")

    def _read(self, start: int, stop: int) -> bytearray:
        self.counter.total += stop - start
        return self.source.read(start, stop)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.header))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.header[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.header[name]["dtype"]]

    def part(self, name: str, start: int, stop: int) -> Tensor:
        dtype = self.dtype(name)
        if start == stop:
            return torch.empty(0, dtype=dtype, device="cpu")
        first = self.origin + self.header[name]["data_offsets"][0]
        content = self._read(first + start * dtype.itemsize, first + stop * dtype.itemsize)
        return torch.frombuffer(content, dtype=dtype)


def _tensor_end(entry: Mapping[str, Any]) -> int:
    """Return where a tensor's bytes end; raise ValueError unless they are as many as its shape and dtype require."""
    start, end = entry["data_offsets"]
    size = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    if start < 0 or end - start != size:
        raise ValueError("offsets do not fit the shape")
    return end


class PickledFile(WeightFile):
    """A `.bin` file written by torch; it may contain tensors only, and none of its code is run."""

    def __init__(self, path: Path, name: str, counter: ByteCounter) -> None:
        super().__init__(counter)
        self.path, self.name = path, name

    @cached_property
    def content(self) -> Mapping[str, Tensor]:
        """The tensors by name; a zip archive, which torch writes since 1.6, is memory-mapped and not read yet."""
        with self.path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if zipped and not zipfile.is_zipfile(self.path):
            got = f"{self.path.stat().st_size:,} bytes that end inside the archive"
            raise Unreadable(self.name, "a complete file", got, "download it again")
        try:
            with warnings.catch_warnings():  # about the pickle protocol: the file is either read or refused below
                warnings.simplefilter("ignore")
                tensors = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipped)
        except pickle.UnpicklingError:
            remedy = "convert it to safetensors if you trust it, or leave it out"
            raise Unreadable(
                self.name, "tensors only", "a pickle with other objects in it", remedy, must="contain"
            ) from None
        except (RuntimeError, EOFError, OSError, ValueError) as cause:
            raise Unreadable(self.name, "a file written by torch", short_reason(cause), "download it again") from None
        if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
            got = f"a {type(tensors).__name__} of other objects"
            raise Unreadable(self.name, "a table of tensors", got, "save only the model's `state_dict()`")
        return tensors

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.content))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.content[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.content[name].dtype

    def part(self, name: str, start: int, stop: int) -> Tensor:
        values = self.content[name].reshape(-1)[start:stop].clone()
        self.counter.total += values.nbytes
        return values


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint that has not been opened yet.

    Attributes:
        name: the file's name in error messages, with its folder or revision.
        identity: a string that changes whenever the content does.
        source: opens the file for reading by byte ranges.
        path: returns a local file with the content; a file on the hub is downloaded into the hub's cache first.
    """

    name: str
    identity: str
    source: Callable[[], ByteSource]
    path: Callable[[], Path]

    def open(self, counter: ByteCounter) -> WeightFile:
        """Open the file for reading its tensors."""
        if self.name.endswith(".safetensors"):
            return SafetensorsFile(self.source(), counter)
        return PickledFile(self.path(), self.name, counter)

    def json(self, counter: ByteCounter) -> Any:
        """Return the content of a small JSON file, such as an index."""
        source = self.source()
        counter.total += source.size
        try:
            return json.loads(source.read(0, source.size))
        except ValueError:
            raise Unreadable(source.name, "valid JSON", "something else", "download it again") from None


SINGLE = ("model.safetensors", "pytorch_model.bin")  # in order of preference: safetensors before pickles
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def select_weight_files(
    entries: Mapping[str, FileEntry], checkpoint: str, counter: ByteCounter
) -> dict[str, FileEntry]:
    """Select the files that hold a checkpoint's weights: a single file, or the shards that an index names.

    Safetensors files are preferred to `.bin` files.
    """
    for single, index in zip(SINGLE, INDEX, strict=True):
        if single in entries:
            return {single: entries[single]}
        if index in entries:
            return _shards(entries, entries[index].json(counter), f"{checkpoint}/{index}")
    safetensors = sorted(name for name in entries if name.endswith(".safetensors"))
    if len(safetensors) == 1:
        return {safetensors[0]: entries[safetensors[0]]}
    got = ", ".join(sorted(entries)[:5]) or "an empty one"
    remedy = "download it again or leave it out"
    raise Unreadable(checkpoint, f"a checkpoint with {' or '.join(SINGLE)}", got, remedy)


def _shards(entries: Mapping[str, FileEntry], index: Any, name: str) -> dict[str, FileEntry]:
    try:
        shards = sorted(set(index["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise Unreadable(name, "an index with a `weight_map`", "none", "download it again") from None
    missing = [shard for shard in shards if shard not in entries]
    if missing or not shards:
        got = f"{len(missing)} of {len(shards)} missing: {', '.join(missing[:3])}"
        raise Unreadable(name, "an index of shards that are all present", got, "download them again")
    return {shard: entries[shard] for shard in shards}
