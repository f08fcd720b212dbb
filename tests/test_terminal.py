"""Text from outside is printed without control characters, and a reader that has left changes no exit code."""

import io
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma import cli
from joma.terminal import WHITESPACE, GuardedStream, OutputError, guarded_streams, json_document, printable

TEXT = st.text(st.characters(), max_size=40)  # surrogates too


@given(TEXT)
def test_printable_text_has_no_control_characters_and_stays_as_it_is_without_them(text):
    shown = printable(text)
    assert all(char.isprintable() or char in WHITESPACE for char in shown)
    assert shown == text or not text.isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J\x7f\0", r"\x9b2J\x7f\x00"),
        ("abc\u202edef\u2066", r"abc\u202edef\u2066"),
        ("\udcff", r"\udcff"),
        ("ρ = ½, 3\u202f%", "ρ = ½, 3\u202f%"),
    ],
)
def test_escape_sequences(text, shown):
    assert printable(text) == shown


UTF_8 = st.text(max_size=40)


@given(st.recursive(UTF_8 | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(UTF_8, inner), max_leaves=8))
def test_a_json_document_is_printable_and_keeps_every_character(value):
    document = json_document(value)
    assert document.replace("\n", "").isprintable()
    assert json.loads(document) == value


class Broken(io.StringIO):
    """A stream that fails with the given error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, _):
        raise self.error


def test_a_reader_that_left_is_ignored_and_a_full_disk_is_reported_on_standard_output_only():
    full = OSError(28, "No space left on device")
    for strict in (False, True):
        assert GuardedStream(Broken(BrokenPipeError(32, "Broken pipe")), strict=strict).write("word") == 4
    assert GuardedStream(Broken(full), strict=False).write("word") == 4
    with pytest.raises(OutputError, match="cannot write to standard output: No space left on device"):
        GuardedStream(Broken(full), strict=True).write("word")


def test_streams_are_guarded_inside_the_block_only():
    before = sys.stdout, sys.stderr
    with guarded_streams():
        assert isinstance(sys.stdout, GuardedStream)
        assert isinstance(sys.stderr, GuardedStream)
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(
    ("redirections", "code"),
    [("| true", 0), (">&-", 0), (">/dev/full", 2), (">&- 2>&-", 0), (">/dev/full 2>/dev/full", 2), ("2>&- | true", 0)],
)
def test_the_interpreter_ends_with_the_result_s_code_whatever_became_of_its_streams(redirections, code):
    script = f"set -o pipefail; {sys.executable} -m joma --help {redirections}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    expected = ["joma: cannot write to standard output: No space left on device; redirect it elsewhere."]
    assert done.stderr.splitlines() == (expected if code == 2 and "2>" not in redirections else [])


def test_a_usage_error_shows_arguments_without_control_characters(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["\x1b[31mred\n", "--preset", "quick"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert r"\x1b[31mred\n" in error
    assert error.replace("\n", "").isprintable()
