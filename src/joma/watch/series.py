"""Series of checkpoints in training order: revisions of a repository on the hub, or local folders.

Checkpoints are read lazily, one tensor at a time, and each measurement is stored under an identity of the checkpoint's
content: a series of any length needs the memory of a single tensor, and is never read twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.arguments import InputError, short_reason
from joma.progress import SILENT, Progress
from joma.watch.byte_ranges import Unreadable, is_storable
from joma.watch.locations import CONFIG, Folders, Hub, is_folder
from joma.watch.step_names import MAX_STEP, read_steps, step_number
from joma.watch.store import Measure, Store, measure_or_load
from joma.watch.weight_files import ByteCounter, FileEntry, WeightFile, select_weight_files

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a series.

    Attributes:
        kind: the kind of fault, in one or two words.
        checkpoints: the names of the checkpoints that have it.
        message: what is wrong.
        remedy: what to do.
        left_out: those of the checkpoints that are not measured, because the results would be misleading.
    """

    kind: str
    checkpoints: tuple[str, ...]
    message: str
    remedy: str
    left_out: tuple[str, ...] = ()

    @classmethod
    def from_error(cls, kind: str, checkpoint: str, error: InputError, *, left_out: bool = True) -> Fault:
        """Return the fault of the one checkpoint that `error` was raised for."""
        return cls(kind, (checkpoint,), error.problem, error.remedy, (checkpoint,) if left_out else ())

    @property
    def loses_data(self) -> bool:
        """Whether a checkpoint was left out or not measured; checkpoints that are merely identical lose nothing."""
        return bool(self.left_out) or self.kind != "identical"

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}."


class LazyCheckpoint:
    """A checkpoint of a series: its training step and its tensors, which are read on demand.

    Attributes:
        name: the revision or the folder.
        step: the training step.
    """

    def __init__(
        self,
        name: str,
        step: int,
        *,
        entries: Callable[[], Mapping[str, FileEntry]],
        folder: Callable[[Iterable[str]], Path],
        counter: ByteCounter,
    ) -> None:
        self.name, self.step, self.counter = name, step, counter
        self._entries, self._folder = entries, folder

    def __repr__(self) -> str:
        return f"LazyCheckpoint({self.name!r}, step={self.step})"

    @cached_property
    def entries(self) -> Mapping[str, FileEntry]:
        """All files of the checkpoint, by name."""
        return self._entries()

    @property
    def identity(self) -> str:
        """A hash that changes whenever a weight file or the config does.

        It is computed from sizes and modification times, or the hub's checksums; no file is read.
        """
        identities = {name: entry.identity for name, entry in self.entries.items()}
        relevant = sorted(
            (name, identity)
            for name, identity in identities.items()
            if name == CONFIG or name.endswith(WEIGHT_SUFFIXES)
        )
        return hashlib.sha256(json.dumps(relevant).encode()).hexdigest()

    @cached_property
    def files(self) -> Mapping[str, WeightFile]:
        """The weight files, by name."""
        return {name: entry.open(self.counter) for name, entry in self._weight_entries().items()}

    def _weight_entries(self) -> dict[str, FileEntry]:
        return select_weight_files(self.entries, self.name, self.counter)

    def folder(self, *, weights: bool = True) -> Path:
        """Return a local folder to load the model from; files on the hub are downloaded into the hub's cache.

        With `weights=False` only the files that describe the model and its tokenizer are needed.
        """
        return self._folder(self._weight_entries() if weights else ())

    @cached_property
    def layout(self) -> Mapping[str, str]:
        """The file of each tensor, by the tensor's name, sorted."""
        places = sorted((name, file) for file, weights in self.files.items() for name in weights.names())
        for (name, file), (next_name, next_file) in pairwise(places):
            if name == next_name:
                got = f"{name} in {file} and in {next_file}"
                raise Unreadable(self.name, "a checkpoint with each tensor once", got, "download it again")
        return dict(places)

    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors, sorted."""
        return tuple(self.layout)

    def _file_of(self, name: str) -> WeightFile:
        if name not in self.layout:
            raise InputError("name", f"a tensor of {self.name}", repr(name), "see `names()`")
        return self.files[self.layout[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, read from the header alone."""
        return self._file_of(name).shape(name)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in the dtype that it is stored in, or converted to `dtype`."""
        return self._file_of(name).tensor(name, dtype)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return the values `start` to `stop` of a flattened tensor, and read nothing else of it."""
        return self._file_of(name).part(name, start, stop)


