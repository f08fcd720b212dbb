"""The study of Theorem 4: its claims, that each can fail, the published numbers, and the order of Euler's steps."""

from dataclasses import replace

import numpy as np
import pytest

from joma.arguments import InputError
from joma.studies.theorems.sparse_dense import CLAIMS, FIGURE_4, Config, _euler, outcome, run
from joma.study import Context
from joma.theory import growth

SMALL = Config(until=3.0, draws=10, classes=3, distinct=2, common=2, units_steps=20)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def verdicts(trajectory):
    return {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in CLAIMS}


def test_the_flow_meets_every_published_and_derived_number(trajectory):
    counted = {"visible", "condition"}  # counts over draws
    solved = {claim.name for claim in CLAIMS if not claim.name.startswith("units-")} - counted
    assert {name: verdict for name, verdict in verdicts(trajectory).items() if name in solved} == dict.fromkeys(
        solved, "holds"
    )


def test_constants_of_our_own_are_checks_and_the_independent_solution_is_judged(trajectory):
    kinds = {claim.name: claim.kind for claim in CLAIMS}
    constants = ("figure-4-least", "example-end", "ratio-constants", "condition")
    own_solutions = ("trained", "linear-trained", "ratio-flow")  # Euler steps of the flow, and our own closed form
    assert {kinds[name] for name in (*constants, *own_solutions)} == {"check"}
    assert kinds["ratio-limit"] == "control"  # a limit at a finite time, within a bound of our own
    assert kinds["always"] == "theorem"
    wrong = trajectory.assign(pair_ratio_flow=0.99 * trajectory.pair_ratio_flow)
    assert verdicts(wrong)["ratio-flow"] == verdicts(wrong)["ratio-limit"] == "does not hold"
    assert verdicts(wrong)["ratio-constants"] == "holds"  # of the closed form


@pytest.mark.parametrize(
    ("claim", "spoil"),
    [
        ("figure-4", lambda run: run.assign(figure_4_entropy_euler=run.figure_4_entropy_euler.cumsum() * -1)),
        ("figure-4-order", lambda run: run.assign(figure_4_euler=run.figure_4_euler[:, ::-1])),
        ("trained", lambda run: run.assign(trained=run.trained * 1.03)),
        ("nonlinear-returns", lambda run: run.assign(entropy=run.linear_entropy)),
        ("linear-falls", lambda run: run.assign(linear_entropy=run.entropy)),
        ("always", lambda run: run.assign(counted_depth=0 * run.counted_depth)),
        ("ratio-power", lambda run: run.assign(pair_ratio_flow=run.pair_limit - run.pair_time**-0.5)),
    ],
)
def test_a_claim_fails_on_a_run_that_contradicts_it(trajectory, claim, spoil):
    assert verdicts(trajectory)[claim] == "holds"
    assert verdicts(spoil(trajectory))[claim] == "does not hold"


def test_the_outcome_states_the_run(trajectory):
    sentence = outcome(trajectory)
    assert "falls from 2.30 to 0.94 nats and comes back to 1.55" in sentence
    flat = trajectory.assign(figure_4_entropy_euler=0 * trajectory.figure_4_entropy_euler + 2.0)
    assert "falls from 2.00 to 2.00 nats" in outcome(flat)


def test_euler_is_first_order():
    mu = np.array(FIGURE_4)
    exact = growth.softmax_nonlinear(mu, 10.0, 0.05, 3.0)
    coarse, fine = (np.abs(_euler(mu, 0.05, 3.0, step, round(10 / step))[-1] - exact).max() for step in (0.02, 0.01))
    assert coarse / fine == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    "change", [{"figure_4_mu": ()}, {"figure_4_steps": 0}, {"components": 1}, {"draws": 0}, {"v0": float("nan")}]
)
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))
