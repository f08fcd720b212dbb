"""Checkpoints that survive anything: `<step>.safetensors` with its `.sha256`, the newest two kept.

A generation counts only when its checksum file is there and agrees. Both are renamed into place, the checksum last, and
an older generation is removed only after the new one is whole; so whenever the process dies, a good one remains. What a
killed process left behind goes with the older generations: the folder must be held by one process (`joma.files.lock`).
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

from joma.files import StorageError, checksum, write_bytes, write_text

KEPT = 2
NAME = re.compile(r"(0|[1-9]\d*)\.safetensors(\.sha256)?")
TEMPORARY = re.compile(r"\.\d+(-\w+\.safetensors|\.safetensors-\w+\.sha256)")  # of `write_whole`


class DamagedCheckpoint(UserWarning):
    """A checkpoint was cut short or altered, or has no checksum; an earlier one is used, or none."""


@dataclass(frozen=True)
class Generation:
    """What one checkpoint holds: the number of updates done, named tensors, and what it says of its run."""

    step: int
    tensors: dict[str, Tensor]
    about: dict[str, str]


@dataclass(frozen=True)
class Checkpoints:
    """The generations in one folder, which need not exist yet.

    Attributes:
        folder: where they are.
        about: what each that is saved says of its run, by name.
    """

    folder: Path
    about: Mapping[str, str] = field(default_factory=dict)
    _damaged: set[int] = field(default_factory=set, init=False)  # the steps that `load` passed over

    def save(self, step: int, tensors: Mapping[str, Tensor], *, keep: int = KEPT) -> None:
        """Write a generation, whole, and tidy up."""
        from safetensors.torch import save

        file, said = self._files(step)
        about = json.dumps(dict(self.about), sort_keys=True)  # as one entry: the order of several is left to chance
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = save(own, {"about": about})

        with ThreadPoolExecutor(1) as beside:  # the checksum is made while the disk is written
            digest = beside.submit(lambda: hashlib.sha256(content).hexdigest())
            write_bytes(file, content)
        write_text(said, f"{digest.result()}  {file.name}\n")
        self._damaged.discard(step)
        self.tidy(step, keep=keep)

    def tidy(self, step: int, *, keep: int = KEPT) -> None:
        """Remove what is older than the whole generation of `step`, but for the newest whole ones, `keep` with it."""
        for leftover in self._names(TEMPORARY):
            self._remove(leftover)
        older = [old for old in self._steps() if old < step]
        whole = [old for old in older if old not in self._damaged and all(map(Path.exists, self._files(old)))]
        for old in sorted({*older} - {*whole[::-1][: keep - 1]}):
            for file in reversed(self._files(old)):  # the checksum first: what has none does not count
                self._remove(file.name)

    def load(self) -> Generation | None:
        """The newest generation that is whole, or None; a damaged one is named in a warning and passed over."""
        found: Generation | None = None
        faults: list[str] = []
        for step in reversed(self._steps()):
            found = self._read(step, faults)
            if found is not None:
                break
            self._damaged.add(step)
        instead = "the run begins at step 0" if found is None else f"the checkpoint of step {found.step} is used"
        for fault in faults:
            warnings.warn(f"{fault}; {instead}.", DamagedCheckpoint, stacklevel=2)
        return found

    def _read(self, step: int, faults: list[str]) -> Generation | None:
        """The generation of `step` if it is whole; else None, and what is wrong goes to `faults`."""
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file

        file, said = self._files(step)
        try:
            if not said.exists():
                faults.append(f"{file} has no checksum file")
            elif said.read_bytes().split()[:1] != [checksum(file).encode()]:
                faults.append(f"{file} is cut short or altered")
            else:
                with safe_open(file, "pt") as content:
                    about = json.loads((content.metadata() or {}).get("about", "{}"))
                return Generation(step, load_file(file), about)
        except (OSError, SafetensorError, ValueError) as cause:
            faults.append(f"{file} cannot be read ({cause})")
        return None

    def _names(self, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
        """The names in the folder that the pattern fits, with what it found in them."""
        matches = map(pattern.fullmatch, sorted(file.name for file in self.folder.glob("*")))
        return {match[0]: match for match in matches if match}

    def _steps(self) -> list[int]:
        """The steps of which there is anything, oldest first."""
        return sorted({int(match[1]) for match in self._names(NAME).values()})

    def _files(self, step: int) -> tuple[Path, Path]:
        """The file of a generation and that of its checksum."""
        file = self.folder / f"{step}.safetensors"
        return file, file.with_name(file.name + ".sha256")

    def _remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as cause:
            raise StorageError(f"cannot remove {self.folder / name}: {cause.strerror}; remove it by hand.") from None
