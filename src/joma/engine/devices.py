"""The cores and GPUs that processes of this machine may use, without importing torch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path, PurePosixPath

QUERY_SECONDS = 20
GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores of this process: those that it may run on, or fewer if its container has fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            hierarchy, _, path = line.partition("::")
            group = PurePosixPath(path.lstrip("/"))
            quotas = [_quota(GROUPS / name) for name in (group, *group.parents)] if hierarchy == "0" else []
            cores = min([cores, *(quota for quota in quotas if quota is not None)])
    return cores


def _quota(group: Path) -> int | None:
    """Return the number of cores that a control group may keep busy, rounded up; None without a limit."""
    try:
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def visible_devices() -> list[str]:
    """Return the names of the visible GPUs, as CUDA_VISIBLE_DEVICES has them: its own, or 0, 1, … of nvidia-smi."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return _valid_names(names)
    query = shutil.which("nvidia-smi")
    if query is None:
        return []
    try:
        listing = subprocess.run([query, "-L"], capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]


def _valid_names(names: str) -> list[str]:
    """Return the names before the first invalid one, as CUDA does.

    >>> _valid_names("2, GPU-8f1c,-1,3"), _valid_names("")
    (['2', 'GPU-8f1c'], [])
    """
    valid = []
    for name in map(str.strip, names.split(",")):
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        valid.append(name)
    return list(dict.fromkeys(valid))
