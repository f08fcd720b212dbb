"""Checkpoints that survive anything: `<step>.safetensors` with its `.sha256`, the newest two kept.

A generation counts only when its checksum file is there and agrees. Both are renamed into place, the checksum last, and
an older generation is removed only after the new one is whole; so whenever the process dies, a good one remains.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from joma.files import StorageError, checksum, write_text, write_whole

KEPT = 2
NAME = re.compile(r"(\d+)\.safetensors")


class DamagedCheckpoint(UserWarning):
    """A checkpoint was cut short or altered; an earlier one is used."""


@dataclass(frozen=True)
class Generation:
    """What one checkpoint holds: the number of updates done, and named tensors."""

    step: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoints:
    """The generations in one folder, which need not exist yet."""

    folder: Path

    def save(self, step: int, tensors: Mapping[str, Tensor], *, keep: int = KEPT) -> None:
        """Write a generation, whole, and drop all but the newest `keep`."""
        from safetensors.torch import save

        file = self.folder / f"{step}.safetensors"
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})

        def write(temporary: Path) -> None:
            temporary.write_bytes(content)
            temporary.chmod(0o644)

        with ThreadPoolExecutor(1) as beside:  # the checksum is made while the disk is written
            digest = beside.submit(lambda: hashlib.sha256(content).hexdigest())
            write_whole(file, write)
        write_text(_sum_of(file), f"{digest.result()}  {file.name}\n")
        for old in self._steps()[:-keep]:
            self._remove(old)

    def load(self) -> Generation | None:
        """The newest generation that is whole, or None; a damaged one is named in a warning and passed over."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for step in reversed(self._steps()):
            file = self.folder / f"{step}.safetensors"
            try:
                if _said(file) == checksum(file):
                    return Generation(step, load_file(file))
                fault = "is cut short or altered"
            except (OSError, SafetensorError) as cause:
                fault = f"cannot be read ({cause})"
            warnings.warn(f"{file} {fault}; the checkpoint before it is used.", DamagedCheckpoint, stacklevel=2)
        return None

    def _steps(self) -> list[int]:
        """The steps whose generation was finished, oldest first: without its checksum file there is none."""
        found = (NAME.fullmatch(file.name) for file in self.folder.glob("*.safetensors"))
        steps = sorted(int(match[1]) for match in found if match)
        return [step for step in steps if _sum_of(self.folder / f"{step}.safetensors").exists()]

    def _remove(self, step: int) -> None:
        file = self.folder / f"{step}.safetensors"
        try:
            _sum_of(file).unlink(missing_ok=True)  # first: what has no checksum does not count
            file.unlink(missing_ok=True)
        except OSError as cause:
            raise StorageError(f"cannot remove {file}: {cause.strerror}; remove it by hand.") from None


def _sum_of(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _said(file: Path) -> str:
    """The checksum written beside `file`; an empty one never agrees."""
    words = _sum_of(file).read_text(encoding="utf-8").split()
    return words[0] if words else ""
