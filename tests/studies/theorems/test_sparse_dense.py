"""The study of Theorem 4: the published numbers, the order of Euler's steps and of SGD, and what is drawn."""

from dataclasses import replace

import numpy as np
import pytest

from drawn import legend, series
from joma.arguments import InputError
from joma.studies.theorems.sparse_dense import (
    CLAIMS,
    FIGURE_4,
    Config,
    _euler,
    draw_bounce,
    draw_figure_4,
    draw_theorem_4,
    run,
)
from joma.study import Context
from joma.theory import growth

SMALL = Config(until=1.5, components=3, draws=10)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_every_published_figure_is_met(trajectory):
    exempt = {"visible", "condition"}  # counts over draws: results, not published figures
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in CLAIMS}
    assert {name: verdict for name, verdict in verdicts.items() if name not in exempt and verdict != "holds"} == {}


def test_euler_is_first_order():
    mu = np.array(FIGURE_4)
    exact = growth.softmax_nonlinear(mu, 10.0, 0.05, 3.0)
    coarse, fine = (np.abs(_euler(mu, 0.05, 3.0, step, round(10 / step))[-1] - exact).max() for step in (0.02, 0.01))
    assert coarse / fine == pytest.approx(2, rel=0.02)


def test_the_trained_block_is_first_order_in_the_rate(trajectory):
    finer = run(replace(SMALL, rate=SMALL.rate / 2), Context((0, 1)))
    times = trajectory.time.values[::40]
    coarse_gap, fine_gap = (
        abs(result.trained - result.predicted).sel(time=times, method="nearest").max() for result in (trajectory, finer)
    )
    assert float(coarse_gap / fine_gap) == pytest.approx(2, rel=0.1)


def test_figure_4_is_drawn_at_five_times_and_bounces(trajectory):
    left, right = draw_figure_4(trajectory).axes
    assert legend(left) == ["t = 0", "t = 5", "t = 13.4", "t = 30", "t = 100", "target μ"]
    np.testing.assert_array_equal(series(left)["target μ"], np.stack([np.arange(1, 11), FIGURE_4], axis=-1))
    np.testing.assert_allclose(series(left)["t = 0"][:, 1], 0.05)
    assert legend(right) == ["closed form", "Euler, step 0.02", "limit"]
    entropy = series(right)["closed form"]
    assert entropy[:, 1].min() == pytest.approx(0.94, abs=0.01)
    assert entropy[entropy[:, 1].argmin(), 0] == pytest.approx(669 * 0.02, abs=0.2)
    np.testing.assert_allclose(series(right)["limit"][:, 1], 1.6216, atol=1e-4)


def test_theorem_4_is_drawn_with_training_and_ratio(trajectory):
    left, middle, right = draw_theorem_4(trajectory).axes
    targets = sorted(trajectory.mu.isel(seed=0).values, reverse=True)
    assert legend(left) == [f"μ = {mu:.2f}" for mu in targets]
    assert legend(middle) == ["seed 0", "seed 1"]
    np.testing.assert_array_equal(series(middle)["seed 1"][:, 1], trajectory.entropy_predicted.isel(seed=1))
    assert legend(right) == ["closed form", "integrated flow", "limit"]
    assert right.get_xscale() == "log"
    np.testing.assert_allclose(series(right)["limit"][:, 1], np.exp((1.5**2 - 1.0**2) / 2))


def test_bounces_are_drawn_for_every_seed_and_draw(trajectory):
    (panel,) = draw_bounce(trajectory).axes
    assert legend(panel) == ["seed 0", "seed 1", "1 %", "mean 0.88"]
    points = series(panel)["seed 1"]
    expected = trajectory.sel(seed=1)
    np.testing.assert_array_equal(points, np.stack([expected.counted_mean, expected.counted_regained], axis=-1))
    assert panel.get_yscale() == "log"


@pytest.mark.parametrize(
    "change", [{"figure_4_mu": ()}, {"figure_4_steps": 0}, {"components": 1}, {"draws": 0}, {"v0": float("nan")}]
)
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))
