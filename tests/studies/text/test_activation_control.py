"""Linear against nonlinear: claims on curves whose shape is known, and the study on a small text."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.text.activation_control import (
    CLAIMS,
    LINEAR,
    NONLINEAR,
    Config,
    draw_activations,
    nonlinear_excess,
    outcome,
    run,
)
from joma.studies.text.entropy_bounce import bounces
from joma.study import Context

SMALL = Config(tokeniser="bytes", width=8, hidden=8, batch=4, length=8, steps=6, every=2, rate=1e-2, glance=30)
STEPS = np.arange(50)
FALLS, TURNS = 2 - STEPS / 49, 1 + abs(STEPS / 24.5 - 1)
LEVEL = np.full(50, 2.0)


def run_with(curves, *, noise=0.01, seeds=3):
    """A run whose entropy has a known shape for each activation."""
    rng = np.random.default_rng(5)
    clean = np.stack([*curves.values()])[:, None, :, None, None]
    values = clean + noise * rng.standard_normal((len(curves), seeds, len(STEPS), 1, 1))
    entropy = xr.DataArray(values, dims=("activation", "seed", "step", "layer", "head"))
    loss = xr.DataArray(np.arange(len(curves)), dims="activation") + xr.zeros_like(entropy[..., 0, 0])
    trajectory = xr.Dataset({"entropy": entropy, "valid_loss": loss}).assign_coords(activation=[*curves], step=STEPS)
    return trajectory.merge(bounces(trajectory.entropy))


NAMES = {claim.name for claim in CLAIMS}


def claims_with(trajectory, verdict="holds"):
    return {claim.name for claim in CLAIMS if claim.judge(trajectory, "quick")["verdict"] == verdict}


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_all_claims_hold_where_the_theorems_do():
    trajectory = run_with({LINEAR: FALLS, **dict.fromkeys(NONLINEAR, TURNS)})
    assert claims_with(trajectory) == NAMES
    np.testing.assert_allclose(nonlinear_excess(trajectory), 0.5, atol=0.03)


def test_what_a_seed_did_before_it_diverged_is_no_result():
    clean = run_with({LINEAR: FALLS, **dict.fromkeys(NONLINEAR, TURNS)})[["entropy", "valid_loss"]]
    clean["entropy"] = clean.entropy.where((clean.seed != 1) | (clean.step < 45))
    diverged = clean.merge(bounces(clean.entropy))
    for claim in CLAIMS:
        np.testing.assert_array_equal(np.isnan(claim.measure(diverged)), [False, True, False], claim.name)
    assert claims_with(diverged) == set()


def test_a_linear_bounce_is_seen():
    trajectory = run_with(dict.fromkeys((LINEAR, *NONLINEAR), TURNS))
    assert claims_with(trajectory) == {"bounce-relu", "bounce-gelu", "bounce-silu", "sparser-linear"}
    np.testing.assert_allclose(nonlinear_excess(trajectory), 0, atol=0.03)


def test_attention_that_stays_is_not_sparser():
    trajectory = run_with({LINEAR: LEVEL, "relu": TURNS, "gelu": FALLS, "silu": TURNS})
    assert claims_with(trajectory) == {"bounce-relu", "bounce-silu", "monotone-linear"}


def test_what_was_not_trained_is_not_judged():
    trajectory = run_with({LINEAR: FALLS, "relu": TURNS})
    assert claims_with(trajectory) == {"bounce-relu", "sparser-linear", "monotone-linear"}
    assert claims_with(trajectory, "not tested") == {"bounce-gelu", "bounce-silu", "apart"}
    assert claims_with(run_with({"relu": TURNS}), "not tested") == NAMES - {"bounce-relu"}


def test_the_outcome_gives_the_recovery_with_each_activation():
    trajectory = run_with({LINEAR: FALLS, "relu": TURNS}, noise=0.0)
    assert outcome(trajectory) == (
        "After its minimum entropy recovers by 0.00 nats with a linear MLP and 0.98 nats with ReLU (mean over seeds)."
    )
    assert "0.98 nats with tanh (mean" in outcome(run_with({"tanh": TURNS}, noise=0.0))


def test_activations_are_an_axis_and_a_seed_starts_alike_with_each(trajectory):
    assert trajectory.activation.values.tolist() == [LINEAR, *NONLINEAR]
    assert trajectory.bounce.sizes == {"activation": 4, "seed": 2}
    start = trajectory.entropy.isel(step=0)  # attention of the one layer comes before its activation
    np.testing.assert_allclose(start, start.isel(activation=[0] * 4), rtol=1e-6)
    end = trajectory.valid_loss.isel(step=-1)
    assert abs(end.diff("activation")).min() > 1e-6
    assert (end < trajectory.valid_loss.isel(step=0)).all()


def test_each_activation_is_drawn():
    curves = {LINEAR: FALLS, "relu": TURNS, "gelu": LEVEL}
    trajectory = run_with(curves, noise=0.0)
    entropy, loss, gap, recovery = draw_activations(trajectory).axes
    lines = [line for line in entropy.lines if len(line.get_xdata()) > 1]
    assert [line.get_label() for line in lines] == ["linear", "ReLU", "GELU"]
    for line, curve in zip(lines, curves.values(), strict=True):
        np.testing.assert_allclose(line.get_xydata(), np.stack([STEPS + 1, curve], axis=-1))
    minima = [line.get_xydata()[0] for line in entropy.lines if len(line.get_xdata()) == 1]
    np.testing.assert_allclose(minima, [[curve.argmin() + 1, curve.min()] for curve in (FALLS, TURNS)])
    assert [text.get_text() for text in entropy.get_legend().get_texts()] == ["linear", "ReLU", "GELU"]
    np.testing.assert_allclose([line.get_ydata()[0] for line in loss.lines], [0, 1, 2])
    np.testing.assert_allclose([line.get_ydata()[0] for line in gap.lines], [1, 2])
    assert [label.get_text() for label in recovery.get_xticklabels()] == ["linear", "ReLU", "GELU"]
    hollow = [container.lines[0].get_ydata()[0] for container in recovery.containers[::2]]
    np.testing.assert_allclose(hollow, trajectory.recovery.mean("seed"))
    grey = [container.lines[0].get_ydata()[0] for container in recovery.containers[1::2]]
    np.testing.assert_allclose(grey, trajectory.chance.mean("seed"))
    assert recovery.get_ylim()[0] == 0


def test_without_the_linear_activation_no_gap_is_drawn(trajectory):
    gap = draw_activations(run_with({"relu": FALLS, "tanh": TURNS})).axes[2]
    assert not gap.lines
    assert len(draw_activations(trajectory).axes[2].lines) == 3


@pytest.mark.parametrize(
    ("change", "name"),
    [({"activations": ()}, "activations"), ({"activations": ("relu", "relu")}, "activations"),
     ({"activations": ("relu", "step")}, "activations"), ({"layers": 0}, "layers"), ({"rate": -1.0}, "rate"),
     ({"glance": 0}, "glance")],
)  # fmt: skip
def test_an_error_names_the_field(change, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_an_unknown_activation_lists_the_known_ones():
    with pytest.raises(InputError, match=r"linear, relu.*did you mean 'gelu'"):
        run(replace(SMALL, activations=("gelus",)), Context((0,)))
