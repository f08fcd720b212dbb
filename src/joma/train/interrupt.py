"""Ctrl-C: a training run stops between two steps, never inside one, and a command always answers within a second.

Python runs signal handlers in the main thread only, between two instructions. A matrix product of a minute delays them
by a minute. So a command has a second thread, which the operating system wakes through a pipe: it prints what is being
waited for, and ends the process if the main thread does not. Ending the process at any moment does no damage, because
files are written whole.

SIGTERM is treated like Ctrl-C. A signal that the process was started to ignore stays ignored.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
LAST_LINE = "joma: interrupted; finished runs are kept, and the same command resumes the others.\n"
NOTICE_SECONDS = 0.5  # from Ctrl-C to the line that says what is being waited for
UNWIND_SECONDS = 1.0  # for the main thread to end by itself where nothing is left to save
SECOND_UNWIND_SECONDS = 0.3  # the same after a second Ctrl-C
REPEAT_SECONDS = 0.1  # a signal that comes again so soon is the same one: `timeout` sends each to us and to our group
TICK_SECONDS = 0.05
SIGNALS = (signal.SIGINT, signal.SIGTERM)
END = 0  # in the pipe, where a signal is its number: the command has ended


class StopRequest:
    """Whether Ctrl-C was pressed (true once it was), and what has to end before the run can stop."""

    def __init__(self, activity: str) -> None:
        self.requested = False
        self.begin(activity)

    def __bool__(self) -> bool:
        return self.requested

    def begin(self, activity: str, step: int = 0) -> None:
        """State what is done from now on: a phrase such as "step {} to end", in which {} stands for `step`."""
        self.activity, self.step, self.start_time = activity, step, time.monotonic()

    @property
    def notice(self) -> str:
        """What a user who pressed Ctrl-C is waiting for, in one line."""
        seconds = time.monotonic() - self.start_time
        waiting = f"waiting for {self.activity.format(self.step)} ({seconds:.1f} s so far)"
        return f"joma: interrupted: {waiting}; press Ctrl-C again to leave at once, without it.\n"


@contextmanager
def interruptible(activity: str = "the present step to end") -> Iterator[StopRequest]:
    """Record the first Ctrl-C (or SIGTERM) instead of raising; a second one raises at once.

    Signals reach the main thread only; in other threads the block runs unchanged.

    >>> with interruptible() as stop:
    ...     bool(stop)
    False
    """
    stop = StopRequest(activity)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request_stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (the signature of a handler)
        new = _command is None or _command.note()
        if stop.requested and new:
            raise KeyboardInterrupt
        stop.requested = True

    before = {number: signal.signal(number, request_stop) for number in _listened_signals()}
    outer = None if _command is None else _command.enter(stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if _command is not None:
            _command.enter(outer)


def _listened_signals() -> list[int]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class _Command:
    """The state of the command that this process runs, and the thread that answers Ctrl-C for it.

    Attributes:
        noted_at: when Ctrl-C was first handled in the main thread, None if it was not.
        stop: the request of the `interruptible` block that is running, None outside of one.
    """

    def __init__(self) -> None:
        self.noted_at: float | None = None
        self.stop: StopRequest | None = None
        self._stop_changed = time.monotonic()
        self._signal_times: list[float] = []
        self._notified = False
        self._leaving = threading.Lock()
        self._reader, self._writer = map(_above_standard_streams, os.pipe())

    def enter(self, stop: StopRequest | None) -> StopRequest | None:
        """Make `stop` the request that Ctrl-C waits for, None for no waiting; return the one before."""
        before, self.stop, self._stop_changed = self.stop, stop, time.monotonic()
        return before

    def note(self) -> bool:
        """Note that Ctrl-C is handled in the main thread; return whether it was pressed, not the same one again."""
        now = time.monotonic()
        if self.noted_at is None:
            self.noted_at = now
            return True
        return now - self.noted_at > REPEAT_SECONDS

    def start(self) -> None:
        """Handle the signals and start the thread."""
        os.set_blocking(self._writer, False)
        for number in _listened_signals():
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()

    def end(self) -> None:
        """End the thread. Ctrl-C is ignored from now on: all is done, and the process is about to end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.write(self._writer, bytes([END]))

    def leave(self) -> NoReturn:
        """Print the last line and end the process, in any thread and at any moment."""
        from_main = threading.current_thread() is threading.main_thread()
        if from_main:
            with suppress(OSError, ValueError):  # closed by the reader, or by us
                sys.stdout.flush()
            for number in SIGNALS:  # a third Ctrl-C must not print a second line
                signal.signal(number, signal.SIG_IGN)
        self._leaving.acquire()  # for ever if another thread is leaving
        with suppress(OSError):
            os.write(2, (LAST_LINE if from_main else _over_progress_bars(LAST_LINE)).encode())
        os._exit(EXIT_CODE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (the signature of a handler)
        first = self.noted_at is None
        if self.note():
            if not first:
                self.leave()
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Wait for signals and, after the first, see to it that Ctrl-C is answered."""
        while True:
            timeout = TICK_SECONDS if self._signal_times else None
            if select.select([self._reader], [], [], timeout)[0]:
                numbers = os.read(self._reader, 64)
                if END in numbers:
                    return
                self._count(sum(number in SIGNALS for number in numbers), time.monotonic())
            if self._signal_times:
                self._answer(time.monotonic())

    def _count(self, signals: int, now: float) -> None:
        """Count signals that came at `now`, unless they are the first one again."""
        if signals and not (self._signal_times and now - self._signal_times[0] <= REPEAT_SECONDS):
            self._signal_times.append(now)

    def _answer(self, now: float) -> None:
        """Print what is being waited for, or leave where nothing is, unless the main thread ends in time."""
        first, second = self._signal_times[0], self._signal_times[1:2]
        stop = self.stop
        if second:
            overdue = now - second[0] > SECOND_UNWIND_SECONDS
        else:
            overdue = stop is None and now - max(first, self._stop_changed) > UNWIND_SECONDS
        if overdue:
            self.leave()
        if stop is not None and not second and not self._notified and now - first > NOTICE_SECONDS:
            self._notified = True
            sys.stderr.write(stop.notice)  # through rich, if it shows bars: the line appears above them
            sys.stderr.flush()


def _above_standard_streams(handle: int) -> int:
    """Return a handle to the same file with a number that no standard stream has, as those may be closed."""
    above = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(handle)
    return above


_command: _Command | None = None


@contextmanager
def answering() -> Iterator[None]:
    """Answer Ctrl-C until this process ends, which must be soon after the block: see the module's docstring.

    Outside of `interruptible` blocks Ctrl-C raises KeyboardInterrupt, and ends the process a second later if that was
    delayed or caught. A second Ctrl-C ends it at once.
    """
    global _command  # noqa: PLW0603  (signals are the whole process's)
    _command = _Command()
    report = sys.unraisablehook

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # Ctrl-C in a finaliser: the thread ends us
            report(unraisable)

    sys.unraisablehook = report_others
    _command.start()
    try:
        yield
    except BaseException as cause:
        if _command.noted_at is not None or isinstance(cause, KeyboardInterrupt):
            _command.leave()
        raise
    finally:
        _command.end()


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed in this command; an error is then most likely a consequence of it."""
    return _command is not None and _command.noted_at is not None


def end_interrupted() -> int:
    """Print the last line of an interrupted command; end its process, or return the exit code if there is none."""
    if _command is not None:
        _command.leave()
    sys.stderr.write(LAST_LINE)
    return EXIT_CODE


def _over_progress_bars(line: str) -> str:
    """Return `line` with the control codes that erase a progress bar before it and show the cursor after it."""
    plain = not os.isatty(2) or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return line if plain else f"\r\x1b[2K{line}\x1b[?25h"