class Checkpoints(Sequence[LazyCheckpoint]):
    r"""A series of checkpoints in training order, read lazily.

    A folder has one subfolder per checkpoint (`step1000`, or `checkpoint-1000` as the Hugging Face Trainer names them),
    each with `model.safetensors`, shards and their index, or `pytorch_model.bin`. On the hub each revision is a
    checkpoint. A folder or a repository that holds a single model is a series of one. Every iteration creates new
    `LazyCheckpoint` objects, so that nothing of the earlier ones stays in memory.

    Args:
        source: a folder, or a repository on the hub such as "EleutherAI/pythia-70m".
        pattern: a regular expression for the whole name, with a group `step`, or a key of
            `joma.watch.step_names.PATTERNS`; by default all of those are tried.
        revisions: the name or names to use, instead of all that match; unknown ones are listed in `faults`.
        endpoint: the URL of another hub than huggingface.co (or than HF_ENDPOINT).

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (1000, 0, 512):
    ...         (Path(folder) / f"step{step}").mkdir()
    ...         save_file({"w": torch.full((2,), step)}, Path(folder) / f"step{step}" / "model.safetensors")
    ...     [(checkpoint.step, checkpoint.tensor("w").tolist()) for checkpoint in Checkpoints(folder)]
    [(0, [0, 0]), (512, [512, 512]), (1000, [1000, 1000])]
    """

    def __init__(
        self,
        source: str | Path,
        *,
        pattern: str | None = None,
        revisions: str | Sequence[str] | None = None,
        endpoint: str | None = None,
    ) -> None:
        if not str(source).strip():  # an empty path would be the current folder
            raise InputError("source", "a folder or a repository", "an empty name", "write `.` for the current folder")
        revisions = [revisions] if isinstance(revisions, str) else revisions
        self.source, self.counter, self.faults = str(source), ByteCounter(), ()
        self._location: Folders | Hub = Folders(Path(source)) if is_folder(source) else Hub(str(source), endpoint)
        available = self._location.names()
        chosen = available
        if revisions is not None:
            chosen = [name for name in revisions if name in available]
            unknown = sorted(set(revisions) - set(available))
            self.faults = tuple(_unknown_revision(self.source, name, available) for name in unknown)
        self._members, without_step, faults = _in_training_order(chosen, pattern)
        self.faults += faults
        if revisions is not None and len(chosen) == 1:  # a single revision needs no step in its name
            self._members = self._members or [(0, chosen[0])]
        elif revisions is not None:
            self.faults += tuple(_revision_without_step(name) for name in without_step)
        if not self._members and revisions is None and pattern is None and self._location.single:
            self._members = [(0, self._location.single)]
        if not self._members:
            wanted = f"the revisions {', '.join(revisions)}" if revisions else "checkpoints named by their step"
            got = f"{self.source} with {', '.join(available[:8]) or 'none'}"
            raise InputError("source", f"a series with {wanted}", got, "give revisions or a pattern")

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._checkpoint(*member) for member in self._members[index]]
        return self._checkpoint(*self._members[index])

    def __iter__(self) -> Iterator[LazyCheckpoint]:
        return (self._checkpoint(*member) for member in self._members)

    def _checkpoint(self, step: int, name: str) -> LazyCheckpoint:
        entries, folder = partial(self._location.entries, name), partial(self._location.folder, name)
        return LazyCheckpoint(name, step, entries=entries, folder=folder, counter=self.counter)

    @property
    def steps(self) -> tuple[int, ...]:
        """The training steps, in order."""
        return tuple(step for step, _ in self._members)

    @property
    def names(self) -> tuple[str, ...]:
        """The revisions or folders, in the order of their steps."""
        return tuple(name for _, name in self._members)

    @property
    def bytes_read(self) -> int:
        """How many bytes of weights have been read so far."""
        return self.counter.total

    def measure(
        self,
        measure: Measure,
        *,
        store: Store | None = None,
        leave_out: Iterable[str] = (),
        progress: Progress = SILENT,
    ) -> Iterator[tuple[LazyCheckpoint, dict[str, np.ndarray] | InputError]]:
        """Yield each checkpoint with its measurement, or with the error if it cannot be read or measured.

        An unexpected error of the measuring function, which may be a defect of it, does not end the series either: it
        becomes an `Unreadable` that says its type and has it as its cause.

        Args:
            measure: what to measure.
            store: where measurements are kept; without a store they are computed again.
            leave_out: names of checkpoints to skip.
            progress: where to show the progress.
        """
        excluded = set(leave_out)
        members = [(step, name) for step, name in self._members if name not in excluded]
        guarded = replace(measure, function=partial(_measure_or_refuse, measure))
        with progress.task(measure.name, total=len(members)) as task:
            for member in members:
                checkpoint = self._checkpoint(*member)
                task.say(checkpoint.name)
                try:
                    result = measure_or_load(store, checkpoint, guarded)
                except InputError as error:
                    result = error
                yield checkpoint, result
                task.advance()


