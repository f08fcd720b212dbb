"""The study `even-pairs`: its verdicts and the fields of its config."""

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.common_axes import NAMES, STEP
from joma.studies.related import even_pairs
from joma.studies.related.even_pairs import STUDY, Config, outcome, run
from joma.study import Context

SMALL = Config(lengths=(3,), until=1e4, records=60, trained_length=3, rates=(0.5, 1.0), steps=1500)
TINY = Config(lengths=(2,), until=20.0, records=20, trained_length=2, rates=(0.5,), steps=40)
CHANGES = {
    "lengths": (3,), "until": 30.0, "records": 25, "trained_length": 3, "rates": (0.4,), "start": 0.02, "steps": 45,
}  # fmt: skip
FIELDS = Fields(even_pairs, TINY, CHANGES)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_the_phases_are_seen_and_attention_is_not_stable(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in STUDY.claims}
    expected = {"phase-1", "margin-direction", "square-growth", "ledger", "parity-chain", "chain-trained",
                "ends-needed", "parity-direct"}  # fmt: skip
    assert {name for name in expected if verdicts[name] == "holds"} == expected
    assert verdicts["attention-stable"] == "does not hold"


def test_common_axes_are_recorded(trajectory):
    assert all(trajectory[name].dims == ("seed", STEP) for name in NAMES)
    np.testing.assert_allclose(trajectory.axes_rank, 1.0)
    np.testing.assert_allclose(trajectory.axes_entropy.isel({STEP: 0}), 1.0, atol=1e-3)
    assert (trajectory.axes_entropy.isel({STEP: -1}) < 0.5).all()


def test_the_outcome_states_the_accuracies(trajectory):
    assert "trained directly is right in 50 %" in outcome(trajectory)


@pytest.mark.parametrize(
    "change",
    [{"lengths": (1,)}, {"lengths": (3, 3)}, {"until": 1.0}, {"records": 3}, {"trained_length": 1}, {"rates": (0.0,)},
     {"start": 0.0}, {"steps": 5}],
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
