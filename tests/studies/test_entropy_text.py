"""The WikiText-2 figure's claims on curves whose answer is known, and the study on a small text."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.base import Context
from joma.studies.entropy_text import BEST, CLAIMS, STUDY, Config, published, run

SMALL = Config(width=8, hidden=8, length=8, batch=4, columns=3, steps=6, every=2, rate=1e-2, glance=60, depths=(1, 2))


def verdicts(found, preset):
    return {claim.name: claim.judge(found, preset)["verdict"] for claim in CLAIMS}


@pytest.fixture(scope="module")
def theirs():
    """The published curves themselves, as if three equal seeds had been trained."""
    own = published().expand_dims(seed=[0, 1, 2])
    return own.assign(entropy=own.entropy.expand_dims(head=[0]))


def test_the_published_curves_pass_their_own_claims(theirs):
    assert set(verdicts(theirs, "paper").values()) == {"holds"}


def test_published_figures_are_those_of_the_reference():
    own = published()
    for depth, value in BEST.items():
        least = float(own.valid_loss.sel(depth=depth).min())  # of the mean over seeds: not below the mean of the least
        assert 0 <= least - value <= 2e-3
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


def test_a_deeper_model_that_learns_less_is_seen(theirs):
    worse = theirs.assign(valid_loss=theirs.valid_loss + 0.2 * (theirs.depth == 5))
    assert verdicts(worse, "paper")["deeper"] == "does not hold"


def test_one_depth_alone_is_judged_and_says_nothing_of_deeper_ones(theirs):
    alone = theirs.sel(depth=[1])
    assert verdicts(alone, "paper")["loss-1"] == "holds"
    (deeper,) = [claim for claim in STUDY.claims if claim.name == "deeper"]
    assert deeper.judge(alone, "quick")["measured"]["mean"] is None


def test_a_model_deeper_than_any_published_is_drawn(theirs):
    deeper = theirs.reindex(depth=[1, 12], layer=range(12)).assign_attrs(config='{"corpus": "wikitext:wikitext-2-v1"}')
    figure = STUDY.figures["entropy"].draw(deeper)
    assert len(figure.axes) == 2


def test_the_study_runs_and_is_drawn():
    found = run(SMALL, Context((0, 1)))
    assert found.entropy.dims[:2] == ("depth", "seed")
    assert found.entropy.sel(depth=1).isel(layer=1).isnull().all()
    assert not found.entropy.sel(depth=2).isnull().any()
    assert isinstance(found, xr.Dataset)
    for drawing in STUDY.figures.values():
        assert drawing.draw(found).axes


@pytest.mark.parametrize("depths", [(), (1, 1), (0,)])
def test_bad_depths_are_named(depths):
    with pytest.raises(InputError, match="`depths`"):
        run(dataclasses.replace(SMALL, depths=depths), Context((0,)))
