"""The command line: it parses arguments, calls the library and prints.

Exit codes. 0: done, every tested claim holds. 1: done, a claim does not hold, or a checkpoint of a series was left out.
2: bad input or environment, with one line that says so. 3: an internal error. 130: interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional, UseAppendAction, arg, subcommand

DONE, CLAIM_FAILED, BAD_INPUT, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130


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
            rows = ((claim.statement, claim.expected.text, ", ".join(claim.presets)) for claim in study.claims)
            title = f"{study.name}: {study.title}\n[not bold]{study.source}; on 2 cores: {costs}[/]"
            show(grid(title, ("claim", "expected", "decided at"), rows))
        return DONE


@dataclass(frozen=True)
class RunCommand:
    """Run studies and judge their claims. No STUDY means all of them."""

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
        from joma.progress import Bars
        from joma.studies import STUDIES, load
        from joma.study import execute

        studies = [load(name) for name in self.studies or STUDIES]
        runs = [(study, config_with(study, self.preset, self.set)) for study in studies]
        device, bars, outcomes = available_device(self.device), Bars(), []
        with bars.task("studies", total=len(runs)) as task:
            for study, config in runs:
                options = {"preset": self.preset, "out": self.out, "seeds": self.seeds, "device": device}
                outcomes.append(execute(study, config=config, progress=bars, **options))
                if not self.json:
                    show_claims(study.title, outcomes[-1])
                task.advance()
        return exit_code(outcomes, as_json=self.json)


@dataclass(frozen=True)
class JudgeCommand:
    """Judge finished runs by the present claims and draw their figures again. Nothing is trained.

    Exit code 2 means that a run could not be judged, for example one of another version. It is not changed.
    """

    dir: Positional[Annotated[Path, arg(metavar="DIR")]] = Path("runs")
    """Folder that runs are stored in, or the folder of one study or one run in it."""
    json: bool = False
    """Print one JSON document instead of tables."""

    def __call__(self) -> int:
        from joma.arguments import InputError
        from joma.files import StorageError
        from joma.runs import find_runs, read_config
        from joma.studies import load
        from joma.study import judge

        paths = next(filter(None, (find_runs(self.dir, depth) for depth in range(3))), [])
        if not paths:
            remedy = "give the folder that runs are stored in, or that of one run, OUT/<study>/<hash>"
            raise StorageError(f"no finished run below {self.dir}; {remedy}.")
        outcomes = []
        for path in paths:
            try:
                study = load(read_config(path)["study"])
                outcomes.append(judge(study, path))
            except (StorageError, InputError) as problem:  # the others are judged nevertheless
                complain(f"{path} was not changed: {problem}")
                continue
            if not self.json:
                show_claims(study.title, outcomes[-1], "judged again")
        code = exit_code(outcomes, as_json=self.json)
        return code if len(outcomes) == len(paths) else BAD_INPUT


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
    """Audit and measure a model or a series of checkpoints: attention entropy, stable rank, orthogonality, bounce.

    Exit code 1 means that a checkpoint was left out or could not be measured.
    """

    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """A repository of the Hugging Face hub, the folder of a model, or a folder of checkpoints."""
    revisions: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Revisions or subfolders to measure; if not given, all whose names contain a step."""
    pattern: str | None = None
    """Regular expression of the names, with a group `step`, if they are not like step1000 or checkpoint-1000."""
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
        series = Checkpoints(self.model, revisions=self.revisions or None, pattern=self.pattern)
        model_folder, result_folder = self._folders(text)
        check_writable(result_folder)
        result = probe(series, text=text, store=Store(model_folder / "measures"), progress=Bars())
        for table in () if self.json else tables(result.data, result.audit.faults):  # faults before any figure
            show(table)
        save(result.data, result.audit.faults, result_folder)
        if self.json:
            faults = [dataclasses.asdict(fault) for fault in result.audit.faults]
            emit({**summary(result.data), "faults": faults, "out": result_folder})
        else:
            sys.stdout.write(f"{result_folder}\n")
        return CLAIM_FAILED if result.audit.incomplete else DONE

    def _folders(self, text: Any) -> tuple[Path, Path]:
        """Return the folder of the model or series, where measurements are kept, and the folder of the results.

        They are the same unless revisions, a pattern or a text are chosen: each choice has a subfolder. Local folders
        of the same name in different places are told apart by a hash of their paths.
        """
        from joma.files import short_hash

        path = Path(self.model).resolve()
        name = f"{path.name}-{short_hash(str(path), 6)}" if path.is_dir() else self.model.replace("/", "--")
        choices = (self.revisions, self.pattern, text)
        folder = self.out / name
        return folder, folder if choices == ((), None, None) else folder / f"of-{short_hash(repr(choices), 6)}"


@dataclass(frozen=True)
class ReportCommand:
    """Write one self-contained HTML file about the runs in DIR.

    Exit code 2 means that a damaged run was left out. The report names it.
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
            emit({"report": report.path, "runs": report.runs, "left_out": report.left_out})
        else:
            sys.stdout.write(f"{report.path}\n")
        return BAD_INPUT if report.left_out else DONE


Command = (
    Annotated[ListCommand, subcommand(name="list")]
    | Annotated[RunCommand, subcommand(name="run")]
    | Annotated[JudgeCommand, subcommand(name="judge")]
    | Annotated[VerifyCommand, subcommand(name="verify")]
    | Annotated[ProbeCommand, subcommand(name="probe")]
    | Annotated[ReportCommand, subcommand(name="report")]
)


def show_claims(title: str, outcome: Any, note: str | None = None) -> None:
    """Print the claims of one run as a table, with a note in the title such as how long it took."""
    from rich.markup import escape

    from joma.report.table import claims, show

    note = note or ("was finished already" if outcome.reused else f"took {outcome.wall_time:.1f} s")
    show(claims(f"{outcome.study}: {title}\n[not bold]{escape(str(outcome.path))}, {note}[/]", outcome.claims))


def exit_code(outcomes: list[Any], *, as_json: bool) -> int:
    """Return the exit code of these runs, after printing them as JSON if that is wanted."""
    if as_json:
        emit([dataclasses.asdict(outcome) | {"failed": outcome.failed} for outcome in outcomes])
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
        args += [f"--{field.name}", *_tyro_arguments(hints[field.name], value)]
    if not args:
        return config
    prog, markers = f"joma run {study.name}", (tyro.conf.FlagConversionOff,)
    return tyro.cli(type(config), default=config, args=args, prog=prog, config=markers)


def _tyro_arguments(hint: Any, value: str) -> list[str]:
    """Return the arguments from which tyro reads a value of this type: a list is split at its commas."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(get_origin(kind) is tuple for kind in types):
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
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def complain(line: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"joma: {line}\n")


def main(args: list[str] | None = None) -> int:
    """Parse the arguments, run the command, and return the exit code."""
    try:
        command = tyro.cli(
            Command,
            args=args,
            prog="joma",
            description="A laboratory for how Transformers learn.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
            code = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted; finished runs are kept, and the same command resumes the others.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as problem:
        return _report_failure(problem)
    return code


def _report_failure(problem: Exception) -> int:
    """Print what went wrong and return the exit code: one line for bad input, a traceback for a defect."""
    from joma.arguments import InputError  # after parsing: `--help` needs none of it
    from joma.files import StorageError

    if isinstance(problem, (InputError, StorageError)):
        complain(str(problem))
        return BAD_INPUT
    traceback.print_exception(problem)
    complain(f"internal error ({type(problem).__name__}): please report it with the lines above.")
    return INTERNAL
