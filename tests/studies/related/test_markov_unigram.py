"""The study of the unigram: its verdicts on a small run, its config, and its sentence."""

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.related import markov_unigram
from joma.studies.related.markov_unigram import STUDY, Config, outcome, run
from joma.study import Context

SMALL = Config(steps=250, length=8, records=10, probe=32, inits=(0.05, 0.4), variants=(), adam_rate=1e-2)
TINY = Config(
    chains=((0.5, 0.8), (0.2, 0.3)), length=4, width=3, batch=3, steps=4, inits=(0.05, 0.4),
    variants=("long", "wide"), long_length=5, wide_width=4, probe=4, records=2, reduced_until=20.0,
)  # fmt: skip
FIELDS = Fields(
    markov_unigram,
    TINY,
    {
        "chains": ((0.5, 0.8),), "length": 6, "width": 2, "batch": 4, "steps": 5, "rate": 0.4, "inits": (0.05, 0.3),
        "adam_rate": 4e-3, "adam_init": 0.03, "variants": ("long",), "long_length": 6, "wide_width": 5, "probe": 5,
        "records": 1, "reduced_start": 0.6, "reduced_until": 30.0,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1, 2, 3)))


def test_tied_sgd_stays_and_everything_else_gets_through(trajectory):
    records = {claim.name: claim.judge(trajectory, "quick") for claim in STUDY.claims}
    holding = {name for name, record in records.items() if record["verdict"] == "holds"}
    assert {"rate", "reduced-ends", "stuck", "through", "basin", "fate", "adam", "saddle-first"} <= holding
    assert records["norm"]["reason"] == "this run has no arm norm"


def test_the_reduced_model_has_the_predicted_rates_and_ends(trajectory):
    np.testing.assert_allclose(trajectory.reduced_rate, trajectory.reduced_rate_predicted, rtol=1e-5)
    expected = [[0.6663, 0.6190], [0.6931, 0.3251], [0.5446, 0.5446]]
    np.testing.assert_allclose(trajectory.reduced_loss_predicted, expected, atol=5e-5)


def test_the_outcome_counts_what_is_stuck(trajectory):
    sentence = outcome(trajectory)
    assert "8 of 8 transformers trained by SGD stop" in sentence
    assert "Every one by SGD stops there if initial weights are at most 0.05." in sentence
    freed = outcome(trajectory.assign(loss=trajectory.loss * 0 + trajectory.kernel))
    assert "0 of 8 transformers trained by SGD stop" in freed
    assert "Every one by SGD" not in freed


def test_every_field_is_changed_below():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", FIELDS.changes)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()


@pytest.mark.parametrize("change", [{"reduced_start": 0.0}, {"reduced_until": -1.0}])
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(TINY, **change), Context((0,)))


def test_statements_are_short_and_have_a_quantity():
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert claim.quantity, claim.name
