"""The claims of the WikiText-2 figure on the published curves, and the study on a small text."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.data.text import corpus
from joma.studies.text.entropy_text import AUTHORS_LAYOUT, CLAIMS, STUDY, Config, mean_distance, outcome, run
from joma.studies.text.published_curves import PUBLISHED_LOSS, PUBLISHED_LOSS_103, WIKITEXT2, published
from joma.study import Context
from joma.verdicts import KINDS

SMALL = Config(width=8, hidden=8, length=8, batch=4, columns=3, steps=6, every=2, rate=1e-2, glance=60, depths=(1, 2))


MEASURES = ("curve", "window", "mean-curve", "mean-window")
CURVES = {f"{measure}-{depth}" for measure in MEASURES for depth in PUBLISHED_LOSS}
WINDOWS = {name for name in CURVES if "window" in name}
WINDOW_SIZES = {"window-fall", "window-recovery"}
TEXT_SIZES = {"fall", "recovery"}


ON_103 = {f"wikitext-103-loss-{depth}" for depth in PUBLISHED_LOSS}


def verdicts(trajectory, preset):
    return {claim.name: claim.judge(trajectory, preset)["verdict"] for claim in CLAIMS}


def claims_with(trajectory, verdict, preset="paper"):
    return {name for name, judged in verdicts(trajectory, preset).items() if judged == verdict}


@pytest.fixture(scope="module")
def theirs():
    """The published curves themselves, as if they were ours."""
    curves = published().assign_coords(seed=[0, 1, 2])
    entropy = curves.entropy.expand_dims(head=[0])
    curves = curves.assign(entropy=entropy, window_entropy=entropy)
    return curves.assign_attrs(**WIKITEXT2, **AUTHORS_LAYOUT, glance=0)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_the_published_curves_pass_their_own_claims(theirs):
    """The interval of three distances of the authors' own runs can contain the bound, but none lies beyond it."""
    assert claims_with(theirs, "does not hold") == set()
    undecided = claims_with(theirs, "not tested") - ON_103
    assert undecided <= {name for name in CURVES if not name.startswith("mean")}
    reasons = {claim.judge(theirs, "paper")["reason"] for claim in CLAIMS if claim.name in undecided}
    assert all(reason.startswith("undecided") for reason in reasons)


def test_two_seeds_are_too_few_for_what_three_runs_were_published_of(theirs):
    judged = {claim.name: claim.judge(theirs.isel(seed=[0, 1]), "paper") for claim in CLAIMS}
    too_few = {name for name, record in judged.items() if record["reason"] == "needs 3 seeds, this run has 2"}
    assert too_few == {claim.name for claim in CLAIMS} - {"bounce", "deeper"} - ON_103


def test_attention_that_only_falls_is_no_bounce(theirs):
    falling = theirs.assign(entropy=theirs.entropy.isel(step=0) - 0.9 * (1 - np.exp(-theirs.step / 3000)))
    judged = verdicts(falling, "paper")
    assert judged["recovery"] == judged["bounce"] == judged["curve-1"] == "does not hold"
    assert judged["loss-1"] == "holds"


def test_attention_that_only_rises_is_no_bounce(theirs):
    """A clear rise is no bounce by itself, nor is a rise after a fall of the size of noise."""
    rise = 0.9 * (1 - np.exp(-theirs.step / 3000))
    for dip in (0.0, 0.02 * (theirs.step == 1000)):
        rising = theirs.assign(entropy=theirs.entropy.isel(step=0) + rise - dip)
        assert verdicts(rising, "quick")["bounce"] == "does not hold"


def test_a_rise_before_a_fall_is_no_bounce(theirs):
    tent = 1 - abs(np.arange(theirs.sizes["step"]) - 5) / 40
    turned = theirs.assign(entropy=2 + xr.zeros_like(theirs.entropy) + xr.DataArray(tent, dims="step"))
    assert verdicts(turned, "quick")["bounce"] == "does not hold"


