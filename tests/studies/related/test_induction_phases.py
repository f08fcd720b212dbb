"""The study of in-context chains: its verdicts on a small run, its config, and what its sentences say."""

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.related import induction_phases
from joma.studies.related.induction_measures import first_step, minimal_closed
from joma.studies.related.induction_phases import STUDY, Config, outcome, run
from joma.study import Context

LEARNING = Config(length=32, batch=32, probe=64, lags=6, steps=260, rate=3.0, parents_steps=20, oracle_chains=1000,
                  gradient_samples=16, adam_steps=20)  # fmt: skip
TINY = Config(
    length=12, batch=4, probe=4, lags=4, steps=20, adam_steps=20, parents_steps=20, oracle_chains=20,
    gradient_length=30, gradient_samples=3, full_steps=4, full_length=10, full_width=4, full_batch=2,
    full_rates=(0.01,),
)  # fmt: skip
FIELDS = Fields(
    induction_phases,
    TINY,
    {
        "symbols": 4, "length": 14, "batch": 5, "probe": 5, "lags": 5, "scale": 0.1, "smoothing": 0.02, "steps": 21,
        "rate": 1.0, "adam_steps": 21, "adam_rate": 0.02, "parents": (1, 3), "parents_steps": 21, "oracle_chains": 21,
        "gradient_length": 32, "gradient_samples": 4, "gradient_a": 0.1, "full_steps": 5, "full_rates": (0.02,),
        "full_length": 12, "full_width": 6, "full_batch": 3, "full_scale": 0.5,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(LEARNING, Context((0, 1)))


def test_the_minimal_model_starts_at_the_unigram_and_finds_the_lag(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in STUDY.claims}
    expected = {"unigram-first", "finite-gradient", "predicted-lag", "lag", "second-layer-first"}
    assert {name for name in expected if verdicts[name] == "holds"} == expected
    assert verdicts["transition"] == "not tested"


def test_the_run_has_the_common_axes_of_the_chain(trajectory):
    assert trajectory.axes_entropy.dims == ("seed", "axes_step")
    assert trajectory.axes_step.values.tolist() == trajectory.step.values.tolist()
    assert float(trajectory.axes_entropy.isel(axes_step=0).min()) > 0.99  # uniform attention at the start
    assert float(trajectory.axes_entropy.isel(axes_step=-1).max()) < 0.95


def test_seeds_do_not_depend_on_their_neighbours():
    alone, together = run(TINY, Context((1,))), run(TINY, Context((0, 1)))
    for name in ("minimal_loss", "parents_loss", "full_loss", "dependence", "gradient"):
        np.testing.assert_allclose(alone[name].sel(seed=1), together[name].sel(seed=1), rtol=1e-4, atol=1e-5)


def test_the_outcome_states_when_the_jump_is(trajectory):
    closed = minimal_closed(trajectory).sel(world="chain")
    early = float(first_step(closed >= 0.1, "step").mean())
    assert f"between steps {early:.0f} and" in outcome(trajectory)
    assert "Transformers with two layers" in outcome(run(TINY, Context((0, 1))))


@pytest.mark.parametrize(
    "change",
    [
        {"symbols": 1}, {"length": 3}, {"probe": 0}, {"lags": 0}, {"smoothing": 0.0}, {"steps": 5}, {"rate": 0.0},
        {"adam_rate": -1.0}, {"parents": (1,)}, {"parents": (2, 1)}, {"parents": (1, 9)}, {"oracle_chains": 0},
        {"full_rates": ()}, {"full_width": 0}, {"full_batch": 0}, {"full_scale": -1.0},
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(TINY, **change), Context((0,)))


def test_every_field_is_changed_below():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", FIELDS.changes)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()


def test_every_claim_has_its_kind_and_a_short_statement():
    assert {claim.kind for claim in STUDY.claims} == {"theorem", "reading", "control"}
    for claim in STUDY.claims:
        assert len(claim.statement) <= 110, claim.name
        assert claim.quantity, claim.name
