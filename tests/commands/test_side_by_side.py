"""Studies in several processes: the same output and bits as in one, whatever ends early."""

import dataclasses
import json
import re
import signal
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import xarray as xr

import several_studies
import toy_study
from command_line import joma
from joma import open_run
from joma.commands.plans import Plan
from joma.commands.side_by_side import Place, default_jobs, outcomes
from joma.engine import Engine, Failure, Result
from joma.engine.performing import INTERRUPTED, perform
from joma.progress import Progress, Task
from joma.studies import load
from joma.study import execute
from joma.study.execution import planned_run
from joma.train.interrupt import EXIT_CODE, LAST_LINE
from offered_studies import offer
from robustness.torture_interrupts import MAX_SECONDS, NOTICE

SMALL = {
    "permutation": {"length": 3, "sequences": 1, "inputs": 4, "width": 8},
    "cooccurrence": {"samples": 2000, "trees": 1},
}
TIMES = re.compile(r"took \d+\.\d s")


def small_plans(out):
    """Return plans of real studies, made small."""
    chosen = {name: load(name) for name in SMALL}
    configs = {name: dataclasses.replace(chosen[name].presets["quick"].config, **SMALL[name]) for name in SMALL}
    runs = {name: planned_run(chosen[name], configs[name], seeds=1, out=out) for name in SMALL}
    return [Plan(chosen[name], "quick", configs[name], "cpu", runs[name]) for name in SMALL]


class Labels(Progress):
    """Progress that notes which tasks there are."""

    def __init__(self):
        self.labels = []

    @contextmanager
    def task(self, label, total):  # noqa: ARG002
        self.labels.append(label)
        yield Task()


def test_studies_in_two_processes_store_the_same_bits_and_share_one_display(tmp_path):
    claims, trajectories = [], []
    for jobs in (1, 2):
        progress = Labels()
        pairs = list(outcomes(small_plans(tmp_path / str(jobs)), Place(jobs), progress))
        paths = {plan.study.name: outcome.path for plan, outcome in pairs}
        claims.append({name: json.loads((path / "claims.json").read_text()) for name, path in paths.items()})
        trajectories.append({name: open_run(path).drop_attrs(deep=False) for name, path in paths.items()})
    assert {label.split(":")[0] for label in progress.labels} == {*SMALL}
    for name in SMALL:
        first, second = (records[name] | {"wall_time_s": None} for records in claims)
        assert first == second
        xr.testing.assert_identical(*(members[name] for members in trajectories))


def test_tables_are_printed_in_order_and_the_report_is_there_after_the_first_study(tmp_path):
    """The studies end in the reverse order: the longest begins first, and one runs at a time."""
    outputs = {}
    for jobs in (1, 2):
        out = tmp_path / f"out{jobs}"
        command = several_studies.start(tmp_path / str(jobs), "run", "--jobs", jobs, "--out", out, steps=20)
        assert command.wait() == 0, command.errors
        outputs[jobs] = TIMES.sub("", (command.folder / "out").read_text().replace(str(out), "OUT"))
        assert command.errors == ""
    assert outputs[1] == outputs[2]
    positions = [outputs[2].index(f"{name}: A small training run") for name in several_studies.NAMES]
    assert positions == sorted(positions)
    assert outputs[2].startswith("The report grows with every study: OUT/report.html\n")
    assert outputs[2].endswith("The report: OUT/report.html\n")


class ScriptedEngine(Engine):
    """An engine that runs units in this process, the last first, but for those that fail as a test says."""

    failures: ClassVar[dict[str, Failure]] = {}
    submitted: ClassVar[list[str]] = []
    closed: ClassVar[list[bool]] = []

    def __init__(self, jobs, **options):
        self.jobs, self.units = jobs, []
        options["warn"]("mind the gap")

    def submit(self, unit):
        self.units.append(unit)
        self.submitted.append(unit.name)

    def results(self):
        while self.units:
            unit = self.units.pop()
            failure = self.failures.get(unit.name)
            if failure is not None:
                yield Result(unit, failure=failure)
            else:
                yield perform(unit)[0]

    def cancel(self):
        self.units.clear()

    def close(self):
        self.cancel()
        self.closed.append(True)


