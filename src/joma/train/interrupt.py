"""Handle Ctrl-C between two steps, never inside one: a run cannot resume from a half-applied update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether Ctrl-C was pressed; true once it was."""

    def __init__(self) -> None:
        self.requested = False

    def __bool__(self) -> bool:
        return self.requested


@contextmanager
def interruptible() -> Iterator[StopRequest]:
    """Record the first Ctrl-C (or SIGTERM) instead of raising; a second one raises at once.

    Signals reach the main thread only; in other threads the block runs unchanged.

    >>> with interruptible() as stop:
    ...     bool(stop)
    False
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (the signature of a handler)
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
