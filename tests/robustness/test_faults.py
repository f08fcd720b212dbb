"""The fast part of `torture_faults`: a few faults of each kind, and that the harness sees what is wrong."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from joma.files import remove_leftovers, write_text
from robustness.fault_scenarios import SCENARIOS, Scenario, nothing
from robustness.faulty_files import ERRORS, KILLS, READS, Fault, run_apart
from robustness.torture_faults import chosen, disturb, undisturbed

FEW = {"study": 6, "judge": 5, "training": 6, "recording": 4, "probe": 4, "text": 4}


@pytest.mark.parametrize("name", FEW)
def test_what_is_disturbed_fails_by_name_and_resumes(tmp_path, name):
    scenario = SCENARIOS[name]
    reference = undisturbed(scenario, tmp_path / "folder")
    for fault in chosen(reference.operations, FEW[name]):
        place = f"{fault.kind} at {' of '.join(reference.operations[fault.operation])}"
        assert [f"{place}: {problem}" for problem in disturb(scenario, reference, fault)] == []


def append(file: Path) -> int:
    with file.open("a") as stream:
        stream.write("12345678")
    return file.stat().st_size


def test_operations_are_counted_in_the_folder_alone(tmp_path):
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    end = run_apart(work, lambda: (append(elsewhere), append(work / "a"), os.replace(work / "a", work / "b")))
    calls = [("open", "a"), ("write", "a"), ("stat", "a"), ("rename", "a")]
    assert [tuple(operation) for operation in end.operations] == calls
    assert (end.how, (work / "b").read_text()) == ("done", "12345678")


@pytest.mark.parametrize(
    ("fault", "how", "content"),
    [
        (Fault(0, "kill before"), "killed", None),
        (Fault(0, "kill after"), "killed", ""),
        (Fault(1, "kill before"), "killed", ""),
        (Fault(1, "tear"), "killed", "1234"),
        (Fault(1, "kill after"), "killed", "12345678"),
        (Fault(1, "EIO"), "failed", "12345678"),  # Python writes again when it closes the file
        (Fault(1, "ENOSPC"), "failed", "1234"),
        (Fault(2, "EIO"), "failed", "12345678"),
        (Fault(3, "EIO"), "done", "12345678"),
    ],
)
def test_faults_happen_where_they_should(tmp_path, fault, how, content):
    end = run_apart(tmp_path, lambda: append(tmp_path / "a"), fault)
    assert end.how == how
    assert ((tmp_path / "a").read_text() if (tmp_path / "a").exists() else None) == content
    if how == "failed":
        assert os.strerror(getattr(errno, fault.kind)) in end.value


def test_a_full_disk_stays_full_and_lets_files_be_removed(tmp_path):
    def act() -> list[str]:
        ends = []
        for call in (lambda: append(tmp_path / "a"), lambda: append(tmp_path / "b"), (tmp_path / "c").unlink):
            try:
                ends.append(str(call()))
            except OSError as cause:
                ends.append(errno.errorcode[cause.errno or 0])
        return ends

    (tmp_path / "c").touch()
    assert run_apart(tmp_path, act, Fault(0, "ENOSPC")).value == ["ENOSPC", "ENOSPC", "None"]
    (tmp_path / "c").touch()
    assert run_apart(tmp_path, act, Fault(0, "EROFS")).value == ["EROFS", "EROFS", "EROFS"]
    assert run_apart(tmp_path, act, Fault(0, "EACCES")).value == ["EACCES", "8", "None"]


def problems(act: Callable[[Path], str], folder: Path, kinds: Collection[str], call: str) -> Iterator[str]:
    """Yield what the harness finds wrong with a writer that is disturbed at its first operation of the kind `call`."""
    scenario = Scenario(nothing, act, read)
    reference = undisturbed(scenario, folder)
    number = [operation.call for operation in reference.operations].index(call)
    for kind in kinds:
        yield from disturb(scenario, reference, Fault(number, kind))


def careless(folder: Path) -> str:
    (folder / "a").write_text("careless")
    return (folder / "a").read_text()


def forgetful(folder: Path) -> str:
    """Writes well but never removes what a killed process left."""
    write_text(folder / "a", "whole")
    return (folder / "a").read_text()


def careful(folder: Path) -> str:
    remove_leftovers(folder)
    return forgetful(folder)


def stubborn(folder: Path) -> str:
    """Takes any file that exists for a good one."""
    if not (folder / "a").exists():
        careless(folder)
    return (folder / "a").read_text()


def read(folder: Path) -> str | None:
    return (folder / "a").read_text() if (folder / "a").exists() else None


@pytest.mark.parametrize(
    ("writer", "call", "kind", "problem"),
    [
        (careless, "write", "EIO", "another error than StorageError"),
        (careless, "write", "tear", "a reader sees something else"),
        (stubborn, "write", "tear", "ends with other bits"),
        (forgetful, "write", "kill after", "other files than without the fault: ['.joma-a-"),
    ],
)
def test_the_harness_sees_what_is_wrong(tmp_path, writer, call, kind, problem):
    assert problem in " ".join(problems(writer, tmp_path / "folder", [kind], call))


@pytest.mark.parametrize("call", ["create", "write", "rename"])
def test_the_harness_sees_nothing_wrong_where_nothing_is(tmp_path, call):
    assert list(problems(careful, tmp_path / "folder", ("kill after", "EIO", "ENOSPC"), call)) == []


def test_faults_are_spread_over_operations_and_kinds(tmp_path):
    operations = undisturbed(SCENARIOS["training"], tmp_path / "folder").operations
    every = chosen(operations, 10**6)
    calls = Counter("read" if operation.call in READS else operation.call for operation in operations)
    changes = calls.total() - calls["read"]
    assert len(every) == len(set(every)) == changes * (len(ERRORS) + 2) + calls["write"] + calls["read"] * 2
    few = chosen(operations, 50)
    assert {fault.kind for fault in few} == {*ERRORS, *KILLS}
    assert {fault.kind for fault in few if operations[fault.operation].call in READS} == {"EIO", "EACCES"}
    assert len({fault.operation for fault in few}) > 30
