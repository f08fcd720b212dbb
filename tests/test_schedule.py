import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma import schedule
from joma.arguments import InputError


@given(st.integers(1, 50), st.integers(0, 500))
def test_every_hits_each_multiple_and_both_ends(interval, total):
    steps = schedule.every(interval, total)
    assert set(steps) == {step for step in range(total + 1) if step % interval == 0 or step == total}
    assert list(steps) == sorted(steps)


@given(st.integers(2, 60), st.integers(0, 100_000))
def test_logarithmic_grows_by_a_bounded_factor(count, total):
    steps = schedule.logarithmic(count, total)
    assert steps[0] == 0
    assert steps[-1] == total
    assert list(steps) == sorted(set(steps))
    factor = (total + 1) ** (1 / (count - 1))
    assert all(later + 1 <= factor * (earlier + 2) + 1 for earlier, later in itertools.pairwise(steps))


@pytest.mark.parametrize("wrong", [11, -1, 1.5, "x", True])
def test_listed_refuses_steps_beyond_the_end_and_what_is_no_step(wrong):
    with pytest.raises(InputError, match=rf"`steps` must be a whole number in \[0, 10\], got {wrong!r}"):
        schedule.listed(iter([3, wrong]), 10)  # the types in a list would be checked before
