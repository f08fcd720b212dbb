"""Ctrl-C raises in the tests of this folder, even if the shell that started them made it ignored."""

import signal

import pytest


@pytest.fixture(autouse=True)
def _ctrl_c_raises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
