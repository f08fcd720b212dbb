"""A worker alone, at the other end of a socket: what it sends, and when it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.chores import chore
from joma.engine.messages import Decoder, encode
from joma.engine.processes import START


class Conversation:
    """A worker process and the socket to it."""

    def __init__(self, parent=None):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(20)
        parent = os.getpid() if parent is None else parent
        command = [sys.executable, "-P", "-c", START, str(theirs.fileno()), str(parent), *sys.path]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), start_new_session=True)
        self.decoder, self.received = Decoder(), []

    def order(self, unit, cores=1, folder=None):
        self.socket.sendall(encode({"unit": unit.as_json(), "cores": cores, "folder": folder or os.getcwd()}))

    def read(self, kind):
        """Return the next message of a kind; skip others."""
        while True:
            while self.received:
                message = self.received.pop(0)
                if message["kind"] == kind:
                    return message
            piece = self.socket.recv(2**16)
            assert piece, "the worker closed the connection"
            self.received += self.decoder.feed(piece)

    def close(self):
        self.socket.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker():
    conversation = Conversation()
    conversation.read("ready")
    yield conversation
    conversation.close()


def wait_for(file: Path) -> None:
    limit = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < limit, f"{file.name} did not appear"
        time.sleep(0.02)


def test_a_unit_is_answered_by_its_value(worker):
    for number in range(3):
        worker.order(chore("unit", "double", number=number))
        result = worker.read("result")
        assert result.pop("seconds") >= 0
        assert result == {"kind": "result", "value": 2 * number, "failure": None}


def test_the_progress_of_a_unit_is_sent(worker):
    worker.order(chore("unit", "report", tasks=1))
    first, last = worker.read("task"), worker.read("task")
    while "ended" not in last:
        last = worker.read("task")
    assert first["label"] == "task 0"
    assert (first["total"], first["done"]) == (5, 0)
    assert (last["done"], last["skipped"], last["note"]) == (3, 2, "a note")


def test_a_warning_is_sent_with_its_kind(worker):
    worker.order(chore("unit", "warn", text="beware"))
    assert worker.read("warning") == {"kind": "warning", "message": "beware", "category": "UserWarning"}


def test_a_working_folder_that_is_gone_fails_the_unit_only(worker, tmp_path):
    worker.order(chore("unit", "double", number=1), folder=str(tmp_path / "gone"))
    assert "FileNotFoundError" in worker.read("result")["failure"]["message"]
    worker.order(chore("unit", "double", number=1))
    assert worker.read("result")["value"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_unit_saves_and_its_worker_ends(worker, tmp_path, number):
    worker.order(chore("unit", "save", out=tmp_path, name="unit"))
    wait_for(tmp_path / "unit.begun")
    worker.process.send_signal(number)
    assert worker.read("result")["failure"]["kind"] == "interrupted"
    assert (tmp_path / "unit.saved").exists()
    assert worker.process.wait(5) == 0


def test_an_interrupt_that_comes_before_the_unit_stops_it(worker, tmp_path):
    worker.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    worker.order(chore("unit", "wait", out=tmp_path, name="unit"))
    assert worker.read("result")["failure"]["kind"] == "interrupted"
    assert not (tmp_path / "unit.begun").exists()


def test_interrupts_never_cut_a_message(worker):
    worker.order(chore("unit", "warn_for_ever"))
    worker.read("warning")
    time.sleep(0.5)  # the connection is full, and the worker in the midst of a message
    worker.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert worker.read("result")["failure"]["kind"] == "interrupted"


def test_a_worker_ends_when_its_connection_closes_whatever_it_does(worker, tmp_path):
    worker.order(chore("unit", "refuse_to_stop", out=tmp_path, name="unit"))
    wait_for(tmp_path / "unit.begun")
    worker.socket.close()
    assert worker.process.wait(5) == -signal.SIGKILL


def test_a_worker_ends_when_it_cannot_understand_its_engine(worker):
    worker.socket.sendall(b"no order\n")
    assert worker.process.wait(5) == -signal.SIGKILL


def test_a_worker_ends_when_its_engine_is_not_its_parent_even_if_the_connection_is_open():
    conversation = Conversation(parent=1)
    try:
        assert conversation.process.wait(20) == -signal.SIGKILL
    finally:
        conversation.close()
