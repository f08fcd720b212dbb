"""The study `ladder`: what holds in a small run, that each claim can fail, and what its outcome states."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.theorems import ladder_training
from joma.studies.theorems.ladder import STUDY, Config, outcome, run
from joma.studies.theorems.ladder_measures import CLAIMS
from joma.study import Context

SMALL = Config(
    trained_arms=("base",), trained_steps=20, trained_probe=8, trained_batch=8,
    length=3, long_length=5, until=3e4, records=60, shares=(0.5,), planted=(0.7,), draws=2, searches=1,
    gelu_worlds=("overlap", "separable"), sgd_worlds=("overlap", "lengths"), sgd_steps=100,
)  # fmt: skip
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context(SEEDS))


def verdicts(trajectory):
    return {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in CLAIMS}


def test_linear_units_come_back_where_the_optimum_is_dense_and_nowhere_else(trajectory):
    judged = verdicts(trajectory)
    named = ("optimum", "uniform", "fall", "full-bounce", "gelu-bounce", "bayes", "separable", "constant", "sgd-flow")
    assert {name: judged[name] for name in named} == dict.fromkeys(named, "holds")
    assert judged["nonlinearity-needed"] == "does not hold"


def rising(entropy, time):
    """A curve that falls by half and comes back by a half of that."""
    shape = xr.DataArray(np.interp(np.linspace(0, 2, entropy.sizes[time]), [0, 1, 2], [1.0, 0.5, 0.75]), dims=time)
    return xr.zeros_like(entropy) + shape


def falling(entropy, time):
    return xr.zeros_like(entropy) + xr.DataArray(np.linspace(1, 0.5, entropy.sizes[time]), dims=time)


@pytest.mark.parametrize(
    ("claim", "spoil"),
    [
        ("optimum", lambda run: run.assign(optimum_loss=run.optimum_loss + 1e-6)),
        ("uniform", lambda run: run.assign(optimum_entropy=run.optimum_entropy - 1e-4)),
        ("fall", lambda run: run.assign(entropy=0.01 * run.entropy)),
        ("full-bounce", lambda run: run.assign(entropy=falling(run.entropy, "time"))),
        ("gelu-bounce", lambda run: run.assign(entropy=rising(run.entropy, "time"))),
        ("bayes", lambda run: run.assign(loss=run.loss + 1e-3)),
        ("separable", lambda run: run.assign(entropy=rising(run.entropy, "time"))),
        ("constant", lambda run: run.assign(constant_entropy=rising(run.constant_entropy, "constant_time"))),
        ("gelu-bounce", lambda run: run.assign(entropy=falling(run.entropy, "time"))),
        ("to-the-optimum", lambda run: run.assign(optimum_entropy=run.optimum_entropy + 0.1)),
        ("sgd-flow", lambda run: run.assign(sgd_entropy=run.sgd_entropy - 0.02)),
    ],
)
def test_a_claim_fails_on_a_run_that_contradicts_it(trajectory, claim, spoil):
    assert verdicts(trajectory)[claim] == "holds"
    assert verdicts(spoil(trajectory))[claim] == "does not hold"


def test_the_reading_holds_where_entropy_only_falls(trajectory):
    fallen = trajectory.assign(entropy=falling(trajectory.entropy, "time"))
    assert verdicts(fallen)["nonlinearity-needed"] == "holds"


def test_a_world_that_was_not_trained_is_not_tested(trajectory):
    record = next(claim for claim in CLAIMS if claim.name == "sgd-lengths")
    assert record.judge(trajectory.isel(sgd_world=[0]), "quick")["reason"] == "this run has no sgd_world lengths"
    assert record.judge(trajectory, "quick")["verdict"] != "not tested"


@pytest.mark.parametrize("name", ["gelu-bounce", "separable", "constant", "gelu-optimum", "gelu-to-the-optimum"])
def test_claims_on_gelu_units_are_not_tested_where_these_were_not_solved(trajectory, name):
    names = ("entropy", "constant_entropy", "optimum_entropy")
    without = trajectory.assign({name: trajectory[name].where(trajectory.activation == "linear") for name in names})
    record = next(claim for claim in CLAIMS if claim.name == name).judge(without, "quick")
    assert (record["verdict"], "GELU units" in record["reason"]) == ("not tested", True)


def test_the_study_has_the_claims_and_the_outcome_of_both_parts(trajectory):
    names = [claim.name for claim in STUDY.claims]
    assert len({*names}) == len(names)
    assert {"full-bounce", "base", "top"} <= {*names}
    assert outcome(trajectory).endswith(ladder_training.outcome(trajectory))
    assert list(trajectory.arm.values) == ["base"]


def test_the_outcome_states_the_run(trajectory):
    sentence = outcome(trajectory)
    assert "regains 100 % of that where tokens are independent" in sentence
    assert "Of 4 data distributions drawn at random" in sentence
    half = trajectory.assign(entropy=rising(trajectory.entropy, "time"))
    assert "falls by 50 % of its largest value, ln M for M tokens. It regains 50 % of that" in outcome(half)


def test_every_preset_has_the_default_world():
    for preset in STUDY.presets.values():
        config = preset.config
        assert (config.tokens, config.classes, config.length, config.scale, config.rate_z) == (6, 2, 4, 0.7, 4.0)
        assert config.until == 3e4


@pytest.mark.parametrize("change", [{"tokens": 2}, {"rate": 0.0}, {"shares": (1.0,)}, {"sgd_worlds": ("other",)}])
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))
