"""Series of checkpoints in training order: revisions of a repository on the hub, or local folders.

Checkpoints are read lazily, one tensor at a time, and each measurement is stored under an identity of the checkpoint's
content: a series of any length needs the memory of a single tensor, and is never read twice.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from joma.watch.adapters import (
    ADAPTER_CONFIG,
    MERGED,
    LoraConfig,
    MergedWeights,
    adapter_file,
    is_adapter,
    missing_base,
)
from joma.watch.byte_ranges import Unreadable, is_storable
from joma.watch.ignored import FINAL, Ignored, empty_series, holds_weights, ignored_folders, trainer_step, unread_files
from joma.watch.locations import CONFIG, Folders, Hub, is_folder
from joma.watch.step_names import MAX_STEP, read_steps, step_number
from joma.watch.store import Measure, Store, measure_or_load
from joma.watch.weight_files import ByteCounter, FileEntry, WeightFile, select_weight_files

WEIGHT_FILES = (".safetensors", ".bin")
WEIGHT_SUFFIXES = (*WEIGHT_FILES, ".index.json")


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
        """Whether a checkpoint was left out or not measured.

        Checkpoints that are merely identical lose nothing, nor does what never was part of the series.
        """
        return bool(self.left_out) or self.kind not in ("identical", "ignored")

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}."


class LazyCheckpoint:
    """A checkpoint of a series: its training step and its tensors, which are read on demand.

    The tensors of a LoRA adapter are those of its base model with the adapter merged into them.

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
        find_base: Callable[[str, LoraConfig], LazyCheckpoint] | None = None,
    ) -> None:
        self.name, self.step, self.counter = name, step, counter
        self._entries, self._folder, self._find_base = entries, folder, find_base

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
        base = self.base.identity if self.is_adapter else None
        return _digest({name: entry.identity for name, entry in self.entries.items()}, base)

    @property
    def portable_identity(self) -> str:
        """The identity as every machine has it that sees the same files, or copies with their modification times."""
        base = self.base.portable_identity if self.is_adapter else None
        return _digest({name: entry.portable or entry.identity for name, entry in self.entries.items()}, base)

    @property
    def size(self) -> int:
        """The size of the weight files in bytes, with those of an adapter's base."""
        weights = sum(entry.size for name, entry in self.entries.items() if name.endswith(WEIGHT_FILES))
        return weights + (self.base.size if self.is_adapter else 0)

    @property
    def is_adapter(self) -> bool:
        """Whether the checkpoint is an adapter, which is merged into its base."""
        return is_adapter(self.entries)

    @cached_property
    def lora_config(self) -> LoraConfig:
        """The config of an adapter."""
        return LoraConfig.from_fields(self.entries[ADAPTER_CONFIG].json(self.counter), self.name)

    @cached_property
    def base(self) -> LazyCheckpoint:
        """The base model of an adapter."""
        if self._find_base is None:
            raise missing_base(self.name, self.lora_config)
        return self._find_base(self.name, self.lora_config)

    @cached_property
    def files(self) -> Mapping[str, WeightFile]:
        """The weight files, by name; for an adapter, one that stands for base and adapter together."""
        if self.is_adapter:
            adapter = adapter_file(self.entries, self.name).open(self.counter)
            return {MERGED: MergedWeights(adapter, self.lora_config, self.base, self.name)}
        return {name: entry.open(self.counter) for name, entry in self._weight_entries().items()}

    def _weight_entries(self) -> dict[str, FileEntry]:
        return select_weight_files(self.entries, self.name, self.counter)

    def folder(self, *, weights: bool = True) -> Path:
        """Return a local folder to load the model from; files on the hub are downloaded into the hub's cache.

        With `weights=False` only the files that describe the model and its tokenizer are needed. For an adapter it is
        the folder of its base.
        """
        if self.is_adapter:
            return self.base.folder(weights=weights)
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


