"""Scan and Snap: the measures on curves that are known, the closed forms by other ways, and a small run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.data.tokens import sequence_classes
from joma.studies.hierarchy import scan_snap
from joma.studies.hierarchy.scan_snap import CLAIMS, STUDY, Config, run
from joma.study import Context, NotInRun, Preset, execute
from joma.theory import flows

SMALL = Config(classes=2, distinct=3, common=3, outputs=12, steps=1000, records=50, sweep=(10.0, 100.0))
TIMES = np.unique(np.rint(np.geomspace(1, 1e4, 100)))


def curve(values, times=TIMES):
    return xr.DataArray(values, {"step": times}, "step")


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1, 2)))


@given(power=st.floats(0.1, 3), scale=st.floats(1e-3, 1e3))
def test_the_local_power_of_a_power_is_that_power(power, scale):
    line = curve(scale * TIMES**power)
    np.testing.assert_allclose(scan_snap.exponent(line), power, rtol=1e-9)
    np.testing.assert_allclose(scan_snap.mean_exponent(line, 100, 1000), power, rtol=1e-9)


@given(begin=st.floats(20, 2000))
def test_the_slowing_is_where_the_power_falls_to_one(begin):
    """z = t²/(1 + (t/b)²) has the power 2/(1 + (t/b)²), which is 1 at t = b."""
    times = np.geomspace(1, 1e4, 400)
    found = scan_snap.slowing(curve(times**2 / (1 + (times / begin) ** 2), times))
    np.testing.assert_allclose(found, begin, rtol=1e-3)


def test_a_curve_that_does_not_slow_has_no_transition():
    assert np.isnan(scan_snap.slowing(curve(TIMES**2.0)))


def test_a_logarithm_and_a_line_are_told_apart():
    """By NumPy's own least squares for a curve that is neither."""
    log, line = 3 + 2 * np.log(TIMES), 1 + 0.1 * TIMES
    assert scan_snap.straightness(curve(log)) < 1e-9
    assert scan_snap.straightness(curve(line)) > 1e9
    late = TIMES >= 1000
    left = [
        np.sqrt(np.polyfit(abscissa[late], np.sqrt(TIMES)[late], 1, full=True)[1][0])
        for abscissa in (np.log(TIMES), TIMES)
    ]
    np.testing.assert_allclose(scan_snap.straightness(curve(np.sqrt(TIMES))), left[0] / left[1], rtol=1e-6)


def test_a_logarithm_grows_evenly():
    """Over the last decade, z = √t gains √10 times as much at the end as at the start, but for the records' spacing."""
    times = np.geomspace(1, 1e4, 401)
    np.testing.assert_allclose(scan_snap.unevenness(curve(5 * np.log(times), times)), 1, rtol=1e-8)
    np.testing.assert_allclose(scan_snap.unevenness(curve(np.sqrt(times), times)), 10 ** (99 / 200), rtol=1e-8)


@pytest.mark.parametrize("outputs", [3, 64, 1000])
def test_the_decoder_alone_follows_its_closed_form(outputs):
    """Train a decoder on one of K orthogonal unit features by its flow: ḣ = g/K; the clock is ∫ (1 − α) s dt/K."""
    labels, times = 4, np.geomspace(0.01, 1e4, 40)

    def rhs(_, state):
        a = np.exp(state[:outputs] - state[:outputs].max())
        g = np.eye(outputs)[0] - a / a.sum()
        return np.append(g, g @ state[:outputs]) / labels

    states = flows.integrate(rhs, np.zeros(outputs + 1), np.r_[0.0, times]).states[1:]
    unit = times / labels
    margin = scan_snap.decoder_margin(unit, outputs)
    np.testing.assert_allclose(margin, states[:, 0] - states[:, 1], rtol=1e-8)
    np.testing.assert_allclose((outputs - 1) / (2 * outputs) * margin**2, states[:, -1], rtol=1e-8)
    step = 1e-4
    ahead, behind = (np.log(scan_snap.decoder_margin(unit * np.exp(way * step), outputs)) for way in (1, -1))
    np.testing.assert_allclose(scan_snap.clock_exponent(unit, outputs), (ahead - behind) / step, rtol=1e-5)
    assert scan_snap.clock_exponent(np.array(0.0), outputs) == 2