def test_a_layer_off_its_published_curve_is_seen_at_its_depth_alone(theirs):
    shifted = theirs.entropy + 2.0 * ((theirs.depth == 5) & (theirs.layer == 2))
    off_text, off_window = theirs.assign(entropy=shifted), theirs.assign(window_entropy=shifted)
    assert claims_with(off_text, "does not hold") == {"curve-5", "mean-curve-5"}
    assert claims_with(off_window, "does not hold") == {"window-5", "mean-window-5"}
    assert mean_distance(off_text, 5, "curve") == pytest.approx(2.0 / 5)
    untested = claims_with(theirs.drop_vars("window_entropy"), "not tested")
    assert untested >= WINDOWS | WINDOW_SIZES
    assert not untested & TEXT_SIZES


@pytest.mark.parametrize(
    ("change", "reason", "names"),
    [
        ({"glance": 3600}, "this run has no entropy over the whole validation text", CURVES - WINDOWS | TEXT_SIZES),
        ({"columns": 9}, "this run has no entropy in the authors' window", WINDOWS | WINDOW_SIZES),
        ({"length": 36}, "this run has no entropy in the authors' window", WINDOWS | WINDOW_SIZES),
    ],
)
def test_other_validation_texts_are_not_compared_with_the_published_curves(theirs, change, reason, names):
    judged = [claim.judge(theirs.assign_attrs(change), "paper") for claim in CLAIMS]
    assert {record["name"] for record in judged if record["reason"] == reason} == names


def test_a_curve_that_stops_short_is_not_judged_and_a_diverged_one_does_not_hold(theirs):
    judged = [claim.judge(theirs.isel(step=slice(0, -1)), "paper") for claim in CLAIMS]
    assert {record["name"] for record in judged if record["reason"] == "this run has no step 58000"} == CURVES
    diverged = theirs.copy()
    for name in ("entropy", "window_entropy"):
        diverged[name] = theirs[name].where((theirs.step < 2000) | (theirs.seed > 0))
    assert claims_with(diverged, "does not hold") >= CURVES


@pytest.mark.parametrize("depth", [1, 10])
def test_a_seed_that_diverged_has_no_least_loss(theirs, depth):
    """Neither the least loss before it diverged nor the other depths stand for it."""
    lost = (theirs.seed == 0) & (theirs.depth == depth) & (theirs.step > 50_000)
    diverged = theirs.assign(valid_loss=theirs.valid_loss.where(~lost))
    judged = verdicts(diverged, "paper")
    assert judged[f"loss-{depth}"] == judged["deeper"] == "does not hold"


def test_a_deeper_model_that_learns_less_is_seen(theirs):
    worse = theirs.assign(valid_loss=theirs.valid_loss + 0.2 * (theirs.depth == 5))
    assert verdicts(worse, "paper")["deeper"] == "does not hold"


def test_a_depth_that_was_not_trained_is_not_judged(theirs):
    for depth, others in ((1, {"bounce", *TEXT_SIZES, *WINDOW_SIZES}), (2, set())):
        judged = [claim.judge(theirs.sel(depth=[depth]), "paper") for claim in CLAIMS]
        absent = {record["name"] for record in judged if record["reason"].startswith("this run has no")}
        at_depth = {claim.name for claim in CLAIMS if claim.name.endswith(f"-{depth}")} - ON_103
        assert absent == {claim.name for claim in CLAIMS} - at_depth - others


@pytest.mark.parametrize("other", [{"types": 256}, {"tokens": 5}, {}])
def test_another_text_is_not_compared_with_the_published_numbers(theirs, other):
    other_text = theirs.copy()
    other_text.attrs = {**theirs.attrs, **other} if other else {}
    everywhere = {"bounce", "deeper"}
    names = {claim.name for claim in CLAIMS}
    assert claims_with(other_text, "not tested") == names - everywhere
    assert claims_with(other_text, "holds") == everywhere


