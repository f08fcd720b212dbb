"""Messages survive any cutting of the stream; what is none is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.engine.messages import MAX_LINE, Decoder, GarbledError, encode

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
MESSAGES = st.lists(st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=3), max_size=4), max_size=5)


@given(MESSAGES, st.lists(st.integers(0, 400), max_size=8))
def test_messages_are_the_same_however_the_stream_is_cut(messages, cuts):
    stream, decoder, decoded = b"".join(map(encode, messages)), Decoder(), []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    for start, stop in itertools.pairwise(bounds):
        decoded += decoder.feed(stream[start:stop])
    assert decoded == messages
    assert not decoder.is_cut


@given(st.binary(min_size=1, max_size=40))
def test_arbitrary_bytes_are_messages_or_refused(piece):
    decoder = Decoder()
    try:
        messages = decoder.feed(piece + b"\n")
    except GarbledError:
        return
    assert all(isinstance(message, dict) for message in messages)
    assert not decoder.is_cut


@pytest.mark.parametrize("line", [b"\n", b"[1]\n", b"{'a': 1}\n", b"\xff\n", b"[" * 100_000 + b"\n"])
def test_a_line_that_is_no_object_is_refused(line):
    with pytest.raises(GarbledError, match="no message"):
        Decoder().feed(line)


def test_the_beginning_of_a_message_is_known_to_be_cut():
    decoder = Decoder()
    assert decoder.feed(b'{"a"') == []
    assert decoder.is_cut


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("joma.engine.messages.MAX_LINE", 100)
    decoder = Decoder()
    decoder.feed(b"x" * 100)
    with pytest.raises(GarbledError, match="more than 100 bytes"):
        decoder.feed(b"x")
    assert MAX_LINE > 10**7
