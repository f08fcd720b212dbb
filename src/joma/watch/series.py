"""Series of checkpoints in training order: revisions on the hub, or folders of this machine.

Nothing is read before it is asked for, one tensor at a time, and what was measured of a checkpoint is kept under the
identity of its content: a series of any length needs the memory of one tensor, and is never read twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.arguments import InputError
from joma.files import storage_error, write_bytes
from joma.progress import SILENT, Progress
from joma.watch.weight_files import Bytes, Entry, Meter, Unreadable, Weights, local_bytes, weight_files

# How series are named, each with the group `step`; tried together unless a pattern is given.
PATTERNS = {
    "step": r"(?:global_)?step[-_]?(?P<step>\d+)",  # Pythia, and many others
    "checkpoint": r"checkpoint-(?P<step>\d+)",  # the Trainer's folders
    "olmo": r"(?:stage1-)?step(?P<step>\d+)-tokens\d+B",  # its second stage starts to count anew: give a pattern
}
FILES = (".safetensors", ".bin", ".index.json")
CONFIG = "config.json"  # says how the weights are run
DESCRIPTIONS = ("*.json", "*.txt", "*.model")


@dataclass(frozen=True)
class Fault:
    """Something wrong with a series.

    Attributes:
        kind: what, in one or two words.
        checkpoints: the names of those concerned.
        said: what is wrong.
        remedy: what to do.
        left_out: those of them whose measures would mislead, and which are therefore not measured.
    """

    kind: str
    checkpoints: tuple[str, ...]
    said: str
    remedy: str
    left_out: tuple[str, ...] = ()

    @classmethod
    def told(cls, kind: str, name: str, problem: InputError) -> Fault:
        """The fault of one checkpoint that bad input stands for; its message ends with the remedy."""
        said, remedy = str(problem).rstrip(".").rsplit("; ", 1)
        return cls(kind, (name,), said, remedy, (name,))

    @property
    def grave(self) -> bool:
        """Whether anything was left out or could not be measured; identical neighbours alone are no such thing."""
        return bool(self.left_out) or self.kind != "identical"

    def __str__(self) -> str:
        return f"{self.said}; {self.remedy}."


class Checkpoint:
    """One checkpoint of a series: its step and its tensors, read when they are asked for.

    Attributes:
        name: the revision or the folder.
        step: the training step.
    """

    def __init__(
        self,
        name: str,
        step: int,
        *,
        entries: Callable[[], Mapping[str, Entry]],
        folder: Callable[[Iterable[str]], Path],
        meter: Meter,
    ) -> None:
        self.name, self.step, self.meter = name, step, meter
        self._entries, self._folder = entries, folder

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, step={self.step})"

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Every file of the checkpoint."""
        return self._entries()

    @property
    def identity(self) -> str:
        """Changes whenever a file of weights or the config does: from sizes and times, or the hub's checksums.

        Nothing is read for it.
        """
        named = {name: entry for name, entry in self.entries.items() if name == CONFIG or name.endswith(FILES)}
        relevant = sorted((name, entry.identity) for name, entry in named.items())
        return hashlib.sha256(json.dumps(relevant).encode()).hexdigest()

    @cached_property
    def files(self) -> Mapping[str, Weights]:
        """The files that hold the weights, by name."""
        found = weight_files(self.entries, self.name, self.meter)
        return {name: entry.open(self.meter) for name, entry in found.items()}

    def folder(self, *, weights: bool = True) -> Path:
        """A local folder to load the whole model from; what lies on the hub is downloaded into the hub's own cache."""
        return self._folder(weight_files(self.entries, self.name, self.meter) if weights else ())

    @cached_property
    def layout(self) -> Mapping[str, str]:
        """The file that each tensor lies in, by the tensor's name, sorted."""
        return dict(sorted((name, file) for file, weights in self.files.items() for name in weights.names()))

    def names(self) -> tuple[str, ...]:
        """The tensors, sorted."""
        return tuple(self.layout)

    def _holding(self, name: str) -> Weights:
        if name not in self.layout:
            raise InputError("name", f"a tensor of {self.name}", repr(name), "see `names()`")
        return self.files[self.layout[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header alone."""
        return self._holding(name).shape(name)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, in the type it is stored in or converted."""
        return self._holding(name).tensor(name, dtype)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The values `start` to `stop` of a tensor's flattened form, and nothing else of it."""
        return self._holding(name).part(name, start, stop)


class Checkpoints(Sequence[Checkpoint]):
    r"""A series of checkpoints in training order, read lazily.

    A folder holds one subfolder a checkpoint (`step1000`, or `checkpoint-1000` as the Trainer names them), each with
    `model.safetensors`, shards and their index, or `pytorch_model.bin`. On the hub each revision is a checkpoint. A
    folder or a repository without any such is a series of one. Every pass makes new `Checkpoint` objects, so that
    nothing of one that went by is kept.

    Args:
        source: a folder, or a repository of the hub such as "EleutherAI/pythia-70m".
        pattern: a regular expression for the whole name, with a group `step`, or a name in `PATTERNS`;
            by default all of those are tried.
        revisions: the name or names to take, instead of all that match; unknown ones are listed in `faults`.
        endpoint: another hub than huggingface.co (or than HF_ENDPOINT).

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (1000, 0, 512):
    ...         (Path(folder) / f"step{step}").mkdir()
    ...         save_file({"w": torch.full((2,), step)}, Path(folder) / f"step{step}" / "model.safetensors")
    ...     [(one.step, one.tensor("w").tolist()) for one in Checkpoints(folder)]
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
        if not str(source).strip():  # a path without a name would be the current folder
            raise InputError("source", "a folder or a repository", "no name", "write `.` for the current folder")
        revisions = [revisions] if isinstance(revisions, str) else revisions
        self.source, self.meter, self.faults = str(source), Meter(), ()
        self._place: Folders | Hub = Folders(Path(source)) if Path(source).is_dir() else Hub(str(source), endpoint)
        matches = _compiled(pattern)
        known = self._place.names()
        chosen = known
        if revisions is not None:
            chosen, unknown = [name for name in revisions if name in known], sorted(set(revisions) - set(known))
            self.faults = tuple(self._unknown(name, known) for name in unknown)
        self._members, without = _ordered(chosen, matches, pattern)
        if revisions is not None and len(chosen) == 1:  # a lone revision that was asked for needs no step in its name
            self._members = self._members or [(0, chosen[0])]
        elif revisions is not None:
            self.faults += tuple(self._stepless(name) for name in without)
        if not self._members and revisions is None and pattern is None and self._place.single:
            self._members = [(0, self._place.single)]
        if not self._members:
            raise self._empty(known, revisions)

    def _unknown(self, name: str, known: list[str]) -> Fault:
        remedy = f"choose among {', '.join(known[:8])}{' …' if len(known) > 8 else ''}"
        return Fault("unknown", (name,), f"{self.source} has no revision {name!r}", remedy, (name,))

    def _stepless(self, name: str) -> Fault:
        remedy = "give a pattern with a group `step`, or leave it out"
        return Fault(
            "unordered", (name,), f"{name!r} says no step, so that it has no place in a series", remedy, (name,)
        )

    def _empty(self, known: list[str], revisions: Sequence[str] | None) -> InputError:
        asked = "with the revisions " + ", ".join(revisions) if revisions else "with checkpoints named by their step"
        there = ", ".join(known[:8]) or "none"
        return InputError("source", f"a series {asked}", f"{self.source} with {there}", "give revisions or a pattern")

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._made(*member) for member in self._members[index]]
        return self._made(*self._members[index])

    def __iter__(self) -> Iterator[Checkpoint]:
        return (self._made(*member) for member in self._members)

    def _made(self, step: int, name: str) -> Checkpoint:
        entries = partial(self._place.entries, name)
        return Checkpoint(name, step, entries=entries, folder=partial(self._place.folder, name), meter=self.meter)

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
        """How many bytes of weights were read so far."""
        return self.meter.bytes

    def measure(
        self,
        measure: Measure,
        *,
        store: Store | None = None,
        leave_out: Iterable[str] = (),
        progress: Progress = SILENT,
    ) -> Iterator[tuple[Checkpoint, dict[str, np.ndarray] | InputError]]:
        """Each checkpoint with its measure, from the store where it is there; what cannot be read comes as its error.

        Args:
            measure: what to measure.
            store: where measures are kept; without one they are measured anew.
            leave_out: names of checkpoints to pass over.
            progress: where to show how far it is.
        """
        chosen = [member for member in self._members if member[1] not in set(leave_out)]
        with progress.task(measure.name, total=len(chosen)) as work:
            for member in chosen:
                checkpoint = self._made(*member)
                work.say(checkpoint.name)
                try:
                    found = _through(store, checkpoint, measure)
                except InputError as problem:
                    found = problem
                yield checkpoint, found
                work.advance()


def _compiled(pattern: str | None) -> list[re.Pattern[str]]:
    texts = list(PATTERNS.values()) if pattern is None else [PATTERNS.get(pattern, pattern)]
    try:
        found = [re.compile(text) for text in texts]
    except re.error as cause:
        raise InputError("pattern", "a regular expression", f"{pattern!r} ({cause})", "mend it") from None
    if any("step" not in one.groupindex for one in found):
        raise InputError("pattern", "with a group `step`", repr(pattern), r"write for example 'step(?P<step>\d+)'")
    return found


def _ordered(
    names: Iterable[str], matches: list[re.Pattern[str]], pattern: str | None
) -> tuple[list[tuple[int, str]], list[str]]:
    """Steps and names in training order, and the names that no pattern matches."""
    found: dict[int, str] = {}
    without = []
    for name in names:
        match = next((match for one in matches if (match := one.fullmatch(name))), None)
        if match is None:
            without.append(name)
        elif (step := int(match["step"])) in found:
            got, tried = f"{found[step]} and {name} for step {step}", pattern or "the known ones"
            raise InputError("pattern", "narrow enough to give each step one checkpoint", got, f"it was {tried}")
        else:
            found[step] = name
    return sorted(found.items()), without


class Folders:
    """The folders of a series on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """The subfolders."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_dir() and not entry.name.startswith("."))

    @property
    def single(self) -> str | None:
        """The folder itself, where it holds a model."""
        held = any(self.path.glob("*.safetensors")) or any(self.path.glob("*.bin"))
        return self.path.resolve().name if held else None

    def folder(self, name: str, files: Iterable[str] = ()) -> Path:  # noqa: ARG002 (all are there)
        """The folder of one checkpoint."""
        return self.path / name if (self.path / name).is_dir() else self.path

    def entries(self, name: str) -> dict[str, Entry]:
        """The files of one checkpoint."""
        return {file.name: self._entry(name, file) for file in sorted(self.folder(name).iterdir()) if file.is_file()}

    def _entry(self, name: str, file: Path) -> Entry:
        label, at = f"{name}/{file.name}", file.stat()
        identity = f"{at.st_size} {at.st_mtime_ns} {at.st_dev} {at.st_ino}"
        return Entry(label, identity, partial(local_bytes, file, label), lambda: file)


class Hub:
    """The revisions of a repository on the Hugging Face hub, read by byte ranges."""

    def __init__(self, repository: str, endpoint: str | None) -> None:
        try:
            import huggingface_hub
            import huggingface_hub.errors
            import huggingface_hub.hf_api
            import huggingface_hub.utils
        except ImportError:
            got = f"{repository!r}, which is no folder, and the hub's package is not installed"
            raise InputError("source", "a folder or a repository", got, "pip install 'joma[hf]'") from None
        self.hub, self.repository = huggingface_hub, repository
        self.api = huggingface_hub.HfApi(endpoint=endpoint)
        self.commits: dict[str, str] = {}

    single = "main"

    def names(self) -> list[str]:
        """The branches and tags."""
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.repository):
            raise self._absent("no name of a repository either")
        refs = self._asked(lambda: self.api.list_repo_refs(self.repository))
        self.commits = {ref.name: ref.target_commit for ref in [*refs.tags, *refs.branches]}
        return sorted(self.commits)

    def folder(self, name: str, files: Iterable[str]) -> Path:
        """Download these files of a revision, with what describes the model and its tokenizer."""
        options = {"revision": self.commits[name], "endpoint": self.api.endpoint}
        chosen = [*files, *DESCRIPTIONS]
        download = self.hub.snapshot_download
        return Path(self._asked(lambda: download(self.repository, allow_patterns=chosen, **options), name))

    def entries(self, name: str) -> dict[str, Entry]:
        """The files of one revision."""
        tree = self._asked(lambda: list(self.api.list_repo_tree(self.repository, revision=self.commits[name])))
        return {file.path: self._entry(name, file) for file in tree if isinstance(file, self.hub.hf_api.RepoFile)}

    def _entry(self, name: str, file: Any) -> Entry:
        label, commit = f"{name}/{file.path}", self.commits[name]
        url = self.hub.hf_hub_url(self.repository, file.path, revision=commit, endpoint=self.api.endpoint)

        def download() -> Path:
            options = {"revision": commit, "endpoint": self.api.endpoint}
            return Path(self._asked(lambda: self.hub.hf_hub_download(self.repository, file.path, **options)))

        identity = file.lfs.sha256 if file.lfs else file.blob_id
        opened = Bytes(label, file.size, lambda start, stop: self._range(url, label, start, stop))
        return Entry(label, identity, lambda: opened, download)

    def _range(self, url: str, label: str, start: int, stop: int) -> bytes:
        headers = {**self.hub.utils.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}

        def get() -> Any:
            response = self.hub.utils.http_backoff("GET", url, headers=headers, timeout=60)
            self.hub.utils.hf_raise_for_status(response)
            return response

        response = self._asked(get, label)
        if response.status_code != 206 and len(response.content) != stop - start:
            got = f"status {response.status_code}"
            raise Unreadable(label, "served in parts", got, "download the revision and give its folder")
        return response.content

    def _asked(self, question: Callable[[], Any], label: str | None = None) -> Any:
        """What the hub answers; its refusals and a network that is not there become one line."""
        errors = self.hub.errors
        try:
            return question()
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise self._absent("no public repository of the hub either") from None
        except (OSError, *errors.HfHubHTTPError.__bases__) as cause:
            reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
            if label is not None:
                raise Unreadable(label, "a file that the hub serves", reason, "try again") from None
            got = f"{self.repository!r}, but {self.api.endpoint} does not answer ({reason})"
            raise InputError(
                "source", "a folder or a repository", got, "check the network, or give the folder of a download"
            ) from None

    def _absent(self, why: str) -> InputError:
        got = f"{self.repository!r}, which is no folder and {why}"
        return InputError("source", "a folder or a repository of the hub", got, "check the spelling")


@dataclass(frozen=True)
class Measure:
    """A function of one checkpoint, with what it is kept under.

    Attributes:
        name: for the progress bar and the store.
        version: raised whenever the result changes.
        of: from a checkpoint to named arrays.
        options: whatever else the result depends on.
    """

    name: str
    version: int
    of: Callable[[Checkpoint], dict[str, np.ndarray]]
    options: Mapping[str, Any] = field(default_factory=dict)


class Store:
    """Measures of checkpoints in a folder, one small safetensors file each, under the identity of the content."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def _file(self, checkpoint: Checkpoint, measure: Measure) -> Path:
        key = [checkpoint.identity, measure.name, measure.version, dict(measure.options)]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{measure.name.replace(' ', '-')}-{digest[:32]}.safetensors"

    def get(self, checkpoint: Checkpoint, measure: Measure) -> dict[str, np.ndarray] | None:
        """What was measured before, or None; a file that is not whole counts as none."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        file = self._file(checkpoint, measure)
        try:
            return load(file.read_bytes())
        except (FileNotFoundError, SafetensorError):
            return None
        except OSError as cause:  # a file where the folder should be, or one that may not be read
            raise storage_error(file, cause) from None

    def put(self, checkpoint: Checkpoint, measure: Measure, values: Mapping[str, np.ndarray]) -> None:
        """Keep what was measured."""
        from safetensors.numpy import save

        content = save({name: np.asarray(value, order="C") for name, value in values.items()})
        write_bytes(self._file(checkpoint, measure), content)


def _through(store: Store | None, checkpoint: Checkpoint, measure: Measure) -> dict[str, np.ndarray]:
    found = store.get(checkpoint, measure) if store else None
    if found is None:
        found = measure.of(checkpoint)
        if store:
            store.put(checkpoint, measure, found)
    return found
