"""Fresh draws: every file of property tests is known, failures become code, and slow tests end with their draw."""

from __future__ import annotations

import time

import pytest

from robustness import torture_draws
from robustness.torture_draws import ROOT, examples, property_tests, run

TESTS = """
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 9))
def test_of_a_wrong_property(number):
    assert number < 5


@pytest.mark.parametrize("name", ["a"])
@given(st.integers(3, 9), st.booleans())
def test_without_end(name, number, flag):
    for _ in itertools.count():
        pass


@given(st.integers())
def test_of_a_true_property(number):
    assert number == number


def test_without_draws():
    assert False
"""


PROFILE = """
from hypothesis import settings

settings.register_profile("fresh", deadline=None, print_blob=True)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "conftest.py").write_text(PROFILE, "utf-8")
    file = tmp_path / "test_drawn.py"
    file.write_text(TESTS, "utf-8")
    return file


def test_failing_and_slow_draws_become_code(file, monkeypatch):
    monkeypatch.setenv(torture_draws.TEST_SECONDS_VARIABLE, "0.5")
    counts, output = run(file, time.time() + 60)
    assert counts == {"failed": 2, "passed": 1}, output
    draws = examples(output)
    assert "@example(number=5)  # for test_of_a_wrong_property" in draws
    assert "@example(number=3, flag=False)  # for test_without_end[a]" in draws
    assert any(line.startswith("@reproduce_failure(") for line in draws)


def test_no_test_starts_after_the_end(file):
    counts, output = run(file, time.time() - 1)
    assert counts == {"failed": 1}, output  # the first, which then is the last


def test_files_of_property_tests_are_found():
    names = {str(file.relative_to(ROOT)) for file in property_tests()}
    assert "tests/theory/test_growth.py" in names
    assert "tests/test_house.py" not in names