def _digest(identities: Mapping[str, str], base: str | None) -> str:
    """Return a hash of the identities of weight files, configs and the base of an adapter; others do not matter."""
    relevant = sorted(
        (name, identity)
        for name, identity in identities.items()
        if name in (CONFIG, ADAPTER_CONFIG) or name.endswith(WEIGHT_SUFFIXES)
    )
    if base is not None:
        relevant.append(("base", base))
    return hashlib.sha256(json.dumps(relevant).encode()).hexdigest()


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
        base: the base model of LoRA adapters, a folder or a repository on the hub; by default the local folder that an
            adapter names, if it exists.

    Attributes:
        unit: what the series counts, "step", or "epoch" if its folders are named by their epochs.
        faults: what is wrong with the names, and what else is there that is ignored.

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
        base: str | Path | None = None,
    ) -> None:
        if not str(source).strip():  # an empty path would be the current folder
            raise InputError("source", "a folder or a repository", "an empty name", "write `.` for the current folder")
        revisions = [revisions] if isinstance(revisions, str) else revisions
        self.source, self.unit, self.counter, self.faults = str(source), "step", ByteCounter(), ()
        self._endpoint, self._base, self._bases = endpoint, base, {}
        self._location: Folders | Hub = Folders(Path(source)) if is_folder(source) else Hub(str(source), endpoint)
        available = self._location.names()
        if revisions is not None:
            self._members = self._chosen(revisions, available, pattern)
        else:
            self._members = self._named_by_step(available, pattern)
        if not self._members:
            wanted = f"the revisions {', '.join(revisions)}" if revisions else "checkpoints named by their step"
            folder = self._location.path if isinstance(self._location, Folders) else None
            raise empty_series(self.source, wanted, available, folder)
        if isinstance(self._location, Folders):
            folders = {name: self._location.folder(name) for name in self.names}
            self.faults += tuple(map(_ignored_fault, unread_files(self._location.path, folders)))

    def _chosen(self, revisions: Sequence[str], available: list[str], pattern: str | None) -> list[tuple[int, str]]:
        """Return the chosen revisions in training order; those that are unknown or have no step are faults."""
        chosen = [name for name in revisions if name in available]
        unknown = sorted(set(revisions) - set(available))
        self.faults += tuple(_unknown_revision(self.source, name, available) for name in unknown)
        members, without_step, faults = _in_training_order(chosen, pattern)
        self.faults += faults
        if len(chosen) == 1:  # a single revision needs no step in its name
            return members or [(0, chosen[0])]
        self.faults += tuple(_revision_without_step(name) for name in without_step)
        return members

    def _named_by_step(self, available: list[str], pattern: str | None) -> list[tuple[int, str]]:
        """Return the checkpoints whose names contain a step; what looks like one and is not used is a fault.

        Where no name has a step, epochs are counted, and without those the folder itself may be a model. A final model
        comes last if the state of its trainer says a step after all others.
        """
        members, without_step, self.faults = _in_training_order(available, pattern)
        if pattern is not None:
            return members
        if not members:
            members, without_step, faults = _in_training_order(available, "epoch")
            self.unit, self.faults = "epoch" if members else "step", self.faults + faults
        single = self._location.single
        if not members and single:
            members = [(0, single)]
        if not members:
            return []
        if isinstance(self._location, Hub):
            names = [name for name in without_step if name not in dict(members).values()]
            self.faults += tuple(_revision_not_used(name) for name in names if FINAL.fullmatch(name) or name == "main")
            return members
        root = self._location.path
        if self.unit == "step" and members != [(0, single)]:
            members = _with_final(root, members, without_step)
        used = {name: step for step, name in members}
        others = [name for name in without_step if name not in used]
        ignored = ignored_folders(root, others, used, self.unit, root_is_model=single in used)
        self.faults += tuple(map(_ignored_fault, ignored))
        return members

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
        places = {"entries": entries, "folder": folder, "counter": self.counter}
        return LazyCheckpoint(name, step, **places, find_base=self._find_base)

    def _find_base(self, name: str, config: LoraConfig) -> LazyCheckpoint:
        """Return the base model of an adapter: the one given, or the local folder that the adapter names."""
        base = self._base_of(name, config)
        key = (str(base), config.revision)
        if key not in self._bases:
            self._bases[key] = self._open_base(base, config.revision or "main")
        return self._bases[key]

    def _base_of(self, name: str, config: LoraConfig) -> str | Path:
        base = self._base
        if base is None and config.base and isinstance(self._location, Folders):
            places = (Path(), self._location.folder(name), self._location.path)
            base = next((place / config.base for place in places if is_folder(place / config.base)), None)
        if base is None:
            raise missing_base(name, config)
        return base

    def address(self, checkpoint: LazyCheckpoint) -> dict[str, Any]:
        """Return where a checkpoint of the series is, as JSON has it, for `open_checkpoint` in another process."""
        is_local = isinstance(self._location, Folders)
        is_listed = not is_local or checkpoint.name in self._location.names()
        base = self._base_of(checkpoint.name, checkpoint.lora_config) if checkpoint.is_adapter else None
        return {
            "source": os.path.abspath(self.source) if is_local else self.source,
            "is_local": is_local,
            "name": checkpoint.name,
            "is_listed": is_listed,
            "endpoint": self._endpoint,
            "base": os.path.abspath(base) if base is not None and is_folder(base) else base,
            "identity": checkpoint.portable_identity,
        }

    def _open_base(self, base: str | Path, revision: str) -> LazyCheckpoint:
        """Return the full model in a folder, or in a revision of a repository on the hub."""
        location = Folders(Path(base)) if is_folder(base) else Hub(str(base), self._endpoint)
        known = [location.single] if isinstance(location, Folders) else [revision] * (revision in location.names())
        for name in filter(None, known):
            entries, folder = partial(location.entries, name), partial(location.folder, name)
            checkpoint = LazyCheckpoint(name, 0, entries=entries, folder=folder, counter=self.counter)
            if not checkpoint.is_adapter:
                return checkpoint
        got = f"{base}, {'an adapter' if any(known) else 'without a model'}"
        raise InputError("base", "a full model", got, "give the folder of the base model")

    @property
    def steps(self) -> tuple[int, ...]:
        """The training steps, in order."""
        return tuple(step for step, _ in self._members)

    @property
    def names(self) -> tuple[str, ...]:
        """The revisions or folders, in the order of their steps."""
        return tuple(name for _, name in self._members)

    @property
    def bases(self) -> tuple[str, ...]:
        """The base models of the adapters that have been read so far."""
        return tuple(sorted(base for base, _ in self._bases))

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
        guarded = replace(measure, function=partial(measure_or_refuse, measure))
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


def _revision_not_used(name: str) -> Fault:
    message = f"the name {name!r} says no step, so that its place in the series is unknown"
    return Fault("ignored", (name,), message, "give its name as a revision to measure it alone")


def _ignored_fault(ignored: Ignored) -> Fault:
    return Fault("ignored", ignored.names, ignored.message, ignored.remedy)


def _with_final(root: Path, members: list[tuple[int, str]], names: Iterable[str]) -> list[tuple[int, str]]:
    """Append the final model, if there is one and its trainer's state says a step after all others."""
    steps = {name: trainer_step(root / name) for name in names if FINAL.fullmatch(name)}
    later = sorted((step, name) for name, step in steps.items() if step is not None and step > members[-1][0])
    return [*members, later[0]] if len(later) == 1 and holds_weights(root / later[0][1]) else members


def measure_or_refuse(measure: Measure, checkpoint: LazyCheckpoint) -> dict[str, np.ndarray]:
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
