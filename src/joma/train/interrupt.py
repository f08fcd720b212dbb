"""Ctrl-C between two steps, never inside one: a half-applied update could not be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Note the first Ctrl-C (or SIGTERM) instead of raising; a second one raises at once.

    Signals reach the main thread only; elsewhere the block runs as if this were not here.

    >>> with interruptible() as stop:
    ...     bool(stop)
    False
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (the signature of a handler)
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
