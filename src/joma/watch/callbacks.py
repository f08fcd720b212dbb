"""The common part of the callbacks of all frameworks: a recorder that never ends the training, and its trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xarray as xr
from torch import nn

from joma.arguments import StateError
from joma.watch.distributed import Processes, find_processes
from joma.watch.failures import Failures
from joma.watch.recorder import Recorder


class RecorderCallback:
    """A recorder, made when training begins; whatever fails is a warning, and the training goes on.

    Attributes:
        recorder: the recorder of the current or last training, or None if there is none.
        options: the options of the recorder.
    """

    recorder: Recorder | None = None
    options: dict[str, Any]
    _failures: Failures | None = None
    _failed = False

    @property
    def trajectory(self) -> xr.Dataset:
        """All probes so far, with dims step, layer, head and weight."""
        return self._started_recorder().dataset()

    def save(self, path: str | Path) -> None:
        """Write the trajectory as netCDF, with provenance; `joma.open_run(path)` reads it."""
        self._started_recorder().save(path)

    def _started_recorder(self) -> Recorder:
        if self.recorder is not None:
            return self.recorder
        if self._failed:
            raise StateError(type(self).__name__, "could not prepare its probes", "see the warning `ProbeFailed`")
        raise StateError(type(self).__name__, "has no trajectory before training has begun", "train first")

    def _start(self) -> None:
        """Begin a new training, without a recorder as yet."""
        self.recorder, self._failures, self._failed = None, Failures(), False

    def _processes(self, model: nn.Module) -> Processes:
        """Return the processes that measure together: all of them, as a framework calls its callbacks on each."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return find_processes(model, self.options.get("distributed", several or None))

    @contextmanager
    def _guarded(self, what: str, step: int) -> Iterator[None]:
        """Turn an error in the block into a warning, unless the option `strict` is set."""
        try:
            yield
        except Exception as error:
            if self.options.get("strict"):
                raise
            self._failed = True
            self._failures = self._failures or Failures()
            self._failures.warn(what, step, error, stacklevel=4)


@contextmanager
def replaced(attributes: dict[str, Any], **values: Any) -> Iterator[None]:
    """Set instance attributes in the block; afterwards those of the class are visible again, or the former ones."""
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)
