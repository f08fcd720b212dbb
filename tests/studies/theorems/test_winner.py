"""The study of Theorem 2: its verdicts, and the order of SGD's distance from the flow."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.studies.theorems.winner import STUDY, Config, outcome, run, salience
from joma.studies.theorems.winner_measures import distance, ratio_spread
from joma.study import Context

SMALL = Config(tokens=5, samples=12, steps=400, figure_3_steps=100)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1, 2)))


def test_the_block_follows_theorem_2_and_the_slides_do_not(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in STUDY.claims}
    expected = {"closed-form", "ratio", "blow-up", "winner", "losers", "sparser", "salience-order", "salience-equal"}
    assert {name for name in expected if verdicts[name] == "holds"} == expected
    assert verdicts["ratio-slides"] == verdicts["salience-common"] == "does not hold"


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


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((2,)))
    np.testing.assert_allclose(alone.trained[0], trajectory.trained.sel(seed=2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "change", [{"tokens": 1}, {"samples": 0}, {"steps": 10}, {"steps": 401}, {"until": 1.5}, {"figure_3_steps": -1}]
)
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))


def test_salience_is_the_gradient_of_the_loss_at_zero_weights():
    """By autograd: −∂loss/∂v of Figure 3's block, cross entropy, at zero weights, with the frequencies as attention."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    v = torch.zeros(2, 6, 4, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy((x @ v).mT, torch.arange(4).expand(2, -1), reduction="none").mean(-1)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    torch.testing.assert_close(salience(x), -gradient, rtol=0, atol=1e-15)


def test_numbers_of_the_winner_are_one_number(trajectory):
    """The winners of all seeds have the same salience, hence the same numbers: they are not five measurements."""
    records = {claim.name: claim.judge(trajectory, "quick") for claim in STUDY.claims}
    for name in ("trained-winner", "first-order-winner", "blow-up"):
        assert len(records[name]["measured"]["values"]) == 1
    for name in ("trained", "first-order", "ratio-slides"):
        assert np.ptp(records[name]["measured"]["values"]) > 1e-6


def test_the_outcome_states_the_spread_of_the_printed_ratio(trajectory):
    printed = float(ratio_spread(trajectory, 2.0).isel(time=-1).mean())
    assert f"differs by {100 * printed:.0f} % between" in outcome(trajectory)


def test_every_claim_has_its_kind_and_a_short_statement():
    assert {claim.kind for claim in STUDY.claims} == {"theorem", "figure", "reading", "control", "check"}
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert claim.quantity, claim.name
