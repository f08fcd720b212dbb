"""The comparison of flows: measures by hand, cases where an approximation is exact, and what is drawn."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from drawn import legend, series, title
from joma.arguments import InputError
from joma.studies.theorems.flow_comparison import (
    FULL,
    LADDER,
    START,
    FlowConfig,
    check,
    compare,
    distance,
    draw_parting,
    followed_by,
    lifetime,
    parting_time,
    recovery,
)
from joma.theory import growth

SMALL = FlowConfig(starts=9, samples=4, horizon=3.0, times=31)


@pytest.fixture(scope="module")
def trajectory():
    seeds = [compare(SMALL, np.random.default_rng([seed, 3])) for seed in (0, 1)]
    return xr.concat(seeds, dim=xr.Variable("seed", [0, 1]))


def test_all_flows_start_at_the_same_weights(trajectory):
    np.testing.assert_allclose(trajectory.coupled.isel(time=0), START)
    for name in ("folded", "averaged", "reduced at rest"):
        np.testing.assert_allclose(trajectory.approximation.sel(ladder=name).isel(time=0), START)
    assert trajectory.ladder.values.tolist() == list(LADDER)
    assert trajectory.full.values.tolist() == list(FULL)


def test_folding_is_exact_without_decay_and_not_with_it(trajectory):
    gap = distance(trajectory).sel(ladder="folded")
    assert float(gap.sel(full="plain").max()) < 1e-4
    assert float(gap.sel(full="decayed", driven="relu").max()) > 1e-4


def test_the_reduced_path_is_theorem_4_about_its_centre(trajectory):
    selected = trajectory.sel(driven="tanh", full="decayed").isel(seed=1)
    expected = growth.nonlinear(selected.centre.values, float(selected.rate) * selected.time.values, START)
    np.testing.assert_allclose(selected.approximation.sel(ladder="reduced at rest"), expected, atol=1e-12)


def test_with_one_centre_and_decay_theorem_4_follows_a_relu_unit():
    """All of the noise is above the kink: the drive is constant, rate = λ, μ = x̄/λ, and Theorem 4 omits nothing."""
    config = replace(SMALL, context_weights=(1.0,), driven=("relu",), horizon=0.6, times=13)
    compared = compare(config, np.random.default_rng(0))
    gap = distance(compared).sel(full="decayed", driven="relu")
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


def test_recovery_is_the_rise_above_the_least_entropy(trajectory):
    bounced = trajectory.copy(deep=True)
    bounced["entropy"][:] = 1.0
    bounced["entropy"][..., 5:10] = 0.3
    bounced["entropy"][..., 10:] = 0.7
    np.testing.assert_allclose(recovery(bounced), 0.4)
    bounced["entropy"][..., 10:] = np.nan  # blown up at the bottom
    np.testing.assert_allclose(recovery(bounced), 0.0)


def test_share_followed_is_the_least_over_activations():
    run = xr.concat([flow_with_distance([0, 0.2, 0, 0, 0]), flow_with_distance([0, 0, 0, 0.2, 0])], dim="driven")
    run = run.expand_dims(full=["plain"])
    run = run.assign(parted=parting_time(run))
    assert float(followed_by("reduced", "plain")(run)) == 0.25


def test_each_activation_is_drawn_with_components_distance_and_entropy(trajectory):
    panels = draw_parting(trajectory).axes
    suffixes = ("seed 0", "from the full flow", "entropy")
    expected = [f"{activation}, {suffix}" for activation in SMALL.driven for suffix in suffixes]
    assert [title(panel)[5:] for panel in panels] == expected
    components, distances, entropy = panels[3:]  # of tanh
    assert len(legend(components)) == 3
    assert components.get_ylim() == (-2.5, 2.5)
    assert legend(distances) == list(LADDER)
    averaged = distance(trajectory).sel(driven="tanh", full="plain", ladder="averaged").mean("seed")
    np.testing.assert_allclose(series(distances)["averaged"][1:, 1], averaged[1:])
    assert legend(entropy) == ["reduced", "reduced, weight decay", "full", "full, weight decay"]
    full = trajectory.entropy.sel(driven="tanh", full="decayed").mean("seed")[::8]
    np.testing.assert_allclose(series(entropy)["full, weight decay"][:, 1], full)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"driven": ("swish",)}, "driven"),
        ({"samples": 5}, "samples"),
        ({"context_tokens": 1}, "context_tokens"),
        ({"context_sigma": 0.4}, "context_sigma"),
        ({"context_weights": (-1.0,)}, "context_weights"),
        ({"horizon": 0.0}, "horizon"),
    ],
)
def test_a_bad_config_is_refused_by_name(change, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        check(replace(SMALL, **change))
