"""Claims as rows: numbers as people read them, what a claim is judged by, and counts by kind."""

from __future__ import annotations

import math

import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.report.rows import HEADINGS, NO_BREAK, VERDICTS, by_kind, readable, row
from joma.study.claim import Claim, at_least, at_most
from joma.verdicts import KINDS

SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def record(values, across="every", kind="theorem", presets=("quick",)):
    run = xr.Dataset({"value": ("seed", values)})
    claim = Claim("c", "It holds.", lambda run: run.value, at_least(1), kind, "nats", across, presets)
    return claim.judge(run, "quick")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_power_of_ten_is_the_number_it_stands_for(value):
    text = readable(f"{value:.4g}").replace("−", "-")
    mantissa, times, power = text.partition(f"{NO_BREAK}×{NO_BREAK}")
    if not times and text.translate(SUPERSCRIPTS) != text:  # the mantissa 1 is not written
        mantissa, power = text.partition("10")[0] + "1", text.lstrip("-")
    exponent = power[2:].translate(SUPERSCRIPTS)
    assert float(f"{mantissa}e{exponent or 0}") == float(f"{value:.4g}")


@pytest.mark.parametrize(
    "text",
    [
        "≥ 0.9",
        "inf",
        "nan",
        "–",
        "",
        "e",
        "1e",
        "here and there",
        "e5",
        "0.4278 ± 0.001",
        "lr=1e-4",
        "v1e5",
        "1e-4x",
        "x=-1",
        "--2",
        "2402-3",
    ],
)
def test_other_text_stays_as_it_is(text):
    assert readable(text) == text


@pytest.mark.parametrize(
    ("across", "number", "judged"),
    [
        ("every", "4 ± 1", "3 to 5 over 3 seeds; judged by every seed"),
        ("mean", "4 ± 1", "3 to 5 over 3 seeds; judged by the mean"),
        ("interval", "4 ± 1", "judged by the 95\N{NO-BREAK SPACE}% interval 1.52 to 6.48 over 3 seeds"),
    ],
)
def test_a_row_says_what_the_claim_is_judged_by(across, number, judged):
    shown = row(record([3.0, 4.0, 5.0], across))
    assert (shown["number"], shown["judged"]) == (number, judged)
    assert (shown["statement"], shown["quantity"], shown["expected"]) == ("It holds.", "nats", "≥ 1")


def test_an_undecided_claim_has_its_interval_once():
    shown = row(record([0.0, 1.0, 2.0], "interval"))
    assert (shown["number"], shown["judged"]) == ("1 ± 1", "over 3 seeds")
    assert shown["reason"] == "undecided: the 95\N{NO-BREAK SPACE}% interval over seeds, −1.48 to 3.48, contains 1"


def test_a_single_value_has_no_spread():
    shown = row(record([2.0]))
    assert (shown["number"], shown["judged"]) == ("2", "")


def test_seeds_that_are_not_finite_are_counted():
    shown = row(record([2.0, math.nan, math.inf]))
    assert (shown["number"], shown["judged"]) == ("–", "2 of 3 seeds have no finite value")
    assert (shown["sign"], shown["css"]) == VERDICTS["does not hold"]


@pytest.mark.parametrize(
    ("values", "number", "judged"),
    [
        ([1.0, 1.0, 1.0], "1", "the same in all 3 seeds"),
        ([1.9879, 1.9881, 1.9880], "1.988 ± 0.0001", "1.9879 to 1.9881 over 3 seeds; judged by every seed"),
        ([5e-4, 5.2e-4, 4.8e-4], "0.0005 ± 0.00002", "0.00048 to 0.00052 over 3 seeds; judged by every seed"),
        ([2.0, 2.0000002, 2.0000004], "2 ± 2 × 10⁻⁷", "the same to six digits in all 3 seeds"),
        ([0.9996, 3.0, 5.0], "3 ± 2", "0.9996 to 5 over 3 seeds; judged by every seed"),
        ([100.0, 300.0, 500.0], "300 ± 200", "100 to 500 over 3 seeds; judged by every seed"),
        ([-3.0, -4.0, -5.0], "−4 ± 1", "−5 to −3 over 3 seeds; judged by every seed"),
        ([2.0, math.nan, 2.0], "–", "1 of 3 seeds has no finite value"),
    ],
)
def test_a_spread_is_written_as_people_write_it(values, number, judged):
    shown = row(record(values))
    assert (shown["number"].replace(NO_BREAK, " "), shown["judged"]) == (number, judged)


def test_tiny_numbers_have_one_power_of_ten():
    shown = row(record([3e-14, 4e-14, 5e-14]))
    assert shown["number"].split(NO_BREAK) == ["(4 ± 1)", "×", "10⁻¹⁴"]


@given(st.lists(st.floats(-1e100, 1e100), min_size=2, max_size=4, unique=True))
def test_every_spread_has_a_text_whose_ends_differ(values):
    shown = row(record(values))
    assert "e" not in shown["number"]
    if f"{min(values):.6g}" == f"{max(values):.6g}":
        assert shown["judged"] == f"the same to six digits in all {len(values)} seeds"
    else:
        low, high = shown["judged"].partition(" over ")[0].split(" to ")
        assert low != high


def test_a_claim_that_is_not_tested_has_its_reason():
    shown = row(record([2.0], presets=("paper",)))
    assert (shown["verdict"], shown["reason"], shown["sign"]) == ("not tested", "decided at preset paper only", "–")


def test_kinds_are_apart_and_in_their_order():
    claims = [(record([2.0], kind=kind), {"link": kind}) for kind in reversed(KINDS)]
    claims.append((record([0.0], kind="theorem"), {"link": "second"}))
    groups = by_kind(claims)
    assert [group["kind"] for group in groups] == [*KINDS] == [*HEADINGS]
    assert [[row["link"] for row in group["rows"]] for group in groups[:2]] == [["theorem", "second"], ["figure"]]
    assert [group["counts"] for group in groups[:2]] == ["1 holds, 1 does not", "1 holds"]


def test_bounds_are_powers_of_ten_too():
    run = xr.Dataset({"value": ("seed", [0.0])})
    claim = Claim("c", "Small.", lambda run: run.value, at_most(1e-10), "check").judge(run, "quick")
    assert row(claim)["expected"] == "≤ 10⁻¹⁰"
