"""The training loop: many seeds are one model with the seed as the leading axis of every parameter.

The losses of all seeds are added and differentiated at once. No parameter is shared, so each seed has its own gradient
and trains as it would alone.

On CUDA a step is compiled and captured once and then replayed without Python. On the CPU the same code runs eagerly.
With a folder for checkpoints a run that was killed resumes, and on the CPU ends with the same bits as one never killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from joma.arguments import InputError, whole
from joma.files import StorageError, lock
from joma.progress import SILENT, Task
from joma.train.checkpoint import CheckpointStore
from joma.train.cuda import matmul_precision
from joma.train.interrupt import StopRequest, interruptible
from joma.train.optimiser import Optimiser
from joma.train.options import Compute, Record, Saving
from joma.train.state import Loss, Model, Training

OpenTask = Callable[..., AbstractContextManager[Task]]
NO_PROGRESS: OpenTask = partial(SILENT.task, "training")

# What a user who pressed Ctrl-C is waiting for.
STEP, SAVED_STEP, SAVE = "step {} to end", "step {} to end and be saved", "the checkpoint of step {} to be saved"


def fit(
    model: Model,
    loss: Loss[Model],
    *,
    optimiser: Optimiser,
    steps: int,
    record: Record | None = None,
    saving: Saving | None = None,
    compute: Compute | None = None,
    progress: OpenTask = NO_PROGRESS,
) -> xr.Dataset:
    """Train every seed of `model` for `steps` steps and return what was recorded.

        θ_s ← θ_s − update(∂L_s/∂θ_s),    L_s = loss(model, step)[s]

    At step n the model has been updated n times. Measures are taken between the backward pass and the update, so that
    they see the parameters *and* the gradients of that step; after the last step there is no update.

    A seed whose loss is not finite is frozen where it is, and NaN is recorded for it from that step on. The other seeds
    are not affected.

    A run that was saved resumes as if it had never stopped, provided that all randomness in `loss` and `record` comes
    from the step and a seed, as with `joma.noise`: the state of a generator is not saved. Parameters, persistent
    buffers and the record are.

    Args:
        model: a module whose parameters all have the seed as leading axis.
        loss: a function of the model and the step that returns the loss of each seed, [seed]. The step is a tensor
            without axes on the model's device. On CUDA the function is captured: whatever changes from step to step
            must be computed from the step's tensor, and with bfloat16 products large weights of `Linear` may be in
            bfloat16.
        optimiser: update rule, learning rates and gradient clipping.
        steps: number of updates.
        record: what to measure besides the loss, and at which steps; if None, the loss alone at every step.
        saving: where and when to write checkpoints; none are written if None. The folder is locked while training runs.
            A folder is refused if its checkpoints are of a run with another identity, model, optimiser, number of
            steps, recorded steps or seeds.
        compute: precision and compilation on CUDA.
        progress: opens a progress bar, `progress(total=steps)`.

    Returns:
        A Dataset over `seed` and `step` with `loss`, all measures, and `diverged` [seed]: the step at which the seed's
        loss was first not finite, −1 if it never was.

    >>> model = torch.nn.Module()
    >>> model.p = torch.nn.Parameter(torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    >>> run = fit(model, lambda model, step: (model.p**2).sum(-1) / 2, optimiser=Optimiser("sgd", 0.5), steps=2)
    >>> run.loss.values
    array([[0.5    , 0.125  , 0.03125],
           [2.     , 0.5    , 0.125  ]])
    """
    steps, record = whole("steps", steps, low=0), Record() if record is None else record
    record_steps = record.steps(steps)
    training = Training(model, loss, optimiser, record, Compute() if compute is None else compute)
    labels = record.labels(training.seeds)
    if saving is None:
        _train(training, range(steps + 1), record_steps, progress)
    else:
        save_steps, identity = saving.steps(steps), {**_identity(optimiser, steps, labels), **saving.identity}
        saver = _Saver(CheckpointStore(Path(saving.folder), identity), save_steps, saving.min_seconds)
        with lock(saver.store.folder):
            start, finished = saver.resume(training, record_steps)
            if finished:
                saver.store.tidy(steps, keep=1)
            else:
                _train(training, range(start, steps + 1), record_steps, progress, saver)
    return _dataset(training, sorted(record_steps), record.dims, labels)


def _train(
    training: Training[Any],
    steps: range,
    record_steps: frozenset[int],
    progress: OpenTask,
    saver: _Saver | None = None,
) -> None:
    """Train for `steps`, and save on the way and at the end; Ctrl-C stops between two steps, after a save."""
    start, last = steps.start, steps.stop - 1
    step_activity = STEP if saver is None else SAVED_STEP
    with matmul_precision(training.compute), progress(total=last) as task:
        training.prepare(start)  # Ctrl-C ends this at once: nothing is trained yet
        task.skip(start)
        if saver is not None:
            saver.start_clock()
        with interruptible() as stop:
            for step in steps:
                if saver is not None and step > start:
                    saver.save(training, step, is_last=step == last, stop=stop)
                if stop:
                    raise KeyboardInterrupt
                stop.begin(step_activity, step)
                training.step(step, record=step in record_steps, update=step < last)
                if step < last:
                    training.report(task)
            if saver is not None:
                stop.begin(SAVE, last)
                saver.store.save(last, training.state(final=True), keep=1)
    if stop:  # requested in the last step, or while it was saved
        raise KeyboardInterrupt


class _Saver:
    """Save one training run at the steps that are due, and resume it."""

    def __init__(self, store: CheckpointStore, save_steps: frozenset[int], min_seconds: float) -> None:
        self.store, self.save_steps, self.min_seconds = store, save_steps, min_seconds
        self.saved_at = time.monotonic()

    def start_clock(self) -> None:
        """Measure the time to the next save from now on."""
        self.saved_at = time.monotonic()

    def save(self, training: Training[Any], step: int, *, is_last: bool, stop: StopRequest) -> None:
        """Save the state before `step`, if a save is due by step and time, or in any case if the run is to stop.

        None is due before the last step: soon after it the finished run is saved.
        """
        due = not is_last and step in self.save_steps and time.monotonic() - self.saved_at >= self.min_seconds
        if due or stop:
            stop.begin(SAVE, step)
            self.store.save(step, training.state())
            self.saved_at = time.monotonic()

    def resume(self, training: Training[Any], record_steps: frozenset[int]) -> tuple[int, bool]:
        """Restore the newest intact checkpoint; return the step to go on with, and whether the run is finished."""
        checkpoint = self.store.load()
        if checkpoint is None:
            return 0, False
        stored, present = checkpoint.identity, self.store.identity
        differences = [name for name in {**present, **stored} if stored.get(name) != present.get(name)]
        differences = differences or training.differences(checkpoint, record_steps)
        if differences:
            other = f"of another run, which differs in {', '.join(differences)}"
            which = other if checkpoint.identity else "that do not name their run"
            remedy = "choose another folder, or delete that one to start again"
            raise StorageError(f"{self.store.folder} holds checkpoints {which}; {remedy}.")
        training.restore(checkpoint)
        return checkpoint.step, bool(checkpoint.tensors["finished"])


def _identity(optimiser: Optimiser, steps: int, labels: Sequence[int]) -> dict[str, str]:
    """Return what a checkpoint stores about its run, by argument; schedules are functions, so only their patterns."""
    settings = {**vars(optimiser), "rates": dict(optimiser.rates), "schedules": list(optimiser.schedules)}
    identity = {"optimiser": settings, "steps": steps, "seeds": labels}
    return {name: json.dumps(value, default=_as_list, sort_keys=True) for name, value in identity.items()}


def _as_list(value: Any) -> Any:
    return np.asarray(value).tolist()


def _dataset(
    training: Training[Any], steps: Sequence[int], dims: Mapping[str, Sequence[str]], labels: Sequence[int]
) -> xr.Dataset:
    """Return the record as a labelled Dataset."""
    variables = {}
    for name, values in training.recorded.items():
        array = torch.stack(values, dim=1).numpy()
        axes = tuple(dims.get(name, ()))
        if len(axes) != array.ndim - 2:
            got = f"{axes} for the shape {array.shape[2:]} of {name!r}"
            raise InputError("dims", "one name for each axis after the seed's", got, "name them in `dims`")
        variables[name] = (("seed", "step", *axes), array)
    variables["diverged"] = (("seed",), training.diverged.cpu().numpy())
    coords = {"seed": np.asarray(labels), "step": np.asarray(steps)}
    return xr.Dataset(variables, coords=coords)
