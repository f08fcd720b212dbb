"""Schedules against their definition."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma import schedule
from joma.arguments import InputError


@given(st.integers(1, 50), st.integers(0, 500))
def test_every_returns_all_multiples_and_both_ends(interval, total):
    steps = schedule.every(interval, total)
    assert set(steps) == {step for step in range(total + 1) if step % interval == 0 or step == total}
    assert list(steps) == sorted(steps)


@given(st.integers(2, 60), st.integers(0, 100_000))
def test_logarithmic_steps_grow_by_a_bounded_factor(count, total):
    steps = schedule.logarithmic(count, total)
    assert steps[0] == 0
    assert steps[-1] == total
    assert list(steps) == sorted(set(steps))
    assert len(steps) <= count
    factor = (total + 1) ** (1 / (count - 1))
    assert all(later + 1 <= factor * (earlier + 2) + 1 for earlier, later in itertools.pairwise(steps))


@given(st.integers(0, 500).flatmap(lambda total: st.tuples(st.just(total), st.lists(st.integers(0, total)))))
def test_listed_returns_the_steps_in_order_with_both_ends(arguments):
    total, steps = arguments
    assert schedule.listed(steps, total) == tuple(sorted({0, *steps, total}))


@pytest.mark.parametrize("wrong", [11, -1, 1.5, "x", True])
def test_listed_refuses_steps_beyond_the_end_and_values_that_are_no_steps(wrong):
    with pytest.raises(InputError, match=rf"`steps` must be a whole number in \[0, 10\], got {wrong!r}"):
        schedule.listed(iter([3, wrong]), 10)  # an iterator: the type checker of the tests looks into lists


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: schedule.every(0, 10), "interval"),
        (lambda: schedule.every(2, -1), "total"),
        (lambda: schedule.logarithmic(1, 10), "count"),
        (lambda: schedule.logarithmic(5, -1), "total"),
        (lambda: schedule.listed([], -1), "total"),
    ],
)
def test_bad_input_is_named(call, name):
    with pytest.raises(InputError, match=f"`{name}` must be"):
        call()
