"""The WikiText-2 figure's claims on curves whose answer is known, and the study on a small text."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.data.text import corpus
from joma.studies.text.entropy_text import BEST, CLAIMS, LAID_OUT, STUDY, WIKITEXT2, Config, distance, published, run
from joma.study import Context

SMALL = Config(width=8, hidden=8, length=8, batch=4, columns=3, steps=6, every=2, rate=1e-2, glance=60, depths=(1, 2))


def verdicts(found, preset):
    return {claim.name: claim.judge(found, preset)["verdict"] for claim in CLAIMS}


@pytest.fixture(scope="module")
def theirs():
    """The published curves themselves, as if they were ours."""
    own = published().assign_coords(seed=[0, 1, 2])
    entropy = own.entropy.expand_dims(head=[0])
    return own.assign(entropy=entropy, window_entropy=entropy).assign_attrs(**WIKITEXT2, **LAID_OUT, glance=0)


def test_the_published_curves_pass_their_own_claims(theirs):
    assert set(verdicts(theirs, "paper").values()) == {"holds"}


def test_one_run_of_ten_layers_is_not_asked_to_be_the_mean_of_three(theirs):
    """The authors' own would not be; so means are held against each other."""
    single = [distance(theirs.isel(seed=[seed]), 10) for seed in range(3)]
    assert min(single) > 0.1
    assert of_verdict(verdicts(theirs.isel(seed=[0, 1]), "paper"), "not tested at this preset") == CURVES
    pairs = [distance(theirs.isel(seed=[*range(3)][:seed] + [*range(3)][seed + 1 :]), 10) for seed in range(3)]
    np.testing.assert_allclose(2 * np.array(pairs), single)  # |mean of two − mean| is half of the third's


def test_published_figures_are_those_of_the_reference():
    assert published().sizes["seed"] == 3
    for depth, value in BEST.items():
        assert float(published().valid_loss.sel(depth=depth).min("step").mean()) == pytest.approx(value, abs=6e-4)
    own = published().mean("seed")
    curve = own.entropy.sel(depth=1, layer=0)
    assert float(curve.isel(step=0)) == pytest.approx(2.511, abs=1e-3)
    assert int(curve.idxmin("step")) == 2000
    assert float(curve.min()) == pytest.approx(1.554, abs=1e-3)
    two = own.entropy.sel(depth=2).sel(step=[0, 58_000])
    np.testing.assert_allclose(two.isel(layer=[0, 1], step=0), [2.511, 2.546], atol=1e-3)


def test_attention_that_only_falls_is_no_bounce(theirs):
    falling = theirs.assign(entropy=theirs.entropy.isel(step=0) - 0.9 * (1 - np.exp(-theirs.step / 3000)))
    found = verdicts(falling, "paper")
    assert found["recovery"] == found["bounce"] == found["curve"] == "does not hold"
    assert found["loss-1"] == "holds"


def test_attention_that_only_rises_is_no_bounce(theirs):
    """However clear the rise is; nor is one that comes after a fall of noise's size."""
    rise = 0.9 * (1 - np.exp(-theirs.step / 3000))
    for dip in (0.0, 0.02 * (theirs.step == 1000)):
        rising = theirs.assign(entropy=theirs.entropy.isel(step=0) + rise - dip)
        assert verdicts(rising, "quick")["bounce"] == "does not hold"


def test_a_rise_before_a_fall_is_no_bounce(theirs):
    tent = 1 - abs(np.arange(theirs.sizes["step"]) - 5) / 40
    turned = theirs.assign(entropy=2 + xr.zeros_like(theirs.entropy) + xr.DataArray(tent, dims="step"))
    assert verdicts(turned, "quick")["bounce"] == "does not hold"


def test_one_layer_off_its_published_curve_is_seen_at_its_depth_alone(theirs):
    off = 0.6 * ((theirs.depth == 5) & (theirs.layer == 2))
    found = verdicts(theirs.assign(entropy=theirs.entropy + off), "paper")
    assert of_verdict(found, "does not hold") == {"curve-5"}
    found = verdicts(theirs.assign(window_entropy=theirs.entropy + off), "paper")
    assert of_verdict(found, "does not hold") == {"window-5"}
    found = verdicts(theirs.drop_vars("window_entropy"), "paper")
    assert of_verdict(found, "not tested at this preset") == {"window", "window-2", "window-5", "window-10"}
    assert distance(theirs.assign(entropy=theirs.entropy + off), 5) == pytest.approx(0.12)


