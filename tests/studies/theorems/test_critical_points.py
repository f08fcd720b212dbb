"""The study of critical points: closed forms, the counts that Theorem 3 leads to, bad configs, and what is drawn."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from drawn import legend, series, title
from joma.arguments import InputError
from joma.drawing import activation_name
from joma.studies.theorems.critical_points import CLAIMS, STUDY, Config, draw_landscape, outcome, run
from joma.study import Context

SMALL = Config(
    tokens=6,
    components=3,
    starts=9,
    overlaps=(0.0, 0.5),
    mixtures=2,
    runs=3,
    clock=200.0,
    driven=("relu",),
    samples=2,
    horizon=0.1,
    times=4,
)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def verdict(trajectory, name):
    return next(claim for claim in CLAIMS if claim.name == name).judge(trajectory, "quick")["verdict"]


def test_the_plain_flow_has_no_stable_point_and_the_constrained_ones_have(trajectory):
    stable = trajectory["count"].sel(kind="stable")
    assert float(stable.sel(flow="plain").max()) == 0
    assert float(stable.sel(flow=["sphere", "decayed"]).min()) == 1
    verdicts = {name: verdict(trajectory, name) for name in ("plain", "folded", "complete")}
    assert verdicts == {"plain": "does not hold", "folded": "holds", "complete": "holds"}
    assert (
        float((trajectory.cosine.sel(activation="relu") - trajectory.cosine.sel(activation="linear"))[:, 1:].min()) > 0
    )


def test_linear_control_is_the_closed_form(trajectory):
    np.testing.assert_allclose(trajectory.overlap_cosine.sel(unit="linear"), trajectory.overlap_linear, atol=1e-8)
    cosine = trajectory.cosine.sel(activation="linear")
    np.testing.assert_allclose(cosine.sel(flow="sphere"), cosine.sel(flow="decayed"), atol=1e-8)


def test_every_run_has_one_fate(trajectory):
    np.testing.assert_allclose(trajectory.fate_share.sum("fate"), 1)
    assert float(trajectory.fate_share.sel(fate="grew").min()) > 0


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(replace(SMALL, mixtures=1, horizon=0.01, times=3), Context((1,)))
    shared = trajectory.sel(seed=1)
    for name in ("count", "cosine", "near"):
        np.testing.assert_array_equal(alone[name][0], shared[name])


def test_the_landscape_is_drawn_from_the_stored_dataset_alone(trajectory, tmp_path):
    path = tmp_path / "trajectory.nc"
    trajectory.to_netcdf(path, engine="h5netcdf")
    with xr.open_dataset(path, engine="h5netcdf") as stored:
        left, middle, right = draw_landscape(stored).axes
    assert [title(panel)[:3] for panel in (left, middle, right)] == ["(a)", "(b)", "(c)"]
    assert legend(left) == ["plain", "unit norm", "weight decay"]
    assert [tick.get_text() for tick in left.get_xticklabels()] == [activation_name(name) for name in SMALL.activations]
    np.testing.assert_array_equal(series(left)["unit norm"][:, 1], 1)
    assert [tick.get_text() for tick in middle.get_xticklabels()] == ["grew", "died", "stalled"]
    assert legend(right) == ["linear, closed form", "ReLU", "linear"]
    closed = series(right)["linear, closed form"]
    np.testing.assert_array_equal(closed[:, 0], SMALL.overlaps)
    np.testing.assert_allclose(series(right)["linear"][:, 1], closed[:, 1], atol=1e-8)


def test_all_figures_are_in_the_study(trajectory):
    panels = {name: len(drawing.draw(trajectory).axes) for name, drawing in STUDY.figures.items()}
    assert panels == {"landscape": 3, "parting": 3 * len(SMALL.driven), "settings": 3}


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
        ({"overlaps": (0.5, 0.5)}, "overlaps"),
        ({"driven": ("relu", "relu")}, "driven"),
        ({"close": 2.0}, "close"),
        ({"mixtures": 0}, "mixtures"),
        ({"samples": 1}, "samples"),
        ({"samples": 5}, "samples"),
        ({"context_sigma": 0.5}, "context_sigma"),
        ({"context_weights": (0.0, -1.0)}, "context_weights"),
        ({"horizon": -1.0}, "horizon"),
        ({"times": 1}, "times"),
        ({"clock": np.nan}, "clock"),
    ],
)
def test_bad_config_is_named_before_anything_runs(change, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        run(replace(SMALL, **change), Context((0,)))


def test_every_claim_can_be_measured_on_the_run(trajectory):
    records = {claim.name: claim.judge(trajectory, "quick") for claim in CLAIMS}
    assert len(records) == len(CLAIMS)
    assert {name for name, record in records.items() if record["measured"]["mean"] is None} == set()


def test_the_outcome_states_the_run(trajectory):
    sentence = outcome(trajectory)
    assert "exists for 0 % of the plain flows, 100 % of those with weights of length 1" in sentence
    everywhere = trajectory.assign(near=0 * trajectory.near + 1)
    assert "exists for 100 % of the plain flows" in outcome(everywhere)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("folded", lambda run: run.assign(coupled=run.coupled * (1 + 2e-6))),
        ("complete", lambda run: run.assign(euler_defect=run.euler_defect + 1)),
        ("unit-norm", lambda run: run.assign(near=0 * run.near)),
        ("fates", lambda run: run.assign(fate_share=0 * run.fate_share + 1 / 3)),
    ],
)
def test_a_claim_fails_on_a_run_that_contradicts_it(trajectory, name, spoil):
    assert verdict(spoil(trajectory), name) == "does not hold"
