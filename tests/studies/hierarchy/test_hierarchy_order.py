"""The study of a hierarchy's order: its measures on curves of known order and time, its trees, and its claims."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import spearmanr

from joma.arguments import InputError
from joma.data.trees import HBLT
from joma.models.transformer import Decoder, DecoderConfig, Layer
from joma.studies.hierarchy import hierarchy_order as study
from joma.study import Context, Preset, execute
from joma.theory import hierarchy

SMALL = study.Config(width=8, steps=12, batch=8, pool=5, probes=96, moments=4)
STEPS = np.arange(0, 101, 5)


@pytest.fixture(scope="module")
def run() -> xr.Dataset:
    return study.run(SMALL, Context((0, 1)))


@pytest.fixture(scope="module")
def ideal(run: xr.Dataset) -> xr.Dataset:
    """A run in which everything is as claimed: pairs double at steps 10, 30, 50, and the root's never.

    Siblings gain in layer 1, others in layer 3; in the shallow trees cousins are as siblings are in the deep one.
    """
    deep = run.height.sel(tree="deep", drop=True)
    seen_as = xr.where((deep == study.COUSINS) & (run.tree != "deep"), study.SIBLINGS, deep)
    layer = xr.where(seen_as == study.SIBLINGS, 1, 3)
    gain = _rise(seen_as) * (run.layer == layer) * study.LAYERS
    full = xr.concat([gain, gain], dim=xr.Variable("seed", [0, 1])).transpose("tree", "seed", "step", "layer", "pair")
    single = _rise(deep).expand_dims(seed=[0, 1]).transpose("seed", "step", "pair")
    fixed = run[["height", "cooccurrence", "marginal", "one", "other"]]
    return fixed.assign(gain=full, gain_single=single).assign_coords(run.layer.coords)


def _rise(height: xr.DataArray) -> xr.DataArray:
    """A straight rise to ln 2 at step 20 height − 10; for the root's pairs a fall."""
    step = xr.DataArray(STEPS, coords={"step": STEPS})
    return step * xr.where(height == study.LEVELS, -0.01, math.log(2) / (20 * height - 10) * (1 + 1e-9))


def verdicts(run: xr.Dataset) -> dict[str, str]:
    return {claim.name: claim.judge(run, "paper")["verdict"] for claim in study.CLAIMS}


def curves(*values: list[float], steps: list[int]) -> xr.DataArray:
    return xr.DataArray(list(values), dims=("pair", "step"), coords={"step": steps})


def test_a_doubling_time_is_the_first_step_at_ln_2_and_the_last_step_if_there_is_none():
    low, high = 0.69, 0.70
    gain = curves([0, low, high, 2], [0, high, low, 0], [0, -1, -2, -3], steps=[0, 3, 10, 50])
    np.testing.assert_array_equal(study.doubling_time(gain), [10, 3, 50])


def test_the_average_gain_is_the_area_under_the_curve():
    gain = curves([0, 1, 1], [0, 2, 0], steps=[0, 10, 40])
    np.testing.assert_allclose(study.early_gain(gain), [35 / 40, 1.0], rtol=1e-12)


@given(hnp.arrays(np.float64, (2, 12), elements=st.integers(-4, 4).map(float)))
def test_the_rank_correlation_is_spearmans_with_ties(values):
    first, second = (xr.DataArray(own, dims="pair") for own in values)
    found = float(study.rank_correlation(first, second))
    if np.ptp(values, axis=1).min() == 0:
        assert found == 0
    else:
        assert found == pytest.approx(spearmanr(*values)[0], abs=1e-12)


def test_ties_allow_a_rank_correlation_of_at_most_91_hundredths(run):
    height = run.height.sel(tree="deep")
    perfect = -(height + xr.DataArray(np.linspace(0, 0.5, height.size), dims="pair"))
    found = float(study.rank_correlation(run.cooccurrence.sel(tree="deep"), perfect))
    assert found == pytest.approx(0.909, abs=5e-4)


