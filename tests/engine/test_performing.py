"""What a unit returns and what goes wrong in it, as the process that performs it reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from joma.arguments import InputError
from joma.engine import Output, Unit
from joma.engine.performing import INTERRUPTED, find_function, perform
from joma.files import StorageError
from joma.memory import OutOfMemory

MODULE = "engine.test_performing"


def multiply(out, progress, *, first, second):
    with progress.task("products", total=1) as task:
        task.advance()
    return Output([str(out), first * second], ("a folder",))


def refuse(out, progress, *, kind):
    del out, progress
    problems = {
        "input": InputError("size", "small", 9, "give a smaller one"),
        "storage": StorageError("the disk is full."),
        "memory": MemoryError(),
        "size": OutOfMemory("width", "small", 9, "give a smaller one"),
        "error": KeyError("x"),
    }
    raise problems[kind]


def test_the_value_and_the_folders_are_those_of_the_function(tmp_path):
    unit = Unit("product", f"{MODULE}:multiply", {"first": 6, "second": 7}, Path("driver"))
    result, output = perform(unit, tmp_path)
    assert result.value == [str(tmp_path), 42]
    assert result.failure is None
    assert output.folders == ("a folder",)
    assert perform(unit)[0].value == ["driver", 42]


def test_a_size_that_does_not_fit_is_a_failure_of_memory():
    assert perform(Unit("refused", f"{MODULE}:refuse", {"kind": "size"}))[0].failure.kind == "memory"


@pytest.mark.parametrize("kind", ["input", "storage", "memory", "error"])
def test_a_failure_says_whose_it_is_in_one_line(kind):
    result, _ = perform(Unit("refused", f"{MODULE}:refuse", {"kind": kind}))
    assert result.value is None
    assert result.failure.kind == kind
    assert "\n" not in result.failure.message
    assert ("Traceback" in result.failure.details) == (kind == "error")


def test_a_value_that_json_lacks_is_a_defect_of_the_unit(monkeypatch):
    monkeypatch.setattr("engine.test_performing.multiply", lambda *_: Output(object()))
    assert perform(Unit("odd", f"{MODULE}:multiply"))[0].failure.kind == "error"


@pytest.mark.parametrize("name", ["no colon", "no.such.module:f", "joma.engine.performing:nothing"])
def test_a_function_that_is_not_there_is_named(name):
    with pytest.raises(InputError, match="module:name"):
        find_function(name)


def test_an_interrupted_unit_can_be_resumed(monkeypatch):
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.test_performing.multiply", press)
    assert perform(Unit("stopped", f"{MODULE}:multiply"))[0].failure == INTERRUPTED
