"""The study `scan-snap`: a small run against its flow, its claims, and its figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.data.tokens import sequence_classes
from joma.studies.hierarchy import growth_phases, scan_snap
from joma.studies.hierarchy.scan_snap import ARMS, CLAIMS, STUDY, Config, run
from joma.study import Context, Preset, execute

SMALL = Config(classes=2, distinct=3, common=3, outputs=12, steps=1000, records=50, sweep=(10.0, 100.0))


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1, 2)))


def test_sgd_follows_the_flow_and_attends_as_it_does(trajectory):
    assert float(growth_phases.flow_distance(trajectory).max()) < 0.01
    np.testing.assert_allclose(trajectory.common, trajectory.common_flow, atol=0.01)
    np.testing.assert_allclose(trajectory.common.isel(step=0), SMALL.share, rtol=1e-12)


def test_distinct_tokens_win_in_the_order_of_their_co_occurrence(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in CLAIMS}
    for name in ("common-falls", "common-always", "distinct-grows", "order", "flow", "snap", "logarithm"):
        assert verdicts[name] == "holds", name
    assert (trajectory.cooccurrence.diff("rank") < 0).all()


def test_a_reversed_order_is_measured(trajectory):
    reversed_order = trajectory.assign(cooccurrence=trajectory.cooccurrence[..., ::-1])
    np.testing.assert_array_equal(growth_phases.final_order(reversed_order, "faster"), -1)


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((2,)))
    for name in ("logit", "common", "logit_flow", "sweep_slowing"):
        np.testing.assert_allclose(alone[name][0], trajectory[name].sel(seed=2), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "change",
    [
        {"queries": 0},
        {"classes": 1},
        {"distinct": 1},
        {"common": 0},
        {"share": 1.5},
        {"variation": -0.1},
        {"outputs": 3},
        {"rate_z": 0.0},
        {"rate_z": float("nan")},
        {"steps": 10},
        {"records": 3},
        {"sweep": ()},
        {"sweep": (0.0,)},
        {"sweep": (1.0,)},
        {"sweep": (1.0, 10.0, 10.0)},
        {"rate_z": 1e30},
    ],
)
def test_bad_config_is_named_before_any_training(change, monkeypatch):
    monkeypatch.setattr(Context, "fit", lambda *_args, **_options: pytest.fail("trained"))
    with pytest.raises(InputError, match=f"`{next(iter(change))}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_the_order_of_the_sweep_does_not_matter():
    data = sequence_classes(generators=Context((0,)).generators("data"), classes=2, distinct=3, common=3)
    first, second = (
        scan_snap._sweep(replace(SMALL, sweep=sweep), Context((0,)), data)
        for sweep in ((10.0, 100.0), (100.0, 10.0, 100.0))
    )
    xr.testing.assert_identical(first, second)


def test_a_rate_far_too_large_is_a_result(tmp_path):
    """The scan is over before the first step, and training is nowhere near the flow."""
    config = replace(SMALL, rate_z=100.0)
    outcome = execute(replace(STUDY, presets={"quick": Preset(config, 1, 1)}), out=tmp_path)
    verdicts = {claim["name"]: claim["verdict"] for claim in outcome.claims}
    assert verdicts["scan"] == "not tested"
    assert verdicts["flow"] == "does not hold"
    assert len(list((outcome.path / "figures").glob("*.svg"))) == 2


CLAIMS_OF_ARM = {
    "faster": {claim.name for claim in CLAIMS} - {"order-slower", "no-snap", "phase-limit"},
    "equal": {"common-falls", "phase-rate", "phase-later", "flow"},
    "slower": {"common-falls", "order-slower", "no-snap", "phase-later", "flow"},
}


@pytest.mark.parametrize("begin", [50, 1000])
@pytest.mark.parametrize("arm", CLAIMS_OF_ARM)
def test_a_diverged_seed_is_nan_in_every_claim_that_uses_it(trajectory, arm, begin):
    diverged = trajectory.copy(deep=True)
    for name in ("logit", "common", "gain"):
        diverged[name].loc[{"seed": 0, "arm": arm, "step": slice(begin, None)}] = np.nan
    for claim in CLAIMS:
        before, after = (np.asarray(claim.measure(run)) for run in (trajectory, diverged))
        np.testing.assert_array_equal(after[1:], before[1:], claim.name)
        if claim.name in CLAIMS_OF_ARM[arm]:
            assert np.isnan(after[0]), claim.name
            assert claim.judge(diverged, "quick")["verdict"] == "does not hold"
        else:
            assert after[0] == before[0] or np.isnan(before[0]), claim.name


def test_divergence_is_stored_for_every_seed_and_arm(trajectory):
    assert trajectory.diverged.sizes == {"seed": 3, "arm": 3}
    assert (trajectory.diverged == -1).all()


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def points(bars) -> np.ndarray:
    """The positions [2, point] of points with error bars."""
    return np.asarray(bars.lines[0].get_data())


def test_the_scan_is_drawn_as_flow_and_training(trajectory):
    common, logits, order = STUDY.figures["scan"].draw(trajectory).axes
    assert [axes.get_xscale() for axes in (common, logits, order)] == ["log", "log", "linear"]
    assert common.get_ylabel() == "attention to common tokens"
    assert labels(common) == [f"decoder {arm}" for arm in ARMS]
    for arm, bars in zip(ARMS, common.containers, strict=True):
        step, share = points(bars)
        expected = trajectory.common.sel(arm=arm, step=step).mean(("seed", "label"))
        np.testing.assert_allclose(share, expected, rtol=1e-12)
    assert labels(logits) == [f"P = {value:.3f}" for value in trajectory.cooccurrence[0, 0].values]
    flows = [line for line in logits.lines if line.get_marker() == "None"]
    for rank, line in enumerate(flows):
        expected = trajectory.logit_flow.sel(arm="faster").isel(seed=0, label=0, rank=rank, step=slice(1, None))
        np.testing.assert_array_equal(line.get_ydata(), expected)
    assert len(flows) == SMALL.distinct
    assert labels(order) == ["$(P_l/P_1)^2$", *ARMS]
    square, *arms = order.lines
    np.testing.assert_array_equal(square.get_ydata(), square.get_xdata() ** 2)
    assert [len(line.get_xdata()) for line in arms] == [3 * SMALL.labels * (SMALL.distinct - 1)] * 3


def test_the_snap_is_drawn_as_growth_exponents_and_times(trajectory):
    growth, exponents, times = STUDY.figures["snap"].draw(trajectory).axes
    assert (growth.get_xscale(), growth.get_yscale()) == ("log", "log")
    assert labels(growth) == [f"decoder {arm}" for arm in ARMS]
    winners = growth_phases.winning_logits(trajectory)
    for arm, bars in zip(ARMS, growth.containers, strict=True):
        step, logit = points(bars)
        np.testing.assert_allclose(logit, winners.sel(arm=arm, step=step).mean("seed"), rtol=1e-12)
    assert len(exponents.containers) == len(ARMS)
    assert labels(exponents) == ["orthogonal classes"]
    (clock,) = (line for line in exponents.lines if line.get_label() == "orthogonal classes")
    assert (np.diff(clock.get_xdata()) >= 0).all()
    assert np.nanmax(clock.get_ydata()) <= 2
    assert labels(times) == ["integrated flow", r"$2 K \ln M / \eta_w$", "SGD"]
    flow, transition = (line for line in times.lines if line.get_marker() == "None")
    np.testing.assert_allclose(flow.get_ydata(), trajectory.sweep_slowing.mean("seed"))
    np.testing.assert_allclose(transition.get_ydata(), 8 * np.log(12) / (0.1 * np.array([10, 100])))
    np.testing.assert_array_equal(points(times.containers[0])[0], list(ARMS.values()))


def test_a_run_whose_seeds_all_diverged_is_drawn_up_to_that_step(trajectory):
    diverged = trajectory.assign({name: trajectory[name].where(trajectory.step < 50) for name in ("logit", "common")})
    common, *_ = STUDY.figures["scan"].draw(diverged).axes
    step, share = points(common.containers[0])
    np.testing.assert_array_equal(np.isnan(share), step >= 50)
    *_, times = STUDY.figures["snap"].draw(diverged).axes
    assert np.isnan(points(times.containers[0])[1]).all()
