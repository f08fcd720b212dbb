"""`joma run`: run studies and judge their claims."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from joma.commands.growing_report import GrowingReport
from joma.commands.parsing import available_device, config_with
from joma.commands.plans import Plan
from joma.commands.printing import exit_code, show_claims
from joma.commands.side_by_side import Place, StudyStoppedAllError, default_jobs, outcomes, visible_gpus

if TYPE_CHECKING:
    from joma.study import Outcome, Study


@dataclass(frozen=True)
class RunCommand:
    """Run studies and judge their claims. No STUDY means all of them.

    Exit code 2 means bad input, or that the stored run of a study is damaged or locked; the other studies are run.
    """

    studies: Positional[Annotated[tuple[str, ...], arg(metavar="[STUDY ...]", help_behavior_hint="")]] = ()
    """Names as in `joma list`."""
    preset: str = "quick"
    """quick (seconds to a minute on 2 cores), paper (the sizes of the papers), or wikitext-103 (entropy-text alone)."""
    out: Path = Path("runs")
    """Folder to store the runs in."""
    seeds: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Run seeds 0 to N-1; the preset's number of seeds if not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train models on; auto is cuda if available."""
    set: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="KEY=VALUE")]] = ()
    """Change one field of the study's config, e.g. steps=500; may be repeated. Write a list as 1,2,3."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Studies to run in parallel; as many as cores and memory (or GPUs) allow if not given."""
    shards: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Parts to split the seeds of each study into, to run in parallel. If not given: one for each GPU if one study
    runs, otherwise 1."""
    engine: Literal["local", "ray"] = "local"
    """Where studies run: in processes of this machine, or on a Ray cluster."""
    address: Annotated[str | None, arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Address of the Ray cluster, e.g. auto; a local one is started if not given."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.files import check_writable
        from joma.progress import Bars

        plans = self._plans()
        place = self._place()
        if not os.path.isdir(self.out):  # finished runs in a folder that may only be read are shown
            check_writable(self.out)
        report = GrowingReport(self.out, len(plans), quiet=self.json)
        tables = Tables(plans, quiet=self.json)
        bars = Bars()
        try:
            with bars.task("studies", total=len(plans)) as task, closing(outcomes(plans, place, bars)) as ended:
                for plan, outcome in ended:
                    if outcome is not None:
                        report.update(outcome.path)
                    tables.add(plan, outcome)
                    task.advance()
        except StudyStoppedAllError as problem:
            tables.show_rest()
            return problem.exit_code
        report.finish()
        return exit_code(tables.outcomes, len(plans), as_json=self.json)

    def _place(self) -> Place:
        """Return where the studies run; raise `InputError` for options that belong to another place."""
        from joma.arguments import InputError, whole
        from joma.engine.local import MAX_JOBS

        if self.engine == "ray":
            if self.jobs is not None:
                raise InputError("--jobs", "left out with --engine ray", self.jobs, "the cores of the cluster decide")
            return Place(ray=True, address=self.address)
        if self.address is not None:
            raise InputError("--address", "left out without --engine ray", self.address, "add --engine ray")
        jobs = None if self.jobs is None else whole("--jobs", self.jobs, high=MAX_JOBS)
        return Place(jobs or default_jobs(self._device))

    @property
    def _device(self) -> str:
        """Where models train; whether the machines of a cluster have GPUs is known there."""
        return "cuda" if self.engine == "ray" and self.device == "cuda" else available_device(self.device)

    def _plans(self) -> list[Plan]:
        """Return the runs to make; raise `InputError` for bad input before anything is run or written."""
        from joma.arguments import whole
        from joma.studies import STUDIES, load
        from joma.study.execution import MAX_SEEDS, planned_run

        studies = [load(name) for name in self.studies or STUDIES]
        configs = [config_with(study, self.preset, self.set) for study in studies]
        seeds = None if self.seeds is None else whole("seeds", self.seeds, high=MAX_SEEDS)
        counts = [seeds or study.presets[self.preset].seeds for study in studies]
        device, plans = self._device, []
        for study, config, count in zip(studies, configs, counts, strict=True):
            run = planned_run(study, config, seeds=count, out=self.out)
            split = self._split(study, count, device, only=len(studies) == 1)
            plans.append(Plan(study, self.preset, config, device, run, split))
        return plans

    def _split(self, study: Study, seeds: int, device: str, *, only: bool) -> tuple[tuple[int, ...], ...]:
        """Return the seeds of each shard of a study, nothing if it is not split."""
        from joma.arguments import whole
        from joma.engine.local import MAX_JOBS

        over_gpus = only and self.engine == "local" and device == "cuda"
        default = max(1, visible_gpus()) if over_gpus else 1
        shards = default if self.shards is None else whole("--shards", self.shards, high=MAX_JOBS)
        if min(shards, seeds) == 1:
            return ()
        from joma.study.shards import check_splits, split_seeds

        check_splits(study, device)
        return split_seeds(seeds, shards)


class Tables:
    """The tables of claims, printed in the order of the plans: one that is early waits for those before it."""

    def __init__(self, plans: list[Plan], *, quiet: bool) -> None:
        self._plans, self._quiet = plans, quiet
        self._ended: dict[int, Outcome | None] = {}
        self._shown = 0

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all studies that have one, in the order of the plans."""
        return [outcome for _, outcome in sorted(self._ended.items()) if outcome is not None]

    def add(self, plan: Plan, outcome: Outcome | None) -> None:
        """Print the table of a study, and those that waited for it; None for a study without one."""
        self._ended[next(index for index, other in enumerate(self._plans) if other is plan)] = outcome
        while self._shown in self._ended:
            self._show(self._shown)
            self._shown += 1

    def show_rest(self) -> None:
        """Print the tables that wait for studies that will not end."""
        for index in sorted(index for index in self._ended if index > self._shown):
            self._show(index)

    def _show(self, index: int) -> None:
        outcome = self._ended[index]
        if outcome is not None and not self._quiet:
            show_claims(self._plans[index].study, outcome)
