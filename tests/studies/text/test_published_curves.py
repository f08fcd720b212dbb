"""The authors' curves as published, and distances from them against sums written out."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from joma.studies.text.published_curves import (
    PUBLISHED_LOSS,
    WIKITEXT2,
    distance_of_means,
    distances,
    early_fall,
    has_attributes,
    leave_one_out,
    like_published,
    loss_tolerance,
    on_wikitext,
    on_wikitext103,
    prediction_half_width,
    published,
    published_entropy,
)
from joma.study import NotInRun


def test_published_numbers_are_those_of_the_paper():
    assert published().sizes["seed"] == 3
    for depth, value in PUBLISHED_LOSS.items():
        assert float(published().valid_loss.sel(depth=depth).min("step").mean()) == pytest.approx(value, abs=6e-4)
    mean = published().mean("seed")
    curve = mean.entropy.sel(depth=1, layer=0)
    assert float(curve.isel(step=0)) == pytest.approx(2.511, abs=1e-3)
    assert int(curve.idxmin("step")) == 2000
    assert float(curve.min()) == pytest.approx(1.554, abs=1e-3)
    two_layers = mean.entropy.sel(depth=2).sel(step=[0, 58_000])
    np.testing.assert_allclose(two_layers.isel(layer=[0, 1], step=0), [2.511, 2.546], atol=1e-3)


@pytest.mark.parametrize("depth", PUBLISHED_LOSS)
def test_distances_are_sums_written_out(depth):
    theirs = published_entropy(depth).transpose("seed", "layer", "step").values
    ours = theirs + np.random.default_rng(depth).normal(0, 0.1, theirs.shape)
    pairs = [(1, 2), (0, 2), (0, 1)]
    for seed, (first, second) in enumerate(pairs):
        expected = np.abs(theirs[seed] - (theirs[first] + theirs[second]) / 2).mean()
        assert leave_one_out(depth)[seed] == pytest.approx(expected, rel=1e-12)
    labels = {"seed": [0, 1, 2], "layer": range(depth), "step": published().step.values, "head": [0]}
    entropy = xr.DataArray(ours[..., None], labels, ("seed", "layer", "step", "head"))
    by_hand = [np.mean([np.abs(run - theirs[[*pair]].mean(0)).mean() for pair in pairs]) for run in ours]
    np.testing.assert_allclose(distances(entropy, depth), by_hand, rtol=1e-12)
    assert distance_of_means(entropy, depth) == pytest.approx(np.abs(ours.mean(0) - theirs.mean(0)).mean(), rel=1e-12)


def test_a_curve_without_the_published_steps_has_no_distance():
    entropy = published_entropy(1).isel(step=slice(0, 5)).expand_dims(head=[0])
    for measure in (distances, distance_of_means):
        with pytest.raises(NotInRun, match="step 5000"):
            measure(entropy, 1)


def test_the_mean_of_three_more_values_lies_in_the_prediction_interval_in_95_of_100_cases():
    draws = np.random.default_rng(0).normal(2.0, 0.3, (4_000, 6))
    inside = [abs(row[:3].mean() - row[3:].mean()) <= prediction_half_width(row[:3]) for row in draws]
    low, high = stats.binomtest(sum(inside), len(inside)).proportion_ci(0.999)
    assert low <= 0.95 <= high
    expected = like_published(xr.DataArray(draws[0, :3]))
    assert (expected.low + expected.high) / 2 == pytest.approx(draws[0, :3].mean(), abs=1e-4)
    assert expected.high - expected.low == pytest.approx(2 * prediction_half_width(draws[0, :3]), abs=2e-4)


def test_the_early_fall_is_within_its_steps():
    curve = xr.DataArray([3.0, 2.0, 1.5, 0.5, 2.5], {"step": [0, 2_000, 4_000, 6_000, 8_000]}, ("step",))
    assert float(early_fall(curve)) == 1.5


def test_wikitext_is_known_by_its_numbers():
    run = xr.Dataset(attrs={**WIKITEXT2, "glance": 0})
    assert on_wikitext(run)
    assert not on_wikitext(run.assign_attrs(tokens=5))
    assert not on_wikitext(xr.Dataset())
    assert has_attributes(xr.Dataset(), {"glance": 0})
    assert not on_wikitext103(run)
    assert on_wikitext103(run.assign_attrs(tokens=101_000_000))
    assert not on_wikitext103(run.assign_attrs(tokens=110_000_000))


def test_the_tolerance_of_losses_is_the_largest_over_depths():
    losses = [published().valid_loss.sel(depth=depth).min("step").values for depth in PUBLISHED_LOSS]
    quantile = stats.t.ppf(0.975, 2)
    assert loss_tolerance() == pytest.approx(max(quantile * np.std(three, ddof=1) * np.sqrt(2 / 3) for three in losses))
