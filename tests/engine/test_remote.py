"""What a worker does with a unit, in this process: no Ray is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.chores import chore
from engine.ray_cluster import contents, store, unit
from joma.engine import Needs, remote
from joma.engine.performing import perform
from joma.files import lock
from joma.progress import SILENT
from joma.transport import unpack


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"joma-units-{os.getuid()}"


def order(a_unit, **fields):
    return {"versions": remote.versions(), "unit": a_unit.as_json(), "key": 1, "attempts": 4, "marker": None, **fields}


def test_files_come_back_as_bytes_and_nothing_stays_behind(tmp_path, temporary):
    sent = unit("a", "store", out="driver", name="a", number=2)
    answer = remote.work(order(sent))
    unpack(answer["folders"]["a"], tmp_path / "arrived" / "a")
    store(tmp_path / "here", SILENT, name="a", number=2)
    assert contents(tmp_path / "arrived") == contents(tmp_path / "here")
    assert remote.relocated(answer["value"], answer["out"], "driver") == {"number": 2, "path": "driver/a"}
    assert list(temporary.iterdir()) == []


def test_only_folders_of_dead_workers_are_removed(temporary, monkeypatch):
    monkeypatch.setattr(remote, "_has_removed_abandoned", False)
    for name in ("dead", "alive"):
        (temporary / name / "checkpoints").mkdir(parents=True)
        os.utime(temporary / name, (0, 0))
    (temporary / "new").mkdir()
    with lock(temporary / "alive"), remote.working_folder() as folder:
        assert sorted(temporary.iterdir()) == sorted([temporary / "alive", temporary / "new", folder])


def test_workers_that_start_together_do_not_remove_each_others_folders(temporary):
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from joma.engine import remote\n"
        "for number in range(50):\n"
        "    remote._has_removed_abandoned = False\n"
        "    with remote.working_folder() as folder:\n"
        "        (folder / 'file').write_text('kept')\n"
        "        assert (folder / 'file').read_text() == 'kept'"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program, str(temporary.parent)]
    workers = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert list(temporary.iterdir()) == []


def test_a_disk_without_room_is_a_failure_of_storage(temporary):
    temporary.write_text("a file in the place of the folder")
    failure = remote.work(order(chore("a", "double", number=1)))["failure"]
    assert failure["kind"] == "storage"
    assert str(temporary) in failure["message"]


@pytest.mark.parametrize("versions", [["0.0.1", "3.11"], [remote.versions()[0], "2.7"], ["0.0.1"]])
def test_other_versions_are_refused_in_one_line_before_anything_else_is_read(versions):
    failure = remote.work({"versions": [*versions, "?"][:2]})["failure"]
    assert failure["kind"] == "input"
    assert "\n" not in failure["message"]
    assert all(version in failure["message"] for version in [*versions, *remote.versions()])


def test_a_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MARKER_SECONDS", 0.2)
    failure = remote.work(order(chore("a", "double", number=1, out=tmp_path / "other"), marker=".joma-x"))["failure"]
    assert failure["kind"] == "input"
    assert str(tmp_path / "other") in failure["message"]


def test_a_shared_folder_is_written_in_place(tmp_path, temporary):
    (tmp_path / ".joma-x").touch()
    sent = unit("a", "store", out=tmp_path, name="a", number=2)
    answer = remote.work(order(sent, marker=".joma-x"))
    assert answer["folders"] == {}
    assert answer["value"] == perform(sent)[0].value
    assert not temporary.exists()


def test_a_failure_of_the_unit_sends_no_files():
    answer = remote.work(order(unit("a", "refuse", text="no")))
    assert answer["failure"]["kind"] == "error"
    assert answer["folders"] == {}
    assert answer["value"] is None


def test_a_folder_without_a_manifest_is_a_failure_of_storage(monkeypatch):
    monkeypatch.setattr("engine.ray_cluster.write_manifest", lambda *_: None)
    answer = remote.work(order(unit("a", "store", out="driver", name="a", number=2)))
    assert answer["failure"]["kind"] == "storage"


def test_too_much_memory_ends_the_process_and_leaves_no_folder(tmp_path, temporary):
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from engine.chores import chore; from joma.engine import Needs, remote; import engine.test_remote as test\n"
        "remote.work(test.order(chore('a', 'allocate', size=10**9, needs=Needs(memory=5 * 10**8))))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=False)
    assert process.returncode == remote.EXCEEDED_CODE
    assert list(temporary.iterdir()) == []


def test_what_earlier_units_left_behind_is_not_counted(monkeypatch):
    sizes = iter([900, 950, 950, 950, 950])
    exceeded = []
    monkeypatch.setattr(remote, "_first_resident", 100)
    monkeypatch.setattr(remote, "resident_memory", lambda _: next(sizes, 950))
    monkeypatch.setattr(remote, "WATCH_SECONDS", 0.01)
    with remote.watched_memory(200, exceeded.append):
        time.sleep(0.1)
    assert exceeded == []


def test_the_board_counts_attempts_and_forgets_units_that_ended():
    board = remote.Board()
    assert board.begin(1) == {"begun": 1, "exceeded": 0}
    board.exceed(1, 500)
    assert board.begin(1) == {"begun": 2, "exceeded": 500}
    for number in range(3):
        board.post(1, {"done": number})
        board.post(2, {"done": 0})
    assert board.take([1]) == {2: {"done": 0}}
    assert board.take([]) == {}
    assert board.begin(1) == {"begun": 1, "exceeded": 0}


@pytest.mark.parametrize(
    ("earlier", "kind"),
    [
        ({"begun": 2, "exceeded": 10**9}, "memory"),
        ({"begun": 5, "exceeded": 0}, "lost"),
        ({"begun": 4, "exceeded": 0}, None),
    ],
)
def test_an_attempt_that_must_not_be_made_is_not(monkeypatch, earlier, kind):
    monkeypatch.setattr(remote.Notes, "begin", lambda _: earlier)
    answer = remote.work(order(chore("a", "double", number=1, needs=Needs(memory=10**9))))
    assert (answer["failure"] and answer["failure"]["kind"]) == kind
    assert answer["value"] == (2 if kind is None else None)


class SlowBoard:
    """A board that answers to nothing."""

    def __init__(self):
        self.messages = []
        self.post = self

    def remote(self, key, message):
        self.messages.append((key, message))
        return object()


class NothingReady:
    def wait(self, references, timeout):
        del timeout
        return [], references


def test_a_slow_board_is_sent_one_note_and_delays_nobody(monkeypatch):
    monkeypatch.setattr(remote, "import_ray", NothingReady)
    monkeypatch.setattr(remote, "UPDATE_SECONDS", 0.0)
    board = SlowBoard()
    with remote.BoardProgress(remote.Notes(board, 7)).task("steps", total=100) as task:
        task.skip(20)
        task.say("loss 1")
        for _ in range(80):
            task.advance()
    counts = {"done": 1, "skipped": 20, "note": "loss 1"}
    assert board.messages == [(7, {"kind": "task", "number": 0, "label": "steps", "total": 100, **counts})]


def test_paths_are_those_of_the_driver():
    value = {"path": "/w/a/b", "list": ["/w/a", "/w/abc", 3, None]}
    assert remote.relocated(value, "/w/a", "runs") == {"path": "runs/b", "list": ["runs", "/w/abc", 3, None]}
    assert Path(remote.relocated("/w/a", "/w/a", "x")) == Path("x")
