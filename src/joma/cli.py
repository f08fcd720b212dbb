"""The command line: it parses arguments, calls the library and prints.

Exit codes. 0: done, every tested claim holds. 1: done, a claim does not hold, or a checkpoint of a series was left out.
2: bad input or environment, with one line that says so. 3: an internal error. 130: interrupted.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
import traceback
import warnings
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional, UseAppendAction, arg, subcommand

from joma.terminal import OutputError, guarded_streams, json_document, printable
from joma.train import interrupt

MAX_LINE = 4000  # characters of a message; a longer one loses its middle
OPTION = re.compile(r"-(?![\d.]|inf|nan)", re.IGNORECASE)  # begins with a dash, and is no negative number
DONE, CLAIM_FAILED, BAD_INPUT, INTERNAL = 0, 1, 2, 3


@dataclass(frozen=True)
class ListCommand:
    """List the studies, their claims, presets and cost."""

    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.studies import STUDIES, load

        studies = [load(name) for name in STUDIES]
        if self.json:
            emit([_listing(study) for study in studies])
            return DONE
        from joma.report.table import grid, show

        for study in studies:
            costs = ", ".join(f"{name} {preset.seconds:g} s" for name, preset in study.presets.items())
            rows = ((c.kind, c.statement, c.expected.text, ", ".join(c.presets)) for c in study.claims)
            columns, note = ("kind", "claim", "expected", "decided at"), f"{study.source}; on 2 cores: {costs}"
            show(grid(f"{study.name}: {study.title}", columns, rows, note))
        return DONE


@dataclass(frozen=True)
class RunCommand:
    """Run studies and judge their claims. No STUDY means all of them.

    Exit code 2 means bad input, or that the stored run of a study is damaged or locked; the other studies are run.
    """

    studies: Positional[Annotated[tuple[str, ...], arg(metavar="STUDY")]] = ()
    """Names as in `joma list`."""
    preset: str = "quick"
    """quick (seconds to a minute on 2 cores) or paper (the sizes of the papers)."""
    out: Path = Path("runs")
    """Folder to store the runs in."""
    seeds: Annotated[int | None, arg(metavar="N")] = None
    """Run seeds 0 to N-1; the preset's number of seeds if not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train models on; auto is cuda if available."""
    set: UseAppendAction[tuple[Annotated[str, arg(metavar="KEY=VALUE")], ...]] = ()
    """Change one field of the study's config, e.g. steps=500; may be repeated. Write a list as 1,2,3."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.files import StorageError, check_writable
        from joma.memory import OutOfMemory
        from joma.progress import Bars
        from joma.studies import STUDIES, load
        from joma.study import execute

        studies = [load(name) for name in self.studies or STUDIES]
        runs = [(study, config_with(study, self.preset, self.set)) for study in studies]
        device, bars, outcomes = available_device(self.device), Bars(), []
        if not os.path.isdir(self.out):  # finished runs in a folder that may only be read are shown
            check_writable(self.out)
        report = GrowingReport(self.out, len(runs), quiet=self.json)
        with bars.task("studies", total=len(runs)) as task:
            for study, config in runs:
                options = {"preset": self.preset, "out": self.out, "seeds": self.seeds, "device": device}
                try:
                    outcomes.append(execute(study, config=config, progress=bars, **options))
                except (StorageError, OutOfMemory) as problem:  # the others are run nevertheless
                    complain(problem)
                    if interrupt.was_interrupted():  # Ctrl-C came first, and saving failed
                        raise KeyboardInterrupt from None
                else:
                    if not self.json:
                        show_claims(study, outcomes[-1])
                    report.update(outcomes[-1].path)
                task.advance()
        report.finish()
        return exit_code(outcomes, len(runs), as_json=self.json)


@dataclass(frozen=True)
class JudgeCommand:
    """Judge finished runs by the present claims and draw their figures again. Nothing is trained.

    Exit code 2 means that a run could not be judged, for example one of another version.
    Trajectories are never changed.
    """

    dir: Positional[Annotated[Path, arg(metavar="DIR")]] = Path("runs")
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
                complain(f"{path} was not judged: {problem}")
                continue
            if not self.json:
                show_claims(study, outcomes[-1], "judged again")
        return exit_code(outcomes, len(paths), as_json=self.json)


@dataclass(frozen=True)
class VerifyCommand:
    """Check every theorem against an independent solution; takes less than a minute."""

    json: bool = False
    """Print one JSON document instead of a table."""

    def __call__(self) -> int:
        from joma.progress import Bars
        from joma.verify import verify

        results = verify(Bars())
        if self.json:
            emit([dataclasses.asdict(result) for result in results])
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
    """Audit and measure a model or a series of checkpoints: attention, stable rank, orthogonality; write a page.

    Exit code 1 means that a checkpoint was left out or could not be measured.
    """

    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """A repository of the Hugging Face hub, the folder of a model, or a folder of checkpoints."""
    revisions: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Revisions or subfolders to measure; if not given, all whose names contain a step."""
    pattern: str | None = None
    """Regular expression of the names, with a group `step`, if they are not like step1000 or checkpoint-1000."""
    base: Annotated[str | None, arg(metavar="MODEL")] = None
    """Base model of LoRA adapters, a folder or a repository; if not given, the folder that the adapters name."""
    measures: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("entropy", "sink_mass")
    """Measures of attention besides the entropy: effective_tokens, relative_entropy, largest_weight, top_mass,
    sink_mass, distance, largest_logit."""
    text: Annotated[Path | None, arg(metavar="FILE")] = None
    """Text to run the models on; the beginning of the embedded corpus if not given."""
    out: Path = Path("runs/probe")
    """Folder for the results, which go into a subfolder named after the model; measurements are kept and reused."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.files import check_writable
        from joma.progress import Bars
        from joma.report.probe import save, summary, tables
        from joma.report.table import show
        from joma.watch.probing import probe, read_text
        from joma.watch.series import Checkpoints
        from joma.watch.store import Store

        text = None if self.text is None else read_text(self.text)
        series = Checkpoints(self.model, revisions=self.revisions or None, pattern=self.pattern, base=self.base)
        model_folder, result_folder = self._folders(text)
        check_writable(result_folder)
        options = {"measures": self.measures, "text": text, "progress": Bars()}
        result = probe(series, **options, store=Store(model_folder / "measures"))
        page = save(result.data, result.audit.faults, result_folder)
        if self.json:
            faults = [dataclasses.asdict(fault) for fault in result.audit.faults]
            emit({**summary(result.data), "faults": faults, "out": result_folder, "page": page})
        else:
            for table in tables(result.data, result.audit.faults):  # faults before any figure
                show(table)
            write_line(page)
        return CLAIM_FAILED if result.audit.incomplete else DONE

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
    """Write one self-contained HTML file about the runs and the probed models in DIR.

    Exit code 2 means that a damaged run or probe was left out. The report names it.
    """

    dir: Positional[Annotated[Path, arg(metavar="DIR")]] = Path("runs")
    """Folder that runs are stored in."""
    json: bool = False
    """Print one JSON document instead of a line."""

    def __call__(self) -> int:
        from joma.report.html import write_report
        from joma.studies import STUDIES

        report = write_report(self.dir, order=list(STUDIES))
        for problem in report.left_out:
            complain(f"left out: {problem}")
        if self.json:
            content = {"report": report.path, "runs": report.runs, "probes": report.probes}
            emit({**content, "left_out": report.left_out})
        else:
            write_line(report.path)
        return BAD_INPUT if report.left_out else DONE


Command = (
    Annotated[ListCommand, subcommand(name="list")]
    | Annotated[RunCommand, subcommand(name="run")]
    | Annotated[JudgeCommand, subcommand(name="judge")]
    | Annotated[VerifyCommand, subcommand(name="verify")]
    | Annotated[ProbeCommand, subcommand(name="probe")]
    | Annotated[ReportCommand, subcommand(name="report")]
)


class GrowingReport:
    """The report of a folder that studies are run into, written after every study.

    Its path is printed after the first of several studies and at the end. A folder that may not be written does not
    stop the studies; the reason is printed at the end.
    """

    def __init__(self, out: Path, studies: int, *, quiet: bool) -> None:
        self._out, self._studies, self._quiet = out, studies, quiet
        self._seen: dict[Path, dict[str, Any]] = {}
        self._problem: Exception | None = None
        self._written = False

    def update(self, run: Path) -> None:
        """Write the report after a study has stored `run`, which is read; runs that were read before are not."""
        is_first = not self._written
        self._seen.pop(run, None)
        self._write(self._seen)
        if is_first and self._written and self._studies > 1 and not self._quiet:
            write_line(f"The report grows with every study: {os.path.abspath(self._out / 'report.html')}")

    def finish(self) -> None:
        """Write the report of all runs, each read again, and print its path, or the reason why it was not written."""
        if self._written:
            self._write(None)
        if self._problem is not None:
            complain(f"the report was not written: {self._problem}")
        elif self._written and not self._quiet:
            write_line(f"The report: {os.path.abspath(self._out / 'report.html')}")

    def _write(self, seen: dict[Path, dict[str, Any]] | None) -> None:
        from joma.files import StorageError
        from joma.report.html import write_report
        from joma.studies import STUDIES

        try:
            write_report(self._out, list(STUDIES), seen)
        except StorageError as problem:
            self._problem = problem
        else:
            self._problem, self._written = None, True


def show_claims(study: Any, outcome: Any, note: str | None = None) -> None:
    """Print the claims of one run as a table, with a note below the title such as how long it took."""
    from joma.report.table import claims, show, totals

    note = note or ("was finished already" if outcome.reused else f"took {outcome.wall_time:.1f} s")
    title, counts = study.description(outcome.preset).title, totals(outcome.claims)
    show(claims(f"{outcome.study}: {title}", outcome.claims, f"{outcome.path}, {note} ({counts})"))


def exit_code(outcomes: list[Any], expected: int, *, as_json: bool) -> int:
    """Return the exit code of these of the `expected` runs, after printing them as JSON if that is wanted."""
    if as_json:
        emit([dataclasses.asdict(outcome) | {"failed": outcome.failed} for outcome in outcomes])
    if len(outcomes) < expected:
        return BAD_INPUT
    return CLAIM_FAILED if any(outcome.failed for outcome in outcomes) else DONE


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


def config_with(study: Any, preset: str, changes: tuple[str, ...]) -> Any:
    """Return the preset's config with `KEY=VALUE` changes, each parsed by tyro as the field's type."""
    from joma.arguments import InputError, choice

    config = choice("preset", preset, study.presets).config
    fields = {field.name: field for field in dataclasses.fields(config)}
    hints = get_type_hints(type(config))
    args: list[str] = []
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise InputError("--set", "KEY=VALUE", repr(change), "write for example --set steps=500")
        field = choice(f"--set key of {study.name}", key.replace("-", "_"), fields)
        args += [f"--{field.name}", *_tyro_arguments(field.name, hints[field.name], value)]
    if not args:
        return config
    prog, markers = f"joma run {study.name}", (tyro.conf.FlagConversionOff,)
    return parse(type(config), args, default=config, prog=prog, config=markers)


def _tyro_arguments(name: str, hint: Any, value: str) -> list[str]:
    """Return the arguments from which tyro reads a value of this type: a list is split at its commas."""
    from joma.arguments import InputError

    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_list = any(get_origin(kind) is tuple for kind in types)
    for part in value.split(",") if is_list else [value]:
        if OPTION.match(part):  # tyro would take it for one
            raise InputError(name, "a value", repr(part), "leave the dash out")
    if is_list:
        return value.split(",") if value else []
    return [value.capitalize()] if bool in types and value.lower() in {"true", "false"} else [value]


def available_device(name: str) -> str:
    """Return the device to use: `auto` is cuda if available; a device that is missing is bad input."""
    import torch

    from joma.arguments import InputError

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise InputError("--device", "an available device", "cuda, which this machine lacks", "use --device cpu")
    return ("cuda" if has_cuda else "cpu") if name == "auto" else name


def emit(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(f"{json_document(value)}\n")


def write_line(text: object) -> None:
    """Print one line on standard output."""
    sys.stdout.write(f"{printable(text)}\n")


def complain(problem: object) -> None:
    """Print one line on standard error."""
    line = printable(problem)
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE // 2]} … {line[-MAX_LINE // 2 :]}"
    sys.stderr.write(f"joma: {line}\n")


def parse(kind: Any, args: list[str], **options: Any) -> Any:
    """Parse arguments with tyro; a usage error shows them without control characters."""
    readable = [printable(argument) for argument in args]
    if readable == args:
        return tyro.cli(kind, args=args, **options)
    try:
        with redirect_stderr(io.StringIO()):
            return tyro.cli(kind, args=args, **options)
    except SystemExit as stop:
        if stop.code:
            tyro.cli(kind, args=readable, **options)  # fails in the same way, with arguments that can be shown
        raise


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
    description, config = "A laboratory for how Transformers learn.", (tyro.conf.FlagCreatePairsOff,)
    command = parse(Command, args, prog="joma", description=description, config=config)
    _check_text(command)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
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
        complain(problem)
        return BAD_INPUT
    if isinstance(problem, OSError) and problem.errno and problem.filename is not None:
        complain(f"cannot use {problem.filename}: {os.strerror(problem.errno)}; check the path and its permissions.")
        return BAD_INPUT
    if memory.is_exhausted(problem):
        size = memory.requested_size(problem)
        complain(f"the memory of this machine does not suffice for {size}; use smaller sizes.")
        return BAD_INPUT
    if interrupt.was_interrupted():
        return interrupt.end_interrupted()
    traceback.print_exception(problem)
    complain(f"internal error ({type(problem).__name__}): please report it with the lines above.")
    return INTERNAL
