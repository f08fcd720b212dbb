"""`joma lab`: serve the interactive pages on this machine alone, and open them in the browser."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated
from urllib.error import URLError

from tyro.conf import Positional, arg

from joma.commands.printing import BAD_INPUT, print_error, print_json, write_line
from joma.train.interrupt import EXIT_CODE

HOST = "127.0.0.1"  # loopback: other machines cannot connect
FIRST_PORT, PORTS = 2718, 100  # tried one after another if no port is given
START_SECONDS = 60.0
STOP_SECONDS = 0.4  # of the second in which Ctrl-C must be answered


@dataclass(frozen=True)
class LabCommand:
    """Open the interactive pages in the browser; Ctrl-C ends them.

    They are served on this machine alone, and only to a browser that has the token of the printed address.
    """

    page: Positional[Annotated[str | None, arg(metavar="[PAGE]", help_behavior_hint="")]] = None
    """Page to open, such as sparse-then-dense; a list of all pages if not given."""
    no_browser: bool = False
    """Print the address without opening a browser."""
    port: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Port of the server; the first free one from 2718 on if not given."""
    json: bool = False
    """Print the address as a JSON document."""

    def __call__(self) -> int:
        from joma.lab import PAGES, page_file

        files = [str(page_file(name)) for name in ([self.page] if self.page is not None else PAGES)]
        _check_installed()
        try:
            return self._serve(files, _free_port(self.port))
        except KeyboardInterrupt:
            print_error("interrupted; the lab is closed.")
            return EXIT_CODE

    def _serve(self, files: list[str], port: int) -> int:
        """Serve the pages until the server ends; return the exit code."""
        token = secrets.token_urlsafe(24)
        with _server(files, port, token) as server:
            if not _answers(server, port):
                print_error("the server of marimo did not start; its messages stand above.")
                return BAD_INPUT
            url = f"http://{HOST}:{port}?access_token={token}"
            print_json({"url": url, "pid": server.pid}) if self.json else write_line(f"The lab is open at {url}")
            sys.stdout.flush()
            if not self.no_browser:
                import webbrowser

                webbrowser.open(url)
            server.wait()
        print_error("the server of marimo has ended; its messages stand above.")
        return BAD_INPUT


def _check_installed() -> None:
    from joma.arguments import InputError

    if find_spec("marimo") is None:
        raise InputError("marimo", "installed", "no such package", "run `pip install 'joma[lab]'`")


def _free_port(port: int | None) -> int:
    """Return the given port, or the first free one; raise `InputError` if it cannot be listened at."""
    from joma.arguments import InputError, whole

    if port is not None:
        problem = _port_problem(whole("--port", port, high=65535))
        if problem is not None:
            got, remedy = f"{port} ({problem})", "choose another, or leave --port out"
            raise InputError("--port", "a port that is free", got, remedy)
        return port
    free = (number for number in range(FIRST_PORT, FIRST_PORT + PORTS) if _port_problem(number) is None)
    if (first := next(free, None)) is None:
        got = f"none from {FIRST_PORT} to {FIRST_PORT + PORTS - 1}"
        raise InputError("--port", "a port that is free", got, "give one with --port")
    return first


def _port_problem(port: int) -> str | None:
    """Return why a server cannot listen at this port, or None."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended is no obstacle
        try:
            listener.bind((HOST, port))
        except OSError as cause:
            return os.strerror(cause.errno) if cause.errno else str(cause)
    return None


@contextmanager
def _server(files: list[str], port: int, token: str) -> Iterator[subprocess.Popen[bytes]]:
    """Serve notebooks in a process of its own, which ends with the block, or with this process."""
    # The token travels by standard input: whoever lists processes sees their arguments.
    options = ["--host", HOST, "--port", str(port), "--token", "--token-password-file", "-", "--headless"]
    command = [sys.executable, "-m", "marimo", "--quiet", "run", *options, "--no-sandbox", *files]
    surroundings = {**os.environ, "MARIMO_ANCESTOR_PID": str(os.getpid()), "MPLBACKEND": "agg"}
    # Its own session: Ctrl-C in the terminal reaches this process alone, which ends the server.
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=surroundings, start_new_session=True)
    try:
        assert server.stdin is not None
        with suppress(BrokenPipeError), server.stdin as pipe:  # a server that failed at once reads nothing
            pipe.write(token.encode())
        yield server
    finally:
        _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and wait for it, by force if it does not end soon."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers; return False if it ends, or takes too long."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know this machine
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(URLError, OSError), opener.open(f"http://{HOST}:{port}/health", timeout=5):
            return True
        time.sleep(0.05)
    return False
