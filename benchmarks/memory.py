"""The memory of this process, as Linux reports it. This module imports little: imports would add to the memory."""

from pathlib import Path


def resident(field: str) -> int:
    """Return a number of bytes from /proc/self/status: `VmRSS` for the memory now, `VmHWM` for its peak.

    Unlike the `ru_maxrss` of `getrusage`, the peak does not include that of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Set the peak back to the memory that the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
