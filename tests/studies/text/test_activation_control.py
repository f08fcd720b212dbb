from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.text.activation_control import CLAIMS, LINEAR, NONLINEAR, STUDY, Config, apart, draw_activations, run
from joma.studies.text.language_training import bounces
from joma.study import Context

SMALL = Config(tokeniser="bytes", width=8, hidden=8, batch=4, length=8, steps=6, every=2, rate=1e-2, glance=30)
STEPS = np.arange(50)
FALLS, TURNS = 2 - STEPS / 49, 1 + abs(STEPS / 24.5 - 1)
LEVEL = np.full(50, 2.0)


def made_up(curves, *, noise=0.01, seeds=3):
    """A run whose entropy has a known shape for each activation."""
    rng = np.random.default_rng(5)
    clean = np.stack([*curves.values()])[:, None, :, None, None]
    values = clean + noise * rng.standard_normal((len(curves), seeds, len(STEPS), 1, 1))
    entropy = xr.DataArray(values, dims=("activation", "seed", "step", "layer", "head"))
    loss = xr.zeros_like(entropy[..., 0, 0])
    made = xr.Dataset({"entropy": entropy, "valid_loss": loss}).assign_coords(activation=[*curves], step=STEPS)
    return made.merge(bounces(made.entropy))


NAMES = [claim.name for claim in CLAIMS]


def holding(made, verdict="holds"):
    return {claim.name for claim in CLAIMS if claim.judge(made, "quick")["verdict"] == verdict}


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_all_holds_where_the_theorems_do():
    made = made_up({LINEAR: FALLS, **dict.fromkeys(NONLINEAR, TURNS)})
    assert holding(made) == {claim.name for claim in CLAIMS}
    np.testing.assert_allclose(apart(made), 0.5, atol=0.03)


def test_a_linear_bounce_is_seen():
    made = made_up(dict.fromkeys((LINEAR, *NONLINEAR), TURNS))
    assert holding(made) == {"bounce-relu", "bounce-gelu", "bounce-silu", "sparser-linear"}
    np.testing.assert_allclose(apart(made), 0, atol=0.03)


def test_attention_that_stays_is_not_sparser():
    made = made_up({LINEAR: LEVEL, "relu": TURNS, "gelu": FALLS, "silu": TURNS})
    assert holding(made) == {"bounce-relu", "bounce-silu", "monotone-linear"}


def test_what_was_not_trained_is_not_judged():
    made = made_up({LINEAR: FALLS, "relu": TURNS})
    assert holding(made) == {"bounce-relu", "sparser-linear", "monotone-linear"}
    assert holding(made, "not tested at this preset") == {"bounce-gelu", "bounce-silu", "apart"}
    assert holding(made_up({"relu": TURNS}), "not tested at this preset") == {*NAMES} - {"bounce-relu"}


def test_activations_are_an_axis_and_share_their_start_with_the_seed(trajectory):
    assert trajectory.activation.values.tolist() == [LINEAR, *NONLINEAR]
    assert trajectory.bounce.sizes == {"activation": 4, "seed": 2}
    start = trajectory.entropy.isel(step=0)  # attention of the one layer comes before its activation
    np.testing.assert_allclose(start, start.isel(activation=[0] * 4), rtol=1e-6)
    end = trajectory.valid_loss.isel(step=-1)
    assert abs(end.diff("activation")).min() > 1e-6
    assert (end < trajectory.valid_loss.isel(step=0)).all()


def test_it_is_drawn_from_the_dataset_alone(trajectory):
    assert len(draw_activations(trajectory).axes) == 4
    assert len(draw_activations(made_up({"relu": FALLS, "tanh": TURNS})).axes) == 4


@pytest.mark.parametrize(
    ("change", "name"),
    [({"activations": ()}, "activations"), ({"activations": ("relu", "relu")}, "activations"),
     ({"activations": ("relu", "step")}, "activations"), ({"layers": 0}, "layers"), ({"rate": -1.0}, "rate"),
     ({"glance": 0}, "glance")],
)  # fmt: skip
def test_bad_config(change, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_an_unknown_activation_lists_the_known_ones():
    with pytest.raises(InputError, match=r"linear, relu.*did you mean 'gelu'"):
        run(replace(SMALL, activations=("gelus",)), Context((0,)))


def test_presets_are_configs_of_this_study():
    assert all(isinstance(preset.config, Config) for preset in STUDY.presets.values())
    assert STUDY.presets["paper"].config.steps == 58_560
