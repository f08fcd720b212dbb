"""The command line: it parses arguments, calls the library and prints.

Exit codes. 0: done, every tested claim holds. 1: done, a claim does not hold, or a checkpoint of a series was left out.
2: bad input or environment, with one line that says so. 3: an internal error. 130: interrupted.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from joma import __version__
from joma.commands.engines import open_engine
from joma.commands.lab import LabCommand
from joma.commands.parsing import parse
from joma.commands.printing import (
    BAD_INPUT,
    CLAIM_FAILED,
    DONE,
    INTERNAL,
    exit_code,
    print_error,
    print_json,
    show_claims,
    write_line,
)
from joma.commands.run import RunCommand
from joma.commands.sweep import SweepCommand
from joma.terminal import OutputError, guarded_streams
from joma.train import interrupt


@dataclass(frozen=True)
class ListCommand:
    """List the studies: the claims of each one, then a table of all studies with their costs."""

    studies: Positional[Annotated[tuple[str, ...], arg(metavar="[STUDY ...]", help_behavior_hint="")]] = ()
    """Names of studies; all of them if not given."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.studies import STUDIES, load

        studies = [load(name) for name in self.studies or STUDIES]
        if self.json:
            print_json([_listing(study) for study in studies])
            return DONE
        from joma.report.table import grid, show

        for study in studies:
            rows = ((c.kind, c.statement, c.expected.text, ", ".join(c.presets)) for c in study.claims)
            show(grid(f"{study.name}: {study.title}", ("kind", "claim", "expected", "decided at"), rows, study.source))
        rows = ((study.name, study.title, str(len(study.claims)), _costs(study)) for study in studies)
        columns = ("study", "title", "claims", "cost on 2 cores")
        show(grid("Studies", columns, rows, "joma list STUDY shows the claims of one, joma run STUDY runs it."))
        return DONE


