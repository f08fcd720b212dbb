"""The command `joma lab`: its server, which is for this machine and this user alone, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from urllib.error import HTTPError

import pytest

from command_line import joma
from joma import cli

HOST = "127.0.0.1"


@contextmanager
def served(*args: str):
    """Serve the pages in a process of its own; yield it and what it printed."""
    command = [sys.executable, "-m", "joma", "lab", "--no-browser", "--json", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        document = ""
        while not document.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            document += line
        yield process, json.loads(document)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server():
    """Serve one page for all tests that only read."""
    with served("sparse-then-dense") as (process, printed):
        yield process, printed["url"], printed["pid"]


def fetch(url: str) -> tuple[int, str, str]:
    """Return the status, the address after redirections and the body that a URL gives to someone without cookies."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
    try:
        with opener.open(url, timeout=30) as response:
            return response.status, response.geturl(), response.read().decode(errors="replace")
    except HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.url or "", refusal.read().decode(errors="replace")


def local_addresses(port: int) -> set[str]:
    """Return the addresses at which this machine listens on a port, as the kernel lists them."""
    addresses = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        addresses |= {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    return addresses


def test_the_page_is_given_to_whoever_has_the_token(server):
    status, _, body = fetch(server[1])
    assert status == 200
    assert "sparse_then_dense" in body


def test_without_the_token_or_with_another_one_no_page_is_given(server):
    address = server[1].partition("?")[0]
    for url in (address, f"{address}/?access_token=guessed", f"{address}/?file=sparse_then_dense.py"):
        status, final, body = fetch(url)
        assert status in (401, 403) or "/auth/login" in final, url
        assert "sparse_then_dense" not in body
    request = urllib.request.Request(f"{address}/api/kernel/run", data=b"{}", method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(HTTPError) as refusal:
        opener.open(request, timeout=30)
    assert refusal.value.code in (401, 403)
    refusal.value.close()


def test_every_start_has_another_token_that_no_list_of_processes_shows(server):
    token = re.search(r"access_token=([\w-]{20,})$", server[1])
    assert token
    with open(f"/proc/{server[2]}/cmdline") as arguments:
        assert token[1] not in arguments.read()


def test_the_server_listens_on_loopback_alone(server):
    port = int(re.search(r":(\d+)", server[1].removeprefix("http:"))[1])
    assert local_addresses(port) == {"0100007F"}  # 127.0.0.1, as /proc writes it


def test_ctrl_c_ends_the_server_with_code_130():
    with served("sparse-then-dense") as (process, printed):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert errors.count("\n") == 1
        assert errors == "joma: interrupted; the lab is closed.\n"
        port = int(re.search(r":(\d+)", printed["url"].removeprefix("http:"))[1])
        assert local_addresses(port) == set()


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        code, output, errors = joma("lab", "--no-browser", "--port", port, capsys=capsys)
    assert (code, output) == (2, "")
    assert errors == (
        f"joma: `--port` must be a port that is free, got {port} (Address already in use); choose another, or leave "
        "--port out.\n"
    )


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_one_line(port, capsys):
    code, _, errors = joma("lab", "--no-browser", "--port", port, capsys=capsys)
    assert code == 2
    assert errors.startswith("joma: `--port` must be a whole number in [1, 65535]")


def test_an_unknown_page_lists_the_known_ones(capsys):
    code, _, errors = joma("lab", "sparse", "--no-browser", capsys=capsys)
    assert code == 2
    assert "`PAGE` must be one of sparse-then-dense, invariant" in errors
    assert errors.count("\n") == 1


def test_without_marimo_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("joma.commands.lab.find_spec", lambda _: None)
    code, _, errors = joma("lab", "--no-browser", capsys=capsys)
    assert code == 2
    assert errors == "joma: `marimo` must be installed, got no such package; run `pip install 'joma[lab]'`.\n"


def test_a_server_that_does_not_start_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("joma.commands.lab.sys.executable", "false")
    code, output, errors = joma("lab", "--no-browser", capsys=capsys)
    assert (code, output) == (2, "")
    assert errors == "joma: the server of marimo did not start; its messages stand above.\n"


def test_help_and_import_load_neither_marimo_nor_torch():
    script = (
        "import sys, joma.cli\n"
        "try:\n    joma.cli.main(['lab', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'marimo', 'torch', 'matplotlib'} & {*sys.modules}, 'loaded'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("--no-browser", "--port", "PAGE", "Ctrl-C ends them"):
        assert text in done.stdout


def test_the_browser_opens_the_address_unless_it_is_refused(monkeypatch, capsys):
    opened = []

    class Server:
        pid = 1

        def wait(self):
            return 0

    @contextmanager
    def server(*_):
        yield Server()

    monkeypatch.setattr("joma.commands.lab._server", server)
    monkeypatch.setattr("joma.commands.lab._answers", lambda *_: True)
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["lab"]) == 2  # a server that ends by itself is a fault
    line = capsys.readouterr().out.strip()
    assert line == f"The lab is open at {opened[0]}"
    assert cli.main(["lab", "--no-browser"]) == 2
    assert len(opened) == 1
