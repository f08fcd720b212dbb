"""Measurements of checkpoints in a folder, so that a checkpoint is never measured twice in the same way.

A measurement is a small safetensors file. Its header holds the identity of what was measured and how, and its checksum
lies beside it: a file that was damaged, or swapped with another, is measured again.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from joma.files import DamagedFile, StorageError, exists, read_checked, remove_leftovers, write_checked

if TYPE_CHECKING:
    from joma.watch.series import LazyCheckpoint


class DamagedMeasurement(UserWarning):
    """A stored measurement was damaged, or is that of something else; it is measured again."""


@dataclass(frozen=True)
class Measure:
    """A function of one checkpoint, and what identifies its results in a store.

    Attributes:
        name: the label of the progress bar; part of the identity.
        version: raised whenever the result changes.
        function: maps a checkpoint to named arrays.
        options: everything else that the result depends on.
        arguments: what another process needs to make the same function, as JSON has it.
        uses_gpu: whether it is measured on a GPU where there is one.
    """

    name: str
    version: int
    function: Callable[[LazyCheckpoint], dict[str, np.ndarray]]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    uses_gpu: bool = False


class Store:
    """Measurements in a folder, one file each, under the identity of the checkpoint's content and of the measure."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        remove_leftovers(self.folder)

    def get(self, checkpoint: LazyCheckpoint, measure: Measure) -> dict[str, np.ndarray] | None:
        """Return the stored measurement; None if there is none, and with a warning if it is damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        identity = _identity(checkpoint, measure)
        file = self._file(identity, measure)
        if not exists(file):
            return None
        remedy = "it is measured again"
        try:
            content = read_checked(file, remedy)
            if _stored_identity(content) != identity:
                raise DamagedFile(file, "is the measurement of something else", remedy)
            return load(content)
        except StorageError as problem:
            warnings.warn(str(problem), DamagedMeasurement, stacklevel=2)
        except (SafetensorError, ValueError, KeyError) as cause:
            warnings.warn(f"{file} cannot be read ({cause}); {remedy}.", DamagedMeasurement, stacklevel=2)
        return None

    def put(self, checkpoint: LazyCheckpoint, measure: Measure, values: Mapping[str, np.ndarray]) -> None:
        """Store a measurement."""
        from safetensors.numpy import save

        identity = _identity(checkpoint, measure)
        arrays = {name: np.asarray(value, order="C") for name, value in values.items()}
        write_checked(self._file(identity, measure), save(arrays, {"identity": identity}))

    def _file(self, identity: str, measure: Measure) -> Path:
        digest = hashlib.sha256(identity.encode()).hexdigest()
        return self.folder / f"{measure.name.replace(' ', '-')}-{digest[:32]}.safetensors"


def measure_or_load(store: Store | None, checkpoint: LazyCheckpoint, measure: Measure) -> dict[str, np.ndarray]:
    """Return the measurement of a checkpoint: the stored one, or a new one, which is stored."""
    values = store.get(checkpoint, measure) if store else None
    if values is None:
        values = measure.function(checkpoint)
        if store:
            store.put(checkpoint, measure, values)
    return values


def pack_names(names: Iterable[str]) -> np.ndarray:
    """Return names as an array of bytes, which safetensors can store."""
    return np.frombuffer(json.dumps([str(name) for name in names]).encode(), dtype=np.uint8).copy()


def _identity(checkpoint: LazyCheckpoint, measure: Measure) -> str:
    """Return what was measured and how, as one text."""
    return json.dumps([checkpoint.identity, measure.name, measure.version, dict(measure.options)], sort_keys=True)


def _stored_identity(content: bytes) -> str | None:
    """Return the identity in the header of a safetensors file: 8 bytes with its length, then JSON."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__", {}).get("identity")