@pytest.fixture
def engine(monkeypatch):
    """Three toy studies, of which "long" takes longest, on an engine that does what a test says."""
    names, presets = ("short", "longer", "long"), toy_study.STUDY.presets
    for seconds, name in enumerate(names):
        preset = dataclasses.replace(presets["quick"], seconds=float(seconds))
        study = dataclasses.replace(toy_study.STUDY, name=name, presets={"quick": preset})
        monkeypatch.setitem(sys.modules, f"toy_{name}", SimpleNamespace(STUDY=study))
    offer(monkeypatch, {name: f"toy_{name}" for name in names})
    for name in ("failures", "submitted", "closed"):
        monkeypatch.setattr(ScriptedEngine, name, type(getattr(ScriptedEngine, name))())
    monkeypatch.setattr("joma.engine.LocalEngine", ScriptedEngine, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return ScriptedEngine


def test_the_longest_begins_first_and_a_warning_is_one_line(engine, tmp_path, capsys):
    code, out, err = joma("run", "--jobs", 2, "--out", tmp_path, capsys=capsys)
    assert (code, err) == (0, "joma: warning: mind the gap\n")
    assert engine.submitted == ["long", "longer", "short"]
    assert [out.index(f"{name}: A line") for name in ("short", "longer", "long")] == sorted(
        out.index(f"{name}: A line") for name in engine.submitted
    )


@pytest.mark.parametrize("kind", ["storage", "memory", "lost"])
def test_a_study_that_cannot_run_is_one_line_and_the_others_go_on(kind, engine, tmp_path, capsys):
    engine.failures["longer"] = Failure(kind, "its process was killed; run it again.", "details")
    code, out, err = joma("run", "--jobs", 2, "--out", tmp_path, "--json", capsys=capsys)
    assert code == 2
    assert [outcome["study"] for outcome in json.loads(out)] == ["short", "long"]
    assert err.splitlines()[1:] == ["joma: longer: its process was killed; run it again."]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("kind", "code"), [("input", 2), ("error", 3)])
def test_bad_input_and_defects_end_the_command(kind, code, engine, tmp_path, capsys):
    engine.failures["longer"] = Failure(kind, "`points` of longer must be at least 2", "Traceback\n  \x1b[2J")
    ending = joma("run", "--jobs", 2, "--out", tmp_path, capsys=capsys)
    assert ending[0] == code
    assert "short: A line" in ending[1]  # it had ended
    assert not (tmp_path / "long").exists()
    assert engine.closed == [True]
    message = "joma: `points` of longer must be at least 2"
    if kind == "error":
        lines = ["Traceback", r"  \x1b[2J", f"{message}; please report it with the lines above."]
    else:
        lines = [message]
    assert ending[2].splitlines()[1:] == lines


def test_a_unit_that_was_interrupted_interrupts_the_command(engine, tmp_path, capsys):
    engine.failures["longer"] = INTERRUPTED
    code, _, err = joma("run", "--jobs", 2, "--out", tmp_path, capsys=capsys)
    assert (code, err.splitlines(keepends=True)[1:]) == (EXIT_CODE, [LAST_LINE])
    assert engine.closed == [True]


def test_finished_runs_need_no_process_and_one_that_is_left_runs_here(engine, tmp_path, capsys):
    joma("run", "short", "long", "--jobs", 1, "--out", tmp_path, capsys=capsys)
    assert engine.submitted == []
    code, out, err = joma("run", "--jobs", 2, "--out", tmp_path, "--json", capsys=capsys)
    assert (code, err, engine.submitted) == (0, "", [])
    assert [outcome["reused"] for outcome in json.loads(out)] == [True, False, True]
    code, out, _ = joma("run", "--jobs", 2, "--out", tmp_path, "--seeds", 2, "--json", capsys=capsys)
    assert (code, len(engine.submitted)) == (0, 3)


def test_a_study_that_is_named_twice_is_run_once(engine, tmp_path, capsys):
    code, out, _ = joma("run", "short", "short", "--jobs", 2, "--out", tmp_path, "--json", capsys=capsys)
    assert (code, engine.submitted) == (0, [])
    assert [outcome["reused"] for outcome in json.loads(out)] == [False, True]
    names = ("short", "long", "short")
    code, out, _ = joma("run", *names, "--seeds", 2, "--jobs", 2, "--out", tmp_path, "--json", capsys=capsys)
    assert (code, engine.submitted) == (0, ["long", "short"])
    assert [(outcome["study"], outcome["reused"]) for outcome in json.loads(out)] == [
        *(("short", False), ("long", False), ("short", True)),
    ]


def test_seeds_in_shards_are_joined_and_trained_ones_are_kept(engine, tmp_path, capsys):
    args = ("run", "short", "--shards", 2, "--out", tmp_path, "--json")
    lost = "short, seeds 2 to 2"
    engine.failures[lost] = Failure("lost", "its process was killed; run it again.")
    code, out, err = joma(*args, "--jobs", 2, capsys=capsys)
    assert (code, json.loads(out)) == (2, [])
    assert err.splitlines()[1:] == [f"joma: {lost}: its process was killed; run it again."]
    contents = [file.read_bytes() for file in tmp_path.glob("short/*/shards/0-1/trajectory.nc")]
    engine.failures.clear()
    engine.submitted.clear()
    code, out, _ = joma(*args, "--jobs", 2, capsys=capsys)
    assert (code, len(contents), engine.submitted) == (0, 1, ["short, seeds 0 to 1", lost])
    (joined,) = json.loads(out)
    joma("run", "short", "--jobs", 1, "--out", tmp_path / "whole", capsys=capsys)
    (whole,) = (tmp_path / "whole" / "short").iterdir()
    xr.testing.assert_identical(*(open_run(path).drop_attrs(deep=False) for path in (joined["path"], whole)))
    assert joma(*args, "--jobs", 1, "--seeds", 2, capsys=capsys)[0] == 0  # in this process


