from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.data.combinations import CombinationTree
from joma.models import Decoder
from joma.studies.alignment import CLAIMS, STUDY, Config, _collapsed, _decoder, cell, gain, run
from joma.studies.base import Context

SMALL = Config(
    classes=(6,), children=(2,), latents=((4, 5), (5, 6)), vocabulary=12, length=14, width=16, hidden=24,
    rate=1e-2, steps=60, records=4, controls=(6,),
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_cells_arms_and_seeds_are_axes(trajectory):
    assert dict(trajectory.alignment.sizes) == {
        "arm": 4, "cell": 2, "seed": 2, "step": trajectory.sizes["step"], "latent_layer": 2, "layer": 3,
    }  # fmt: skip
    assert trajectory.cell.values.tolist() == [cell(6, 2, (4, 5)), cell(6, 2, (5, 6))]
    assert trajectory.arm.values.tolist() == ["trained", "frozen", "uniform", "linear"]
    assert not trajectory.alignment.isnull().any()
    assert float(abs(trajectory.alignment).max()) <= 1


def test_it_learns_up_to_the_cap(trajectory):
    end = trajectory.accuracy.isel(step=-1).sel(arm="trained")
    cap = trajectory.accuracy_cap.sel(arm="trained")
    np.testing.assert_allclose(end, cap.transpose(*end.dims))


def test_a_seed_does_not_depend_on_its_neighbours(trajectory):
    alone = run(replace(SMALL, controls=()), Context((1,)))
    whole = trajectory.loss.sel(arm="trained", seed=1)
    np.testing.assert_allclose(alone.loss.sel(arm="trained", seed=1).transpose(*whole.dims), whole, rtol=1e-3)


@pytest.mark.parametrize(("children", "length"), [(2, 30), (3, 30), (3, 28)])
def test_merged_pads_change_nothing(children, length):
    context = Context((0, 1))
    law = CombinationTree(20, children, length=length)
    trees = [law.draw(context.generators())]
    merged, whole = _collapsed(trees), trees[0].sequence
    config = replace(Config(), width=8, hidden=10)
    model = Decoder(_decoder(config, "trained", 20), generators=context.generators(), dtype=torch.float64)
    full = model(whole, last=1)
    short = model(merged.sequence, last=1, multiplicity=merged.multiplicity[0])
    torch.testing.assert_close(full, short, rtol=1e-10, atol=1e-10)


def test_gain_is_a_difference_of_arms(trajectory):
    shifted = trajectory.copy(deep=True)
    shifted.alignment.loc[{"arm": "trained"}] = shifted.alignment.sel(arm="frozen") + 0.25
    np.testing.assert_allclose(gain(shifted, "frozen", 1), 0.25)


def test_claims_and_figures(trajectory):
    records = [claim.judge(trajectory, "quick") for claim in CLAIMS]
    assert sum(record["verdict"] == "not tested at this preset" for record in records) == 16
    for drawing in STUDY.figures.values():
        assert drawing.draw(trajectory).axes


@pytest.mark.parametrize(
    "change", [{"latents": ((4, 500),)}, {"length": 3}, {"steps": 0}, {"children": (9,)}, {"width": 0}, {"batch": 0}]
)
def test_bad_config(change):
    with pytest.raises(InputError):
        run(replace(SMALL, **change), Context((0,)))