def test_the_centre_is_a_mean_layer_weighted_by_gains_that_are_positive():
    gain = xr.DataArray(
        [[0, 0, 2.0], [1, 1, 1.0], [3, -9, 1.0], [-1, 0, -1.0]], dims=("pair", "layer"), coords={"layer": [1, 2, 3]}
    )
    np.testing.assert_allclose(study.centre(gain), [3, 2, 1.5, np.nan], rtol=1e-12)


def test_every_token_occurs_as_often_in_every_tree_in_each_class():
    for classes in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]):
        found = [hierarchy.marginals(tree.parents, classes, tree.p_child, tree.rho) for tree in _trees()]
        np.testing.assert_allclose(found, np.full((3, 16), found[0][0]), rtol=0, atol=1e-15)


def _trees() -> list[HBLT]:
    return list(study.trees(0.85).values())


def test_the_matched_tree_has_the_deep_trees_cousins_as_siblings(run):
    deep = run.height.sel(tree="deep", drop=True)
    cousins, siblings = deep == study.COUSINS, deep == study.SIBLINGS
    together = run.cooccurrence.where(cousins, drop=True)
    np.testing.assert_allclose(together.sel(tree="matched"), together.sel(tree="deep"), rtol=1e-13)
    assert (together.sel(tree="shallow") > together.sel(tree="deep") + 0.05).all()
    assert (run.height.sel(tree="shallow").where(cousins | siblings, drop=True) == 1).all()
    np.testing.assert_array_equal(np.unique(deep, return_counts=True)[1], [8, 16, 32, 64])


def test_sequences_hide_what_is_asked_and_answer_as_the_tree_draws():
    tree = _trees()[0]
    drawn = study._drawn(tree, (50, 100), 4, Context((7,)).generators(), "cpu")
    assert drawn.visible.shape == (50, 1, 100, 16)
    asked = F.one_hot(drawn.asked.long(), 16).sum(dim=-2)
    assert int(asked.max()) == 1
    assert not (drawn.visible & asked.bool()).any()
    chance = hierarchy.marginals(tree.parents, tree.p0, tree.p_child, tree.rho)[0]
    assert float(drawn.answer.float().mean()) == pytest.approx(chance, abs=0.02)
    # One of a pair visible and the other asked for: the answer is Theorem 5's, for every two siblings together.
    pairs, yes = 0, 0
    for place in range(4):
        sibling = drawn.asked[..., place].long() ^ 1
        there = drawn.visible.gather(-1, sibling[..., None])[..., 0]
        pairs, yes = pairs + int(there.sum()), yes + int((there & drawn.answer[..., place]).sum())
    expected = float(hierarchy.cooccurrence(1, 4, 0.85, 0.3))
    assert yes / pairs == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / pairs))


def _decoder(layers: int, dtype: torch.dtype = torch.float32) -> Decoder:
    config = DecoderConfig(vocabulary=33, width=8, layers=layers, outputs=1, mask="full")
    return Decoder(config, generators=Context((0, 1)).generators(), dtype=dtype)


def _probe() -> study.Sequences:
    drawn = study._drawn(_trees()[0], (1, 96), 4, Context((5, 6)).generators(), "cpu")
    return study.Sequences(*(part[0] for part in drawn))


def test_first_layer_attention_is_the_logits_of_the_embeddings():
    model, probe = _decoder(1), _probe()
    found = study._watch(probe)(model, 0)["attention"]
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    assert layer.attention.query is not None
    assert layer.attention.key is not None
    x = layer.norms[0](model.embedding[:, None])
    query, key = (part(x)[:, 0] for part in (layer.attention.query, layer.attention.key))
    logits = query[:, 17:] @ key[:, :17].mT / math.sqrt(8)
    odds = logits[..., 1:] - logits[..., :1]
    asked = F.one_hot(probe.asked.long(), 16).sum(dim=-2).float()
    count = asked.mT @ probe.visible.float()
    one, other = np.triu_indices(16, k=1)
    expected = ((odds * count + (odds * count).mT) / (count + count.mT))[:, one, other]
    torch.testing.assert_close(found[:, 0], expected.detach(), rtol=0, atol=1e-5)


