"""The study `polarise`: its verdicts, its training, and the fields of its config."""

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.common_axes import NAMES, STEP
from joma.studies.related import polarise
from joma.studies.related.polarise import (
    STUDY,
    Config,
    farthest_ratio,
    fixed_rate,
    law_ratio,
    outcome,
    run,
    train,
    trained_rate,
)
from joma.studies.related.polarise_flows import draw
from joma.study import Context

SMALL = Config(tokens=(2, 3), records=12, loss_tokens=3, steps=200, until=400.0, targets=(1.0, 30.0))
TINY = Config(
    tokens=(2,), dim=2, records=10, loss_tokens=2, steps=20, until=20.0, targets=(2.0,), target_tokens=3, margin=2.0
)
CHANGES = {
    "tokens": (3,), "dim": 3, "norm": 1.2, "start": 0.06, "until": 30.0, "records": 11, "loss_tokens": 3, "margin": 3.0,
    "targets": (3.0,), "target_tokens": 4, "target_start": 0.02, "rate": 0.2, "steps": 21,
}  # fmt: skip
FIELDS = Fields(polarise, TINY, CHANGES)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_the_laws_hold_and_low_entropy_is_not_inherent(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in STUDY.claims}
    expected = {
        "ledger", "gap-zero", "invariant", "one-orbit", "sgd", "large-target", "final-entropy", "rate-fixed",
        "rate-trained",
    }  # fmt: skip
    assert {name for name in expected if verdicts[name] == "holds"} == expected
    assert verdicts["inherent"] == "does not hold"


def test_the_law_is_nearer_the_later_the_time(trajectory):
    early, late = (abs(trajectory.law / trajectory.error - 1).isel(time=index) for index in (-3, -1))
    assert (late < early).all()
    assert (abs(farthest_ratio(trajectory) - 1) == abs(law_ratio(trajectory) - 1).max("tokens")).all()


def test_the_rates_are_those_of_the_laws(trajectory):
    np.testing.assert_allclose(fixed_rate(trajectory), 1.0, atol=1e-6)
    np.testing.assert_allclose(trained_rate(trajectory), 2.0, atol=0.1)
    late = trajectory.isel(point=-1)
    np.testing.assert_allclose(late.fixed_gap, late.fixed_law, rtol=1e-6)
    np.testing.assert_allclose(late.trained_gap, late.trained_law, atol=0.3)


def test_a_block_that_diverged_is_not_on_the_orbit(trajectory):
    diverged = trajectory.copy(deep=True)
    diverged["sgd_entropy"][{"seed": 1, STEP: slice(5, None)}] = np.nan
    (claim,) = (claim for claim in STUDY.claims if claim.name == "sgd")
    np.testing.assert_array_equal(np.isnan(claim.measure(diverged)), [False, True])
    assert claim.judge(diverged, "quick")["verdict"] == "does not hold"


def test_smaller_steps_bring_sgd_to_the_orbit():
    context = Context((0, 1))
    starts = [
        draw(generator, SMALL.loss_tokens, SMALL.dim, norm=SMALL.norm, start=SMALL.start)
        for generator in context.numpy_generators("losses")
    ]
    finer = replace(SMALL, rate=SMALL.rate / 4, steps=4 * SMALL.steps)
    runs = [train(config, context, starts) for config in (SMALL, finer)]
    coarse, fine = (abs(each.sgd_entropy - each.sgd_orbit).max(STEP) for each in runs)
    np.testing.assert_allclose(coarse / fine, 4.0, rtol=0.1)


def test_the_block_begins_where_the_flows_begin(trajectory):
    logistic = trajectory.sel(loss="logistic").isel(time=0)
    np.testing.assert_allclose(trajectory.sgd_margin.isel({STEP: 0}), logistic.margin, atol=1e-12)
    np.testing.assert_allclose(trajectory.sgd_entropy.isel({STEP: 0}), logistic.entropy, atol=1e-12)


def test_common_axes_are_recorded(trajectory):
    assert all(trajectory[name].dims == ("seed", STEP) for name in NAMES)
    entropy = trajectory.sgd_entropy / np.log(SMALL.loss_tokens)
    np.testing.assert_allclose(trajectory.axes_entropy, entropy, atol=1e-12)


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((1,)))
    for name in ("error", "entropy", "final_entropy", "trained_gap", "sgd_entropy"):
        np.testing.assert_array_equal(alone[name].isel(seed=0), trajectory[name].sel(seed=1), err_msg=name)


def test_the_outcome_states_the_rates(trajectory):
    assert f"{float(trained_rate(trajectory).mean()):.2f} ln ln t" in outcome(trajectory)


@pytest.mark.parametrize(
    "change",
    [{"tokens": (1,)}, {"tokens": (2, 2)}, {"dim": 0}, {"norm": 0.0}, {"start": -1.0}, {"until": 1.0}, {"records": 2},
     {"loss_tokens": 1}, {"margin": 0.1}, {"targets": (0.0,)}, {"target_tokens": 1}, {"target_start": 0.0},
     {"rate": 0.0}, {"steps": 1}],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(TINY, **change), Context((0,)))


def test_every_field_is_changed():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()


def test_every_claim_has_a_short_statement():
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert claim.quantity, claim.name
