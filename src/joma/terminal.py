"""What goes to the terminal: text from outside without its control characters, on streams whose reader may leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any

WHITESPACE = frozenset("\u00a0\u2009\u202f")  # not printable for Python, but harmless


class OutputError(OSError):
    """Standard output cannot be written, for example because the disk is full."""


def printable(text: object) -> str:
    r"""Return the text of `text` with every character that is not printable written as an escape sequence.

    Names of tensors, files and folders may contain newlines, terminal controls, or marks that reverse the direction of
    writing. Whatever came from outside passes through here on its way to the terminal.

    >>> print(printable("step1\x1b[2J\nall is well"))
    step1\x1b[2J\nall is well
    """
    return "".join(
        char if char.isprintable() or char in WHITESPACE else char.encode("unicode_escape").decode("ascii")
        for char in str(text)
    )


def json_document(value: Any) -> str:
    r"""Return `value` as indented JSON in which every character is printable; what JSON lacks is written as its text.

    >>> print(json_document(["é", "\x9b2J"]))
    [
      "é",
      "\u009b2J"
    ]
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


class GuardedStream:
    """A standard stream that stays usable when its reader has left: what is written from then on is discarded.

    Args:
        stream: the stream.
        strict: raise `OutputError` for other problems, such as a full disk. They are ignored otherwise, as for
            standard error: there is nowhere to report them.
    """

    def __init__(self, stream: Any, *, strict: bool) -> None:
        self._stream, self._strict = stream, strict

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, or discard it if the reader has left."""
        with self._guard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, or discard it if the reader has left."""
        with self._guard():
            self._stream.flush()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            with suppress(OSError):  # Python flushes at its end too, and would report what stays in the buffer
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._strict and not isinstance(cause, BrokenPipeError):
                raise OutputError(
                    f"cannot write to standard output: {cause.strerror}; redirect it elsewhere."
                ) from None


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard standard output and standard error inside the block, and replace them by /dev/null if they are closed."""
    for handle in range(3):  # a file opened by the program must not take the number of a closed standard stream
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is `handle`
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        streams = [stream or nowhere for stream in before]
        for stream in streams:
            if isinstance(stream, TextIOWrapper):  # its encoding may lack our characters, as ASCII does
                stream.reconfigure(errors="backslashreplace")
        sys.stdout, sys.stderr = GuardedStream(streams[0], strict=True), GuardedStream(streams[1], strict=False)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
