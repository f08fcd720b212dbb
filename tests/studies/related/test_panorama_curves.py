"""Curves of different lengths in one Dataset."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.common_axes import NAMES, STEP
from joma.studies.related.panorama_curves import split, stack


def curve(seeds, steps, value=0.5):
    values = value * np.ones((seeds, len(steps)))
    return xr.Dataset(dict.fromkeys(NAMES, (("seed", STEP), values)), {STEP: steps, "seed": np.arange(seeds)})


@pytest.mark.parametrize("member", ["seed", "member"])
def test_what_is_stacked_is_split_again(member):
    curves = {"a": curve(2, [0, 1, 5], 0.25), "b": curve(2, [0, 8], 0.75)}
    stacked = stack(curves, "stored", member=member)
    assert dict(stacked.sizes) == {"stored_source": 2, member: 2, "stored_record": 3}
    again = split(stacked, "stored", member=member)
    assert list(again) == ["a", "b"]
    for name, expected in curves.items():
        xr.testing.assert_equal(again[name], expected.drop_vars("seed"))


def test_curves_may_have_different_numbers_of_seeds():
    again = split(stack({"a": curve(3, [0, 1]), "b": curve(1, [0, 1])}, "x", member="member"), "x", member="member")
    assert [part.sizes["seed"] for part in again.values()] == [3, 1]


def test_diverged_seeds_are_left_out_and_so_is_a_source_without_any_other():
    partly, wholly = curve(2, [0, 1]), curve(2, [0, 1])
    partly.axes_entropy[1, 1] = np.nan
    wholly.axes_entropy[:] = np.nan
    again = split(stack({"a": partly, "b": wholly}, "x", member="seed"), "x", member="seed")
    assert list(again) == ["a"]
    assert again["a"].sizes["seed"] == 1


def test_a_run_without_curves_has_none():
    assert split(xr.Dataset(), "stored", member="member") == {}