def test_the_flow_is_the_gradient_of_the_loss():
    """One short time of the flow moves the logits as autograd's Hessian-free second order says: z ∝ t² from zero."""
    data = sequence_classes(generators=[torch.Generator().manual_seed(3)], classes=2, distinct=2, common=2)
    x, query, time = data.frequency[0], data.query, 1e-3
    z = torch.zeros(2, x.shape[1], dtype=torch.float64, requires_grad=True)
    v = torch.zeros(x.shape[1], 5, dtype=torch.float64, requires_grad=True)

    def loss():
        f = torch.nn.functional.normalize(x * z[query].exp(), dim=-1)
        return torch.nn.functional.cross_entropy(f @ v, torch.arange(4))

    (slope,) = torch.autograd.grad(loss(), v, create_graph=True)
    v.data = -0.7 * slope.detach()
    (pull,) = torch.autograd.grad(loss(), z)  # to first order in v, hence ż = −η_z · pull · t
    scale = 1e-6
    v.data *= scale
    (small,) = torch.autograd.grad(loss(), z)
    expected = -0.3 * small.numpy() / scale * time**2 / 2
    found = scan_snap.flow(x.numpy(), query.numpy(), np.array([0, time]), outputs=5, rate_w=0.7, rate_z=0.3)
    assert float(pull.abs().max()) > 1e-3
    np.testing.assert_allclose(found[-1], expected, rtol=1e-2, atol=1e-13)


def test_sgd_follows_the_flow_and_attends_as_it_does(trajectory):
    assert float(scan_snap.flow_distance(trajectory).max()) < 0.01
    np.testing.assert_allclose(trajectory.common, trajectory.common_flow, atol=0.01)
    np.testing.assert_allclose(trajectory.common.isel(step=0), SMALL.share, rtol=1e-12)


def test_distinct_tokens_win_in_the_order_of_their_co_occurrence(trajectory):
    verdicts = {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in CLAIMS}
    for name in ("common-falls", "common-always", "distinct-grows", "order", "flow", "snap", "logarithm"):
        assert verdicts[name] == "holds", name
    assert (trajectory.cooccurrence.diff("rank") < 0).all()


def test_a_reversed_order_is_seen(trajectory):
    turned = trajectory.assign(cooccurrence=trajectory.cooccurrence[..., ::-1])
    np.testing.assert_array_equal(scan_snap.spearman(turned, "faster"), -1)


def test_theorem_3_holds_in_the_limit_of_a_fast_decoder():
    """Its error is of first order in κ = η_z/η_w."""
    data = sequence_classes(generators=[torch.Generator().manual_seed(0)])
    x, query = data.frequency.numpy(), data.query.numpy()
    rank = xr.DataArray(scan_snap._own(data, x, x)[0], dims=("label", "rank"))
    errors = []
    for kappa in (1e-2, 1e-3, 1e-4):
        z = scan_snap.flow(x[0], query, np.array([0.0, 3000.0]), outputs=64, rate_w=1.0, rate_z=kappa)
        logit = xr.DataArray(scan_snap._distinct(data, z[None])[0, -1], dims=("label", "rank"))
        gap = (logit - scan_snap.relative_gain(logit, rank)).isel(rank=slice(1, None))
        errors.append(float(np.sqrt((gap**2).sum() / (logit.isel(rank=slice(1, None)) ** 2).sum())))
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 10, rtol=0.15)
    assert errors[-1] < 1e-3


