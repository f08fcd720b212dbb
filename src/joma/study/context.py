"""What a run receives besides its config: seeds, random streams, a device, and training with checkpoints."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xarray as xr

from joma import schedule
from joma.arguments import InputError
from joma.progress import SILENT, Progress

if TYPE_CHECKING:
    import torch

    from joma.train import Compute, Job, Optimiser, Record

Value = TypeVar("Value")
CUDA_SAVE_SECONDS = 300.0  # between saves: on CUDA a save takes longer than repeating many steps


@dataclass(frozen=True)
class Arms:
    """Several models trained as one, each with all seeds: the seeds of the first label, then those of the second, …

    Attributes:
        axis: the dimension that the labels have in the trajectory, such as `rate`.
        labels: one for each arm.
    """

    axis: str
    labels: Sequence[Any]


@dataclass(frozen=True)
class LabelledTraining:
    """One training of `Context.fit_together`. Its attributes are the arguments of `Context.fit`, and `brief`.

    A `brief` training takes seconds and is saved at its end only: where much is recorded at every step, saves on the
    way would take as long as the training.
    """

    model: Any
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    _: KW_ONLY
    label: str
    optimiser: Optimiser
    steps: int
    record: Record | None = None
    compute: Compute | None = None
    arms: Arms | None = None
    brief: bool = False


@dataclass(frozen=True)
class Context:
    """What a run receives besides its config.

    Attributes:
        seeds: the seeds to run, an axis of everything that is trained and stored.
        device: where models train.
        progress: where progress is reported.
        checkpoints: the folder for checkpoints, with a subfolder for each training; None to save nothing.
        run: what identifies the run, by name; stored in its checkpoints, so that those of another run are refused.
    """

    seeds: tuple[int, ...]
    device: str = "cpu"
    progress: Progress = SILENT
    checkpoints: Path | None = None
    run: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device.startswith("cuda"):
            from joma.train.cuda import load_compiler

            load_compiler()

    def seed_generators(self, arms: Arms | None = None) -> list[torch.Generator]:
        """Return each seed's own random stream, `manual_seed(seed)`, for a run that draws from one stream only.

        A run that draws for several purposes (data, weights, a control) uses `generators`: every call here starts the
        same stream again. With `arms` a seed has the same stream in every arm.
        """
        import torch

        return [torch.Generator().manual_seed(seed) for seed in self.models(arms)]

    def generators(self, purpose: str, arms: Arms | None = None) -> list[torch.Generator]:
        """Return a random stream for each seed, independent of the streams of other purposes.

        The same purpose gives the same stream again. With `arms` a seed has the same stream in every arm.

        >>> first, second = (Context((0,)).generators(purpose)[0].initial_seed() for purpose in ("data", "weights"))
        >>> first == second
        False
        """
        import torch

        return [torch.Generator().manual_seed(_stream_seed(seed, purpose)) for seed in self.models(arms)]

    def numpy_generators(self, purpose: str) -> list[np.random.Generator]:
        """Return a random stream of NumPy for each seed, independent of the streams of other purposes.

        >>> first, again = (Context((3,)).numpy_generators("starts")[0].normal() for _ in range(2))
        >>> first == again
        True
        """
        return [np.random.default_rng(_stream_seed(seed, purpose)) for seed in self.seeds]

    def models(self, arms: Arms | None = None) -> list[int]:
        """Return the seed of each model on the leading axis: all seeds, once for each arm.

        >>> Context((4, 5)).models(Arms("rate", (0.1, 0.2)))
        [4, 5, 4, 5]
        """
        return list(self.seeds) * (1 if arms is None else len(arms.labels))

    def per_model(self, values: Sequence[Value]) -> list[Value]:
        """Repeat the arms' values, one for each arm, so that there is one for each model on the leading axis.

        >>> Context((4, 5)).per_model((0.1, 0.2))
        [0.1, 0.1, 0.2, 0.2]
        """
        return [value for value in values for _ in self.seeds]

    def fit(
        self,
        model: Any,
        loss: Callable[[Any, torch.Tensor], torch.Tensor],
        *,
        label: str,
        optimiser: Optimiser,
        steps: int,
        record: Record | None = None,
        compute: Compute | None = None,
        arms: Arms | None = None,
    ) -> xr.Dataset:
        """Train all seeds by `joma.train.fit`, with checkpoints in a folder named by `label`.

        Args:
            model, loss, optimiser, steps, record, compute: as for `joma.train.fit`.
            label: unique within the study; names the progress bar and the folder of checkpoints.
            arms: given if the model's leading axis is arms times seeds, in the order of `Arms`.

        Returns:
            The trajectory over `seed` and `step`, and over the arms' axis if there are any.
        """
        options: dict[str, Any] = {"record": record, "compute": compute, "arms": arms}
        training = LabelledTraining(model, loss, label=label, optimiser=optimiser, steps=steps, **options)
        (trajectory,) = self.fit_together([training])
        return trajectory

    def fit_together(self, trainings: Sequence[LabelledTraining]) -> list[xr.Dataset]:
        """Train several models by `joma.train.fit_together`, side by side on CUDA; return the trajectory of each.

        Each has its own label, and so its own progress bar and folder of checkpoints. Labels that give the same folder,
        such as "A b" and "a-b", are refused.
        """
        from joma.train import fit_together

        trainings = list(trainings)
        trajectories = fit_together([self._job(training) for training in trainings])
        return [
            trajectory if training.arms is None else self._split_arms(trajectory, training.arms)
            for training, trajectory in zip(trainings, trajectories, strict=True)
        ]

    def _job(self, training: LabelledTraining) -> Job[Any]:
        """Return what the training loop needs, with the model on the device, the seeds' labels and checkpoints."""
        from joma.train import Job, Record, Saving

        label, steps = training.label, training.steps
        record = Record() if training.record is None else training.record
        if record.seeds is not None:
            raise InputError("record.seeds", "left out", record.seeds, "the seeds of the context label the models")
        saving = None
        if self.checkpoints is not None:
            folder = self.checkpoints / re.sub(r"[^a-z0-9.]+", "-", label.lower())
            min_seconds = 0.0 if self.device == "cpu" else CUDA_SAVE_SECONDS
            save_steps = () if training.brief else self.save_steps(steps)
            saving = Saving(folder, save_steps, min_seconds, {**self.run, "training": label})
        return Job(
            training.model.to(self.device),
            training.loss,
            optimiser=training.optimiser,
            steps=steps,
            record=replace(record, seeds=self.seeds if training.arms is None else None),
            saving=saving,
            compute=training.compute,
            progress=partial(self.progress.task, label),
        )

    def save_steps(self, steps: int) -> tuple[int, ...]:
        """Return the steps at which a training of `steps` steps is saved."""
        return schedule.every(max(1, steps // (5 if self.device == "cpu" else 50)), steps)

    def _split_arms(self, trajectory: xr.Dataset, arms: Arms) -> xr.Dataset:
        """Split the leading axis, arms times seeds, into two."""
        count = len(self.seeds)
        parts = [trajectory.isel(seed=slice(arm * count, (arm + 1) * count)) for arm in range(len(arms.labels))]
        joined = xr.concat([part.assign_coords(seed=list(self.seeds)) for part in parts], dim=arms.axis)
        return joined.assign_coords({arms.axis: list(arms.labels)})


def _stream_seed(seed: int, purpose: str) -> int:
    """Return the seed of the random stream for a purpose: the first 63 bits of a hash."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big") >> 1