@dataclass(frozen=True)
class JudgeCommand:
    """Judge finished runs again by the claims of the installed version, and redraw their figures; nothing is trained.

    The measurements of a run (`trajectory.nc`) never change. Exit code 2 means that a run could not be judged, for
    example because another version of its study made it.
    """

    dir: Positional[Annotated[Path, arg(metavar="[DIR]")]] = Path("runs")
    """Folder that runs are stored in, or the folder of one study or one run in it."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.arguments import InputError
        from joma.files import StorageError, lock
        from joma.runs import adopt, find_runs, read_config
        from joma.studies import load
        from joma.study import judge

        paths = next(filter(None, (find_runs(self.dir, depth) for depth in range(3))), [])
        if not paths:
            remedy = "give the folder that runs are stored in, or that of one run, OUT/<study>/<hash>"
            raise StorageError(f"no finished run below {self.dir}; {remedy}.")
        outcomes = []
        for path in paths:
            try:
                with lock(path):
                    adopt(path)
                study = load(read_config(path)["study"])
                outcomes.append(judge(study, path))
            except (StorageError, InputError) as problem:  # the others are judged nevertheless
                print_error(f"{path} was not judged: {problem}")
                continue
            if not self.json:
                show_claims(study, outcomes[-1], "judged again")
        return exit_code(outcomes, len(paths), as_json=self.json)


@dataclass(frozen=True)
class VerifyCommand:
    """Check the code for every theorem against an independent solution; takes less than a minute."""

    json: bool = False
    """Print one JSON document instead of a table."""

    def __call__(self) -> int:
        from joma.progress import Bars
        from joma.verify import verify

        results = verify(Bars())
        if self.json:
            print_json([dataclasses.asdict(result) for result in results])
        else:
            from joma.report.table import MARKS, grid, show

            rows = (
                (r.theorem, r.statement, r.against, f"{r.error:.1e}", f"{r.tolerance:.0e}", MARKS[r.verdict])
                for r in results
            )
            columns = ("theorem", "closed form", "independent solution", "error", "allowed", "verdict")
            show(grid("Every theorem against an independent solution", columns, rows))
        return DONE if all(result.verdict == "holds" for result in results) else CLAIM_FAILED


@dataclass(frozen=True)
class ProbeCommand:
    """Measure a model or a series of checkpoints: attention, stable rank, heads, orthogonality; write an HTML page.

    First the checkpoints are audited: missing, damaged, identical and misordered ones are named.
    Exit code 1 means that a checkpoint was left out or could not be measured.
    """

    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """A repository of the Hugging Face hub, the folder of a model, or a folder of checkpoints."""
    revisions: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Revisions or subfolders to measure; if not given, all whose names contain a step."""
    pattern: Annotated[str | None, arg(metavar="REGEX", help_behavior_hint="")] = None
    """Regular expression with a group `step` for names that are not like step1000 or checkpoint-1000."""
    base: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """Base model of LoRA adapters, a folder or a repository; if not given, the folder that the adapters name."""
    measures: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("entropy", "sink_mass")
    """Measures of attention besides the entropy, which is always measured: effective_tokens, relative_entropy,
    largest_weight, top_mass, sink_mass (the weight on the first token), distance, largest_logit."""
    text: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Text to run the models on; the beginning of the embedded corpus if not given."""
    out: Path = Path("runs/probe")
    """Folder for the results, which go into a subfolder named after the model; measurements are kept and reused."""
    engine: Annotated[Literal["local", "ray"] | None, arg(metavar="{local,ray}", help_behavior_hint="")] = None
    """Measure checkpoints in parallel, in processes of this machine or on a Ray cluster; in turn if not given."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Checkpoints to measure in parallel on this machine; as many as cores and memory allow if not given. Implies
    --engine local."""
    address: Annotated[str | None, arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Address of the Ray cluster, e.g. auto; a local one is started if not given."""
    gpus_per_run: float = 0.0
    """GPUs for the weights of each checkpoint; 0.5 puts two on one GPU. The models themselves run on the CPU."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.files import check_writable
        from joma.report.probe import save, summary, tables
        from joma.report.table import show
        from joma.watch.probing import read_text
        from joma.watch.series import Checkpoints
        from joma.watch.store import Store

        text = None if self.text is None else read_text(self.text)
        series = Checkpoints(self.model, revisions=self.revisions or None, pattern=self.pattern, base=self.base)
        model_folder, result_folder = self._folders(text)
        check_writable(result_folder)
        result = self._probe(series, text, Store(model_folder / "measures"))
        page = save(result.data, result.audit.faults, result_folder)
        if self.json:
            faults = [dataclasses.asdict(fault) for fault in result.audit.faults]
            print_json({**summary(result.data), "faults": faults, "out": result_folder, "page": page})
        else:
            for table in tables(result.data, result.audit.faults):  # faults before any figure
                show(table)
            write_line(page)
        return CLAIM_FAILED if result.audit.incomplete else DONE

    def _probe(self, series: Any, text: str | None, store: Any) -> Any:
        """Return the result of the probe, made here or on the chosen engine."""
        from joma.arguments import InputError
        from joma.progress import Bars
        from joma.watch.probing import probe

        bars = Bars()
        options = {"measures": self.measures, "text": text, "progress": bars, "store": store}
        name = self.engine or ("local" if self.jobs is not None else None)
        if name is None:
            for option, value in (("--address", self.address), ("--gpus-per-run", self.gpus_per_run or None)):
                if value is not None:
                    raise InputError(option, "left out without --engine", value, "add --engine local or --engine ray")
            return probe(series, **options)
        with open_engine(name, jobs=self.jobs, address=self.address, progress=bars) as engine:
            return probe(series, **options, engine=engine, gpus=self.gpus_per_run)

    def _folders(self, text: Any) -> tuple[Path, Path]:
        """Return the folder of the model or series, where measurements are kept, and the folder of the results.

        They are the same unless revisions, a pattern, a base or a text are chosen: each choice has a subfolder. Local
        folders of the same name in different places are told apart by a hash of their paths.
        """
        from joma.files import short_hash

        path = Path(os.path.realpath(self.model))
        is_folder = os.path.isdir(path)
        name = f"{path.name}-{short_hash(str(path), 6)}" if is_folder else self.model.replace("/", "--")
        choices = (self.revisions, self.pattern, text, *([self.base] if self.base else []))
        default = next(field.default for field in dataclasses.fields(self) if field.name == "measures")
        choices += () if self.measures == default else (self.measures,)
        folder = self.out / name
        return folder, folder if choices == ((), None, None) else folder / f"of-{short_hash(repr(choices), 6)}"


@dataclass(frozen=True)
class ReportCommand:
    """Write one self-contained HTML file about the runs, sweeps and probed models in DIR.

    Exit code 2 means that a damaged run, sweep or probe was left out. The report names it.
    """

    dir: Positional[Annotated[Path, arg(metavar="[DIR]")]] = Path("runs")
    """Folder that runs are stored in."""
    json: bool = False
    """Print one JSON document instead of a line."""

    def __call__(self) -> int:
        from joma.report.html import write_report
        from joma.studies import STUDIES

        report = write_report(self.dir, order=list(STUDIES))
        for problem in report.left_out:
            print_error(f"left out: {problem}")
        if self.json:
            content = {"report": report.path, "runs": report.runs, "probes": report.probes, "sweeps": report.sweeps}
            print_json({**content, "left_out": report.left_out})
        else:
            write_line(report.path)
        return BAD_INPUT if report.left_out else DONE


Command = (
    Annotated[ListCommand, subcommand(name="list")]
    | Annotated[RunCommand, subcommand(name="run")]
    | Annotated[SweepCommand, subcommand(name="sweep")]
    | Annotated[JudgeCommand, subcommand(name="judge")]
    | Annotated[VerifyCommand, subcommand(name="verify")]
    | Annotated[ProbeCommand, subcommand(name="probe")]
    | Annotated[ReportCommand, subcommand(name="report")]
    | Annotated[LabCommand, subcommand(name="lab")]
)


def _costs(study: Any) -> str:
    from joma.report.table import duration

    return ", ".join(f"{name} {duration(preset.seconds)}" for name, preset in study.presets.items())


def _listing(study: Any) -> dict[str, Any]:
    return {
        "name": study.name,
        "title": study.title,
        "source": study.source,
        "about": study.about,
        "version": study.version,
        "presets": {name: dataclasses.asdict(preset) for name, preset in study.presets.items()},
        "claims": [claim.declaration for claim in study.claims],
    }


def main(args: list[str] | None = None) -> int:
    """Parse the arguments, run the command, and return the exit code."""
    with guarded_streams():
        try:
            try:
                return _run_command(sys.argv[1:] if args is None else args)
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            return interrupt.end_interrupted()
        except Exception as problem:
            return _report_failure(problem)


def _run_command(args: list[str]) -> int:
    """Parse the arguments and run the command; warnings are lines on standard error."""
    if args == ["--version"]:  # tyro has no such option
        write_line(f"joma {__version__}")
        return DONE
    description = "A laboratory for how Transformers learn. `joma --version` prints the version."
    config = (tyro.conf.FlagCreatePairsOff,)
    command = parse(Command, args, prog="joma", description=description, config=config)
    _check_text(command)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_error(f"warning: {message}")
        return command()


def _check_text(command: Any) -> None:
    """Refuse text that no file or folder can be named by, in any argument of a command."""
    from joma.arguments import plain_text

    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            plain_text(field.name, str(text))


def _report_failure(problem: Exception) -> int:
    """Print what went wrong and return the exit code: one line for bad input, a traceback for a defect."""
    from joma import memory  # after parsing: `--help` needs none of it
    from joma.arguments import InputError
    from joma.files import StorageError

    if isinstance(problem, (InputError, StorageError, OutputError)):
        print_error(problem)
        return BAD_INPUT
    if isinstance(problem, OSError) and problem.errno and problem.filename is not None:
        print_error(f"cannot use {problem.filename}: {os.strerror(problem.errno)}; check the path and its permissions.")
        return BAD_INPUT
    if memory.is_exhausted(problem):
        size = memory.requested_size(problem)
        print_error(f"the memory of this machine does not suffice for {size}; use smaller sizes.")
        return BAD_INPUT
    if interrupt.was_interrupted():
        return interrupt.end_interrupted()
    traceback.print_exception(problem)
    print_error(f"internal error ({type(problem).__name__}): please report it with the lines above.")
    return INTERNAL
