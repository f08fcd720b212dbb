"""Read the tensors of weight files on disk or on the hub, one tensor at a time.

A safetensors file consists of 8 bytes with the length of its header, a JSON header that says where each tensor lies,
and the tensors. The header is read first and then only the byte ranges that are needed, so that the same reader serves
local files and HTTP, and a series of any length. `.bin` files are read in the same way, and none of their code is run.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma.memory import readable
from joma.watch.byte_ranges import (
    ByteSource,
    StoredTensor,
    Unreadable,
    check_memory,
    is_storable,
    local_file,
    reading,
    whole_numbers,
)
from joma.watch.state_dicts import read_state_dict

FIRST_READ = 1 << 16  # bytes; most headers fit into the first read
MAX_HEADER = 1 << 25  # bytes: half a million tensors; the format allows three times as much, which takes half a minute
CONVERT_VALUES = 1 << 20  # values converted to another dtype at once
METADATA = "__metadata__"  # the entry of a header that is no tensor
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


@dataclass
class ByteCounter:
    """The number of bytes of weights that have been read from a series."""

    total: int = 0


class WeightFile(ABC):
    """A file of named tensors; `counter` counts the bytes that are read from it."""

    def __init__(self, source: ByteSource, counter: ByteCounter) -> None:
        self.source, self.counter = source, counter

    @abstractmethod
    def find_tensors(self) -> Mapping[str, StoredTensor]:
        """Return where each tensor lies in the file."""

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Where each tensor lies in the file, by name; a file that cannot hold them is refused."""
        with reading(self.source.name):
            return self.find_tensors()

    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors, sorted."""
        return tuple(sorted(self.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor is stored in."""
        return self.tensors[name].dtype

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return the values `start` to `stop` of a flattened tensor."""
        tensor = self.tensors[name]
        if tensor.strides is not None:
            return self._strided(name)[start:stop].clone()
        if start == stop:
            return torch.empty(0, dtype=tensor.dtype, device="cpu")
        return self._values(tensor, start, stop)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor as it is stored, or converted to `dtype`.

        It is converted block by block, so that memory never holds the whole tensor in both dtypes.
        """
        tensor = self.tensors[name]
        target = tensor.dtype if dtype is None else dtype
        check_memory(f"{self.source.name}: {name}", tensor.count * target.itemsize)
        if tensor.strides is not None:
            return self._strided(name).to(target).reshape(tensor.shape)
        if target == tensor.dtype:
            return self.part(name, 0, tensor.count).reshape(tensor.shape)
        values = torch.empty(tensor.count, dtype=target, device="cpu")
        for start in range(0, tensor.count, CONVERT_VALUES):
            stop = min(tensor.count, start + CONVERT_VALUES)
            values[start:stop] = self.part(name, start, stop)
        return values.reshape(tensor.shape)

    def _strided(self, name: str) -> Tensor:
        """Return all values of a tensor that is stored in another order than that of its axes, flattened."""
        tensor = self.tensors[name]
        check_memory(f"{self.source.name}: {name}", tensor.nbytes + tensor.span * tensor.dtype.itemsize)
        if tensor.count == 0:
            return torch.empty(0, dtype=tensor.dtype, device="cpu")
        return (
            self._values(tensor, 0, tensor.span).as_strided(tensor.shape, tensor.strides or ()).reshape(-1).contiguous()
        )

    def _values(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Read the values `start` to `stop` behind the first one of a tensor, in the file's order."""
        first, itemsize = tensor.start, tensor.dtype.itemsize
        with reading(self.source.name):
            content = self._read(first + start * itemsize, first + stop * itemsize)
            return torch.frombuffer(content, dtype=tensor.dtype)

    def _read(self, start: int, stop: int) -> bytearray:
        self.counter.total += stop - start
        return self.source.read(start, stop)


class SafetensorsFile(WeightFile):
    """A safetensors file, local or remote."""

    def find_tensors(self) -> dict[str, StoredTensor]:
        """Read the header; the tensors must fill the rest of the file without holes, and none may overlap another."""
        origin, text = self._header_text()
        header = self._table(text)
        tensors = {name: self._stored(name, entry, origin) for name, entry in header.items() if name != METADATA}
        if not tensors:
            raise Unreadable(self.source.name, "tensors", "none", "download it again", must="contain")
        end = origin
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.start != end:
                raise self._incomplete("a header with tensors that overlap or leave bytes between them")
            end += tensor.nbytes
        if end != self.source.size:
            raise self._incomplete(f"{self.source.size:,} of {end:,} bytes")
        return tensors

    def _header_text(self) -> tuple[int, bytearray]:
        """Return where the tensors begin, and the header."""
        size = self.source.size
        start = self._read(0, min(FIRST_READ, size))
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= MAX_HEADER:
            raise self._incomplete("a file whose first 8 bytes are not the length of a header")
        if size < 8 + length:
            raise self._incomplete(f"{size:,} bytes, which end inside the header")
        text = start[8 : 8 + length]
        text += self._read(8 + len(text), 8 + length) if len(text) < length else b""
        return 8 + length, text

    def _table(self, text: bytearray) -> dict[str, Any]:
        """Return the header as a table; its metadata must be texts, as in the format's definition."""
        header: Any = None
        if text[:1] == b"{":
            with suppress(ValueError):
                header = json.loads(text.decode(), object_pairs_hook=_table_of_different_names)
        metadata = header.get(METADATA, {}) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._incomplete("a header that is not a table of tensors")
        return header

    def _stored(self, name: str, entry: Any, origin: int) -> StoredTensor:
        """Return where a tensor lies, by its entry in the header."""
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = entry.get("dtype"), *(whole_numbers(entry.get(k)) for k in ("shape", "data_offsets"))
        if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2 or not is_storable(name):
            raise self._incomplete("a header that is not a table of tensors")
        if dtype not in DTYPES:
            remedy = "convert it to one of them, or leave it out"
            expected, got = f"tensors in {', '.join(DTYPES)}", f"{dtype} for {name}"
            raise Unreadable(self.source.name, expected, got, remedy, must="contain")
        tensor = StoredTensor(DTYPES[dtype], shape, origin + offsets[0])
        if offsets[1] - offsets[0] != tensor.nbytes:
            raise self._incomplete("a header with positions that do not fit the shapes")
        return tensor

    def _incomplete(self, got: str) -> Unreadable:
        return Unreadable(self.source.name, "a complete safetensors file", got, "download it again")


def _table_of_different_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


class PickledFile(WeightFile):
    """A `.bin` file written by torch; it may contain tensors only, and none of its code is run."""

    def __init__(self, path: Path, name: str, counter: ByteCounter) -> None:
        super().__init__(local_file(path, name), counter)

    def find_tensors(self) -> dict[str, StoredTensor]:
        """Return where each tensor lies in the file."""
        return read_state_dict(self.source)


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint that has not been opened yet.

    Attributes:
        name: the file's name in error messages, with its folder or revision.
        identity: a string that changes whenever the content does.
        source: opens the file for reading by byte ranges.
        path: returns a local file with the content; a file on the hub is downloaded into the hub's cache first.
        size: its length in bytes, 0 if unknown.
        portable: the identity without what differs between machines that see or copy the same file; empty if nothing
            in it does.
    """

    name: str
    identity: str
    source: Callable[[], ByteSource]
    path: Callable[[], Path]
    size: int = 0
    portable: str = ""

    def open(self, counter: ByteCounter) -> WeightFile:
        """Open the file for reading its tensors."""
        if self.name.endswith(".safetensors"):
            return SafetensorsFile(self.source(), counter)
        return PickledFile(self.path(), self.name, counter)

    def json(self, counter: ByteCounter) -> Any:
        """Return the content of a small JSON file, such as an index."""
        source = self.source()
        if source.size > MAX_HEADER:
            raise Unreadable(source.name, "a small JSON file", f"one of {readable(source.size)}", "download it again")
        counter.total += source.size
        with reading(source.name):
            content = source.read(0, source.size)
            try:
                return json.loads(content.decode())
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
    several = "name the model's file model.safetensors, or put each checkpoint into a folder named after its step"
    remedy = several if safetensors else "download it again or leave it out"
    raise Unreadable(checkpoint, f"a checkpoint with {' or '.join(SINGLE)}", got, remedy)


def _shards(entries: Mapping[str, FileEntry], index: Any, name: str) -> dict[str, FileEntry]:
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        got = "none" if files is None else f"a {type(files).__name__} of something else than file names"
        raise Unreadable(name, "an index with a `weight_map` of file names", got, "download it again")
    shards = sorted(set(files.values()))
    missing = [shard for shard in shards if shard not in entries]
    if missing:
        got = f"{len(missing)} of {len(shards)} missing: {', '.join(missing[:3])}"
        raise Unreadable(name, "an index of shards that are all present", got, "download them again")
    return {shard: entries[shard] for shard in shards}
