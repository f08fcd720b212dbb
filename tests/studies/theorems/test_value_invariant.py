"""The study of the value law: its verdicts in a small run, and what came out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from joma.arguments import InputError
from joma.studies.theorems.value_invariant import STUDY, Config, at_end, half_rate_order, has_diverged, outcome, run
from joma.study import Context

SMALL = Config(
    classes=3, distinct=3, common=2, queries=2, values=3, head_width=2, hidden=4, steps=60, samples=6, length=4,
    batch=2, ladder_steps=30, until=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return run(SMALL, Context((0, 1, 2)))


def test_every_theorem_holds_and_every_breaker_breaks(small):
    records = {claim.name: claim.judge(small, "quick") for claim in STUDY.claims}
    theorems = [claim.name for claim in STUDY.claims if claim.kind == "theorem"]
    assert len(theorems) == 6 + 6 + 5 + 2 + 3 + 3
    assert {records[name]["verdict"] for name in theorems} == {"holds"}
    for name, record in records.items():
        if name.startswith("breaks-"):
            assert record["measured"]["min"] > 0.01, name


def test_a_claim_about_a_law_fails_if_the_law_does(small):
    """With a violation of 1e-6, or drift from a head's laws that no step explains, no theorem holds."""
    names = ("flow_violation", "sgd_residual", "above_residual", "ladder_residual", "head_residual")
    wrong = small.assign({name: small[name] + 1e-6 for name in names}).assign(head_drift=small.head_drift + 0.1)
    for claim in STUDY.claims:
        if claim.kind == "theorem":
            assert claim.judge(wrong, "quick")["verdict"] == "does not hold", claim.name


def test_a_seed_is_the_same_alone_and_among_others(small):
    alone = run(SMALL, Context((1,))).sel(seed=1)
    for name in ("loss", "broken", "ladder_loss", "flow_change"):
        expected = small[name].sel(seed=1).transpose(*alone[name].dims)
        np.testing.assert_allclose(alone[name], expected, rtol=1e-6, atol=1e-9)


def test_what_is_at_the_end_is_of_the_last_step(small):
    np.testing.assert_array_equal(at_end(small.broken, breaker="adam"), small.broken.isel(step=-1).sel(breaker="adam"))
    last = small.ladder_error.isel(ladder_step=-1).sel(rung="adam", correction="none")
    np.testing.assert_array_equal(at_end(small.ladder_error, rung="adam", correction="none"), last)


def test_the_order_of_the_drift_is_the_power_of_the_learning_rate(small):
    """A drift that half the learning rate leaves as it is has order 0; one that it quarters has order 2."""
    full = small.head_drift.sel(head_arm="sgd")
    for ratio, distance in ((1, 1), (0.5, 0), (0.25, 1)):
        half = small.head_arm == "sgd half"
        np.testing.assert_allclose(
            half_rate_order(small.assign(head_drift=small.head_drift.where(~half, ratio * full))), distance
        )


def test_the_law_without_a_breaker_is_the_base(small):
    base = small.sgd.sel(law="exp", rates="equal", correction="full", drop=True)
    np.testing.assert_array_equal(small.broken.sel(breaker="none"), base.transpose(*small.broken.dims[:2]))
    np.testing.assert_array_equal(small.above.sel(network="all", weights="value"), base.transpose("seed", "step"))


def test_the_outcome_states_the_ends_of_the_ladder(small):
    ends = small.ladder_error.isel(ladder_step=-1).sel(correction="none").mean("seed")
    text = outcome(small)
    assert f"goes from {float(ends[0]):.2g} to {float(ends[-1]):.2g}" in text
    assert f"with SGD's steps counted, to {float(small.sgd_residual.max()):.0e} in trained models" in text
    drift = small.head_drift.isel(ladder_step=-1)
    sgd, adam = (100 * drift.sel(head_arm=arm) for arm in ("sgd", "adam"))
    assert f"by at most {float(sgd.max()):.1f} % of how far their terms move" in text
    assert f"Adam by {float(adam.min()):.0f} to {float(adam.max()):.0f} %" in text


def test_a_seed_whose_training_diverged_is_named_and_refutes_no_law(small):
    assert "diverged" not in outcome(small)
    lost = (small.law == "keys exp") & (small.seed == 1)
    diverged = small.assign(sgd=small.sgd.where(~lost))
    assert has_diverged(diverged).values.tolist() == [False, True, False]
    assert outcome(diverged).endswith("Trainings of 1 of 3 seeds diverged, and are left out.")
    records = {claim.name: claim.judge(diverged, "quick") for claim in STUDY.claims}
    reason = "this run has no finite value in every seed: a training or a flow diverged"
    assert {name for name, record in records.items() if record["reason"] == reason} == {"keys-no-law"}
    lost_flow = small.assign(flow_violation=small.flow_violation.where((small.law != "exp") | (small.time < 0.5)))
    flow_claim = next(claim for claim in STUDY.claims if claim.name == "flow-exp")
    assert flow_claim.judge(lost_flow, "quick")["reason"] == reason


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rate": 0.0}, "rate"),
        ({"decay": -1.0}, "decay"),
        ({"overlap": 1.5}, "overlap"),
        ({"adam_rate": 0.0}, "adam_rate"),
        ({"hidden": 0}, "hidden"),
        ({"values": 0}, "values"),
        ({"queries": 0}, "queries"),
        ({"scale": -1.0}, "scale"),
        ({"steps": 0}, "steps"),
        ({"batch": 9}, "batch"),
        ({"ladder_steps": 0}, "ladder_steps"),
        ({"until": 0.0}, "until"),
    ],
)
def test_bad_configs_are_named_before_any_training(changes, name, monkeypatch):
    monkeypatch.setattr(Context, "fit_together", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **changes), Context((0,)))


def test_every_claim_has_a_short_statement_and_a_quantity():
    assert {claim.kind for claim in STUDY.claims} == {"theorem", "control"}
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert not claim.statement.startswith("Ours"), claim.name
        assert claim.quantity, claim.name
