"""What the tests of the pages share: a page as a script without a network, and its code to copy."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from joma.lab import page_file

# Runs a notebook as a script; whatever tries to reach a network fails.
OFFLINE = """
import runpy, socket, sys
def refuse(*_):
    raise OSError("the page tried to reach a network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_as_script(name: str, folder: Any) -> None:
    """Run a page in an empty folder, with warnings as errors and without a network."""
    command = [sys.executable, "-W", "error::UserWarning", "-W", "error::FutureWarning", "-c", OFFLINE]
    done = subprocess.run([*command, str(page_file(name))], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not list(folder.iterdir())


def run_page(app: Any, **inputs: Any) -> dict[str, Any]:
    """Run a page with some of its inputs replaced, and return what its cells define."""
    _, names = app.run(defs=inputs) if inputs else app.run()
    return dict(names)


def run_code(code: str) -> SimpleNamespace:
    """Run the code that a page offers to copy, and return what it defines."""
    names: dict[str, Any] = {}
    exec(compile(code, "copied", "exec"), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")})


def widget(value: Any) -> SimpleNamespace:
    """Return what stands for a slider or a box with this value."""
    return SimpleNamespace(value=value)
