"""Weights on disk or on the hub, read tensor by tensor: safetensors by byte range, `.bin` files without pickled code.

A safetensors file is 8 bytes of length, a JSON header that says where each tensor lies, and the tensors. The header is
read first and then only the bytes that are asked for, so that one reader serves files, HTTP and any length of series.
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

from joma.arguments import InputError

HEAD = 1 << 16  # bytes of the first read, which most headers fit into
LARGEST_HEADER = 100_000_000  # the format's own limit
PIECE = 1 << 24  # bytes that are fetched at a time
BLOCK = 1 << 20  # values that are converted at a time
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
    """Weights that cannot be read: the file, what it should be, what it is, and what to do."""


@dataclass(frozen=True)
class Bytes:
    """A file somewhere: its name for messages, its size, and how bytes `start` to `stop` of it are fetched."""

    name: str
    size: int
    fetch: Callable[[int, int], bytes]

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop`, exactly that many; fetched in pieces, so that no second copy of all exists."""
        found = bytearray(stop - start)
        for first in range(start, stop, PIECE):
            last = min(stop, first + PIECE)
            piece = self.fetch(first, last)
            if len(piece) != last - first:
                got = f"{len(piece):,} bytes where {last - first:,} were asked for"
                raise Unreadable(self.name, "a whole file", got, "download it again")
            found[first - start : last - start] = piece
        return found


