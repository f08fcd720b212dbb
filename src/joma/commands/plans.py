"""A run of a study that a command is to make, in this process or as units of work in others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.engine import Needs, Unit
    from joma.progress import Progress
    from joma.runs import Run
    from joma.study import Outcome, Study


@dataclass(frozen=True, eq=False)
class Plan:
    """A run of a study that is to be made.

    Attributes:
        study: the study.
        preset: the preset whose claims it decides.
        config: its config.
        device: where models train.
        run: its seeds and folder.
        split: the seeds of each shard; empty for a run whose seeds are trained together.
    """

    study: Study
    preset: str
    config: Any
    device: str
    run: Run
    split: tuple[tuple[int, ...], ...] = ()

    @property
    def is_trained(self) -> bool:
        """Whether its trajectory is stored, so that little or nothing is left to do."""
        from joma.files import exists
        from joma.manifest import MANIFEST

        return exists(self.run.path / MANIFEST)

    @property
    def unit_seconds(self) -> float:
        """About how long each of its units takes."""
        return self.study.presets[self.preset].seconds / max(1, len(self.split))

    def execute(self, progress: Progress) -> Outcome:
        """Make the run in this process."""
        from joma.study import execute

        options = {**self._options, "out": self.run.out}
        if not self.split or self.is_trained:
            return execute(self.study, **options, seeds=self._count, device=self.device, progress=progress)
        from joma.study.shards import train_shard

        for seeds in self.split:
            train_shard(self.study, seeds, seed_count=self._count, **options, device=self.device, progress=progress)
        return self.join()

    def join(self) -> Outcome:
        """Make the run from its shards, which are trained."""
        from joma.study.shards import join_shards

        return join_shards(self.study, self.split, **self._options, out=self.run.out)

    def outcome(self, value: Any) -> Outcome:
        """Return the outcome after all units have ended, from the value of the last."""
        from joma.study import Outcome

        return self.join() if self.split else Outcome(**value | {"path": self.run.path})

    def units(self, gpus: float) -> list[Unit]:
        """Return the units of work that train the run in other processes: one, or one for each shard."""
        from joma.engine import Unit

        arguments: dict[str, Any] = {"study": self.study.name, "preset": self.preset, "device": self.device}
        arguments["config"] = dataclasses.asdict(self.config)
        needs, out, name = self._needs(gpus), self.run.out, self.study.name
        if not self.split:
            return [Unit(name, "joma.units:run_study", {**arguments, "seeds": self._count}, out, needs)]
        return [
            Unit(
                f"{name}, seeds {seeds[0]} to {seeds[-1]}",
                "joma.units:train_shard",
                {**arguments, "seeds": seeds, "seed_count": self._count},
                out,
                needs,
            )
            for seeds in self.split
        ]

    @property
    def _count(self) -> int:
        return len(self.run.seeds)

    @property
    def _options(self) -> dict[str, Any]:
        return {"preset": self.preset, "config": self.config}

    def _needs(self, gpus: float) -> Needs:
        from joma.engine import Needs
        from joma.engine.devices import usable_cores

        return Needs(cores=self.study.threads or usable_cores(), gpus=gpus)