def test_the_unused_vocabulary_is_what_makes_the_scan_steeper_than_a_square():
    """With as many outputs as classes the common tokens tell nothing, and the power of t never exceeds 2."""
    data, times = sequence_classes(generators=[torch.Generator().manual_seed(0)]), np.geomspace(1, 50, 40)
    powers = {}
    for outputs in (8, 64):
        z = scan_snap.flow(
            data.frequency[0].numpy(), data.query.numpy(), np.r_[0, times], outputs=outputs, rate_w=1.0, rate_z=0.1
        )
        winner = scan_snap._distinct(data, z[None, 1:])[0, ..., 0].mean(axis=-1)
        powers[outputs] = float(scan_snap.exponent(curve(winner, times)).max())
    assert powers[8] <= 2
    assert powers[64] > 2.3


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((2,)))
    for name in ("logit", "common", "logit_flow", "sweep_slowing"):
        np.testing.assert_allclose(alone[name][0], trajectory[name].sel(seed=2), rtol=0, atol=1e-11)


def test_it_is_drawn_from_the_dataset_alone(trajectory):
    assert [len(drawing.draw(trajectory).axes) for drawing in STUDY.figures.values()] == [3, 3]


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
    data = sequence_classes(generators=Context((0,)).generators(), classes=2, distinct=3, common=3)
    found = [
        scan_snap._sweep(replace(SMALL, sweep=sweep), Context((0,)), data)
        for sweep in ((10.0, 100.0), (100.0, 10.0, 100.0))
    ]
    xr.testing.assert_identical(*found)


def test_a_phase_without_records_is_not_judged():
    with pytest.raises(NotInRun):
        scan_snap.mean_exponent(curve(TIMES**2), 0.01, 0.1)
    with pytest.raises(NotInRun):
        scan_snap.mean_exponent(curve(TIMES**2), 1e4, 1e6)


def test_a_rate_far_too_large_is_a_result(tmp_path):
    """The scan is over before the first step, and training is nowhere near the flow."""
    config = replace(SMALL, rate_z=100.0)
    outcome = execute(replace(STUDY, presets={"quick": Preset(config, 1, 1)}), out=tmp_path)
    verdicts = {claim["name"]: claim["verdict"] for claim in outcome.claims}
    assert verdicts["scan"] == "not tested at this preset"
    assert verdicts["flow"] == "does not hold"
    assert len(list((outcome.path / "figures").glob("*.svg"))) == 2


USES = {
    "faster": {claim.name for claim in CLAIMS} - {"order-slower", "no-snap", "phase-limit"},
    "equal": {"common-falls", "phase-rate", "phase-later", "flow"},
    "slower": {"common-falls", "order-slower", "no-snap", "phase-later", "flow"},
}


@pytest.mark.parametrize("begin", [50, 1000])
@pytest.mark.parametrize("arm", USES)
def test_a_lost_seed_is_nan_in_every_claim_that_uses_it(trajectory, arm, begin):
    spoilt = trajectory.copy(deep=True)
    for name in ("logit", "common", "gain"):
        spoilt[name].loc[{"seed": 0, "arm": arm, "step": slice(begin, None)}] = np.nan
    for claim in CLAIMS:
        before, after = (np.asarray(claim.measure(run)) for run in (trajectory, spoilt))
        np.testing.assert_array_equal(after[1:], before[1:], claim.name)
        if claim.name in USES[arm]:
            assert np.isnan(after[0]), claim.name
            assert claim.judge(spoilt, "quick")["verdict"] == "does not hold"
        else:
            assert after[0] == before[0] or np.isnan(before[0]), claim.name


def test_a_run_of_lost_seeds_is_drawn(trajectory):
    lost = trajectory.assign({name: trajectory[name].where(trajectory.step < 50) for name in ("logit", "common")})
    assert all(drawing.draw(lost).axes for drawing in STUDY.figures.values())


def test_which_seeds_were_lost_is_kept(trajectory):
    assert trajectory.diverged.sizes == {"seed": 3, "arm": 3}
    assert (trajectory.diverged == -1).all()


def test_presets_are_configs_of_this_study():
    assert all(isinstance(preset.config, Config) for preset in STUDY.presets.values())