CURVES = {f"{kind}{depth}" for kind in ("curve", "window") for depth in ("", "-2", "-5", "-10")}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"glance": 3600}, "curve"),
        ({"columns": 9}, "window"),
        ({"length": 36}, "window"),
    ],
)
def test_other_validation_texts_are_not_held_against_the_published_curves(theirs, change, left):
    found = verdicts(theirs.assign_attrs(change), "paper")
    assert of_verdict(found, "not tested at this preset") == {name for name in CURVES if name.startswith(left)}


def test_a_curve_that_stops_short_is_not_judged_and_a_lost_one_does_not_hold(theirs):
    short = verdicts(theirs.isel(step=slice(0, -1)), "paper")
    assert of_verdict(short, "not tested at this preset") == CURVES
    lost = theirs.copy()
    for name in ("entropy", "window_entropy"):
        lost[name] = theirs[name].where((theirs.step < 2000) | (theirs.seed > 0))
    found = verdicts(lost, "paper")
    assert of_verdict(found, "does not hold") >= CURVES


def test_a_deeper_model_that_learns_less_is_seen(theirs):
    worse = theirs.assign(valid_loss=theirs.valid_loss + 0.2 * (theirs.depth == 5))
    assert verdicts(worse, "paper")["deeper"] == "does not hold"


def of_verdict(found, verdict):
    return {name for name, own in found.items() if own == verdict}


def test_a_depth_that_was_not_trained_is_not_judged(theirs):
    one = verdicts(theirs.sel(depth=[1]), "paper")
    assert of_verdict(one, "holds") == {"loss-1", "fall", "recovery", "bounce", "curve", "window"}
    assert of_verdict(one, "does not hold") == set()
    two = verdicts(theirs.sel(depth=[2]), "paper")
    assert of_verdict(two, "holds") == {"loss-2", "curve-2", "window-2"}
    assert of_verdict(two, "does not hold") == set()


@pytest.mark.parametrize("other", [{"types": 256}, {"tokens": 5}, {}])
def test_another_text_is_not_held_against_the_published_figures(theirs, other):
    elsewhere = theirs.copy()
    elsewhere.attrs = {**theirs.attrs, **other} if other else {}
    found = verdicts(elsewhere, "paper")
    assert of_verdict(found, "not tested at this preset") == {*found} - {"bounce", "deeper"}
    assert of_verdict(found, "holds") == {"bounce", "deeper"}


def test_a_model_deeper_than_any_published_is_drawn(theirs):
    deeper = theirs.reindex(depth=[1, 12], layer=range(12))
    figure = STUDY.figures["entropy"].draw(deeper)
    assert len(figure.axes) == 2


def test_the_authors_dots_are_drawn_on_wikitext_alone(theirs):
    elsewhere = theirs.assign_attrs(types=256, config='{"corpus": "notwikitext.txt"}')
    lines = [len(STUDY.figures["entropy"].draw(own).axes[0].lines) for own in (theirs, elsewhere)]
    assert lines == [2, 1]


def test_the_study_runs_and_is_drawn():
    found = run(SMALL, Context((0, 1)))
    assert found.entropy.dims[:2] == ("depth", "seed")
    assert found.entropy.sel(depth=1).isel(layer=1).isnull().all()
    assert not found.entropy.sel(depth=2).isnull().any()
    assert isinstance(found, xr.Dataset)
    own = corpus()
    assert (found.attrs["types"], found.attrs["tokens"]) == (len(own.types), len(own.train))
    for drawing in STUDY.figures.values():
        assert drawing.draw(found).axes


@pytest.mark.parametrize("depths", [(), (1, 1), (0,)])
def test_bad_depths_are_named(depths):
    with pytest.raises(InputError, match="`depths`"):
        run(dataclasses.replace(SMALL, depths=depths), Context((0,)))
