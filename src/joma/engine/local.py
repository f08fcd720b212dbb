"""The local engine: units run side by side in processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from joma import memory as machine_memory
from joma.arguments import whole
from joma.engine.devices import usable_cores, visible_devices
from joma.engine.display import Display, Report, warn_here
from joma.engine.scheduling import Machine, check_arguments, check_needs
from joma.engine.unit import Engine, Result, Unit
from joma.engine.worker_pool import WorkerPool
from joma.progress import SILENT, Progress
from joma.train.interrupt import interruptible

MAX_JOBS = 4096


class LocalEngine(Engine):
    """Units run side by side in processes of this machine, which start when they are needed and stay.

    Units start in the order of submission, as soon as the cores, GPUs and memory that they need are free. Their working
    folder is the one that this process has when the engine is made. What they print appears on standard error.

    Args:
        jobs: units that run at the same time at most; as many as cores and memory allow if not given.
        memory: bytes that all units may take together; most of what is free if not given.
        progress: where the progress of units is shown.
        warn: called with every warning of a unit, once for each text.
        devices: GPUs, by the names that CUDA_VISIBLE_DEVICES has for them; those that are visible if not given.

    >>> from joma.engine import Unit
    >>> with LocalEngine(jobs=1) as engine:
    ...     [result.failure for result in engine.run([])]
    []
    """

    def __init__(
        self,
        jobs: int | None = None,
        *,
        memory: int | None = None,
        progress: Progress = SILENT,
        warn: Callable[[str], None] = warn_here,
        devices: Sequence[str] | None = None,
    ) -> None:
        cores = usable_cores()
        self.jobs = cores if jobs is None else whole("jobs", jobs, high=MAX_JOBS)
        free = int(machine_memory.MARGIN * machine_memory.available()) if memory is None else memory
        self._machine = Machine(self.jobs, max(cores, self.jobs), free)
        self._given_devices, self._folder = devices, os.getcwd()
        self._display = Display(progress, warn, several=self.jobs > 1)
        self._pool: WorkerPool | None = None

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The GPUs that units may use."""
        return tuple(visible_devices() if self._given_devices is None else self._given_devices)

    def submit(self, unit: Unit) -> None:
        check_needs(unit, self.devices if unit.needs.gpus else ())
        check_arguments(unit)
        if self._pool is None:
            self._pool = WorkerPool(self._machine, self._folder)
        if unit.needs.gpus and not self._machine.devices:
            self._machine = replace(self._machine, devices=self.devices)
            self._pool.use(self._machine)
        self._pool.submit(unit)

    def results(self) -> Iterator[Result]:
        for event in () if self._pool is None else self._pool.read():
            if isinstance(event, Report):
                self._display.show(event)
            elif isinstance(event, Result):
                self._display.end(event.unit)
                yield event
            else:
                raise event

    def cancel(self) -> None:
        if self._pool is None:
            return
        with interruptible("the units that run to save and stop") as stop:
            self._pool.cancel()
        if stop:
            raise KeyboardInterrupt

    def close(self) -> None:
        if self._pool is None:
            return
        try:
            self.cancel()
        finally:
            self._pool.close()
            self._pool = None
            self._display.close()