def test_options_of_another_engine_are_one_line(engine, tmp_path, capsys):
    for options, message in [
        (("--address", "auto"), "`--address` must be left out without --engine ray, got auto; add --engine ray."),
        (("--engine", "ray", "--jobs", 2), "`--jobs` must be left out with --engine ray, got 2; the cores of the"),
        (("--shards", 0), "`--shards` must be a whole number in [1, "),
    ]:
        code, out, err = joma("run", *options, "--out", tmp_path / "out", capsys=capsys)
        assert (code, out, err.count("\n"), engine.submitted) == (2, "", 1, [])
        assert message in err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("jobs", ["0", "-1", "1000000"])
def test_jobs_out_of_range_are_one_line_and_nothing_is_written(jobs, engine, tmp_path, capsys):
    code, out, err = joma("run", "--jobs", jobs, "--out", tmp_path / "out", capsys=capsys)
    assert (code, out, engine.submitted) == (2, "", [])
    assert err.startswith("joma: `--jobs` must be a whole number in [1, ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("cores", "free", "expected"), [(8, 100 * 2**30, 8), (8, 3 * 2**30, 3), (2, 2**20, 1), (1, 2**40, 1)]
)
def test_by_default_there_are_as_many_as_cores_and_memory_allow(cores, free, expected, monkeypatch):
    monkeypatch.setattr("joma.engine.devices.usable_cores", lambda: cores)
    monkeypatch.setattr("joma.memory.available", lambda: free)
    assert default_jobs("cpu") == expected


@pytest.mark.parametrize(("gpus", "jobs", "each"), [(1, 1, 1.0), (4, 4, 1.0), (4, 8, 0.5), (1, 3, 1 / 3), (8, 2, 1.0)])
def test_every_study_has_a_gpu_or_a_part_of_one(gpus, jobs, each, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert default_jobs("cuda") == gpus
    assert Place(jobs).gpus_each("cuda") == pytest.approx(each)
    assert Place(jobs).gpus_each("cpu") == 0.0
    assert [Place(ray=True).gpus_each(device) for device in ("cpu", "cuda")] == [0.0, 1.0]


def saved(out):
    """Return which studies have saved a checkpoint."""
    return {file.parts[-5] for file in out.glob("*/*/checkpoints/training/*.sha256")}


def test_ctrl_c_stops_all_studies_and_the_same_command_resumes_them(tmp_path):
    out, steps, names = tmp_path / "out", 1500, ("first", "second")
    args = ("run", *names, "--jobs", 2, "--out", out)
    command = several_studies.start(tmp_path / "torn", *args, steps=steps)
    command.wait_for(lambda: len(saved(out)) == 2)
    workers = several_studies.workers(command)
    assert len(workers) == 2
    start = time.monotonic()
    command.send(signal.SIGINT)
    assert command.wait() == EXIT_CODE, command.errors
    assert time.monotonic() - start < MAX_SECONDS
    *notices, last = command.errors.splitlines(keepends=True)
    assert last == LAST_LINE
    assert [line[: len(NOTICE)] for line in notices] in ([], [NOTICE])
    assert several_studies.alive(workers) == []
    assert not list(out.glob("*/*/manifest.json"))
    command = several_studies.start(tmp_path / "resumed", *args, steps=steps)
    assert (command.wait(), command.errors) == (0, "")
    for name in names:
        (path,) = (out / name).iterdir()
        whole = execute(several_studies.study(name, steps), out=tmp_path / "whole").path
        xr.testing.assert_identical(open_run(path).drop_attrs(deep=False), open_run(whole).drop_attrs(deep=False))
        final = f"checkpoints/training/{steps}.safetensors"
        assert (path / final).read_bytes() == (whole / final).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(number, tmp_path):
    """Not even one in a long call of C, in which Python handles no signals."""
    args = ("run", "first", "second", "--jobs", 2, "--out", tmp_path / "out")
    command = several_studies.start(tmp_path / "torn", *args, place="first")
    command.wait_for(lambda: command.call_began)
    workers = several_studies.workers(command)
    start = time.monotonic()
    command.send(number)
    assert command.wait() == (EXIT_CODE if number == signal.SIGINT else -number)
    while several_studies.alive(workers) and time.monotonic() < start + MAX_SECONDS:
        time.sleep(0.02)
    assert several_studies.alive(workers) == []
