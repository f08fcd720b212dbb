"""The step in a checkpoint's name: patterns from outside are bounded, and wrong ones are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.watch import step_names
from joma.watch.step_names import MAX_STEP, read_steps, step_number


@given(st.text(max_size=30) | st.integers(0, 2**70).map(str))
def test_a_step_is_a_number_of_64_bits_or_none(text):
    try:
        number = int(text)
    except ValueError:
        number = -1
    expected = number if text.isdecimal() and number <= MAX_STEP else None
    assert step_number(text) == expected


def test_a_step_of_more_digits_than_python_converts_is_none():
    assert step_number("9" * 10_000) is None
    assert step_number("0" * 10_000 + "7") == 7


def test_known_patterns_are_chosen_by_name():
    names = ["step1", "checkpoint-2", "stage1-step3-tokens4B", "main"]
    assert read_steps(names, None) == ["1", "2", "3", None]
    assert read_steps(names, "checkpoint") == [None, "2", None, None]
    epochs = ["epoch3", "epoch-4", "epoch_5", "epoch=6", "epoch"]
    assert read_steps(epochs, None) == [None] * 5
    assert read_steps(epochs, "epoch") == ["3", "4", "5", "6", None]


def test_a_pattern_without_end_is_stopped():
    names = [f"run-{'a' * 40}!", "run-1"]
    message = r"`pattern` must be matched within 2 seconds, got .*; write it without repetitions inside repetitions"
    with pytest.raises(InputError, match=message):
        read_steps(names, r"run-(?P<step>(a|a)*)b")


def test_a_system_that_refuses_a_limit_of_memory_matches_without_it(monkeypatch):
    unknown = step_names._MATCH.replace("resource.RLIMIT_AS", "10**6")
    assert unknown != step_names._MATCH
    monkeypatch.setattr(step_names, "_MATCH", unknown)
    assert read_steps(["run-1"], r"run-(?P<step>\d+)") == ["1"]


@pytest.mark.parametrize(
    "pattern", ["run-(", "(" * 5000 + ")" * 5000, r"(?P<step>\d+){99999999999}", r"(?P<step>\d)\2", "[" * 300]
)
def test_a_pattern_that_is_none_is_named(pattern):
    with pytest.raises(InputError, match=r"`pattern` must be a regular expression, got .*; correct it") as raised:
        read_steps(["run-1"], pattern)
    assert len(str(raised.value)) < 500


def test_a_pattern_needs_the_group_step_even_if_nothing_has_to_be_matched():
    for names in ([], ["run-1"]):
        with pytest.raises(InputError, match="must have a group `step`"):
            read_steps(names, r"run-(\d+)")
    assert read_steps([], r"run-(?P<step>\d+)") == []


def test_names_that_are_not_utf8_and_patterns_with_warnings_are_matched():
    assert read_steps(["a\udcff7", "b"], r"[[a]\D(?P<step>\d)?") == ["7", None]
    assert read_steps(["a"], r"a(?P<step>\d)?") == [None]
