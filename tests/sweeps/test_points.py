"""Points of a sweep: the product in order, and draws that are reproducible."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.sweeps import Draws, Grid, Range

values = st.lists(st.integers(-5, 5) | st.sampled_from(["a", "b"]), min_size=1, max_size=4, unique=True)
grids = st.dictionaries(st.sampled_from(["alpha", "beta", "gamma"]), values, min_size=1)
whole_ranges = st.tuples(st.integers(1, 50), st.integers(1, 50)).map(lambda pair: Range(pair[0], sum(pair)))


@given(grids)
def test_every_point_comes_exactly_once_with_the_last_key_fastest(lists):
    points = Grid(lists).points()
    assert len(points) == math.prod(map(len, lists.values()))
    assert len({json.dumps(point) for point in points}) == len(points)
    assert [tuple(point.values()) for point in points] == list(itertools.product(*lists.values()))
    assert all(list(point) == list(lists) for point in points)


@given(whole_ranges, st.integers(0, 3))
def test_draws_lie_in_their_range_and_more_of_them_keep_the_first(numbers, seed):
    sources = {"steps": numbers, "rate": Range(1e-4, 1.0, logarithmic=True), "name": ["a", "b"]}
    few, many = Draws(sources, 3, seed).points(), Draws(sources, 12, seed).points()
    assert many[:3] == few
    assert len({json.dumps(point) for point in many}) == 12
    for point in many:
        assert isinstance(point["steps"], int)
        assert numbers.low <= point["steps"] <= numbers.high
        assert 1e-4 <= point["rate"] <= 1.0
        assert point["name"] in ("a", "b")


def test_a_logarithmic_range_has_equal_numbers_in_every_decade():
    points = Draws({"rate": Range(1e-3, 1.0, logarithmic=True)}, 3000).points()
    decades = [math.floor(math.log10(point["rate"])) for point in points]
    counts = [decades.count(decade) for decade in (-3, -2, -1)]
    assert all(abs(count - 1000) < 5 * math.sqrt(3000 * 2 / 9) for count in counts)  # five standard deviations


def test_whole_numbers_of_a_range_are_equally_likely_and_reach_both_ends():
    shares = [(index + 0.5) / 40 for index in range(40)]
    drawn = [Range(2, 5).at(share) for share in shares]
    assert [drawn.count(number) for number in (2, 3, 4, 5)] == [10, 10, 10, 10]


def test_other_seeds_and_keys_draw_other_points():
    draws = [Draws({"a": Range(0.0, 1.0), "b": Range(0.0, 1.0)}, 4, seed).points() for seed in (0, 1)]
    assert draws[0] != draws[1]
    assert all(point["a"] != point["b"] for point in draws[0])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Grid({"steps": []}), "--grid steps"),
        (lambda: Grid({"steps": [1, 2, 1]}), "--grid steps"),
        (lambda: Grid({"a": range(1000), "b": range(1000)}), "--grid"),
        (lambda: Range(2, 2), "--grid"),
        (lambda: Range(0, 10**400), "--grid"),
        (lambda: Grid({"steps": [object()]}), "--grid steps"),
        (lambda: Range(0, 2, logarithmic=True), "--grid"),
        (lambda: Draws({"steps": Range(1, 9)}, 0), "--random"),
        (lambda: Draws({"steps": [1, 1]}, 1), "--grid steps"),
        (lambda: Draws({"steps": Range(1, 3)}, 4).points(), "--random"),
    ],
)
def test_what_cannot_be_swept_is_named(make, name):
    with pytest.raises(InputError) as problem:
        make()
    assert problem.value.name == name
