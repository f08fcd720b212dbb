"""Read files by byte ranges, and turn whatever an arbitrary file makes a reader raise into one kind of error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import torch

from joma import memory
from joma.arguments import InputError, short_reason

FETCH_BYTES = 1 << 24  # bytes fetched by one request
MAX_DIMS = 64  # axes of a tensor, the limit of NumPy
MAX_VALUES = (1 << 63) - 1  # of a tensor


class Unreadable(InputError):
    """Weights that cannot be read: which file, what it must be, what it is instead, and what to do."""


class NotFinite(Unreadable):
    """Weights or results of a forward pass that are NaN or infinite."""


@contextmanager
def reading(name: str, kind: str = "file") -> Iterator[None]:
    """Turn every error inside the block into `Unreadable` for the file, or the `kind` of thing, with this name.

    A file from outside may contain anything, and no list of the errors that a parser raises on it is complete.
    """
    try:
        yield
    except InputError:
        raise
    except OSError as cause:
        reason = cause.strerror or short_reason(cause)
        remedy = "check its permissions" if isinstance(cause, PermissionError) else "download it again"
        raise Unreadable(name, f"a readable {kind}", reason, remedy) from cause
    except Exception as cause:
        reason = shorten(short_reason(cause), 200, placeholder=" …")
        got = f"content that cannot be read ({type(cause).__name__}: {reason})"
        raise Unreadable(name, f"a complete {kind}", got, "download it again") from cause


def check_memory(name: str, needed: int) -> None:
    """Raise `Unreadable` if `needed` bytes for the weights `name` exceed the available memory."""
    try:
        memory.check(name, needed, "use a machine with more memory, or leave it out")
    except InputError as error:
        raise Unreadable(error.name, error.expected, error.got, error.remedy) from None


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
        if not 0 <= start <= stop <= self.size:
            got = f"{self.size:,} bytes where byte {stop:,} was requested"
            raise Unreadable(self.name, "a complete file", got, "download it again")
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
        with reading(name), path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    with reading(name):
        return ByteSource(name, path.stat().st_size, fetch)


@dataclass(frozen=True)
class StoredTensor:
    """Where the values of a tensor lie in a file.

    Attributes:
        dtype: the dtype that it is stored in.
        shape: its shape.
        start: the position of its first value, in bytes.
        strides: how many values lie between neighbours along each axis; None if all values lie in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all values."""
        return self.count * self.dtype.itemsize

    @property
    def span(self) -> int:
        """The number of values from the first to the last one in the file."""
        if self.strides is None or self.count == 0:
            return self.count
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """Return a shape, strides or offsets as a tuple; None unless all are whole numbers from 0 to 2^63 − 1.

    >>> whole_numbers([2, 3]), whole_numbers([2.0, 3]), whole_numbers([True]), whole_numbers(3)
    ((2, 3), None, None, None)
    """
    if not isinstance(values, list | tuple) or len(values) > MAX_DIMS:
        return None
    return tuple(values) if all(type(value) is int and 0 <= value <= MAX_VALUES for value in values) else None


def is_storable(name: object) -> bool:
    """Return whether `name` is a text that files can store: UTF-8 without NUL.

    >>> is_storable("layers.0"), is_storable("a\\0b"), is_storable("\\ud800"), is_storable(3)
    (True, False, False, False)
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