def test_the_outcome_gives_our_numbers_beside_the_authors(theirs):
    sentence = outcome(theirs)
    assert sentence.startswith("With 1 layer, in the authors' window, entropy falls by 0.97 nats")
    assert "falls by 0.97 nats and recovers by 0.67 (authors: 0.97 and 0.67)" in sentence
    losses = "5.356, 5.255, 5.167 and 5.109"
    assert f"is {losses} nats with 1, 2, 5 and 10 layers (published: {losses})" in sentence
    other = outcome(theirs.assign_attrs(types=3, tokens=65_000))
    assert "authors" not in other
    assert other.startswith("On a text of 65,000 tokens that is not WikiText-2, with 1 layer entropy falls by ")
    assert outcome(theirs.sel(depth=[2])) == (
        "The least validation loss is 5.255 nats with 2 layers (published: 5.255)."
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A made-up text in the files of a WikiText folder."""
    path, rng = tmp_path_factory.mktemp("wikitext-103"), np.random.default_rng(0)
    for split, count in (("train", 3_000), ("valid", 600), ("test", 100)):
        words = rng.choice(["the", "a", "cat", "dog", "sat", "ran", "."], size=count)
        lines = [" ".join(line) for line in np.array_split(words, count // 20)]
        (path / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_preset_of_wikitext_103_runs_on_a_folder_and_judges_its_own_claims_alone(folder, theirs):
    preset = STUDY.presets["wikitext-103"]
    assert preset.config.corpus == "Salesforce/wikitext:wikitext-103-v1"
    small = {"width": 8, "hidden": 8, "length": 8, "batch": 4, "columns": 3, "steps": 6, "every": 2, "depths": (1, 2)}
    trajectory = run(dataclasses.replace(preset.config, corpus=str(folder), **small), Context((0, 1, 2)))
    assert trajectory.attrs["tokens"] == 3_000
    records = {claim.name: claim.judge(trajectory, "wikitext-103") for claim in CLAIMS}
    assert {records[name]["reason"] for name in ON_103} == {"this run has no WikiText-103"}
    others = {record["reason"] for name, record in records.items() if name not in ON_103 | {"bounce", "deeper"}}
    assert others == {"this run has no WikiText-2"}
    long = theirs.assign_attrs(types=200_000, tokens=101_400_000)  # as if the published curves were of that text
    judged = {claim.name: claim.judge(long, "wikitext-103")["verdict"] for claim in CLAIMS}
    assert {judged[name] for name in ON_103} == {"does not hold"}  # its losses are lower
    shift = {depth: published().valid_loss.sel(depth=depth).min("step").mean() for depth in PUBLISHED_LOSS_103}
    shifted = long.valid_loss + xr.DataArray(
        [PUBLISHED_LOSS_103[depth] - float(shift[depth]) for depth in long.depth.values], dims="depth"
    )
    judged = {claim.name: claim.judge(long.assign(valid_loss=shifted), "wikitext-103")["verdict"] for claim in CLAIMS}
    assert {name for name, verdict in judged.items() if verdict == "holds"} == ON_103 | {"bounce", "deeper"}


def test_what_was_published_is_a_figure_what_was_not_a_control_and_a_measure_found_later_a_check():
    kinds = {kind: {claim.name for claim in CLAIMS if claim.kind == kind} for kind in KINDS}
    assert kinds["reading"] == {"bounce", "deeper"}
    assert kinds["check"] == {name for name in CURVES if name.startswith("mean")}
    assert kinds["control"] == {"fall", "recovery", *(f"curve-{depth}" for depth in PUBLISHED_LOSS)}
    assert set().union(*kinds.values()) == {claim.name for claim in CLAIMS}
    assert STUDY.highlight is not None


def test_depths_are_an_axis_and_the_text_is_described(trajectory):
    assert trajectory.entropy.dims[:2] == ("depth", "seed")
    assert trajectory.entropy.sel(depth=1).isel(layer=1).isnull().all()
    assert not trajectory.entropy.sel(depth=2).isnull().any()
    text = corpus()
    expected = {"types": len(text.types), "tokens": len(text.train), "columns": 3, "length": 8, "glance": 60}
    assert {name: trajectory.attrs[name] for name in expected} == expected


@pytest.mark.parametrize("depths", [(), (1, 1), (0,)])
def test_an_error_names_the_depths(depths):
    with pytest.raises(InputError, match="`depths`"):
        run(dataclasses.replace(SMALL, depths=depths), Context((0,)))
