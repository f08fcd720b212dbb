"""The study against what is known of its parts: closed forms, integrated flows, and cases where Theorem 4 is right."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.theorems import flow_comparison
from joma.studies.theorems.critical_points import CLAIMS, KINDS, STUDY, Config, draw_landscape, run
from joma.study import Context
from joma.theory import growth

SMALL = Config(
    tokens=6,
    components=3,
    starts=9,
    overlaps=(0.0, 0.5),
    mixtures=2,
    runs=3,
    clock=200.0,
    samples=4,
    horizon=3.0,
    times=31,
)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def judged(trajectory, name):
    return next(claim for claim in CLAIMS if claim.name == name).judge(trajectory, "quick")


def test_the_plain_flow_has_no_stable_point_and_the_constrained_ones_have(trajectory):
    stable = trajectory["count"].sel(kind="stable")
    assert float(stable.sel(flow="plain").max()) == 0
    assert float(stable.sel(flow=["sphere", "decayed"]).min()) == 1
    verdicts = {name: judged(trajectory, name)["verdict"] for name in ("plain", "folded", "complete", "nonlinear")}
    assert verdicts == {"plain": "does not hold", "folded": "holds", "complete": "holds", "nonlinear": "holds"}


def test_linear_control_is_the_closed_form(trajectory):
    np.testing.assert_allclose(trajectory.overlap_cosine.sel(unit="linear"), trajectory.overlap_linear, atol=1e-8)
    cosine = trajectory.cosine.sel(activation="linear")
    np.testing.assert_allclose(cosine.sel(flow="sphere"), cosine.sel(flow="decayed"), atol=1e-8)


def test_every_run_has_one_fate(trajectory):
    np.testing.assert_allclose(trajectory.fate_share.sum("fate"), 1)
    assert float(trajectory.fate_share.sel(fate="grew").min()) > 0


def test_folding_is_exact_without_decay_and_not_with_it(trajectory):
    gap = flow_comparison.distance(trajectory).sel(ladder="folded")
    assert float(gap.sel(full="plain").max()) < 1e-4
    assert float(gap.sel(full="decayed", driven="relu").max()) > 1e-4


def test_the_reduced_path_is_theorem_4_about_its_centre(trajectory):
    one = trajectory.sel(driven="tanh", full="decayed").isel(seed=1)
    expected = growth.nonlinear(one.centre.values, float(one.rate) * one.time.values, flow_comparison.START)
    np.testing.assert_allclose(one.approximation.sel(ladder="reduced at rest"), expected, atol=1e-12)


def test_with_one_centre_and_decay_theorem_4_follows_a_relu_unit():
    """All of the noise is above the kink, so that the drive is constant: rate = λ, μ = x̄/λ, and nothing is left out."""
    config = replace(SMALL, context_weights=(1.0,), driven=("relu",), horizon=0.6, times=13)
    compared = flow_comparison.compare(config, np.random.default_rng(0))
    gap = flow_comparison.distance(compared).sel(full="decayed", driven="relu")
    assert float(gap.sel(ladder="averaged").max()) < 1e-2
    assert float(gap.sel(ladder="reduced at rest").max()) < 5e-2
    np.testing.assert_allclose(compared.rate.sel(full="decayed"), config.decay, rtol=1e-6)


def made_up(gap):
    """A run in which the full flow is (1, 0) at all times and one approximation is off by `gap`."""
    gap = np.asarray(gap, dtype=float)
    full = np.stack([np.ones_like(gap), np.zeros_like(gap)], axis=-1)
    made = xr.Dataset(
        {"coupled": (("time", "token"), full), "approximation": (("ladder", "time", "token"), full[None] + 0)},
        {"time": np.arange(len(gap)) / 2.0, "ladder": ["reduced"]},
    )
    made["approximation"][0, :, 1] = gap
    return made


def test_distance_and_parting_time_by_hand():
    made = made_up([0, 0.05, 0.2, 0.01, 0.3])
    np.testing.assert_allclose(flow_comparison.distance(made)[0], [0, 0.05, 0.2, 0.01, 0.3])
    assert float(flow_comparison.parting_time(made)[0]) == 1.0
    assert float(flow_comparison.parting_time(made_up([0, 0.05, 0.1]))[0]) == 1.0  # never: the end of its life
    assert float(flow_comparison.parting_time(made_up([np.inf, np.inf]))[0]) == 0.0


def test_after_its_blow_up_the_full_flow_is_not_compared():
    made = made_up([0, 0.0, 0.0, 9.0])
    made["coupled"][2:] = np.inf
    assert float(flow_comparison.life(made)) == 0.5
    np.testing.assert_array_equal(np.isnan(flow_comparison.distance(made)[0]), [False, False, True, True])
    assert float(flow_comparison.parting_time(made)[0]) == 0.5


def test_the_scale_never_shrinks():
    """A full flow that passes through zero must not make small distances look large."""
    made = made_up([0.01, 0.01])
    made["coupled"][1] = 0.0
    made["approximation"][0, 1] = [0.0, 0.01]
    np.testing.assert_allclose(flow_comparison.distance(made)[0], [0.01, 0.01])


def test_recovery_is_the_rise_above_the_least_entropy(trajectory):
    bounced = trajectory.copy(deep=True)
    bounced["entropy"][:] = 1.0
    bounced["entropy"][..., 5:10] = 0.3
    bounced["entropy"][..., 10:] = 0.7
    np.testing.assert_allclose(flow_comparison.recovery(bounced), 0.4)
    bounced["entropy"][..., 10:] = np.nan  # blown up at the bottom
    np.testing.assert_allclose(flow_comparison.recovery(bounced), 0.0)


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(replace(SMALL, mixtures=1, driven=("relu",), horizon=0.2, times=3), Context((1,)))
    shared = trajectory.sel(seed=1)
    for name in ("count", "cosine", "near"):
        np.testing.assert_array_equal(alone[name][0], shared[name])


def test_it_is_drawn_from_the_dataset_alone(trajectory, tmp_path):
    path = tmp_path / "trajectory.nc"
    trajectory.to_netcdf(path, engine="h5netcdf")
    with xr.open_dataset(path, engine="h5netcdf") as stored:
        assert len(draw_landscape(stored).axes) == 3
        assert len(flow_comparison.draw_parting(stored).axes) == 6


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"activations": ("linear", "relu", "swish")}, "activations"),
        ({"activations": ("linear", "gelu")}, "activations"),
        ({"driven": ("tanh",)}, "driven"),
        ({"driven": ("relu", "swish")}, "driven"),
        ({"tokens": 1}, "tokens"),
        ({"components": 1}, "components"),
        ({"sigma": 0.0}, "sigma"),
        ({"decay": 0.0}, "decay"),
        ({"starts": 0}, "starts"),
        ({"overlaps": (0.0, 1.0)}, "overlaps"),
        ({"overlaps": ()}, "overlaps"),
        ({"close": 2.0}, "close"),
        ({"mixtures": 0}, "mixtures"),
        ({"samples": 1}, "samples"),
        ({"context_sigma": 0.5}, "context_sigma"),
        ({"context_weights": (0.0, -1.0)}, "context_weights"),
        ({"horizon": -1.0}, "horizon"),
        ({"times": 1}, "times"),
        ({"clock": np.nan}, "clock"),
    ],
)
def test_bad_config_is_named_before_anything_runs(change, name):
    with pytest.raises(InputError, match=f"`{name}` must be"):
        run(replace(SMALL, **change), Context((0,)))


def test_claims_have_their_own_names_and_presets_are_configs_of_this_study():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert all(isinstance(preset.config, Config) for preset in STUDY.presets.values())
    assert KINDS == ("stable", "saddle", "unstable", "degenerate")
