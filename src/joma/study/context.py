"""What a run is given beside its config: seeds, random streams, a device, and training with checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from joma import schedule
from joma.progress import SILENT, Progress

if TYPE_CHECKING:
    import torch

SPARE = 300.0  # seconds between saves on CUDA, which redoes many steps sooner than it saves one


@dataclass(frozen=True)
class Context:
    """What a run is given beside its config: seeds, device, where to report progress and where to keep checkpoints."""

    seeds: tuple[int, ...]
    device: str = "cpu"
    progress: Progress = SILENT
    checkpoints: Path | None = None

    def generators(self) -> list[torch.Generator]:
        """Fresh random streams, one for each seed, on the CPU."""
        import torch

        return [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def fit(self, model: Any, loss: Callable[[Any, torch.Tensor], torch.Tensor], *, label: str, **options: Any) -> Any:
        """`joma.train.fit` with this run's seeds and progress; with `save`, checkpoints in a folder of that label."""
        from joma.train import fit

        folder = None
        if self.checkpoints is not None and "save" in options:
            folder = self.checkpoints / re.sub(r"[^a-z0-9.]+", "-", label.lower())
        fixed = {"seeds": self.seeds, "progress": self.progress, "label": label, "checkpoints": folder}
        fixed["spare"] = 0.0 if self.device == "cpu" else SPARE
        return fit(model.to(self.device), loss, **{**fixed, **options})

    def saves(self, steps: int) -> tuple[int, ...]:
        """When a training of `steps` steps is saved on its way."""
        return schedule.every(max(1, steps // (5 if self.device == "cpu" else 50)), steps)

    def folded(self, found: xr.Dataset, axis: str, labels: Sequence[Any]) -> xr.Dataset:
        """Fold a leading axis of many models, the seeds of one label after those of another, into `axis` and seed."""
        count = len(self.seeds)
        parts = [found.isel(seed=slice(place * count, (place + 1) * count)) for place in range(len(labels))]
        whole_run = xr.concat([part.assign_coords(seed=list(self.seeds)) for part in parts], dim=axis)
        return whole_run.assign_coords({axis: list(labels)})
