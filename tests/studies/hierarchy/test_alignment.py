from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.data.combinations import CombinationTree
from joma.models import Decoder
from joma.studies.hierarchy.alignment import CLAIMS, STUDY, Config, _collapsed, _decoder, cell, gain, learned, run
from joma.study import Context, Preset, execute

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


def verdicts(run, preset="quick"):
    return {claim.name: claim.judge(run, preset)["verdict"] for claim in CLAIMS}


@pytest.mark.parametrize("change", [{"controls": ()}, {"controls": (7,)}, {"controls": (5,), "classes": (6, 5)}])
def test_controls_may_be_left_out(change, tmp_path):
    """Where there is no control nothing is said about it; where the first cell has none, the others are compared."""
    config = replace(SMALL, **change, steps=3, records=2)
    outcome = execute(replace(STUDY, presets={"quick": Preset(config, 1, 1)}), out=tmp_path)
    there = change["controls"] == (5,)
    tested = {claim["name"] for claim in outcome.claims if claim["verdict"] != "not tested at this preset"}
    compared = {f"{arm}-s{layer}" for arm in ("frozen", "uniform", "linear") for layer in (0, 1)}
    assert tested == {"learned-s0", "learned-s1"} | (compared if there else set())
    values = [claim["measured"]["mean"] for claim in outcome.claims if claim["name"] in compared]
    assert [value is not None for value in values] == [there] * 6
    assert len(list((outcome.path / "figures").glob("*.svg"))) == 2


def test_a_cell_that_was_not_trained_is_not_judged(trajectory):
    """One of Table 1's eight cells."""
    one = trajectory.isel(cell=[0]).assign_coords(cell=[cell(20, 2, (10, 20))])
    found = {name: verdict for name, verdict in verdicts(one, "paper").items() if name.startswith("table")}
    judged = {name for name, verdict in found.items() if verdict != "not tested at this preset"}
    assert judged == {"table-20-2-10-20-s0", "table-20-2-10-20-s1"}


def test_a_seed_lost_in_one_cell_is_lost_in_every_mean_over_cells(trajectory):
    lost = trajectory.copy(deep=True)
    lost.alignment.loc[{"arm": "trained", "cell": cell(6, 2, (4, 5)), "seed": 0, "step": slice(1, None)}] = np.nan
    for values in (gain(lost, "frozen", 0), learned(lost, 1)):
        np.testing.assert_array_equal(np.isnan(values), [True, False])
    assert set(verdicts(lost).values()) == {"does not hold", "not tested at this preset"}


def test_seeds_that_are_equal_are_drawn(trajectory):
    """The mean of three times 0.1 is above 0.1."""
    assert STUDY.figures["table"].draw(
        trajectory.isel(seed=[0, 0, 0]).assign(alignment=lambda run: 0 * run.alignment + 0.1)
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layers": 1}, "layers"),
        ({"records": 1}, "records"),
        ({"classes": (6, 6)}, "classes"),
        ({"classes": ()}, "classes"),
        ({"children": (2, 2)}, "children"),
        ({"latents": ((4, 5), (4, 5))}, "latents"),
    ],
)
def test_bad_config_is_named_before_any_training(change, word, monkeypatch):
    monkeypatch.setattr(Context, "fit", lambda *_args, **_options: pytest.fail("trained"))
    with pytest.raises(InputError, match=f"`{word}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_the_linear_arm_trains_its_attention_too():
    """So that the claim is about the activation, and says so."""
    said = {claim.name: claim.statement for claim in CLAIMS}
    for layer in (0, 1):
        assert said[f"linear-s{layer}"].startswith("The activation matters")
        assert said[f"uniform-s{layer}"].startswith("Training attention matters")


@pytest.mark.parametrize(
    "change", [{"latents": ((4, 500),)}, {"length": 3}, {"steps": 0}, {"children": (9,)}, {"width": 0}, {"batch": 0}]
)
def test_bad_config(change):
    with pytest.raises(InputError):
        run(replace(SMALL, **change), Context((0,)))