def _unknown_revision(source: str, name: str, available: list[str]) -> Fault:
    remedy = f"choose among {', '.join(available[:8])}{' …' if len(available) > 8 else ''}"
    return Fault("unknown", (name,), f"{source} has no revision {name!r}", remedy, (name,))


def _revision_without_step(name: str) -> Fault:
    message = f"the name {name!r} contains no step, so that its place in the series is unknown"
    return Fault("unordered", (name,), message, "give a pattern with a group `step`, or leave it out", (name,))


def _measure_or_refuse(measure: Measure, checkpoint: LazyCheckpoint) -> dict[str, np.ndarray]:
    """Measure a checkpoint; turn every error into one about the checkpoint."""
    try:
        return measure.function(checkpoint)
    except InputError:
        raise
    except Exception as cause:
        got = f"{type(cause).__name__} ({shorten(short_reason(cause), 200, placeholder=' …')})"
        remedy = "download it again; if nothing changes, report it as a defect of joma"
        raise Unreadable(checkpoint.name, f"a checkpoint whose {measure.name} can be measured", got, remedy) from cause


def _in_training_order(
    names: Sequence[str], pattern: str | None
) -> tuple[list[tuple[int, str]], list[str], tuple[Fault, ...]]:
    """Return the steps and names in training order, the names without a step, and the faults of other names."""
    by_step: dict[int, str] = {}
    without_step, faults = [], []
    for name, text in zip(names, read_steps(names, pattern), strict=True):
        step = None if text is None else step_number(text)
        if text is None:
            without_step.append(name)
        elif step is None or not is_storable(name):
            faults.append(_unusable_name(name, text, step))
        elif step in by_step:
            got, used = f"{by_step[step]} and {name} for step {step}", pattern or "the known ones"
            raise InputError("pattern", "narrow enough for one checkpoint per step", got, f"the pattern was {used}")
        else:
            by_step[step] = name
    return sorted(by_step.items()), without_step, tuple(faults)


def _unusable_name(name: str, text: str, step: int | None) -> Fault:
    message = f"the name {name!r} is not UTF-8, so that its results cannot be stored"
    if step is None:
        message = f"the step {text[:40]!r} in the name {name[:80]!r} is not a whole number from 0 to {MAX_STEP}"
    return Fault("unordered", (name,), message, "rename it, or leave it out", (name,))