def local_bytes(path: Path, name: str) -> Bytes:
    """A file of this machine, read without mapping it, so that what was read does not stay resident."""

    def fetch(start: int, stop: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except OSError as cause:
            raise Unreadable(name, "a file that can be read", cause.strerror, "check its permissions") from None

    return Bytes(name, path.stat().st_size, fetch)


@dataclass
class Meter:
    """Counts the bytes that were read of a series."""

    bytes: int = 0


class Weights(ABC):
    """One file of named tensors; `meter` counts what is read of it."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The tensors of the file, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The type that one tensor is stored in."""

    @abstractmethod
    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The values `start` to `stop` of one tensor, in the order of its flattened form."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, as stored or converted block by block so that two whole copies never coexist."""
        shape, count = self.shape(name), math.prod(self.shape(name))
        if dtype is None or dtype == self.dtype(name):
            return self.part(name, 0, count).reshape(shape)
        found = torch.empty(count, dtype=dtype, device="cpu")
        for start in range(0, count, BLOCK):
            stop = min(count, start + BLOCK)
            found[start:stop] = self.part(name, start, stop)
        return found.reshape(shape)


class SafetensorsFile(Weights):
    """A safetensors file, local or remote."""

    def __init__(self, source: Bytes, meter: Meter) -> None:
        super().__init__(meter)
        self.source = source

    @cached_property
    def header(self) -> Mapping[str, Any]:
        """Names to dtype, shape and place; a file that is shorter than its header says is refused here."""
        source = self.source
        head = self._read(0, min(HEAD, source.size))
        length = int.from_bytes(head[:8], "little")
        if len(head) < 8 or not 2 <= length <= LARGEST_HEADER:
            raise self._unreadable("its first 8 bytes are no length of a header")
        if source.size < 8 + length:
            raise self._unreadable(f"{source.size:,} bytes, which end inside the header")
        text = head[8 : 8 + length]
        text += self._read(8 + len(text), 8 + length) if len(text) < length else b""
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            other = {entry["dtype"]: name for name, entry in header.items() if entry["dtype"] not in DTYPES}
            ends = [] if other else [self._checked(entry) for entry in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._unreadable("a header that is no table of tensors") from None
        for dtype, name in other.items():
            remedy = "convert it to one of them, or leave it out"
            raise Unreadable(source.name, f"of tensors in {', '.join(DTYPES)}", f"{dtype} for {name}", remedy)
        self.origin = 8 + length
        whole = self.origin + max(ends, default=0)
        if source.size < whole:
            raise self._unreadable(f"{source.size:,} of {whole:,} bytes")
        return header

    @staticmethod
    def _checked(entry: Mapping[str, Any]) -> int:
        """The end of one tensor, whose bytes must be as many as its shape and dtype say."""
        start, end = entry["data_offsets"]
        size = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        if start < 0 or end - start != size:
            raise ValueError("offsets do not fit the shape")
        return end

    def _unreadable(self, got: str) -> Unreadable:
        return Unreadable(self.source.name, "a whole safetensors file", got, "download it again")

    def _read(self, start: int, stop: int) -> bytearray:
        self.meter.bytes += stop - start
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
        found = self._read(first + start * dtype.itemsize, first + stop * dtype.itemsize)
        return torch.frombuffer(found, dtype=dtype)


class PickledFile(Weights):
    """A `.bin` file as torch writes it, opened with `weights_only`: tensors alone, no code of the file's own."""

    def __init__(self, path: Path, name: str, meter: Meter) -> None:
        super().__init__(meter)
        self.path, self.place = path, name

    @cached_property
    def content(self) -> Mapping[str, Tensor]:
        """Names to tensors, mapped and not yet read where the file is a zip archive, as since torch 1.6."""
        with self.path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if zipped and not zipfile.is_zipfile(self.path):
            got = f"{self.path.stat().st_size:,} bytes that end inside the archive"
            raise Unreadable(self.place, "a whole file", got, "download it again")
        try:
            with warnings.catch_warnings():  # of a pickle's protocol: it is read, or it is refused below
                warnings.simplefilter("ignore")
                found = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipped)
        except pickle.UnpicklingError:
            remedy = "convert it to safetensors where you trust it, or leave it out"
            raise Unreadable(self.place, "tensors alone", "a pickle with other objects in it", remedy) from None
        except (RuntimeError, EOFError, OSError, ValueError) as cause:
            reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
            raise Unreadable(self.place, "a file of torch's own", reason, "download it again") from None
        if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
            got = f"a {type(found).__name__} of other things"
            raise Unreadable(self.place, "a table of tensors", got, "save the model's `state_dict()` alone")
        return found

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.content))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.content[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.content[name].dtype

    def part(self, name: str, start: int, stop: int) -> Tensor:
        found = self.content[name].reshape(-1)[start:stop].clone()
        self.meter.bytes += found.nbytes
        return found


@dataclass(frozen=True)
class Entry:
    """A file of a checkpoint before it is opened.

    Attributes:
        name: for messages, with its folder or revision.
        identity: changes whenever the content does.
        bytes: opens it for reading by ranges.
        path: a local file with its content; what lies on the hub is downloaded into the hub's own cache.
    """

    name: str
    identity: str
    bytes: Callable[[], Bytes]
    path: Callable[[], Path]

    def open(self, meter: Meter) -> Weights:
        """The tensors inside."""
        if self.name.endswith(".safetensors"):
            return SafetensorsFile(self.bytes(), meter)
        return PickledFile(self.path(), self.name, meter)

    def json(self, meter: Meter) -> Any:
        """The content of a small JSON file, such as an index."""
        source = self.bytes()
        meter.bytes += source.size
        try:
            return json.loads(source.read(0, source.size))
        except ValueError:
            raise Unreadable(source.name, "valid JSON", "something else", "download it again") from None


SINGLE = ("model.safetensors", "pytorch_model.bin")  # in the order of preference: safetensors over pickles
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def weight_files(entries: Mapping[str, Entry], place: str, meter: Meter) -> dict[str, Entry]:
    """The files that hold a checkpoint's weights: one, or those that an index names; safetensors before `.bin`."""
    for single, index in zip(SINGLE, INDEX, strict=True):
        if single in entries:
            return {single: entries[single]}
        if index in entries:
            return _sharded(entries, entries[index].json(meter), f"{place}/{index}")
    lone = sorted(name for name in entries if name.endswith(".safetensors"))
    if len(lone) == 1:
        return {lone[0]: entries[lone[0]]}
    there = ", ".join(sorted(entries)[:5]) or "nothing"
    raise Unreadable(place, f"a checkpoint with {' or '.join(SINGLE)}", there, "download it again or leave it out")


def _sharded(entries: Mapping[str, Entry], index: Any, place: str) -> dict[str, Entry]:
    try:
        shards = sorted(set(index["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise Unreadable(place, "an index with a `weight_map`", "none", "download it again") from None
    missing = [shard for shard in shards if shard not in entries]
    if missing or not shards:
        got = f"{len(missing)} of {len(shards)} missing: {', '.join(missing[:3])}"
        raise Unreadable(place, "an index of shards that are all there", got, "download them again")
    return {shard: entries[shard] for shard in shards}
