"""The study `hierarchy-order`: a small run, its claims on runs with known results, and its figures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.data.trees import HBLT
from joma.models.transformer import Decoder
from joma.studies.hierarchy import hierarchy_order as study
from joma.study import Context, NotInRun, Preset, execute
from joma.theory import hierarchy

SMALL = study.Config(width=8, steps=12, batch=8, pool=5, probes=96, moments=4)


@pytest.fixture(scope="module")
def run() -> xr.Dataset:
    return study.run(SMALL, Context((0, 1)))


def verdicts(run: xr.Dataset) -> dict[str, str]:
    return {claim.name: claim.judge(run, "paper")["verdict"] for claim in study.CLAIMS}


def test_gains_begin_at_zero_and_the_loss_near_chance(run):
    assert (run.gain.isel(step=0) == 0).all()
    assert (run.gain_single.isel(step=0) == 0).all()
    assert run.entropy.sizes == {"tree": 3, "seed": 2, "step": 5, "layer": 3}
    assert run.entropy_single.sizes == {"seed": 2, "step": 5}
    assert (run.entropy > 0).all()
    assert (run.entropy <= math.log(17)).all()
    assert run.gain.sizes == {"tree": 3, "seed": 2, "step": 5, "pair": 120}
    np.testing.assert_allclose(run.last_gain.mean("layer"), run.gain.isel(step=-1), atol=1e-6)
    assert float(run.loss_single.isel(step=0).mean()) == pytest.approx(math.log(2), abs=0.25)


def test_a_seed_trains_as_it_would_alone(run):
    alone = study.run(SMALL, Context((1,)))
    np.testing.assert_allclose(alone.gain.isel(seed=0), run.gain.sel(seed=1), atol=2e-5)
    np.testing.assert_allclose(alone.loss.isel(seed=0), run.loss.sel(seed=1), rtol=1e-5)


def test_every_claim_holds_on_a_run_that_agrees_with_it(ideal):
    assert set(verdicts(ideal).values()) == {"holds"}


@pytest.mark.parametrize(
    ("claims", "contradict"),
    [
        (
            ("order-1", "order-1-mean", "gains-1", "bottom-up-1", "heights-1", "high-1"),
            lambda run: run.assign(gain_single=-run.gain_single),
        ),
        (
            ("order-3", "order-3-mean", "gains-3", "bottom-up-3", "heights-3", "high-3"),
            lambda run: run.assign(gain=-run.gain),
        ),
        (
            ("order-1", "order-1-mean", "gains-1", "bottom-up-1", "heights-1", "high-1"),
            lambda run: run.assign(gain_single=0 * run.gain_single),
        ),
        (("same-tokens",), lambda run: run.assign(marginal=run.marginal + 1e-9 * (run.tree == "deep"))),
        (
            ("later", "later-matched"),
            lambda run: run.assign(gain=run.gain.sel(tree=["shallow"] * 3).assign_coords(tree=run.tree)),
        ),
        (
            ("above-siblings", "higher", "higher-matched", "higher-beyond-root"),
            lambda run: run.assign(last_gain=run.last_gain.isel(layer=[2, 1, 0]).assign_coords(layer=run.layer)),
        ),
        (("above-siblings", "higher", "higher-matched"), lambda run: run.assign(last_gain=0 * run.last_gain - 1)),
        (
            ("bounce-1", "bounce-1-mean"),
            lambda run: run.assign(entropy_single=2 - run.step / 100 + 0 * run.entropy_single),
        ),
        (
            [f"bounce-3-layer-{layer}{suffix}" for layer in (1, 2, 3) for suffix in ("", "-mean")],
            lambda run: run.assign(entropy=2 - run.step / 100 + 0 * run.entropy),
        ),
    ],
)
def test_a_claim_fails_on_a_run_that_contradicts_it(ideal, claims, contradict):
    judged = verdicts(contradict(ideal))
    assert {judged[name] for name in claims} == {"does not hold"}


@pytest.mark.parametrize("record", [1, -1])
@pytest.mark.parametrize("tree", ["deep", "shallow", "matched", "single"])
def test_a_diverged_seed_is_nan_in_every_claim_that_uses_it(ideal, record, tree):
    """The step of divergence does not matter, even if the odds had doubled long before it."""
    from_then_on = {"seed": 1, "step": slice(int(ideal.step[record]), None)}
    diverged = ideal.copy(deep=True)
    if tree != "single":
        diverged.last_gain.loc[{"tree": tree, "seed": 1}] = np.nan
    for name in ("gain", "entropy"):
        if tree == "single":
            diverged[f"{name}_single"].loc[from_then_on] = np.nan
        else:
            diverged[name].loc[{"tree": tree, **from_then_on}] = np.nan
    names = {claim.name for claim in study.CLAIMS}
    single = {name for name in names if "-1" in name and not name.startswith("bounce-3")}
    matched = {name for name in names if "-matched" in name}
    deep = names - single - {"same-tokens"}
    uses = {"single": single, "deep": deep, "matched": matched, "shallow": {"later", "higher", "higher-beyond-root"}}
    for claim in study.CLAIMS:
        values = np.asarray(claim.measure(diverged))
        if claim.name in uses[tree]:
            np.testing.assert_array_equal(np.isnan(values), [False, True], claim.name)
            assert claim.judge(diverged, "paper")["verdict"] == "does not hold"
        else:
            assert not np.isnan(values).any(), claim.name


def test_a_run_whose_seeds_all_diverge_warns_and_is_drawn(tmp_path):
    config = replace(SMALL, rate=1e30, steps=20)
    with pytest.warns(UserWarning, match="seeds 0, 1"):
        outcome = execute(replace(study.STUDY, presets={"quick": Preset(config, 2, 1)}), out=tmp_path)
    assert {claim["name"] for claim in outcome.claims if claim["verdict"] == "holds"} == {"same-tokens"}
    assert len(list((outcome.path / "figures").glob("*.svg"))) == 4


def test_the_outcome_says_the_numbers_of_the_run(ideal):
    assert study.outcome(ideal) == (
        "The order in which pairs are associated correlates with co-occurrence by 1.00 with one layer and 1.00 with 3; "
        "pairs that only a high latent joins gain +1.39 and +1.39 nats. Attention turns sparse "
        "and then dense again in 2 of 2 seeds with one layer; with 3 layers, in 2, 2 and 2 of them in layers 1 to 3."
    )
    with pytest.raises(NotInRun):
        study.outcome(ideal.assign(gain=ideal.gain.where(ideal.seed != 1)))


@pytest.mark.parametrize("seeds", [3, 24])
def test_a_layer_claim_within_the_spread_of_seeds_is_undecided(ideal, seeds):
    """A lift of 0.2 layers with a deviation of 0.4 between seeds: three seeds cannot decide it, 24 can."""
    lift = 0.2 + 0.4 * np.sin(np.arange(seeds)) / np.std(np.sin(np.arange(seeds)))
    (claim,) = (claim for claim in study.CLAIMS if claim.name == "higher")
    record = replace(claim, measure=lambda _: lift).judge(ideal.isel(seed=[0] * seeds), "paper")
    assert record["verdict"] == {3: "not tested", 24: "holds"}[seeds]


@pytest.mark.parametrize(("bounced", "verdict"), [(2, "does not hold"), (6, "not tested"), (11, "holds")])
def test_most_seeds_must_come_back_where_a_few_lift_the_mean(ideal, bounced, verdict):
    """Two of twelve seeds that come back leave the mean above 0, but most do not."""
    run = ideal.isel(seed=[0] * 12).assign_coords(seed=range(12))
    falls = 2 - run.step / 100
    run["entropy_single"] = run.entropy_single.where(run.seed < bounced, falls)
    (claim,) = (claim for claim in study.CLAIMS if claim.name == "bounce-1")
    assert claim.judge(run, "paper")["verdict"] == verdict
    assert (float(claim.measure(run).sum()), claim.kind) == (bounced, "reading")
    (average,) = (claim for claim in study.CLAIMS if claim.name == "bounce-1-mean")
    assert float(average.measure(run).mean()) == pytest.approx(bounced / 12 * 0.5, abs=0.01)


def test_divergence_is_stored_for_every_training(run):
    assert run.diverged.training.values.tolist()[-1] == "deep, 1 layer"
    assert run.diverged.sizes == {"training": 4, "seed": 2}
    assert (run.diverged == -1).all()


@pytest.fixture
def forbid_computing(monkeypatch):
    """Drawing must not sample, train or integrate again."""

    def refuse(*_args, **_options):
        raise AssertionError("recomputed")

    monkeypatch.setattr(HBLT, "sample", refuse)
    monkeypatch.setattr(Decoder, "forward", refuse)
    monkeypatch.setattr(hierarchy, "cooccurrence_matrix", refuse)


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def titles(panels) -> list[str]:
    return [axes.get_title(loc="left") for axes in panels]


@pytest.mark.usefixtures("forbid_computing")
def test_the_order_is_drawn_by_height_and_against_cooccurrence(ideal):
    single, full, times = study.draw_order(ideal).axes
    assert titles((single, full, times)) == [
        "(a)  One layer: low ancestors first",
        "(b)  3 layers: low ancestors first",
        "(c)  Pairs that co-occur more come first",
    ]
    for axes in (single, full):
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "gain in attention / nats")
        assert labels(axes) == ["height 1", "height 2", "height 3", "the root"]
        *curves, doubled = axes.lines
        ends = [100 / doubling * math.log(2) for doubling in (10, 30, 50)] + [-1]
        np.testing.assert_allclose([curve.get_ydata()[-1] for curve in curves], ends, rtol=1e-6)
        np.testing.assert_allclose(doubled.get_ydata(), math.log(2))
        low, high = axes.get_ylim()
        assert low <= -1
        assert high > ends[0] + (high - low) / 4  # the legend's room
    assert times.get_ylim()[0] == 0
    assert labels(times) == ["1 layer: 1.00", "3 layers: 1.00"]
    for bars in times.containers:
        points, _, _ = bars.lines
        np.testing.assert_array_equal(points.get_ydata(), [10, 30, 50, 100])
        np.testing.assert_allclose(points.get_xdata()[0], hierarchy.cooccurrence(1, 4, 0.85, 0.3))


@pytest.mark.usefixtures("forbid_computing")
def test_cousins_are_drawn_by_tree_with_their_times_and_layers(ideal):
    figure = study.draw_depth(ideal)
    curves, centres, layers = figure.axes
    shown = ["deep", "shallow, same ρ", "shallow, same P[l | m]", "deep, siblings"]
    assert titles((curves, centres, layers)) == [
        "(a)  Latents in between delay cousins",
        "(b)  Cousins come later and in higher layers",
        "(c)  Which layers associate cousins",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == shown
    ends = [line.get_ydata()[-1] for line in curves.lines[:4]]
    np.testing.assert_allclose(ends, [100 / 30 * math.log(2)] + [10 * math.log(2)] * 3, rtol=1e-6)
    points = [(set(line.get_xdata()), set(np.round(line.get_ydata(), 9))) for line in centres.lines]
    assert points == [({30}, {3})] + [({10}, {1})] * 3
    assert layers.get_xticks().tolist() == [1, 2, 3]
    by_layer = [bars.lines[0].get_ydata() for bars in layers.containers]
    np.testing.assert_allclose(by_layer[0], [0, 0, 10 * math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(by_layer[3], [30 * math.log(2), 0, 0], rtol=1e-6)


@pytest.mark.usefixtures("forbid_computing")
def test_entropy_is_drawn_by_layer_with_the_number_of_seeds_that_come_back(ideal):
    only_falls = ideal.assign(
        entropy=xr.where(ideal.layer == 2, 2 - ideal.step / 100 + 0 * ideal.entropy, ideal.entropy)
    )
    single, full = study.draw_entropy(only_falls).axes
    assert titles((single, full)) == [
        "(a)  One layer: does entropy come back?",
        "(b)  3 layers: does entropy come back?",
    ]
    assert labels(single) == ["layer 1: back in 2 of 2 seeds"]
    assert labels(full) == [f"layer {layer}: back in {count} of 2 seeds" for layer, count in ((1, 2), (2, 0), (3, 2))]
    np.testing.assert_allclose(full.lines[1].get_ydata(), 2 - ideal.step / 100)
    np.testing.assert_allclose(single.lines[0].get_ydata(), 1 + abs(ideal.step - 50) / 50)


@pytest.mark.usefixtures("forbid_computing")
def test_matrices_are_symmetric_with_an_empty_diagonal(ideal):
    panels = [axes for axes in study.draw_matrices(ideal).axes if axes.images]
    assert titles(panels) == [
        "(a)  Theorem 5: co-occurrence",
        "(b)  One layer attends alike",
        "(c)  3 layers attend alike",
    ]
    predicted, single, full = (axes.images[0].get_array().filled(np.nan) for axes in panels)
    for matrix in (predicted, single, full):
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_array_equal(np.isnan(matrix), np.eye(16, dtype=bool))
    assert predicted[0, 1] == pytest.approx(float(hierarchy.cooccurrence(1, 4, 0.85, 0.3)))
    assert single[0, 1] == pytest.approx(5 * math.log(2), rel=1e-6)
    np.testing.assert_allclose(full, single, rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rho": 0.5}, "`rho`"),
        ({"rho": math.nan}, "`rho`"),
        ({"asked": 0}, "`asked`"),
        ({"asked": 16}, "`asked`"),
        ({"probes": 2}, "`probes`"),
        ({"probes": 0}, "`probes`"),
        ({"steps": 0}, "`steps`"),
        ({"batch": 0}, "`batch`"),
        ({"pool": 0}, "`pool`"),
        ({"moments": 0}, "`moments`"),
        ({"width": 0}, "`width`"),
        ({"rate": -1.0}, "`rate`"),
    ],
)
def test_bad_fields_are_named(change, name):
    with pytest.raises(InputError, match=name):
        study.run(replace(SMALL, **change), Context((0,)))
