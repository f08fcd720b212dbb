"""Calls with hostile arguments: the table has every public name, the harness notices failures, and a sample holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from robustness import torture_calls
from robustness.call_table import CALLS, LEFT_OUT
from robustness.torture_calls import Call, drawn_calls, outcomes, single_changes

ROOT = Path(__file__).parents[2]


def public_names():
    """Return the names of the reference page, which `test_surface` compares with the code."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    sections = re.split(r"^## `(.*)`$", page, flags=re.MULTILINE)[1:]
    tables = zip(sections[::2], sections[1::2], strict=True)
    return {
        f"{module}.{name}" for module, table in tables for name in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    }


def is_left_out(name):
    return any(name == left_out or name.startswith(f"{left_out}.") for left_out in LEFT_OUT)


def test_every_public_name_is_called_or_left_out_for_a_reason():
    names = public_names()
    assert {name for name in names if name not in CALLS and not is_left_out(name)} == set()
    assert {name for name in names if name in CALLS and is_left_out(name)} == set()
    assert {name for name in LEFT_OUT if not any(f"{public}.".startswith(f"{name}.") for public in names)} == set()


def test_every_argument_is_changed_and_no_call_is_drawn_twice():
    singles = single_changes()
    assert {(call.function, *call.changed) for call in singles} == {
        (function, name) for function, arguments in CALLS.items() for name in arguments
    }
    drawn = drawn_calls(400, torture_calls.random.Random(1))
    assert len(drawn) == 400
    assert {len(call.changed) for call in drawn} == {1, 2}


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        ("(lambda x: x)", "answered"),
        ("(lambda x: joma.arguments.whole('total', x))", "unnamed"),
        ("(lambda x: joma.arguments.whole('x', x))", "refused"),
        ("(lambda x: x.shape)", "AttributeError"),
        ("(lambda x: np.float64(1) / np.float64(0))", "RuntimeWarning"),
        ("(lambda x: bytearray(10**11))", "MemoryError"),
        ("(lambda x: [None for _ in iter(int, 1)])", "too slow"),
        ("(lambda x: __import__('os')._exit(3))", "died"),
        ("(lambda x: x +)", "impossible"),
    ],
)
def test_the_harness_tells_failures_apart(function, outcome, monkeypatch):
    monkeypatch.setattr(torture_calls, "SECONDS", 0.2)
    calls = [Call("(lambda: 1)", {}), Call(function, {"x": "'abc'"}), Call("(lambda: 2)", {})]
    assert [seen for _, seen, *_ in outcomes(calls)] == ["answered", outcome, "answered"]


def test_a_failing_call_is_code():
    call = Call("joma.schedule.every", {"interval": "4", "total": "10"}).change("total", "2**63")
    assert call.code == "joma.schedule.every(interval=4, total=2**63)"
    assert call.changed == ("total",)


def test_a_sample_of_hostile_calls_answers_or_refuses():
    """In a process of its own: here a type checker would see the arguments first."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [sys.executable, "-m", "robustness.torture_calls", "300"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
