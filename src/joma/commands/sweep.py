"""`joma sweep`: run a study at many points of its config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from joma.commands.engines import open_engine
from joma.commands.parsing import available_device
from joma.commands.printing import BAD_INPUT, CLAIM_FAILED, DONE, print_error, print_json, write_line

if TYPE_CHECKING:
    from joma.sweep_execution import SweepRun
    from joma.sweeps import Sweep, SweepUnit

MAX_ROWS = 24  # of the table of units on the terminal; of more, the first and the last are shown
LAST_ROWS = 4


@dataclass(frozen=True)
class SweepCommand:
    """Run a study at many points of its config: all combinations of lists of values, or random points.

    The same command resumes a sweep: finished runs are not repeated, and failed ones only with --retry-failed. Exit
    code 1 means that a tested claim does not hold at some point, 2 that a run failed; the other runs are kept.
    """

    study: Positional[Annotated[str, arg(metavar="STUDY")]]
    """Name as in `joma list`."""
    grid: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="KEY=A,B,C")]] = ()
    """Values of one field of the study's config; repeat the option for more fields. Separate values that are lists by
    semicolons. With --random also a range, KEY=LOW:HIGH, or KEY=LOW:HIGH:log for one that is even in the logarithm."""
    set: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="KEY=VALUE")]] = ()
    """Change one field of the config for all points, e.g. steps=500; may be repeated."""
    random: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Draw N random points instead of all combinations. A larger N adds points to those of a smaller one."""
    seed: int = 0
    """Seed of the random points."""
    preset: str = "quick"
    """quick (seconds to a minute a run on 2 cores) or paper (the sizes of the papers)."""
    seeds: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Run seeds 0 to N-1 at every point; the preset's number of seeds if not given."""
    engine: Literal["local", "ray"] = "local"
    """Where the runs are made: in processes of this machine, or on a Ray cluster."""
    address: Annotated[str | None, arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Address of the Ray cluster, e.g. auto; a local one is started if not given."""
    shared: bool = False
    """Say that all machines of the Ray cluster see OUT under the same path and can write there; otherwise results are
    sent back over the network."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Runs to make in parallel on this machine; as many as cores and memory allow if not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train models on; auto is cuda if available."""
    gpus_per_run: Annotated[float | None, arg(metavar="SHARE", help_behavior_hint="")] = None
    """GPUs for each run; 0.5 puts two runs on one GPU. 1 on cuda if not given."""
    claim: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Claim whose measured value the figure shows over the points; if not given, one whose verdict changes, or else the
    first that is tested."""
    retry_failed: bool = False
    """Try the points again whose run failed before."""
    out: Path = Path("runs")
    """Folder for the results, which go into OUT/sweeps."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.files import check_writable
        from joma.progress import Bars
        from joma.sweep_execution import draw_claim

        sweep_run = self._sweep_run()
        sweep = sweep_run.sweep
        if sweep_run.left:
            check_writable(sweep.path)
            bars = Bars()
            options: dict[str, Any] = {"jobs": self.jobs, "address": self.address, "progress": bars}
            options["shared"] = self.shared
            with (
                open_engine(self.engine, **options) as engine,
                bars.task("units", total=len(sweep.units)) as task,
            ):
                if not self.json:
                    _show_plan(sweep_run, getattr(engine, "jobs", None))
                task.skip(len(sweep.units) - len(sweep_run.left))
                sweep = sweep_run.run(engine, ended=lambda _: task.advance())
        picture = draw_claim(sweep, self.claim)
        if self.json:
            print_json(_document(sweep, picture))
        else:
            _show_results(sweep, picture, new=len(sweep_run.left))
        for line in _failure_lines(sweep, retry=not self.retry_failed):
            print_error(line)
        return _exit_code(sweep)

    def _sweep_run(self) -> SweepRun:
        """Return the sweep that the arguments describe, and how to run it."""
        from joma.commands.grids import parse_plan
        from joma.studies import load
        from joma.sweep_execution import SweepRun, plan_sweep

        study = load(self.study)
        options: dict[str, Any] = {"changes": self.set, "random": self.random, "seed": self.seed}
        config, plan = parse_plan(study, self.preset, self.grid, **options)
        sweep = plan_sweep(study, config, plan, preset=self.preset, seeds=self.seeds, out=self.out)
        if self.claim is not None:
            from joma.arguments import choice

            choice("--claim", self.claim, {claim.name: claim for claim in study.claims})
        device, gpus = self._device()
        return SweepRun(sweep, study, device, gpus, self.retry_failed)

    def _device(self) -> tuple[str, float]:
        """Return the device of each unit, and how many GPUs it needs; those of a cluster are not looked for here."""
        from joma.arguments import InputError

        wants_gpus = bool(self.gpus_per_run)
        if wants_gpus and self.device == "cpu":
            raise InputError("--gpus-per-run", "left out with --device cpu", self.gpus_per_run, "choose one of them")
        if self.engine == "ray":
            device = "cuda" if wants_gpus or self.device == "cuda" else "cpu"
        else:
            device = available_device("cuda" if wants_gpus else self.device)
        return device, (1.0 if self.gpus_per_run is None else self.gpus_per_run) if device == "cuda" else 0.0


def _show_plan(sweep_run: SweepRun, jobs: int | None) -> None:
    """Print the table of units before they run, with an estimate of what they cost."""
    from joma.report.table import duration, grid, show

    sweep, cost, left = sweep_run.sweep, sweep_run.cost, {unit.run for unit in sweep_run.left}

    def row(number: int, unit: SweepUnit) -> tuple[str, ...]:
        state = "to run" if unit.run in left else sweep.state(unit)
        seconds = f"{cost.seconds[unit.run]:.3g} s" if unit.run in left else ""
        return str(number), *_labels(unit), state, seconds

    finished = sum(unit.run not in left and sweep.state(unit) == "finished" for unit in sweep.units)
    failed = len(sweep.units) - len(left) - finished
    at_once = min(jobs or 1, len(left))  # an engine that knows no number, as Ray: the time of all units together
    counts = f"{len(sweep.units)} units: {len(left)} to run, {finished} finished already"
    counts += f", {failed} failed before (--retry-failed runs them again)" * (failed > 0)
    time = duration(cost.total(at_once))
    pace = (
        f"{at_once} at once about {time}" if jobs else f"all of them together take about {time} of the cluster's cores"
    )
    note = f"{counts}; {pace}, estimated from {cost.basis}"
    columns = ("", *sweep.plan.keys, "state", "estimate")
    show(grid(f"Sweep of {sweep.study}", columns, _abridged([row(*pair) for pair in enumerate(sweep.units)])))
    write_line(f"{note}.")


def _labels(unit: SweepUnit) -> list[str]:
    from joma.sweeps.store import value_label

    return [value_label(value) for value in unit.point.values()]


def _abridged(rows: Sequence[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    """Return rows of a table, of many the first and the last, with their number between them."""
    if len(rows) <= MAX_ROWS:
        return rows
    first = MAX_ROWS - LAST_ROWS
    gap = ("…", f"{len(rows) - MAX_ROWS} more", *[""] * (len(rows[0]) - 2))
    return [*rows[:first], gap, *rows[-LAST_ROWS:]]


def _show_results(sweep: Sweep, picture: Path | None, *, new: int) -> None:
    """Print what came out: each claim's verdicts over the points, and where the results are."""
    from joma.report.sweep_section import claim_rows
    from joma.report.table import grid, show
    from joma.sweeps.joined import claims_dataset

    states = [sweep.state(unit) for unit in sweep.units]
    note = f"{len(states)} units, {states.count('finished')} finished, {states.count('failed')} failed; {new} run now"
    columns = ("kind", "claim", "expected", "measured", "verdicts")
    rows = [tuple(row[column] for column in columns) for row in claim_rows(claims_dataset(sweep))]
    show(grid(f"Sweep of {sweep.study}: claims over the points", columns, rows, note))
    write_line(f"The sweep: {sweep.path}")
    if picture is not None:
        write_line(f"The figure: {picture}")


def _document(sweep: Sweep, picture: Path | None) -> dict[str, Any]:
    """Return what came out as one JSON document."""
    units = [
        {
            "point": dict(unit.point),
            "state": sweep.state(unit),
            "path": sweep.run_path(unit),
            "claims": sweep.finished[unit.run].claims if unit.run in sweep.finished else [],
            "failure": sweep.failures.get(unit.run),
        }
        for unit in sweep.units
    ]
    content = {name: value for name, value in sweep.content.items() if name != "units"}
    return {**content, "path": sweep.path, "figure": picture, "units": units}


def _failure_lines(sweep: Sweep, *, retry: bool) -> Iterable[str]:
    """Yield a line for each reason why units failed, and what to do about them."""
    for message, units in sweep.failed_units.items():
        yield f"{'; '.join(unit.label for unit in units)}: {message}"
    if sweep.failures and retry:
        yield f"{len(sweep.failures)} of {len(sweep.units)} units failed; --retry-failed runs them again."


def _exit_code(sweep: Sweep) -> int:
    if len(sweep.finished) < len(sweep.units):
        return BAD_INPUT
    verdicts = [claim["verdict"] for stored in sweep.finished.values() for claim in stored.claims]
    return CLAIM_FAILED if "does not hold" in verdicts else DONE
