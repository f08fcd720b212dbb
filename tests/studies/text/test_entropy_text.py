"""The claims of the WikiText-2 figure on the published curves, and the study on a small text."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.data.text import corpus
from joma.studies.text.entropy_text import (
    AUTHORS_LAYOUT,
    CLAIMS,
    PUBLISHED_LOSS,
    WIKITEXT2,
    Config,
    distance,
    draw_entropy,
    draw_learning,
    published,
    run,
)
from joma.study import Context

SMALL = Config(width=8, hidden=8, length=8, batch=4, columns=3, steps=6, every=2, rate=1e-2, glance=60, depths=(1, 2))


CURVES = {f"{kind}{depth}" for kind in ("curve", "window") for depth in ("", "-2", "-5", "-10")}


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
    assert set(verdicts(theirs, "paper").values()) == {"holds"}


def test_a_single_run_of_ten_layers_is_not_compared_with_the_mean_of_three(theirs):
    """Single runs of the authors would fail, so the claim compares means over seeds."""
    single = [distance(theirs.isel(seed=[seed]), 10) for seed in range(3)]
    assert min(single) > 0.1
    assert claims_with(theirs.isel(seed=[0, 1]), "not tested") == CURVES
    pairs = [distance(theirs.sel(seed=theirs.seed != seed), 10) for seed in range(3)]
    np.testing.assert_allclose(2 * np.array(pairs), single)  # |mean of two − mean| is half of the third's


def test_published_numbers_are_those_of_the_paper():
    assert published().sizes["seed"] == 3
    for depth, value in PUBLISHED_LOSS.items():
        assert float(published().valid_loss.sel(depth=depth).min("step").mean()) == pytest.approx(value, abs=6e-4)
    mean = published().mean("seed")
    curve = mean.entropy.sel(depth=1, layer=0)
    assert float(curve.isel(step=0)) == pytest.approx(2.511, abs=1e-3)
    assert int(curve.idxmin("step")) == 2000
    assert float(curve.min()) == pytest.approx(1.554, abs=1e-3)
    two_layers = mean.entropy.sel(depth=2).sel(step=[0, 58_000])
    np.testing.assert_allclose(two_layers.isel(layer=[0, 1], step=0), [2.511, 2.546], atol=1e-3)


def test_attention_that_only_falls_is_no_bounce(theirs):
    falling = theirs.assign(entropy=theirs.entropy.isel(step=0) - 0.9 * (1 - np.exp(-theirs.step / 3000)))
    judged = verdicts(falling, "paper")
    assert judged["recovery"] == judged["bounce"] == judged["curve"] == "does not hold"
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
    shift = 0.6 * ((theirs.depth == 5) & (theirs.layer == 2))
    assert claims_with(theirs.assign(entropy=theirs.entropy + shift), "does not hold") == {"curve-5"}
    assert claims_with(theirs.assign(window_entropy=theirs.entropy + shift), "does not hold") == {"window-5"}
    untested = claims_with(theirs.drop_vars("window_entropy"), "not tested")
    assert untested == {"window", "window-2", "window-5", "window-10"}
    assert distance(theirs.assign(entropy=theirs.entropy + shift), 5) == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("change", "untested"),
    [
        ({"glance": 3600}, "curve"),
        ({"columns": 9}, "window"),
        ({"length": 36}, "window"),
    ],
)
def test_other_validation_texts_are_not_compared_with_the_published_curves(theirs, change, untested):
    claims = claims_with(theirs.assign_attrs(change), "not tested")
    assert claims == {name for name in CURVES if name.startswith(untested)}


def test_a_curve_that_stops_short_is_not_judged_and_a_diverged_one_does_not_hold(theirs):
    assert claims_with(theirs.isel(step=slice(0, -1)), "not tested") == CURVES
    diverged = theirs.copy()
    for name in ("entropy", "window_entropy"):
        diverged[name] = theirs[name].where((theirs.step < 2000) | (theirs.seed > 0))
    assert claims_with(diverged, "does not hold") >= CURVES


def test_a_deeper_model_that_learns_less_is_seen(theirs):
    worse = theirs.assign(valid_loss=theirs.valid_loss + 0.2 * (theirs.depth == 5))
    assert verdicts(worse, "paper")["deeper"] == "does not hold"


def test_a_depth_that_was_not_trained_is_not_judged(theirs):
    one_layer, two_layers = theirs.sel(depth=[1]), theirs.sel(depth=[2])
    assert claims_with(one_layer, "holds") == {"loss-1", "fall", "recovery", "bounce", "curve", "window"}
    assert claims_with(one_layer, "does not hold") == set()
    assert claims_with(two_layers, "holds") == {"loss-2", "curve-2", "window-2"}
    assert claims_with(two_layers, "does not hold") == set()


@pytest.mark.parametrize("other", [{"types": 256}, {"tokens": 5}, {}])
def test_another_text_is_not_compared_with_the_published_numbers(theirs, other):
    other_text = theirs.copy()
    other_text.attrs = {**theirs.attrs, **other} if other else {}
    everywhere = {"bounce", "deeper"}
    names = {claim.name for claim in CLAIMS}
    assert claims_with(other_text, "not tested") == names - everywhere
    assert claims_with(other_text, "holds") == everywhere


def test_every_layer_is_drawn_with_the_authors_dots_on_wikitext(theirs):
    panels = draw_entropy(theirs).axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "(a)  1 layer", "(b)  2 layers", "(c)  5 layers", "(d)  10 layers",
    ]  # fmt: skip
    assert [len(panel.lines) for panel in panels] == [2, 4, 10, 20]
    assert [text.get_text() for text in panels[2].get_legend().get_texts()] == ["layer 0", "layer 2", "layer 4"]
    ours, dots = panels[0].lines
    expected = np.stack([theirs.step + 1, published().entropy.sel(depth=1, layer=0).mean("seed")], axis=-1)
    np.testing.assert_allclose(ours.get_xydata(), expected)
    np.testing.assert_allclose(dots.get_xydata(), expected)
    assert dots.get_marker() == "."
    assert (panels[0].get_xscale(), panels[0].get_ylabel()) == ("log", "attention entropy (nats)")


def test_the_authors_dots_are_drawn_on_wikitext_alone(theirs):
    other_text = theirs.assign_attrs(types=256, config='{"corpus": "notwikitext.txt"}')
    assert [len(panel.lines) for panel in draw_entropy(other_text).axes] == [1, 2, 5, 10]


def test_a_model_deeper_than_any_published_is_drawn(theirs):
    deeper = theirs.reindex(depth=[1, 12], layer=range(12))
    one_layer, twelve_layers = draw_entropy(deeper).axes
    assert (len(one_layer.lines), len(twelve_layers.lines)) == (2, 24)
    assert np.isnan(twelve_layers.lines[1].get_ydata()).all()  # no dots where nothing was published


def test_loss_and_rank_are_drawn_by_depth(trajectory):
    loss, rank = draw_learning(trajectory).axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["1 layer", "2 layers"]
    curves, best = loss.lines[::2], loss.lines[1::2]
    for depth, curve, line in zip((1, 2), curves, best, strict=True):
        valid_loss = trajectory.valid_loss.sel(depth=depth)
        np.testing.assert_allclose(curve.get_ydata(), valid_loss.mean("seed"))
        np.testing.assert_allclose(line.get_ydata(), float(valid_loss.min("step").mean()))
    ranks = trajectory.stable_rank.isel(layer=0).mean("seed")
    for depth, curve in zip((1, 2), rank.lines, strict=True):
        np.testing.assert_allclose(curve.get_ydata(), ranks.sel(depth=depth))


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
