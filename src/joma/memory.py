"""How much memory this process may still allocate, so that what cannot fit is refused before anything is read."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from joma.arguments import InputError

MARGIN = 0.9  # of the free memory: the rest is for what is not counted
UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
FITS = "small enough for this machine's memory"
# What torch and NumPy say of sizes that memory, or an array's index, cannot hold.
EXHAUSTED = re.compile(
    r"(out of|not enough|can't allocate|cannot allocate) memory|unable to allocate|bad_alloc|array is too big"
    r"|storage size calculation overflowed|maximum allowed (dimension|size) exceeded|overflow when unpacking"
    r"|too large to convert|index-sized integer",
    re.IGNORECASE,
)
REQUESTED = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)
POWERS = "BKMGTPE"
GROUPS = Path("/sys/fs/cgroup")


class OutOfMemory(InputError):
    """Something of the requested size does not fit into memory."""


def available() -> int:
    """Return the number of bytes that may still be allocated.

    It is the least of what the machine has free, what its control group (a container) has left, and the limit on the
    address space of this process (`ulimit -v`).
    """
    bounds = [_free_on_machine(), _left_in_group(), _left_in_address_space()]
    return max(0, min(bound for bound in bounds if bound is not None))


def check(name: str, needed: int, remedy: str) -> None:
    """Raise `OutOfMemory` if `needed` bytes, for what the argument `name` asks for, exceed the available memory.

    >>> check("width", 10**18, "choose a smaller width")
    Traceback (most recent call last):
    joma.memory.OutOfMemory: `width` must be small enough for this machine's memory, got a size of 1 EB where ...
    """
    free = available()
    if needed > MARGIN * free:
        got = f"a size of {readable(needed)} where {readable(free)} are free"
        raise OutOfMemory(name, FITS, got, remedy)


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error of Python, NumPy or torch says that memory does not suffice.

    >>> is_exhausted(MemoryError()), is_exhausted(RuntimeError("CUDA out of memory.")), is_exhausted(ValueError("NaN"))
    (True, True, False)
    """
    kinds = (RuntimeError, ValueError, OverflowError, TypeError)
    return isinstance(error, MemoryError) or (isinstance(error, kinds) and bool(EXHAUSTED.search(str(error))))


def requested_size(error: BaseException) -> str:
    """Return how much memory was requested, as an error says, as text.

    >>> requested_size(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000 bytes."))
    'a size of 4 GB'
    >>> requested_size(MemoryError())
    'a size that does not fit'
    """
    match = REQUESTED.search(str(error))
    if match is None:
        return "a size that does not fit"
    unit = 1 if match[2].lower() == "bytes" else 1024 ** POWERS.index(match[2][0].upper())
    return f"a size of {readable(int(float(match[1]) * unit))}"


@contextmanager
def refusing(name: str, remedy: str) -> Iterator[None]:
    """Raise `OutOfMemory`, which names the argument `name`, if memory does not suffice for what the block does."""
    try:
        yield
    except InputError:
        raise
    except Exception as cause:
        if not is_exhausted(cause):
            raise
        raise OutOfMemory(name, FITS, requested_size(cause), remedy) from None


def readable(size: int) -> str:
    """Return a number of bytes with a unit.

    >>> readable(512), readable(6_200_000_000)
    ('512 B', '6.2 GB')
    """
    number, unit = float(size), 0
    while number >= 999.5 and unit < len(UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {UNITS[unit]}"


def _free_on_machine() -> int:
    """Return the memory that programs can still get, by Linux's estimate; elsewhere all the machine has."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_group() -> int | None:
    """Return what the control group of this process, and those above it, may still use; None without a limit."""
    for line in _lines("/proc/self/cgroup"):
        hierarchy, _, path = line.partition("::")
        if hierarchy == "0":
            group = PurePosixPath(path.lstrip("/"))
            left = [_left_in(GROUPS / name) for name in (group, *group.parents)]
            return min((size for size in left if size is not None), default=None)
    return None


def _left_in(folder: Path) -> int | None:
    """Return what one control group may still use, None without a limit.

    The system counts files that were read as used, and drops them when memory is needed.
    """
    limit, used = (next(iter(_lines(folder / name)), "max") for name in ("memory.max", "memory.current"))
    if not limit.isdigit() or not used.isdigit():
        return None
    entries = dict(line.split() for line in _lines(folder / "memory.stat"))
    return int(limit) - int(used) + sum(int(entries.get(name, 0)) for name in ("active_file", "inactive_file"))


def _left_in_address_space() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = next(iter(_lines("/proc/self/statm")), "0").split()[0]
    return limit - int(pages) * os.sysconf("SC_PAGE_SIZE")


def _lines(file: str | Path) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
