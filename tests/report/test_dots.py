"""The small picture of a claim: every finite value stands where it must against the band of what is expected."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.report.dots import HEIGHT, MARGIN, WIDTH, Scale, dots
from joma.study.claim import Claim, above, at_least, at_most, below, between, near

NUMBERS = st.floats(-1e150, 1e150)  # whose standard deviation can be computed
FINITE = st.floats(allow_nan=False, allow_infinity=False)
EXPECTED = st.one_of(
    st.builds(at_most, NUMBERS), st.builds(at_least, NUMBERS), st.builds(above, NUMBERS), st.builds(below, NUMBERS)
) | st.tuples(NUMBERS, NUMBERS).map(lambda pair: between(min(pair), max(pair)))


def record(values, expected, across="every"):
    run = xr.Dataset({"value": ("seed", list(values))})
    return Claim("c", "It holds.", lambda run: run.value, expected, "check", across=across).judge(run, "quick")


def parsed(picture):
    svg = ElementTree.fromstring(str(picture))
    circles = sorted(float(circle.get("cx")) for circle in svg.iter("circle"))
    return svg, circles, next(svg.iter("rect"), None)


@given(st.lists(NUMBERS, min_size=1, max_size=8), EXPECTED)
def test_every_dot_is_inside_the_picture_and_on_the_right_side_of_the_band(values, expected):
    svg, circles, band = parsed(dots(record(values, expected)))
    assert all(MARGIN <= x <= WIDTH - MARGIN for x in circles)
    left, width = float(band.get("x")), float(band.get("width"))
    assert 0 <= left <= left + width <= WIDTH + 1
    if min(values) in expected and max(values) in expected:
        assert all(left - 0.3 <= x <= left + width + 0.3 for x in circles)
    if math.isinf(expected.low):
        assert left == 0
    if math.isinf(expected.high):
        assert left + width == pytest.approx(WIDTH)
    assert f"; expected {expected.text}" in svg.get("aria-label")


@given(st.lists(FINITE, min_size=2, max_size=8))
def test_places_are_in_the_order_of_the_values(values):
    scale = Scale.spanning(values)
    places = [scale(value) for value in sorted(values)]
    assert places == sorted(places)
    if min(values) < max(values):
        assert (places[0], places[-1]) == (MARGIN, WIDTH - MARGIN)


def test_positive_numbers_over_decades_have_a_logarithmic_axis():
    picture = dots(record([1e-9, 1e-8, 1e-7], at_most(1e-5)))
    svg, circles, band = parsed(picture)
    step = (WIDTH - 2 * MARGIN) / 4
    assert circles == pytest.approx([MARGIN, MARGIN + step, MARGIN + 2 * step])
    assert float(band.get("width")) == WIDTH - MARGIN
    assert svg.get("aria-label") == "3 seeds from 1e-09 to 1e-07; expected ≤ 1e-05, logarithmic axis"


def test_more_than_nothing_begins_at_zero():
    _, circles, band = parsed(dots(record([1.0, 2.0], above(0.0))))
    assert float(band.get("x")) == MARGIN
    assert circles == [WIDTH / 2, WIDTH - MARGIN]


def test_values_that_are_not_finite_are_said_and_not_drawn():
    picture = dots(record([1.0, math.nan, math.inf, 2.0], near(1.5, 1.0)))
    svg, circles, _ = parsed(picture)
    assert len(circles) == 2
    assert svg.get("aria-label").startswith("2 of 4 seeds have a value, from 1 to 2;")
    svg, *_ = parsed(dots(record([1.0, math.nan], at_most(1))))
    assert svg.get("aria-label").startswith("1 of 2 seeds has a value, at 1;")
    assert dots(record([math.nan], at_most(1))) == ""


def test_a_record_without_bounds_has_no_band():
    claim = record([3.0], at_most(5)) | {"low": None, "high": None}
    svg, circles, band = parsed(dots(claim))
    assert band is None
    assert circles == [WIDTH / 2]
    assert svg.get("aria-label") == "one value, 3; expected ≤ 5"


@pytest.mark.parametrize(("across", "parts"), [("every", 0), ("mean", 1), ("interval", 3)])
def test_the_mean_or_its_interval_is_drawn_if_the_claim_is_judged_by_it(across, parts):
    svg, _, _ = parsed(dots(record([1.0, 2.0, 4.0], at_least(-9.0), across)))
    lines = [path.get("d") for path in svg.iter("path") if path.get("class") == "mean"]
    assert sum(line.count("M") for line in lines) == parts


def test_an_interval_beyond_zero_is_cut_at_the_edge_of_a_logarithmic_axis():
    svg, circles, _ = parsed(dots(record([1e-6, 1e-2, 2e-2], at_most(1.0), "interval")))
    (bar,) = (path.get("d") for path in svg.iter("path") if path.get("class") == "mean")
    assert bar.startswith(f"M0 {HEIGHT // 2}H")
    assert len(circles) == 3


def test_equal_dots_are_drawn_once():
    _, circles, _ = parsed(dots(record([0.5] * 1000, at_most(1))))
    assert circles == [MARGIN]


def test_text_from_a_run_is_escaped():
    claim = record([1.0], at_most(2)) | {"expected": '"<b>&'}
    assert "expected &#34;&lt;b&gt;&amp;" in dots(claim)