def test_mutual_attention_averages_over_meetings_both_ways():
    probe, generator = _probe(), torch.Generator().manual_seed(0)
    odds = torch.randn(2, 96, 4, 16, generator=generator)
    found = study._mutual(odds, probe.visible, F.one_hot(probe.asked.long(), 16).float())
    for pair in (0, 50, 119):
        tokens = [int(side[pair]) for side in np.triu_indices(16, k=1)]
        met = [
            float(odds[1, sample, question, there])
            for asked, there in (tokens, tokens[::-1])
            for sample, question in np.argwhere(probe.asked[1].numpy() == asked)
            if probe.visible[1, sample, there]
        ]
        assert float(found[1, pair]) == pytest.approx(np.mean(met), abs=1e-5)


def test_an_answer_depends_on_what_is_visible_and_not_on_other_questions():
    model, probe = _decoder(3, torch.float64), _probe()

    def score(probe: study.Sequences) -> torch.Tensor:
        tokens, seen = probe.inputs()
        return model(tokens, multiplicity=seen)[:, :, 17, 0]

    others = torch.cat([probe.asked[..., :1], probe.asked[..., 1:].flip(1)], dim=-1)
    torch.testing.assert_close(score(probe._replace(asked=others)), score(probe), rtol=1e-12, atol=1e-12)
    less = probe._replace(visible=torch.zeros_like(probe.visible))
    assert (score(less) - score(probe)).abs().mean() > 1e-3


def test_the_loss_is_the_cross_entropy_of_the_minibatch_whose_turn_it_is():
    data = study._drawn(_trees()[0], (3, 5), 4, Context((0, 1)).generators(), "cpu")
    model = _decoder(1)
    found = study._loss(data)(model, torch.tensor(7))
    now = study.Sequences(*(part[1] for part in data))
    tokens, seen = now.inputs()
    chance = model(tokens, multiplicity=seen)[:, :, 17:, 0].sigmoid().detach()
    expected = -torch.where(now.answer, chance, 1 - chance).log().mean(dim=(1, 2))
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=0)


def test_gains_begin_at_zero_and_loss_near_chance(run):
    assert (run.gain.isel(step=0) == 0).all()
    assert (run.gain_single.isel(step=0) == 0).all()
    assert run.gain.sizes == {"tree": 3, "seed": 2, "step": 5, "layer": 3, "pair": 120}
    assert float(run.loss_single.isel(step=0).mean()) == pytest.approx(math.log(2), abs=0.25)


def test_a_seed_trains_as_it_would_alone(run):
    alone = study.run(SMALL, Context((1,)))
    np.testing.assert_allclose(alone.gain.isel(seed=0), run.gain.sel(seed=1), atol=2e-5)
    np.testing.assert_allclose(alone.loss.isel(seed=0), run.loss.sel(seed=1), rtol=1e-5)


def test_known_order_and_times_are_found(ideal):
    times = study.by_height(study.doubling_time(study.gains(ideal, 1)), ideal.height.sel(tree="deep"))
    np.testing.assert_array_equal(times.sel(seed=0), [10, 30, 50, 100])
    for layers in (1, 3):
        np.testing.assert_allclose(study.order(ideal, layers), 1, rtol=1e-12)
        np.testing.assert_allclose(study.order_of_gains(ideal, layers), 1, rtol=1e-12)
        np.testing.assert_allclose(study.delay(ideal, layers), 20)  # 50 and 100 in 32 and 64 pairs: over 50 in the mean
        np.testing.assert_allclose(study.high_gain(ideal, layers), 100 * math.log(2) / 50, rtol=1e-6)
        # A straight rise has half its end as its average: 5 ln 2 and 5/3 ln 2, ln 2, and −0.5 for the root.
        np.testing.assert_allclose(study.fall(ideal, layers), 2 / 3 * math.log(2), rtol=1e-6)
    np.testing.assert_array_equal(study.later(ideal, "shallow"), 20)
    np.testing.assert_allclose(study.higher(ideal, "matched"), 2, rtol=1e-12)
    np.testing.assert_allclose(study.above_siblings(ideal), 2, rtol=1e-12)


