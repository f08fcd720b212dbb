"""Checkpoints of a training run: `<step>.safetensors` with its `.sha256`; the newest two are kept.

A checkpoint counts only if its checksum file is there and agrees. Both files are renamed into place, the checksum last,
and an older checkpoint is removed only after the new one is complete: whenever the process dies, a good one remains.
Temporary files of a killed process are removed with the older checkpoints, so only one process may use the folder at a
time (`joma.files.lock`).
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from joma.files import (
    CHECKSUM_BYTES,
    checksum,
    checksum_file,
    exists,
    list_folder,
    open_file,
    remove,
    remove_leftovers,
    write_bytes,
    write_text,
)

KEEP = 2
STEP = "step"  # the entry of the stored identity that names the checkpoint's step
CHECKPOINT_NAME = re.compile(r"(0|[1-9]\d*)\.safetensors(\.sha256)?")


class DamagedCheckpoint(UserWarning):
    """A checkpoint was cut short or altered, or has no checksum; an earlier one is used, or none."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """What one checkpoint holds.

    Attributes:
        step: the number of updates made.
        tensors: the state, by name.
        identity: what it stores about its run, by name.
    """

    step: int
    tensors: dict[str, Tensor]
    identity: dict[str, str]


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints in one folder, which need not exist yet.

    Attributes:
        folder: where they are.
        identity: what each saved checkpoint stores about its run, by name.
    """

    folder: Path
    identity: Mapping[str, str] = field(default_factory=dict)
    _damaged: set[int] = field(default_factory=set, init=False)  # the steps that `load` skipped

    def save(self, step: int, tensors: Mapping[str, Tensor], *, keep: int = KEEP) -> None:
        """Write the checkpoint of `step`, then remove older ones until `keep` checkpoints remain."""
        from safetensors.torch import save

        file, checksum_path = self._files(step)
        # As one entry: safetensors does not keep the order of several, and equal runs must write equal bytes.
        identity = json.dumps({**self.identity, STEP: str(step)}, sort_keys=True)
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = save(on_cpu, {"about": identity})
        with ThreadPoolExecutor(1) as executor:  # computes the checksum while the file is written
            digest = executor.submit(lambda: hashlib.sha256(content).hexdigest())
            write_bytes(file, content)
        write_text(checksum_path, f"{digest.result()}  {file.name}\n")
        self._damaged.discard(step)
        self.tidy(step, keep=keep)

    def tidy(self, step: int, *, keep: int = KEEP) -> None:
        """Remove checkpoints older than that of `step`, except for the newest intact ones: `keep` remain in all."""
        remove_leftovers(self.folder)
        older = [old for old in self._steps() if old < step]
        intact = [old for old in older if old not in self._damaged and all(map(exists, self._files(old)))]
        for old in sorted({*older} - {*intact[::-1][: keep - 1]}):
            for file in reversed(self._files(old)):  # the checksum first: a checkpoint without one does not count
                remove(file)

    def load(self) -> TrainingCheckpoint | None:
        """Return the newest intact checkpoint, or None; warn of every damaged one that is skipped."""
        checkpoint: TrainingCheckpoint | None = None
        faults: list[str] = []
        for step in reversed(self._steps()):
            checkpoint = self._read(step, faults)
            if checkpoint is not None:
                break
            self._damaged.add(step)
        if checkpoint is None:
            consequence = "the run begins at step 0"
        else:
            consequence = f"the checkpoint of step {checkpoint.step} is used"
        for fault in faults:
            warnings.warn(f"{fault}; {consequence}.", DamagedCheckpoint, stacklevel=2)
        return checkpoint

    def _read(self, step: int, faults: list[str]) -> TrainingCheckpoint | None:
        """Return the checkpoint of `step` if it is intact; otherwise None, and append what is wrong to `faults`."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file, checksum_path = self._files(step)
        try:
            if not checksum_path.exists():
                faults.append(f"{file} has no checksum file")
                return None
            identity = _stored_identity(file)
            with open_file(checksum_path) as stored:
                digest = stored.read(CHECKSUM_BYTES).split()[:1]
            if identity is None or digest != [checksum(file).encode()]:
                faults.append(f"{file} is cut short or altered")
            elif identity.pop(STEP, None) in (None, str(step)):  # a checkpoint of version 0.1.0 has no step
                return TrainingCheckpoint(step, load_file(file), identity)
            else:
                faults.append(f"{file} holds another step than its name says")
        except (OSError, SafetensorError) as cause:
            faults.append(f"{file} cannot be read ({cause})")
        return None

    def _matches(self, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
        """Return the file names in the folder that match the pattern, with their matches."""
        matches = map(pattern.fullmatch, [file.name for file in list_folder(self.folder)])
        return {match[0]: match for match in matches if match}

    def _steps(self) -> list[int]:
        """Return the steps of which any file exists, oldest first."""
        return sorted({int(match[1]) for match in self._matches(CHECKPOINT_NAME).values()})

    def _files(self, step: int) -> tuple[Path, Path]:
        """Return the paths of a checkpoint and of its checksum."""
        file = self.folder / f"{step}.safetensors"
        return file, checksum_file(file)


def _stored_identity(file: Path) -> dict[str, str] | None:
    """Return what a checkpoint stores about its run, None if its header is broken or tells another size of the file.

    The header is read before the checksum is computed, because of a file that grew: it may be too long to be read.
    """
    from safetensors import SafetensorError, safe_open

    open_file(file).close()  # raises an error for a pipe, on which safetensors would wait
    try:
        with safe_open(file, "pt") as content:
            identity = json.loads((content.metadata() or {}).get("about", "{}"))
    except (SafetensorError, ValueError):
        return None
    return identity if isinstance(identity, dict) else {}
