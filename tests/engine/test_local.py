"""The local engine with real processes: results, what units see, and faults. `test_stopping` has Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.chores import chore
from joma.arguments import InputError
from joma.engine import LocalEngine, Needs
from joma.progress import Progress, Task


def outcomes(units, jobs=2, **options):
    """Return the result of each unit by its name."""
    with LocalEngine(jobs, **options) as engine:
        results = list(engine.run(units))
    assert sorted(result.unit.name for result in results) == sorted(unit.name for unit in units)
    return {result.unit.name: result for result in results}


def doubles(count):
    return [chore(str(number), "double", number=number) for number in range(count)]


def test_every_unit_has_one_result_and_processes_are_used_again():
    units = doubles(60)
    results = outcomes(units)
    assert {name: result.value for name, result in results.items()} == {str(number): 2 * number for number in range(60)}
    assert all(result.failure is None and result.unit in units for result in results.values())


def test_units_may_be_submitted_while_results_are_read():
    with LocalEngine(2) as engine:
        engine.submit(chore("0", "double", number=0))
        values = []
        for result in engine.results():
            values.append(result.value)
            if len(values) < 5:
                engine.submit(chore(str(len(values)), "double", number=len(values)))
        assert values == [0, 2, 4, 6, 8]
        assert list(engine.results()) == []


def test_a_unit_sees_what_it_should(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = outcomes([chore(str(number), "surroundings") for number in range(6)])
    for result in results.values():
        seen = result.value
        assert seen["OMP_NUM_THREADS"] == seen["OPENBLAS_NUM_THREADS"] == "1"
        assert seen["CUDA_VISIBLE_DEVICES"] == ""
        assert seen["session"] == seen["process"] != os.getpid()
        assert seen["folder"] == str(tmp_path)
        assert seen["path"] == [os.path.abspath(folder) for folder in sys.path]
        assert seen["streams"][0] == "/dev/null"
        assert seen["read"] == ""
        assert not seen["torch"]
    assert len({result.value["process"] for result in results.values()}) <= 2


def test_torch_has_as_many_threads_as_the_unit_has_cores_whatever_was_set_before():
    needs = [Needs(1), Needs(1), Needs(2)]
    units = [chore(str(number), "torch_threads", change=3, needs=need) for number, need in enumerate(needs)]
    results = outcomes(units, jobs=1)
    assert [results[str(number)].value for number in range(3)] == [1, 1, min(2, len(os.sched_getaffinity(0)))]


def test_a_process_serves_units_with_the_same_cores_and_gpus_only():
    needs = [Needs(1), Needs(2), Needs(1, gpus=1), Needs(1, gpus=0.5), Needs(1, gpus=2), Needs(1), Needs(1, gpus=0.5)]
    units = [chore(str(number), "surroundings", needs=need) for number, need in enumerate(needs)]
    results = outcomes(units, jobs=2, devices=["3", "GPU-5"])
    bound = [result.value for _, result in sorted(results.items())]
    assert [seen["OMP_NUM_THREADS"] for seen in bound] == ["1", "2", "1", "1", "1", "1", "1"]
    assert bound[4]["CUDA_VISIBLE_DEVICES"] == "3,GPU-5"
    assert {seen["CUDA_VISIBLE_DEVICES"] for seen in (bound[2], bound[3], bound[6])} <= {"3", "GPU-5"}
    assert {seen["CUDA_VISIBLE_DEVICES"] for seen in (bound[0], bound[1], bound[5])} == {""}
    bindings = {}
    for seen in bound:
        bindings.setdefault(seen["process"], set()).add((seen["OMP_NUM_THREADS"], seen["CUDA_VISIBLE_DEVICES"]))
    assert all(len(each) == 1 for each in bindings.values())


def test_units_run_side_by_side_but_not_more_than_jobs(tmp_path):
    for jobs in (1, 3):
        names = [f"{jobs}-{number}" for number in range(2 * jobs)]
        units = [chore(name, "overlap", out=tmp_path, name=name, seconds=0.4) for name in names]
        spans = [result.value for result in outcomes(units, jobs=jobs).values()]
        at_once = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
        assert max(at_once) == jobs


@pytest.mark.parametrize("kind", ["input", "storage", "memory", "error"])
def test_a_unit_that_raises_fails_and_the_others_go_on(kind):
    failing = replace(chore("failing", "", kind=kind), function="engine.test_performing:refuse")
    results = outcomes([failing, chore("other", "double", number=4)], jobs=1)
    assert results["failing"].failure.kind == kind
    assert ("Traceback" in results["failing"].failure.details) == (kind == "error")
    assert results["other"].value == 8


@pytest.mark.parametrize(
    ("function", "arguments", "message", "details"),
    [
        ("kill", {"text": "last words"}, "was killed by SIGKILL, most likely because memory ran out", "last words"),
        ("kill", {"number": signal.SIGUSR1}, "was killed by SIGUSR1;", ""),
        ("crash", {}, "was killed by SIGSEGV;", "chores.py"),
        ("leave", {"code": 3}, "ended with exit code 3;", ""),
        ("close_connection", {}, "closed its connection", ""),
        ("garble", {"text": "no message\n"}, "sent something that is no message", ""),
        ("garble", {"text": '{"kind": "result"}\n'}, "sent something that is no message", ""),
        ("garble", {"text": '{"kind": "song"}\n'}, "no message of the kind 'song'", ""),
    ],
)
def test_a_worker_that_is_lost_is_explained_in_one_line_and_replaced(function, arguments, message, details):
    results = outcomes([chore("lost", function, **arguments), *doubles(4)], jobs=1)
    failure = results["lost"].failure
    assert failure.kind == "lost"
    assert message in failure.message
    assert "run it again" in failure.message
    assert "\n" not in failure.message
    assert details in failure.details
    assert [results[str(number)].value for number in range(4)] == [0, 2, 4, 6]


def test_every_unit_has_one_result_among_many_that_fail():
    faults = [
        ("kill", {}),
        ("leave", {"code": 0}),
        ("garble", {"text": "no\n"}),
        ("warn", {"text": 5}),
        ("nothing", {}),
    ]
    failing = [chore(f"fault {number}", function, **given) for number, (function, given) in enumerate(2 * faults)]
    units = [unit for pair in zip(failing, doubles(10), strict=True) for unit in pair]
    results = outcomes(units, jobs=3)
    assert [results[str(number)].value for number in range(10)] == [2 * number for number in range(10)]
    kinds = [results[unit.name].failure.kind for unit in failing]
    assert kinds == 2 * ["lost", "lost", "lost", "error", "input"]


@pytest.mark.parametrize("in_child", [False, True])
def test_a_unit_that_exceeds_its_memory_is_ended(in_child):
    needs = Needs(memory=200_000_000)
    large = chore("large", "allocate", size=400_000_000, in_child=in_child, needs=needs)
    results = outcomes([large, chore("small", "double", number=1, needs=needs)])
    failure = results["large"].failure
    assert failure.kind == "memory"
    sizes = re.fullmatch(r"it took (\d+) MB of memory, where it may take (\d+) MB; .*", failure.message)
    assert int(sizes[1]) > int(sizes[2]) == 200
    assert results["small"].value == 2


@pytest.mark.parametrize(
    ("program", "message", "details"),
    [
        ("/nonexistent/python", "No such file", ""),
        ("/bin/false", "ended with exit code 1", ""),
        (None, "code 9 (no!)", "no!"),
    ],
)
def test_workers_that_cannot_start_fail_their_units(monkeypatch, tmp_path, program, message, details):
    if program is None:
        program = tmp_path / "python"
        program.write_text("#!/bin/sh\necho no!\nexit 9\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for result in outcomes(doubles(3)).values():
        assert result.failure.kind == "lost"
        assert "its process cannot start" in result.failure.message
        assert message in result.failure.message
        assert details in result.failure.details


def test_a_unit_with_large_arguments_and_a_large_value_gets_through():
    text = "x" * 3_000_000
    results = outcomes([chore(str(number), "echo", text=text) for number in range(3)])
    assert all(result.value == text for result in results.values())


def test_what_units_print_is_shown_on_standard_error_with_their_name(capfd):
    outcomes([chore("first", "say", text="one"), chore("second", "say", text="two\x1b[2J")], jobs=1)
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert {"first: one on standard output", "first: one on standard error", "first: one of a child"} <= set(lines)
    assert "second: two\\x1b[2J on standard error" in lines


def test_every_warning_of_a_unit_is_passed_on_once():
    messages = []
    outcomes([chore(str(number), "warn", text=f"beware {number % 2}") for number in range(6)], warn=messages.append)
    assert sorted(messages) == ["beware 0", "beware 1"]


def test_without_a_function_for_them_warnings_are_those_of_this_process():
    with pytest.warns(UserWarning, match="beware"):
        outcomes([chore("unit", "warn", text="beware")])


class Recorded(Progress):
    """Progress that keeps what it is told."""

    def __init__(self):
        self.tasks, self.open_tasks = {}, 0

    @contextmanager
    def task(self, label, total):
        record = RecordedTask()
        self.tasks[label] = (total, record)
        self.open_tasks += 1
        yield record
        self.open_tasks -= 1


class RecordedTask(Task):
    def __init__(self):
        self.done, self.skipped, self.notes, self.calls = 0, 0, [], 0

    def advance(self, amount=1):
        self.done += amount
        self.calls += 1

    def skip(self, amount):
        self.skipped += amount

    def say(self, note):
        self.notes.append(note)


def test_progress_of_units_is_shown_with_their_names():
    progress = Recorded()
    outcomes([chore("a", "report", tasks=2), chore("task", "report", tasks=1)], progress=progress)
    assert set(progress.tasks) == {"a: task 0", "a: task 1", "task 0"}
    for total, task in progress.tasks.values():
        assert (total, task.done, task.skipped, task.notes) == (5, 3, 2, ["a note"])
    assert progress.open_tasks == 0


def test_a_task_that_advances_often_is_shown_seldom_but_wholly():
    progress = Recorded()
    outcomes([chore("often", "report_often", count=200_000)], progress=progress)
    task = progress.tasks["often"][1]
    assert task.done == 200_000
    assert task.calls < 2000


def test_tasks_of_a_unit_that_is_lost_are_closed():
    progress = Recorded()
    outcomes([chore("lost", "report_and_kill")], progress=progress)
    assert set(progress.tasks) == {"lost: cut"}
    assert progress.open_tasks == 0


def test_gpus_that_are_not_there_are_refused():
    with LocalEngine(1, devices=["0"]) as engine, pytest.raises(InputError, match="no more GPUs"):
        engine.submit(chore("unit", "surroundings", needs=Needs(gpus=2)))


def test_a_number_of_jobs_that_is_none_is_refused():
    with pytest.raises(InputError, match="`jobs` must be a whole number"):
        LocalEngine(0)


SCRIPT = """
from joma.engine import LocalEngine, Unit
with LocalEngine(2) as engine:
    results = list(engine.run([Unit("a", "beside:triple", {"number": 5})]))
print(results[0].value, results[0].failure)
"""


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_script_without_a_main_guard_can_use_functions_beside_it(tmp_path, safe):
    (tmp_path / "beside.py").write_text(
        "from joma.engine import Output\ndef triple(out, progress, *, number):\n    return Output(3 * number)\n"
    )
    (tmp_path / "script.py").write_text("import sys\nsys.path.insert(0, sys.argv[1])\n" + SCRIPT)
    environment = {**os.environ, "PYTHONSAFEPATH": safe}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert done.stdout == "15 None\n"
