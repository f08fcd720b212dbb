"""The comparison of flows: measures by hand, cases where an approximation is exact, and what is drawn."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from drawn import legend, series, title
from joma.arguments import InputError
from joma.drawing import activation_name
from joma.studies.theorems.flow_comparison import (
    FULL,
    LADDER,
    SETTINGS,
    START,
    FlowConfig,
    check,
    compare,
    distance,
    draw_parting,
    draw_settings,
    folded_distance,
    followed_by,
    largest_rise,
    lifetime,
    parting_time,
)
from joma.theory import growth

SMALL = FlowConfig(starts=9, samples=2, horizon=0.2, times=13)


@pytest.fixture(scope="module")
def trajectory():
    return compare(SMALL, np.random.default_rng([0, 3])).expand_dims(seed=[0])


def test_all_flows_start_at_the_same_weights(trajectory):
    start = trajectory.coupled.isel(time=0)
    np.testing.assert_allclose(start.sel(setting=["overlapping", "disjoint"]), START)
    np.testing.assert_allclose((start.sel(setting="near") ** 2).sum("token"), 1)
    for name in ("folded", "averaged", "reduced at rest"):
        np.testing.assert_allclose(trajectory.approximation.sel(ladder=name).isel(time=0).broadcast_like(start), start)
    assert trajectory.setting.values.tolist() == list(SETTINGS)
    assert trajectory.ladder.values.tolist() == list(LADDER)
    assert trajectory.full.values.tolist() == list(FULL)


def test_disjoint_centres_share_no_token_and_the_start_near_one_is_in_it(trajectory):
    cosine = trajectory.centre_cosine
    np.testing.assert_array_equal(cosine.sel(setting=["disjoint", "near"]), 0)
    assert 0.85 < cosine.sel(setting="overlapping").item() < 1
    start = trajectory.coupled.sel(setting="near").isel(time=0, driven=0, full=0)
    np.testing.assert_array_equal(start > 0, np.arange(6) % 3 == np.zeros((1, 1)))  # the tokens of the first centre


def test_folding_is_exact_without_decay_and_not_with_it(trajectory):
    gap = distance(trajectory).sel(ladder="folded")
    assert float(folded_distance(trajectory).max()) < 1e-6
    np.testing.assert_allclose(folded_distance(trajectory).max(), gap.sel(full="plain").max())
    assert float(gap.sel(full="decayed", driven="relu").max()) > 1e-4


def test_the_reduced_path_is_theorem_4_about_its_centre(trajectory):
    selected = trajectory.sel(driven="tanh", full="decayed", setting="disjoint").isel(seed=0)
    expected = growth.nonlinear(selected.centre.values, float(selected.rate) * selected.time.values, START)
    np.testing.assert_allclose(selected.approximation.sel(ladder="reduced at rest"), expected, atol=1e-12)


def test_with_one_centre_and_decay_theorem_4_follows_a_relu_unit():
    """All of the noise is above the kink: the drive is constant, rate = λ, μ = x̄/λ, and Theorem 4 omits nothing."""
    config = replace(SMALL, context_weights=(1.0,), driven=("relu",), horizon=0.3, times=5)
    compared = compare(config, np.random.default_rng(0))
    gap = distance(compared).sel(full="decayed", driven="relu", setting="overlapping")
    assert float(gap.sel(ladder="averaged").max()) < 1e-2
    assert float(gap.sel(ladder="reduced at rest").max()) < 5e-2
    np.testing.assert_allclose(compared.rate.sel(full="decayed"), config.decay, rtol=1e-6)


def flow_with_distance(gap):
    """A run in which the full flow is (1, 0) at all times and one approximation is off by `gap`."""
    gap = np.asarray(gap, dtype=float)
    full = np.stack([np.ones_like(gap), np.zeros_like(gap)], axis=-1)
    run = xr.Dataset(
        {"coupled": (("time", "token"), full), "approximation": (("ladder", "time", "token"), full[None] + 0)},
        {"time": np.arange(len(gap)) / 2.0, "ladder": ["reduced"]},
    )
    run["approximation"][0, :, 1] = gap
    return run


def test_distance_and_parting_time_by_hand():
    run = flow_with_distance([0, 0.05, 0.2, 0.01, 0.3])
    np.testing.assert_allclose(distance(run)[0], [0, 0.05, 0.2, 0.01, 0.3])
    assert float(parting_time(run)[0]) == 1.0
    assert float(parting_time(flow_with_distance([0, 0.05, 0.1]))[0]) == 1.0  # never: the end of its lifetime
    assert float(parting_time(flow_with_distance([np.inf, np.inf]))[0]) == 0.0


def test_after_its_blow_up_the_full_flow_is_not_compared():
    run = flow_with_distance([0, 0.0, 0.0, 9.0])
    run["coupled"][2:] = np.inf
    assert float(lifetime(run)) == 0.5
    np.testing.assert_array_equal(np.isnan(distance(run)[0]), [False, False, True, True])
    assert float(parting_time(run)[0]) == 0.5


def test_the_scale_never_shrinks():
    """A full flow that passes through zero must not make small distances look large."""
    run = flow_with_distance([0.01, 0.01])
    run["coupled"][1] = 0.0
    run["approximation"][0, 1] = [0.0, 0.01]
    np.testing.assert_allclose(distance(run)[0], [0.01, 0.01])


def test_the_largest_rise_is_that_above_the_least_entropy(trajectory):
    bounced = trajectory.copy(deep=True)
    bounced["entropy"][:] = 1.0
    bounced["entropy"][..., 5:10] = 0.3
    bounced["entropy"][..., 10:] = 0.7
    np.testing.assert_allclose(largest_rise("decayed", "near")(bounced), 0.4)
    bounced["entropy"][..., 10:] = np.nan  # blown up at the bottom
    np.testing.assert_allclose(largest_rise("decayed", "near")(bounced), 0.0)


def test_share_followed_is_the_least_over_activations():
    run = xr.concat([flow_with_distance([0, 0.2, 0, 0, 0]), flow_with_distance([0, 0, 0, 0.2, 0])], dim="driven")
    run = run.expand_dims(full=["plain"], setting=["near"])
    run = run.assign(parted=parting_time(run))
    assert float(followed_by("reduced", "plain", "near")(run)) == 0.25


def test_each_activation_is_drawn_with_components_distance_and_entropy(trajectory):
    figure = draw_parting(trajectory)
    panels = figure.axes
    suffixes = ("the weights part", "distance from the full flow", "entropy of attention")
    expected = [f"{activation_name(activation)}: {suffix}" for activation in SMALL.driven for suffix in suffixes]
    assert [title(panel)[5:] for panel in panels] == expected
    components, distances, entropy = panels[3:]  # of tanh
    assert len(legend(components)) == 3
    assert components.get_ylim() == (-2.5, 2.5)
    assert legend(distances) == list(LADDER)
    labels = {"driven": "tanh", "setting": "overlapping"}
    averaged = distance(trajectory).sel(full="plain", ladder="averaged", **labels).mean("seed")
    np.testing.assert_allclose(series(distances)["averaged"][1:, 1], averaged[1:])
    (below,) = figure.legends  # there is no room for it in the panels
    labels_below = [text.get_text() for text in below.get_texts()]
    assert labels_below == ["reduced", "reduced, weight decay", "full", "full, weight decay"]
    full = trajectory.entropy.sel(full="decayed", **labels).mean("seed")[::8]
    np.testing.assert_allclose(series(entropy)["full, weight decay"][:, 1], full)


def test_settings_are_drawn_by_approximation_and_flow(trajectory):
    plain, decayed, entropy = draw_settings(trajectory).axes
    assert legend(plain) == legend(decayed) == list(LADDER)
    assert legend(entropy) == list(FULL)
    expected = [followed_by("averaged", "decayed", name)(trajectory).mean("seed") for name in SETTINGS]
    np.testing.assert_allclose(series(decayed)["averaged"][:, 1], expected)
    gained = [largest_rise("plain", name)(trajectory).mean("seed") for name in SETTINGS]
    np.testing.assert_allclose(series(entropy)["plain"][:, 1], gained)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"driven": ("swish",)}, "driven"),
        ({"samples": 5}, "samples"),
        ({"context_tokens": 1}, "context_tokens"),
        ({"context_tokens": 2}, "context_tokens"),
        ({"context_sigma": 0.4}, "context_sigma"),
        ({"context_weights": (-1.0,)}, "context_weights"),
        ({"horizon": 0.0}, "horizon"),
    ],
)
def test_a_bad_config_is_refused_by_name(change, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        check(replace(SMALL, **change))
