"""The study of rank collapse: its verdicts, its numbers beside plain arithmetic, and its config."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.related import rank_collapse
from joma.studies.related.rank_collapse import STUDY, Config, outcome, run
from joma.study import Context

SMALL = Config(tokens=12, dim=12, score_tokens=12, draws=4)
CHANGES = {
    "tokens": 13, "dim": 13, "layers": 5, "scale": 0.4, "expansion": 3, "strength": 5.0, "sizes": (1e-1, 1e-2),
    "score_scales": (1.0, 16.0), "score_tokens": 13, "score_layers": 3, "draws": 5,
}  # fmt: skip
FIELDS = Fields(rank_collapse, SMALL, CHANGES)


@pytest.fixture(scope="module")
def trajectory():
    return run(Config(), Context((0, 1, 2, 3, 4)))


def test_verdicts(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in STUDY.claims}
    assert {name for name, verdict in verdicts.items() if verdict == "does not hold"} == {"mlp", "mlp-strong"}
    assert all(verdict == "holds" for name, verdict in verdicts.items() if name not in ("mlp", "mlp-strong"))


def test_the_stack_is_softmax_attention():
    """In plain arithmetic, from the same stream: two layers of each arm, whose residuals are still above rounding."""
    config = replace(SMALL, layers=3)
    stored = run(config, Context((4,))).isel(seed=0)
    generator = Context((4,)).numpy_generators("stacks")[0]
    start = 0.3 * generator.normal(size=(12, 12))
    x = dict.fromkeys(rank_collapse.ARMS, start)
    for layer in (1, 2):
        w, v = generator.normal(size=(2, 12, 12)) / np.sqrt(12)
        lower = generator.normal(size=(12, 48)) * np.sqrt(2 / 12)
        upper = generator.normal(size=(48, 12)) / np.sqrt(48)
        for arm, tokens in x.items():
            powers = np.exp(tokens @ w @ tokens.T)
            output = powers / powers.sum(axis=-1, keepdims=True) @ tokens @ v
            if arm == "skip":
                output = tokens + output
            if "MLP" in arm:
                output = np.maximum(output @ lower, 0) @ upper * (10 if arm == "strong MLP" else 1)
            x[arm] = output
            residual = np.sqrt(((output - output.mean(axis=0)) ** 2).mean())
            assert 10 ** float(stored.log10_rms.sel(arm=arm, layer=layer)) == pytest.approx(residual, rel=1e-8)


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    xr.testing.assert_identical(run(Config(), Context((2,))), trajectory.sel(seed=[2]))


def test_the_outcome_has_the_numbers(trajectory):
    residual = 10 ** float(trajectory.log10_rms.sel(arm="attention", layer=3).median())
    assert f"median residual is {residual:.0e}" in outcome(trajectory)


def test_statements_are_short_and_kinds_are_known():
    assert {claim.kind for claim in STUDY.claims} == {"theorem", "reading", "control"}
    assert all(len(claim.statement) <= 110 and claim.quantity for claim in STUDY.claims)


@pytest.mark.parametrize(
    "change",
    [{"tokens": 1}, {"dim": 0}, {"layers": 2}, {"scale": 0.0}, {"expansion": 0}, {"strength": -1.0}, {"sizes": (1.0,)},
     {"sizes": (0.0, 1.0)}, {"score_scales": (1.0,)}, {"score_tokens": 1}, {"score_layers": 0}, {"draws": 0}],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))


def test_every_field_is_changed_below():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()
