"""The study of Theorem 2: its verdicts, the order of SGD's distance from the flow, and what is drawn."""

from dataclasses import replace

import numpy as np
import pytest

from drawn import legend, series, title
from joma.arguments import InputError
from joma.studies.theorems.winner import CLAIMS, Config, distance, draw_figure_3, draw_growth, run, takes_all
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


def test_growth_is_drawn_with_theory_training_distance_and_entropy(trajectory):
    left, middle, right = draw_growth(trajectory).axes
    first = trajectory.isel(seed=0)
    saliences = sorted(first.salience.values, key=abs, reverse=True)
    assert legend(left) == [f"Δ = {salience:.2f}" for salience in saliences]
    winner = int(abs(first.salience).argmax("token"))
    np.testing.assert_array_equal(series(left)[legend(left)[0]][:, 1], first.predicted[:, winner])
    assert legend(middle) == ["half the steps", "all steps"]
    assert middle.get_yscale() == "log"
    distances = series(middle)
    assert (distances["half the steps"][:, 1] > distances["all steps"][:, 1]).all()
    assert legend(right) == ["theory, mean over seeds", "trained, all seeds"]
    assert [panel.get_xlabel() for panel in (left, middle, right)] == ["time / blow-up time"] * 3


def test_figure_3_is_drawn_as_two_images_and_the_growth_of_four_components(trajectory):
    salience, weights, growth = draw_figure_3(trajectory).axes[:3]
    assert [title(panel)[5:] for panel in (salience, weights)] == ["Salience Δ at the start", "Weights v at the end"]
    np.testing.assert_array_equal(salience.images[0].get_array(), trajectory.figure_3_salience.isel(seed=0))
    np.testing.assert_array_equal(weights.images[0].get_array(), trajectory.figure_3.isel(seed=0, step=-1))
    low, high = weights.images[0].get_clim()
    assert low == -high == -float(abs(trajectory.figure_3.isel(seed=0, step=-1)).max())
    assert [label.split(",")[0] for label in legend(growth)] == ["token 0", "token 1", "token 2", "token 3"]
    final = series(growth)[legend(growth)[2]][-1]
    step, mean = 100, float(trajectory.figure_3.isel(word=2, hidden=0, step=-1).mean("seed"))
    np.testing.assert_allclose(final, [step, mean])


@pytest.mark.parametrize(
    "change", [{"tokens": 1}, {"samples": 0}, {"steps": 10}, {"steps": 401}, {"until": 1.5}, {"figure_3_steps": -1}]
)
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))