def test_every_claim_holds_where_it_is_so(ideal):
    assert set(verdicts(ideal).values()) == {"holds"}


@pytest.mark.parametrize(
    ("claims", "spoil"),
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
            ("above-siblings", "higher", "higher-matched"),
            lambda run: run.assign(gain=run.gain.isel(layer=[2, 1, 0]).assign_coords(layer=run.layer)),
        ),
        (
            ("higher-beyond-root",),
            lambda run: run.assign(gain=run.gain.isel(layer=[2, 1, 0]).assign_coords(layer=run.layer)),
        ),
        (("above-siblings", "higher", "higher-matched"), lambda run: run.assign(gain=0 * run.gain - 1)),
    ],
)
def test_a_claim_fails_on_a_run_that_contradicts_it(ideal, claims, spoil):
    found = verdicts(spoil(ideal))
    assert {found[name] for name in claims} == {"does not hold"}


@pytest.mark.parametrize("begin", [1, len(STEPS) - 1])
@pytest.mark.parametrize("tree", ["deep", "shallow", "matched", "single"])
def test_a_lost_seed_is_nan_in_every_claim_that_uses_it(ideal, begin, tree):
    """From whichever step on it was lost, though it had doubled long before."""
    lost = {"seed": 1, "step": slice(int(STEPS[begin]), None)}
    spoilt = ideal.copy(deep=True)
    if tree == "single":
        spoilt.gain_single.loc[lost] = np.nan
    else:
        spoilt.gain.loc[{"tree": tree, **lost}] = np.nan
    names = {claim.name for claim in study.CLAIMS}
    single, matched = ({name for name in names if word in name} for word in ("-1", "-matched"))
    deep = names - single - {"same-tokens"}
    uses = {"single": single, "deep": deep, "matched": matched, "shallow": {"later", "higher", "higher-beyond-root"}}
    for claim in study.CLAIMS:
        values = np.asarray(claim.measure(spoilt))
        if claim.name in uses[tree]:
            np.testing.assert_array_equal(np.isnan(values), [False, True], claim.name)
            assert claim.judge(spoilt, "paper")["verdict"] == "does not hold"
        else:
            assert not np.isnan(values).any(), claim.name


def test_a_run_whose_seeds_are_lost_says_so_and_is_drawn(tmp_path):
    config = replace(SMALL, rate=1e30, steps=20)
    lossy = replace(study.STUDY, presets={"quick": Preset(config, 2, 1)})
    with pytest.warns(UserWarning, match="seeds 0, 1 was not finite"):
        outcome = execute(lossy, out=tmp_path)
    assert {claim["name"] for claim in outcome.claims if claim["verdict"] == "holds"} == {"same-tokens"}
    assert len(list((outcome.path / "figures").glob("*.svg"))) == 3


def test_what_was_lost_is_told_for_every_training(run):
    assert run.diverged.training.values.tolist()[-1] == "deep, 1 layer"
    assert run.diverged.sizes == {"training": 4, "seed": 2}
    assert (run.diverged == -1).all()


def test_drawing_only_draws(ideal, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("recomputed")

    monkeypatch.setattr(HBLT, "sample", refuse)
    monkeypatch.setattr(Decoder, "forward", refuse)
    monkeypatch.setattr(hierarchy, "cooccurrence_matrix", refuse)
    for drawing in study.STUDY.figures.values():
        panels = [axes for axes in drawing.draw(ideal).axes if axes.get_label() != "<colorbar>"]
        assert all(axes.get_xlabel() and axes.get_ylabel() and axes.get_title(loc="left") for axes in panels)


@pytest.mark.parametrize(
    ("change", "word"),
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
def test_bad_settings_are_named(change, word):
    with pytest.raises(InputError, match=word):
        study.run(replace(SMALL, **change), Context((0,)))
