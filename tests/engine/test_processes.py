"""How a process ends is said in words; the rest is tested through the engine in `test_local`."""

from __future__ import annotations

import signal

import pytest

from joma.engine.processes import describe_end


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_named(number):
    assert describe_end(-number) == f"was killed by {signal.Signals(number).name}"


def test_an_unknown_signal_has_its_number():
    assert describe_end(-200) == "was killed by signal 200"
