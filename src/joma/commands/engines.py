"""The engine that the options `--engine`, `--jobs` and `--address` of a command choose."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from joma.commands.printing import print_error

if TYPE_CHECKING:
    from joma.engine import Engine
    from joma.progress import Progress


def open_engine(
    name: str, *, jobs: int | None, address: str | None, progress: Progress, shared: bool = False
) -> AbstractContextManager[Engine]:
    """Return the engine of this name, to be used in a `with` block; refuse options that belong to the other one.

    Args:
        name: "local" or "ray".
        jobs: units at once on this machine; as many as cores and memory allow if None.
        address: the address of the Ray cluster; a local one is started if None.
        progress: where the progress of units is shown.
        shared: whether all machines of the cluster see the folder of results under the same path.
    """
    from joma.arguments import InputError

    def warn(message: str) -> None:
        print_error(f"warning: {message}")

    if name == "local":
        if address is not None:
            raise InputError("--address", "left out with --engine local", address, "add --engine ray")
        if shared:
            raise InputError("--shared", "left out with --engine local", shared, "add --engine ray")
        from joma.engine import LocalEngine

        return LocalEngine(jobs, progress=progress, warn=warn)
    if jobs is not None:
        raise InputError("--jobs", "left out with --engine ray", jobs, "the cores of the cluster decide")
    from joma.engine import RayEngine

    return RayEngine(address, shared=shared, progress=progress, warn=warn)
