from dataclasses import replace

import numpy as np
import pytest

from joma.arguments import InputError
from joma.studies.theorems.winner import CLAIMS, STUDY, Config, distance, draw_figure_3, draw_growth, run, takes_all
from joma.study import Context

SMALL = Config(tokens=5, samples=12, steps=400, figure_3_steps=100)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1, 2)))


def test_the_block_follows_theorem_2_and_the_slides_do_not(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in CLAIMS}
    expected = {"closed-form", "blow-up", "winner", "losers", "sparser"}
    assert {name for name in expected if verdicts[name] == "holds"} == expected
    assert verdicts["slides"] == "does not hold"


def test_the_distance_to_the_flow_is_first_order_in_the_step(trajectory):
    finer = run(replace(SMALL, steps=1600), Context((0, 1, 2)))
    early = {"time": slice(0, 0.8)}
    ratio = distance(trajectory.sel(early), "trained") / distance(finer.sel(early), "trained")
    np.testing.assert_allclose(ratio, 4, rtol=0.05)


def test_salience_is_the_gradient_at_the_start(trajectory):
    """From zero weights and logits one step of SGD moves v by Δ over the number of steps."""
    first = trajectory.trained.isel(time=1) / trajectory.time[1]
    np.testing.assert_allclose(first, trajectory.salience, atol=2e-3)
    np.testing.assert_allclose(abs(trajectory.salience).max("token"), np.sqrt(np.pi / 2))


def test_a_wrong_winner_is_seen(trajectory):
    turned = trajectory.assign(salience=trajectory.salience.roll(token=1))
    assert float(takes_all(turned).sum()) == 0


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((2,)))
    np.testing.assert_allclose(alone.trained[0], trajectory.trained.sel(seed=2), rtol=0, atol=1e-12)


def test_it_is_drawn_from_the_dataset_alone(trajectory):
    assert len(draw_growth(trajectory).axes) == 3
    assert len(draw_figure_3(trajectory).axes) == 5


@pytest.mark.parametrize(
    "change", [{"tokens": 1}, {"samples": 0}, {"steps": 10}, {"until": 1.5}, {"figure_3_steps": -1}]
)
def test_bad_config(change):
    with pytest.raises(InputError):
        run(replace(SMALL, **change), Context((0,)))


def test_presets_are_configs_of_this_study():
    assert all(isinstance(preset.config, Config) for preset in STUDY.presets.values())
