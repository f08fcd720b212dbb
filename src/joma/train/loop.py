"""The training loop: many seeds are one model with the seed as the leading axis of every parameter.

The losses of all seeds are added and differentiated at once. No parameter is shared, so each seed has its own gradient
and trains as it would alone.

On CUDA a step is compiled and captured once and then replayed without Python. On the CPU the same code runs eagerly.
With a folder for checkpoints a run that was killed resumes, and on the CPU ends with the same bits as one never killed.

Several trainings may share one GPU, most of which is idle while small kernels run. Each has its own CUDA stream, and
they make one step each in turn. The stream of the training with the longest chain of kernels is the most urgent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Generic

import numpy as np
import torch
import xarray as xr

from joma.arguments import InputError, instance, sequence, whole
from joma.files import StorageError, as_path, lock
from joma.progress import SILENT, Task
from joma.train.checkpoint import CheckpointStore
from joma.train.cuda import joined, matmul_precision
from joma.train.interrupt import StopRequest, interruptible
from joma.train.optimiser import Optimiser
from joma.train.options import Compute, Record, Saving
from joma.train.state import Loss, Model, Training

OpenTask = Callable[..., AbstractContextManager[Task]]
NO_PROGRESS: OpenTask = partial(SILENT.task, "training")

PRIORITIES = 4  # levels of PyTorch's streams, from 0 down to −3

# What a user who pressed Ctrl-C is waiting for.
STEP, SAVED_STEP, SAVE = "step {} to end", "step {} to end and be saved", "the checkpoint of step {} to be saved"


@dataclass(frozen=True)
class Job(Generic[Model]):
    """One training of `fit_together`. Its attributes are the arguments of `fit`."""

    model: Model
    loss: Loss[Model]
    _: KW_ONLY
    optimiser: Optimiser
    steps: int
    record: Record | None = None
    saving: Saving | None = None
    compute: Compute | None = None
    progress: OpenTask = NO_PROGRESS


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
    options: dict[str, Any] = {"record": record, "saving": saving, "compute": compute, "progress": progress}
    (trajectory,) = fit_together([Job(model, loss, optimiser=optimiser, steps=steps, **options)])
    return trajectory


def fit_together(jobs: Sequence[Job[Any]]) -> list[xr.Dataset]:
    """Train several models and return what `fit` returns for each of them, in their order.

    On CUDA they train side by side: each has its own stream, and a Python loop makes one step of each in turn, so that
    small kernels of one run beside those of another. On the CPU they train one after the other.

    The trainings must share nothing that a step or a measure changes. Their numbers of steps may differ. Ctrl-C saves
    each of them at the step that it has reached; if one raises an error, the others are saved in the same way.

    Args:
        jobs: the trainings. Their models have separate parameters, and their checkpoints separate folders. All
            folders are locked until the last training ends.

    >>> models = [torch.nn.Module(), torch.nn.Module()]
    >>> for model in models:
    ...     model.p = torch.nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    >>> def loss(model, step):
    ...     return (model.p**2).sum(-1) / 2
    >>> jobs = [Job(model, loss, optimiser=Optimiser("sgd", 0.5), steps=n) for model, n in zip(models, (1, 2))]
    >>> [run.loss.values.tolist() for run in fit_together(jobs)]
    [[[2.0, 0.5]], [[2.0, 0.5, 0.125]]]
    """
    remedy = "pass instances of `joma.train.Job`"
    runs = [_Run(instance("jobs", job, Job, remedy)) for job in sequence("jobs", jobs, "a list of jobs")]
    _check_separate(runs)
    with ExitStack() as locks:
        for run in runs:
            run.resume(locks)
        unfinished = [run for run in runs if not run.finished]
        if all(_interleaves(run.training.device) for run in unfinished):
            _set_priorities(unfinished)
            _train(unfinished)
        else:
            for run in unfinished:
                _train([run])
    return [run.dataset() for run in runs]


def _interleaves(device: torch.device) -> bool:
    """Return whether trainings on this device take turns, because its queue runs them side by side."""
    return device.type == "cuda"


def _set_priorities(runs: Sequence[_Run]) -> None:
    """Give the trainings with the longest chains of kernels the most urgent streams.

    A step lasts as long as its kernels take one after the other. If each of many small ones waits for the blocks of
    another training's large kernels, the deepest model holds up all others. The number of parameter tensors stands for
    the length of the chain; of two equal ones, the model with fewer elements has the smaller kernels.
    """
    models = [run.training.model for run in runs]
    sizes = [[parameter.numel() for parameter in model.parameters()] for model in models]
    urgency = sorted(range(len(runs)), key=lambda number: (-len(sizes[number]), sum(sizes[number])))
    for rank, number in enumerate(urgency):
        runs[number].training.set_priority(min(0, rank + 1 - PRIORITIES))


def _check_separate(runs: Sequence[_Run]) -> None:
    """Raise `InputError` if two runs train the same parameters or save to the same folder."""
    parameters = [id(parameter) for run in runs for parameter in run.training.model.parameters()]
    if len(set(parameters)) < len(parameters):
        remedy = "build a model for each training"
        raise InputError("jobs", "models with separate parameters", "shared ones", remedy)
    folders = [run.saver.store.folder.resolve() for run in runs if run.saver is not None]
    repeated = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if repeated:
        raise InputError("saving.folder", "a different one for each training", repeated, "give each its own")


def _train(runs: Sequence[_Run]) -> None:
    """Train the runs to their ends, in turns; Ctrl-C stops between two steps, after a save of each run."""
    with ExitStack() as block:
        for run in runs:  # Ctrl-C ends this at once: nothing is trained yet
            run.prepare(block)
        for run in runs:
            run.start_clock()
        with interruptible() as stop:
            _take_turns(runs, stop)
            if stop:
                _save(runs, stop)
    if stop:  # also if it was requested in the last step, or while that was saved
        raise KeyboardInterrupt


def _take_turns(runs: Sequence[_Run], stop: StopRequest) -> None:
    """Make one step of each run in turn, until all are finished or a stop is requested."""
    while runs and not stop:
        steps = 1 if len(runs) > 1 else runs[0].last + 1  # a run alone needs no turns, which cost some microseconds
        for run in runs:
            try:
                with run.turn():
                    run.advance(steps, stop)
            except Exception:
                _save([other for other in runs if other is not run], stop)
                raise
        runs = [run for run in runs if not run.finished]


def _save(runs: Sequence[_Run], stop: StopRequest) -> None:
    """Save each unfinished run at the step that it has reached."""
    for run in runs:
        if run.saver is not None and not run.finished:
            with run.turn():
                run.saver.save(run.training, run.next_step, stop)


class _Run:
    """A job at work.

    Attributes:
        last: the last step, after which there is no update.
        next_step: the step to make next; after the last one if the run is finished.
    """

    def __init__(self, job: Job[Any]) -> None:
        self.last, self.record = whole("steps", job.steps, low=0), Record() if job.record is None else job.record
        self.record_steps = self.record.steps(self.last)
        compute = Compute() if job.compute is None else job.compute
        self.training = Training(job.model, job.loss, job.optimiser, self.record, compute)
        self.labels = self.record.labels(self.training.seeds)
        self.next_step, self.open_task, self.task = 0, job.progress, Task()
        self.saver: _Saver | None = None
        if job.saving is not None:
            save_steps = job.saving.steps(self.last)
            identity = {**_identity(job.optimiser, self.last, self.labels), **job.saving.identity}
            store = CheckpointStore(as_path("folder", job.saving.folder), identity)
            # None is due before the last step: soon after it the finished run is saved.
            self.saver = _Saver(store, save_steps - {self.last}, job.saving.min_seconds)

    @property
    def finished(self) -> bool:
        return self.next_step > self.last

    def resume(self, locks: ExitStack) -> None:
        """Lock the folder of checkpoints, if there is one, and restore the newest of them."""
        if self.saver is not None:
            locks.enter_context(lock(self.saver.store.folder))
            self.next_step, finished = self.saver.resume(self.training, self.record_steps)
            if finished:
                self.saver.store.tidy(self.last, keep=1)
                self.next_step = self.last + 1

    def prepare(self, block: ExitStack) -> None:
        """Open the progress bar until the end of `block`, and prepare the first step."""
        block.enter_context(joined(self.training.stream))
        self.task = block.enter_context(self.open_task(total=self.last))
        with self.turn():
            self.training.prepare(self.next_step)
        self.task.skip(self.next_step)

    def start_clock(self) -> None:
        """Measure the time to the next save from now on."""
        if self.saver is not None:
            self.saver.saved_at = time.monotonic()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Compute on this run's stream and in its precision for the duration of the block."""
        with matmul_precision(self.training.compute), self.training.on_stream():
            yield

    def advance(self, steps: int, stop: StopRequest) -> None:
        """Make up to `steps` steps, fewer if a stop is requested, and save on the way and at the end."""
        for step in range(self.next_step, min(self.next_step + steps, self.last + 1)):
            if self.saver is not None and self.saver.is_due(step):
                self.saver.save(self.training, step, stop)
            if stop:
                return
            stop.begin(STEP if self.saver is None else SAVED_STEP, step)
            self.training.step(step, record=step in self.record_steps, update=step < self.last)
            if step < self.last:
                self.training.report(self.task)
            self.next_step = step + 1
        if self.finished and self.saver is not None:
            stop.begin(SAVE, self.last)
            self.saver.store.save(self.last, self.training.state(final=True), keep=1)

    def dataset(self) -> xr.Dataset:
        """Return what was recorded."""
        return _dataset(self.training, sorted(self.record_steps), self.record.dims, self.labels)


class _Saver:
    """Save one training run at the steps that are due, and resume it."""

    def __init__(self, store: CheckpointStore, save_steps: frozenset[int], min_seconds: float) -> None:
        self.store, self.save_steps, self.min_seconds = store, save_steps, min_seconds
        self.saved_step, self.saved_at = 0, time.monotonic()  # there is nothing to save before the first step

    def is_due(self, step: int) -> bool:
        """Return whether a save is due before `step`, by step and time."""
        return step in self.save_steps and time.monotonic() - self.saved_at >= self.min_seconds

    def save(self, training: Training[Any], step: int, stop: StopRequest) -> None:
        """Save the state before `step`, unless it is saved already."""
        if step != self.saved_step:
            stop.begin(SAVE, step)
            self.store.save(step, training.state())
            self.saved_step, self.saved_at = step, time.monotonic()

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
        self.saved_step = checkpoint.step
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
