"""Addresses at which there is no Ray are named in one line within seconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import pytest

from joma.arguments import InputError
from joma.engine import RayEngine, connecting


def test_without_ray_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'joma\[ray\]'") as problem:
        RayEngine()
    assert "\n" not in str(problem.value)


@pytest.fixture
def listener():
    """A server that answers every client with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        yield server


def answer(server, text):
    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(text)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("text", "expected"),
    [(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), True), (b"HTTP/1.1 400 Bad Request\r\n\r\n", False), (b"", False)],
)
def test_only_a_server_that_speaks_http2_is_taken_for_ray(listener, text, expected):
    thread = answer(listener, text)
    assert connecting._speaks_http2(*listener.getsockname()) is expected
    thread.join()


def free_port():
    with socket.create_server(("127.0.0.2", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("form", ["127.0.0.2:{}", "ray://127.0.0.2:{}", "nowhere"])
def test_a_cluster_that_is_not_there_is_one_line(form):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'joma[ray]'")
    address = form.format(free_port())
    with pytest.raises(InputError, match="--address") as problem:
        RayEngine(address)
    assert "\n" not in str(problem.value)
    assert address in str(problem.value)


def test_another_server_is_not_taken_for_a_cluster(listener):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'joma[ray]'")
    thread = answer(listener, b"SSH-2.0-OpenSSH_9.2\r\n")
    with pytest.raises(InputError, match="no Ray at"):
        RayEngine(f"ray://127.0.0.1:{listener.getsockname()[1]}")
    thread.join()


def test_only_variables_that_are_not_set_are_set_for_a_while(monkeypatch):
    monkeypatch.setenv("JOMA_FIRST", "kept")
    with connecting._environment({"JOMA_FIRST": "a", "JOMA_SECOND": "b"}):
        assert (os.environ["JOMA_FIRST"], os.environ["JOMA_SECOND"]) == ("kept", "b")
    assert os.environ["JOMA_FIRST"] == "kept"
    assert "JOMA_SECOND" not in os.environ


def test_signals_do_what_they_did():
    before = signal.getsignal(signal.SIGTERM)
    with connecting._signals_unchanged():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == before
