"""Run a sweep: plan its units, estimate what they cost, run those that are left on an engine, and draw the figure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from joma.arguments import choice, whole
from joma.drawing import clear, save
from joma.engine import Engine, Needs, Result, Unit
from joma.files import exists, lock, remove_leftovers
from joma.runs import FIGURES
from joma.study import Study
from joma.study.execution import MAX_SEEDS, planned_run
from joma.sweeps import Draws, Grid, Sweep, SweepUnit
from joma.sweeps.figure import check_claim, default_claim, draw
from joma.sweeps.joined import claims_dataset
from joma.sweeps.store import SWEEPS, planned

RETRIED = ("lost", "interrupted")  # failures that are no fault of the unit: it is run again


def plan_sweep(
    study: Study, config: Any, plan: Grid | Draws, *, preset: str = "quick", seeds: int | None = None, out: Path
) -> Sweep:
    """Return the sweep of a study over the points of a plan; nothing is run or written.

    Args:
        study: what is run.
        config: the values of the fields that do not vary.
        plan: the values of the others.
        preset: the preset whose claims are decided.
        seeds: their number in every run; the preset's if None.
        out: the folder that `joma run` stores runs in; sweeps go into a subfolder.
    """
    chosen = choice("preset", preset, study.presets)
    count = chosen.seeds if seeds is None else whole("seeds", seeds, high=MAX_SEEDS)
    units = []
    for point in plan.points():
        run = planned_run(study, dataclasses.replace(config, **point), seeds=count, out=out)
        units.append(SweepUnit(point, run.path.name))
    fixed = {name: value for name, value in dataclasses.asdict(config).items() if name not in plan.keys}
    identity = {"study": study.name, "version": study.version, "preset": preset, "seeds": count}
    return planned(out.absolute() / SWEEPS, **identity, fixed=fixed, plan=plan, units=units)


@dataclass(frozen=True)
class Cost:
    """An estimate of what the units of a sweep that are left to run cost.

    Attributes:
        seconds: for each unit, by the name of its run.
        basis: what the estimate rests on, as text.
    """

    seconds: Mapping[str, float]
    basis: str

    def total(self, jobs: int) -> float:
        """Return the expected time with this number of units at once."""
        longest = max(self.seconds.values(), default=0.0)
        return max(longest, sum(self.seconds.values()) / jobs)


@dataclass(frozen=True)
class SweepRun:
    """A sweep that is being run.

    Attributes:
        sweep: what is run.
        study: its study.
        device: where models train.
        gpus: of each unit.
        retry_failed: whether units that failed before are run again.
    """

    sweep: Sweep
    study: Study
    device: str = "cpu"
    gpus: float = 0.0
    retry_failed: bool = False

    @cached_property
    def left(self) -> list[SweepUnit]:
        """The units to run: those that are neither finished nor failed, and the failed ones that are run again."""
        return [unit for unit in self.sweep.units if self._is_left(unit)]

    def _is_left(self, unit: SweepUnit) -> bool:
        stored = self.sweep.finished.get(unit.run)
        if stored is not None:  # judged again where the claims have changed since
            results = {"measured", "verdict", "reason"}
            declared = [{name: claim[name] for name in claim if name not in results} for claim in stored.claims]
            return declared != [claim.declaration for claim in self.study.claims]
        failure = self.sweep.failures.get(unit.run)
        return failure is None or self.retry_failed or failure["kind"] in RETRIED

    @property
    def cost(self) -> Cost:
        """What the units that are left cost, by the finished ones if there are any, or else by the preset."""
        weights = {unit.run: self._weight(unit) for unit in self.sweep.units}
        finished = [(stored.wall_time, weights[name]) for name, stored in self.sweep.finished.items()]
        if finished:
            unit_cost = statistics.mean(seconds / weight for seconds, weight in finished)
            basis = f"the {len(finished)} finished unit{'s' * (len(finished) > 1)}"
        else:
            preset = self.study.presets[self.sweep.preset]
            unit_cost = preset.seconds * self.sweep.seeds / preset.seeds
            basis = f"the preset's {preset.seconds:g} s on 2 cores"
        scaled = ", scaled by steps" if len({*weights.values()}) > 1 else ""
        return Cost({unit.run: unit_cost * weights[unit.run] for unit in self.left}, basis + scaled)

    def _weight(self, unit: SweepUnit) -> float:
        """Return the steps of a unit as a multiple of the preset's; 1 for a study without `steps`."""
        steps = {**self.sweep.fixed, **unit.point}.get("steps")
        of_preset = getattr(self.study.presets[self.sweep.preset].config, "steps", None)
        return steps / of_preset if isinstance(steps, int) and steps > 0 and of_preset else 1.0

    def engine_units(self) -> Iterator[Unit]:
        """Yield the units that are left as an engine runs them."""
        needs = Needs(self.study.threads or 1, self.gpus)
        for unit in self.left:
            arguments = {
                "study": self.sweep.study,
                "preset": self.sweep.preset,
                "config": {**self.sweep.fixed, **unit.point},
                "seeds": self.sweep.seeds,
                "device": self.device,
            }
            yield Unit(unit.label, "joma.units:run_study", arguments, self.sweep.place(unit), needs)

    def run(self, engine: Engine, ended: Callable[[Result], None] = lambda _: None) -> Sweep:
        """Run what is left, store failures as they come, and return the sweep as it is then.

        Args:
            engine: where units run; it is not closed.
            ended: called after every unit.
        """
        if not self.left:
            return self.sweep
        runs = {unit.label: unit.run for unit in self.left}
        with lock(self.sweep.path):
            remove_leftovers(self.sweep.path, deep=True)
            self.sweep.begin()
            failures = {run: failure for run, failure in self.sweep.failures.items() if run not in runs.values()}
            self.sweep.write_failures(failures)
            for result in engine.run(self.engine_units()):
                if result.failure is not None and result.failure.kind != "interrupted":
                    failures[runs[result.unit.name]] = dataclasses.asdict(result.failure)
                    self.sweep.write_failures(failures)
                ended(result)
        return dataclasses.replace(self.sweep)  # without what was read before


def draw_claim(sweep: Sweep, claim: str | None = None) -> Path | None:
    """Draw the value of a claim over the grid, unless this figure is drawn already.

    Args:
        sweep: with what its units have stored.
        claim: its name; the first tested claim with a number if None.

    Returns:
        The picture, `figures/1-<claim>.svg` in the folder of the sweep; None if no claim has a number.
    """
    data = claims_dataset(sweep)
    if claim is not None:
        check_claim(data, claim)
    chosen = claim or default_claim(data)
    if chosen is None:
        return None
    name = f"1-{chosen}"
    picture = sweep.path / FIGURES / f"{name}.svg"
    manifest = sweep.manifest
    if manifest.complete and f"{FIGURES}/{picture.name}" in manifest.files and exists(picture):
        return picture
    with lock(sweep.path):
        sweep.begin()
        figure, caption = draw(data, chosen)
        save(figure, picture.with_suffix(""), caption=caption)
        clear(picture.parent, keep=[name])
        sweep.finish()
    return picture
