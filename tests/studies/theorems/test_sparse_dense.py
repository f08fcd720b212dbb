from dataclasses import replace

import numpy as np
import pytest

from joma.arguments import InputError
from joma.studies.theorems.sparse_dense import CLAIMS, FIGURE_4, STUDY, Config, _euler, run
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
    moments = trajectory.time.values[::40]
    gaps = [abs(one.trained - one.predicted).sel(time=moments, method="nearest").max() for one in (trajectory, finer)]
    assert float(gaps[0] / gaps[1]) == pytest.approx(2, rel=0.1)


def test_figures(trajectory):
    for drawing in STUDY.figures.values():
        assert drawing.draw(trajectory).axes


@pytest.mark.parametrize(
    "change", [{"figure_4_mu": ()}, {"figure_4_steps": 0}, {"components": 1}, {"draws": 0}, {"v0": float("nan")}]
)
def test_bad_config(change):
    with pytest.raises(InputError):
        run(replace(SMALL, **change), Context((0,)))
