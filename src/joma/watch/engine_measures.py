"""Measure the checkpoints of a series on an engine: a checkpoint is a unit, and the worker that measures it reads it.

Measurements are arrays of some kilobytes. They come back with their checksums as the values of the units, and the
process that asked for them stores them: no file system is shared, and the store is the same wherever they were made.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from joma.arguments import InputError
from joma.engine import Engine, Failure, Needs, Result, Unit
from joma.progress import SILENT, Progress
from joma.watch.byte_ranges import NotFinite, Unreadable
from joma.watch.series import Checkpoints, LazyCheckpoint
from joma.watch.store import Measure, Store

FUNCTION = "joma.watch.checkpoint_units:measure_checkpoint"
ERRORS = {kind.__name__: kind for kind in (InputError, Unreadable, NotFinite)}
FIXED_MEMORY = 2 << 30  # bytes that a process takes besides the model: torch, transformers, activations
SIZES = 3  # a model in float32 is at most twice as large as its file in half precision, which is mapped beside it

Measurement = dict[str, np.ndarray]


class EngineMeasures:
    """The measurements of a series that the processes of an engine make.

    Args:
        engine: where checkpoints are measured.
        series: the checkpoints.
        store: where measurements are kept; what is there already is not measured again.
        progress: where to show the progress.
        gpus: GPUs that a process uses while it measures weights, also a part of one.
    """

    def __init__(
        self,
        engine: Engine,
        series: Checkpoints,
        *,
        store: Store | None = None,
        progress: Progress = SILENT,
        gpus: float = 0.0,
    ) -> None:
        self._engine, self._series, self._store, self._progress, self._gpus = engine, series, store, progress, gpus
        self._results: dict[tuple[str, str], Measurement | InputError] = {}

    def measure(
        self, measure: Measure, *, leave_out: Collection[str] = (), also: Sequence[Measure] = ()
    ) -> Iterator[tuple[LazyCheckpoint, Measurement | InputError]]:
        """Yield each checkpoint in training order with its measurement, or with the error, as `Checkpoints.measure`.

        Args:
            measure: what to measure.
            leave_out: names of checkpoints to skip.
            also: further measures that the same units take, for later calls of this method.
        """
        checkpoints = [checkpoint for checkpoint in self._series if checkpoint.name not in leave_out]
        self._complete(checkpoints, (measure, *also))
        for checkpoint in checkpoints:
            yield checkpoint, self._results.pop((checkpoint.name, measure.name))

    def _complete(self, checkpoints: Sequence[LazyCheckpoint], measures: Sequence[Measure]) -> None:
        """Have the engine measure whatever is not known yet."""
        pending: dict[str, tuple[LazyCheckpoint, list[Measure]]] = {}
        for checkpoint in checkpoints:
            missing = [measure for measure in measures if not self._is_known(checkpoint, measure)]
            if missing:
                unit_name = f"{self._series.source} {checkpoint.name} ({', '.join(each.name for each in missing)})"
                pending[unit_name] = (checkpoint, missing)
        units = [self._unit(name, *work) for name, work in pending.items()]
        label = " and ".join(measure.name for measure in measures)
        with self._progress.task(label, total=len(checkpoints)) as task:
            task.skip(len(checkpoints) - len(units))
            for result in self._engine.run(units):
                checkpoint, missing = pending[result.unit.name]
                self._receive(checkpoint, missing, result)
                task.say(checkpoint.name)
                task.advance()

    def _is_known(self, checkpoint: LazyCheckpoint, measure: Measure) -> bool:
        """Return whether the measurement came with an earlier one or is stored, or the checkpoint cannot be read."""
        key = (checkpoint.name, measure.name)
        if key in self._results:
            return True
        try:
            checkpoint.identity  # noqa: B018 (it names a checkpoint that cannot be read)
            values = self._store.get(checkpoint, measure) if self._store else None
        except InputError as error:
            self._results[key] = error
            return True
        if values is not None:
            self._results[key] = values
        return values is not None

    def _unit(self, name: str, checkpoint: LazyCheckpoint, measures: Sequence[Measure]) -> Unit:
        """Return the unit that takes these measures of a checkpoint."""
        requests = [{"name": measure.name, **measure.arguments} for measure in measures]
        arguments = {"address": self._series.address(checkpoint), "measures": requests}
        runs_model = any("tokens" in measure.arguments for measure in measures)
        memory = FIXED_MEMORY + SIZES * checkpoint.size if runs_model else 0
        uses_gpu = any(measure.uses_gpu for measure in measures)  # models are run on processors
        needs = Needs(gpus=self._gpus if uses_gpu else 0.0, memory=memory)
        return Unit(name, FUNCTION, arguments, self._store.folder if self._store else Path(), needs)

    def _receive(self, checkpoint: LazyCheckpoint, measures: Sequence[Measure], result: Result) -> None:
        """Keep and store what became of a unit."""
        if result.failure is not None:
            error = _error_of(checkpoint.name, result.failure)
            self._results.update({(checkpoint.name, measure.name): error for measure in measures})
            return
        outcomes = [decode(checkpoint.name, fields) for fields in result.value]
        outcomes += outcomes[-1:] * (len(measures) - len(outcomes))  # a unit ends with its first error
        for measure, outcome in zip(measures, outcomes, strict=True):
            self._results[checkpoint.name, measure.name] = outcome
            if self._store and not isinstance(outcome, InputError):
                self._store.put(checkpoint, measure, outcome)


def _error_of(name: str, failure: Failure) -> InputError:
    """Return the error of a checkpoint whose unit failed."""
    if failure.kind == "interrupted":
        raise KeyboardInterrupt
    remedy = "run the same command again: finished checkpoints are kept"
    return Unreadable(name, "a checkpoint that a worker can measure", failure.message.rstrip("."), remedy)


def encode(outcome: Mapping[str, np.ndarray] | InputError) -> dict[str, Any]:
    """Return a measurement or an error as JSON has it.

    >>> decode("step8", encode({"rank": np.arange(2.0)}))
    {'rank': array([0., 1.])}
    """
    from safetensors.numpy import save

    if isinstance(outcome, InputError):
        kind = next(kind.__name__ for kind in type(outcome).__mro__ if kind.__name__ in ERRORS)
        fields = {"name": outcome.name, "expected": outcome.expected, "got": str(outcome.got)}
        return {"error": kind, **fields, "remedy": outcome.remedy, "must": outcome.must}
    content = save({name: np.asarray(value, order="C") for name, value in outcome.items()})
    return {"arrays": base64.b64encode(content).decode(), "sha256": hashlib.sha256(content).hexdigest()}


def decode(checkpoint: str, fields: Mapping[str, Any]) -> Measurement | InputError:
    """Return the measurement or the error that `encode` described; arrays that were damaged are an error too."""
    from safetensors.numpy import load

    if "error" in fields:
        parts = {name: value for name, value in fields.items() if name != "error"}
        return ERRORS[fields["error"]](**parts)
    content = base64.b64decode(fields["arrays"])
    if hashlib.sha256(content).hexdigest() != fields["sha256"]:
        got = "a measurement that was damaged on its way"
        return Unreadable(checkpoint, "measured by a worker", got, "run the same command again")
    return load(content)
