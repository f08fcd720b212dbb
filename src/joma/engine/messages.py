"""Messages between an engine and its worker processes: one JSON object a line, over a socket."""

from __future__ import annotations

import json
from typing import Any

MAX_LINE = 64 * 2**20  # bytes

Message = dict[str, Any]


class GarbledError(ValueError):
    """What came is no message: it was cut, or something else was written into the connection."""


def encode(message: Message) -> bytes:
    r"""Return a message as a line.

    >>> encode({"note": "two\nlines"})
    b'{"note": "two\\nlines"}\n'
    """
    return json.dumps(message).encode("ascii") + b"\n"


class Decoder:
    """Put messages together from the pieces that a connection delivers."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        r"""Return the messages that `piece` completes; raise `GarbledError` for what is none.

        >>> decoder = Decoder()
        >>> decoder.feed(b'{"a": 1}\n{"b"'), decoder.feed(b': 2}\n')
        ([{'a': 1}], [{'b': 2}])
        """
        self._rest += piece
        if b"\n" not in piece:
            if len(self._rest) > MAX_LINE:
                raise GarbledError(f"a message of more than {MAX_LINE} bytes")
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [_decode(bytes(line)) for line in lines]

    @property
    def is_cut(self) -> bool:
        """Whether a message has begun that is not complete."""
        return bool(self._rest)


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise GarbledError(f"no message: {line[:80]!r}")
    return message
