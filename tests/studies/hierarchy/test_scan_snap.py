"""The study `scan-snap`: a small run against its flow, its claims, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.hierarchy import growth_phases, scan_snap
from joma.studies.hierarchy.distinct_tokens import by_frequency
from joma.studies.hierarchy.scan_snap import ARMS, CLAIMS, PREMISES, STUDY, run
from joma.study import Context, NotInRun, Preset, execute
from studies.hierarchy.conftest import SMALL_PHASES as SMALL


def test_sgd_follows_the_flow_and_attends_as_it_does(phases):
    assert float(growth_phases.flow_distance(phases).max()) < 0.01
    np.testing.assert_allclose(phases.common, phases.common_flow, atol=0.01)
    start = phases.common.isel(step=0)
    np.testing.assert_allclose(start.sel(arm=["faster", "equal", "slower"]), SMALL.share, rtol=1e-12)
    np.testing.assert_allclose(start.sel(arm=PREMISES), 0.01, rtol=1e-12)


def test_the_theorems_hold_where_their_premises_are_met(phases):
    verdicts = {claim.name: claim.judge(phases, "quick")["verdict"] for claim in CLAIMS}
    for claim in CLAIMS:
        if claim.kind in ("theorem", "reading") and claim.name != "clock":  # the least share here is 0.1
            assert verdicts[claim.name] == "holds", claim.name
    assert verdicts["flow"] == "holds"
    assert verdicts["gain-at-10"] == "does not hold"
    assert (phases.cooccurrence.diff("rank") < 0).all()


def test_the_arms_differ_in_the_premises():
    ratios = {name: _arm_ratio(name) for name in ARMS}
    assert ratios == pytest.approx({PREMISES: 1000, "faster": 10, "equal": 1, "slower": 0.1})


def _arm_ratio(name: str) -> float:
    _, rates = scan_snap._arm(SMALL, Context((0,)), name)
    return rates.decoder / rates.logits


def test_co_occurrence_relative_to_the_winner_does_not_depend_on_the_share():
    """So that one co-occurrence serves all arms."""
    few, many = (scan_snap._draw(SMALL, Context((0, 1)), share) for share in (0.01, 0.5))
    ratios = [by_frequency(data, data.frequency.numpy()) for data in (few, many)]
    np.testing.assert_allclose(*(ratio / ratio[..., :1] for ratio in ratios), rtol=1e-12)


def test_the_flow_of_the_sweep_is_that_of_the_arms(phases):
    """The ratio 10 is both an arm and a point of the sweep: growth slows at the same time in both."""
    arm = growth_phases.slowing_time(growth_phases.winning_logits(phases, "logit_flow")) / phases.transition
    np.testing.assert_allclose(arm.sel(arm="faster"), phases.ratio_slowing.sel(ratio=10), rtol=0.02)


def test_the_outcome_says_the_numbers_of_the_run(phases):
    sentence = STUDY.outcome(phases)
    error, lost = phases.ratio_gain_error.mean("seed"), 1 - phases.common.sel(arm="faster").mean("label")[:, -1] / 0.5
    assert f"goes from {float(error.sel(ratio=10)):.2g} to {float(error.sel(ratio=1000)):.2g}" in sentence
    assert sentence.endswith(f"and {float(lost.mean()):.2f} with a decoder 10 times as fast and a share of 0.5.")
    with pytest.raises(NotInRun):
        STUDY.outcome(phases.assign(common=phases.common.where(phases.seed != 1)))


def test_a_reversed_order_is_measured(phases):
    reversed_order = phases.assign(cooccurrence=phases.cooccurrence[..., ::-1])
    np.testing.assert_array_equal(growth_phases.final_order(reversed_order, "faster"), -1)


def test_seeds_do_not_depend_on_their_neighbours(phases):
    alone = run(SMALL, Context((2,)))
    for name in ("logit", "common", "logit_flow", "ratio_slowing", "share_scan"):
        np.testing.assert_allclose(alone[name][0], phases[name].sel(seed=2), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "change",
    [
        {"queries": 0},
        {"classes": 1},
        {"distinct": 1},
        {"common": 0},
        {"share": 1.5},
        {"share": 0.0},
        {"share": 1.0},
        {"shares": ()},
        {"shares": (0.5, 0.0)},
        {"shares": (0.5,)},
        {"variation": -0.1},
        {"outputs": 3},
        {"rate_z": 0.0},
        {"rate_z": float("nan")},
        {"steps": 10},
        {"records": 3},
        {"sweep": ()},
        {"sweep": (0.0,)},
        {"sweep": (1.0,)},
        {"sweep": (1.0, 100.0, 100.0)},
        {"rate_z": 1e30},
    ],
)
def test_bad_config_is_named_before_any_training(change, monkeypatch):
    monkeypatch.setattr(Context, "fit", lambda *_args, **_options: pytest.fail("trained"))
    with pytest.raises(InputError, match=f"`{next(iter(change))}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_no_common_tokens_are_refused_with_the_reason():
    with pytest.raises(InputError, match=r"`share` must be from 0.0001 to 0.99, got 0.*attention moves from common"):
        run(replace(SMALL, share=0.0), Context((0,)))


def test_the_order_of_the_sweep_does_not_matter():
    first, second = (
        scan_snap._approach(replace(SMALL, sweep=sweep, shares=shares), Context((0,)))
        for sweep, shares in (((100.0, 1e3), (0.5, 0.1)), ((1e3, 100.0, 1e3), (0.1, 0.5, 0.1)))
    )
    xr.testing.assert_identical(first, second)
    assert first.share.values.tolist() == [0.5, 0.1]


def test_a_rate_far_too_large_is_a_result(tmp_path):
    """The scan is over before the first step, and training is nowhere near the flow."""
    config = replace(SMALL, rate_z=10.0)
    outcome = execute(replace(STUDY, presets={"quick": Preset(config, 1, 1)}), out=tmp_path)
    verdicts = {claim["name"]: claim["verdict"] for claim in outcome.claims}
    assert verdicts["scan"] == "not tested"
    assert verdicts["flow"] == "does not hold"
    assert len(list((outcome.path / "figures").glob("*.svg"))) == 3


CLAIMS_OF_ARM = {
    PREMISES: {"distinct-grows", "order", "relative-gain", "scan", "logarithm", "phase-time", "flow"},
    "faster": {
        "common-falls", "common-always", "gain-at-10", "scan-common", "logarithm-common", "phase-rate", "phase-later",
        "snap", "steady", "flow",
    },
    "equal": {"common-falls", "phase-rate", "phase-later", "flow"},
    "slower": {"common-falls", "order-slower", "no-snap", "phase-later", "flow"},
}  # fmt: skip


@pytest.mark.parametrize("begin", [50, 1000])
@pytest.mark.parametrize("arm", CLAIMS_OF_ARM)
def test_a_diverged_seed_is_nan_in_every_claim_that_uses_it(phases, arm, begin):
    diverged = phases.copy(deep=True)
    diverged.gain.loc[{"seed": 0, "arm": arm}] = np.nan
    for name in ("logit", "common"):
        diverged[name].loc[{"seed": 0, "arm": arm, "step": slice(begin, None)}] = np.nan
    for claim in CLAIMS:
        before, after = (np.asarray(claim.measure(run)) for run in (phases, diverged))
        np.testing.assert_array_equal(after[1:], before[1:], claim.name)
        if claim.name in CLAIMS_OF_ARM[arm]:
            assert np.isnan(after[0]), claim.name
            assert claim.judge(diverged, "quick")["verdict"] == "does not hold"
        else:
            assert after[0] == before[0] or np.isnan(before[0]), claim.name


def test_divergence_is_stored_for_every_seed_and_arm(phases):
    assert phases.diverged.sizes == {"seed": 3, "arm": 4}
    assert (phases.diverged == -1).all()
