"""The study `alignment`: a small run, its claims with controls and cells left out, and its figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.data.combinations import CombinationTree
from joma.models import Decoder
from joma.studies.hierarchy.alignment import (
    ARM_LABELS,
    CLAIMS,
    PUBLISHED,
    STUDY,
    Config,
    cell,
    decoder_config,
    gain_over_chance,
    gain_over_control,
    gain_over_start,
    merge_pads,
    run,
)
from joma.study import Context, NotInRun, Preset, execute

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
    with_another = trajectory.loss.sel(arm="trained", seed=1)
    alone = alone.loss.sel(arm="trained", seed=1).transpose(*with_another.dims)
    np.testing.assert_allclose(alone, with_another, rtol=1e-3)


@pytest.mark.parametrize(("children", "length"), [(2, 30), (3, 30), (3, 28)])
def test_merged_pads_change_nothing(children, length):
    context = Context((0, 1))
    tree = CombinationTree(20, children, length=length).draw(context.generators("trees"))
    config = decoder_config(replace(Config(), width=8, hidden=10), "trained", 20)
    model = Decoder(config, generators=context.generators("weights"), dtype=torch.float64)
    merged = merge_pads([tree])
    assert int(merged.multiplicity[0, 0].sum()) == length
    full = model(tree.sequence, last=1)
    short = model(merged.sequence, last=1, multiplicity=merged.multiplicity[0])
    torch.testing.assert_close(full, short, rtol=1e-10, atol=1e-10)


def test_trees_of_different_sizes_are_merged_to_one_length():
    """Three children reach more tokens than two, so the longer tree decides the length."""
    context = Context((0, 1))
    trees = [CombinationTree(20, children).draw(context.generators("trees")) for children in (2, 3)]
    merged, alone = merge_pads(trees), merge_pads(trees[1:])
    assert merged.sequence.shape == (4, *alone.sequence.shape[1:])
    torch.testing.assert_close(merged.sequence[2:], alone.sequence)
    assert alone.sequence.shape[-1] > merge_pads(trees[:1]).sequence.shape[-1]


def test_the_gain_over_a_control_is_a_difference_of_arms(trajectory):
    shifted = trajectory.copy(deep=True)
    shifted.alignment.loc[{"arm": "trained"}] = shifted.alignment.sel(arm="frozen") + 0.25
    np.testing.assert_allclose(gain_over_control(shifted, "frozen", 1), 0.25)


def test_the_table_is_judged_at_the_paper_preset_alone(trajectory):
    records = {claim.name: claim.judge(trajectory, "quick") for claim in CLAIMS}
    elsewhere = {name for name, record in records.items() if not record["reason"].startswith(("undecided", "needs"))}
    assert {name for name in elsewhere if records[name]["verdict"] == "not tested"} == {
        name for name in records if name.startswith("table-")
    }
    assert sum(name.startswith("table-") for name in records) == 16


@pytest.mark.parametrize("layer", [0, 1])
def test_a_small_gain_within_the_spread_of_seeds_is_undecided(trajectory, layer):
    """+0.0017 in the mean of five seeds that differ by ten times as much says nothing; the same without spread does."""
    scattered = xr.DataArray([-0.0300, -0.0100, 0.0017, 0.0134, 0.0334], dims="seed")
    judged = {}
    for name, gain in {"scattered": scattered, "even": 0 * scattered + 0.0017}.items():
        run = trajectory.isel(seed=[0] * 5).copy(deep=True)
        linear = run.alignment.sel(arm="linear").copy(deep=True)
        run.alignment.loc[{"arm": "trained"}] = (linear + gain).transpose(*linear.dims)
        (claim,) = (claim for claim in CLAIMS if claim.name == f"linear-s{layer}")
        judged[name] = claim.judge(run, "paper")
    assert judged["scattered"]["measured"]["mean"] == pytest.approx(0.0017, abs=1e-6)
    assert judged["scattered"]["reason"].startswith("undecided")
    assert judged["even"]["verdict"] == "holds"


def test_the_gain_over_chance_is_the_distance_from_the_gaussian_units(trajectory):
    end = trajectory.alignment.isel(step=-1).sel(arm="trained")
    for layer in (0, 1):
        chance = end.isel(latent_layer=layer, layer=layer) - 0.125
        shifted = trajectory.assign(chance=xr.concat([chance, chance], "latent_layer").transpose(..., "latent_layer"))
        np.testing.assert_allclose(gain_over_chance(shifted, layer), 0.125, rtol=1e-12)


def test_the_outcome_says_the_numbers_of_the_run(trajectory):
    end, start = (trajectory.alignment.isel(step=step).sel(arm="trained").mean("seed") for step in (-1, 0))
    sentence = STUDY.outcome(trajectory)
    for values, layer in ((end, 0), (end, 1), (start, 0), (start, 1)):
        cells = values.isel(latent_layer=layer, layer=layer)
        low, high = f"{float(cells.min()):.2f}", f"{float(cells.max()):.2f}"
        assert (low if low == high else f"{low} to {high}") in sentence
    change = float(gain_over_start(trajectory, 1).mean())
    assert f"{change:+.3f} (95 % interval" in sentence
    assert "95 %" not in STUDY.outcome(trajectory.isel(seed=[0]))
    with pytest.raises(NotInRun):
        STUDY.outcome(trajectory.where(trajectory.seed != 1))


def test_the_highlight_has_our_cells_beside_the_published_ranges(trajectory):
    (panel,) = STUDY.highlight.draw(trajectory).axes
    ranges = [(patch.get_y(), patch.get_y() + patch.get_height()) for patch in panel.patches]
    np.testing.assert_allclose(ranges, list(PUBLISHED.values()))
    drawn = [bars.lines[0].get_ydata() for bars in panel.containers]
    end = trajectory.alignment.isel(step=-1).sel(arm="trained").mean("seed")
    np.testing.assert_allclose(drawn, [end.isel(latent_layer=layer, layer=layer) for layer in (0, 1)])


def test_the_table_is_drawn_with_controls_start_and_chance(trajectory):
    panels = STUDY.figures["table"].draw(trajectory).axes
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == trajectory.cell.values.tolist()
    shown = [*ARM_LABELS.values(), "untrained", "Gaussian units"]
    for layer, panel in enumerate(panels):
        assert panel.get_title(loc="left").endswith(f"Latents s = {layer}: trained beside controls")
        assert [bars.get_label() for bars in panel.containers] == shown
        assert panel.yaxis_inverted()
        (published,) = panel.patches
        np.testing.assert_allclose((published.get_x(), published.get_x() + published.get_width()), PUBLISHED[layer])
        drawn = np.array([bars.lines[0].get_xdata() for bars in panel.containers])
        mean = trajectory.alignment.isel(latent_layer=layer, layer=layer).mean("seed")
        np.testing.assert_allclose(drawn[:4], mean.isel(step=-1).transpose("arm", "cell"))
        np.testing.assert_allclose(drawn[4], mean.isel(step=0).sel(arm="trained"))
        np.testing.assert_allclose(drawn[5], trajectory.chance.mean("seed")[:, layer])


def test_training_is_drawn_for_every_arm_of_the_first_cell(trajectory):
    figure = STUDY.figures["training"].draw(trajectory)
    *alignment, accuracy = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(ARM_LABELS.values())
    first = trajectory.isel(cell=0).mean("seed")
    for layer, panel in enumerate(alignment):
        assert (panel.get_xlabel(), panel.get_ylabel(), panel.get_xscale()) == ("step + 1", "alignment", "log")
        for line, arm in zip(panel.lines, ARM_LABELS, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), trajectory.step + 1)
            expected = first.alignment.sel(arm=arm).isel(latent_layer=layer, layer=layer)
            np.testing.assert_allclose(line.get_ydata(), expected)
    *arms, cap = accuracy.lines
    assert len(arms) == 4
    assert accuracy.get_ylim() == (0, 1.05)
    np.testing.assert_allclose(cap.get_ydata(), float(first.accuracy_cap.mean()))


def test_only_the_arms_trained_in_the_first_cell_are_drawn(trajectory):
    controls = trajectory.diverged.where((trajectory.arm == "trained") | (trajectory.cell != trajectory.cell[0]))
    alignment, *_ = STUDY.figures["training"].draw(trajectory.assign(diverged=controls)).axes
    assert [line.get_label() for line in alignment.lines] == ["attention trained"]


def verdicts(run, preset="quick"):
    return {claim.name: claim.judge(run, preset)["verdict"] for claim in CLAIMS}


@pytest.mark.parametrize("change", [{"controls": ()}, {"controls": (7,)}, {"controls": (5,), "classes": (6, 5)}])
def test_controls_may_be_left_out(change, tmp_path):
    """Claims about a control that is nowhere trained are not tested; otherwise the cells that have it are compared."""
    config = replace(SMALL, **change, steps=3, records=2)
    outcome = execute(replace(STUDY, presets={"quick": Preset(config, 2, 1)}), out=tmp_path)
    has_controls = change["controls"] == (5,)
    compared = {f"{arm}-s{layer}" for arm in ("frozen", "uniform", "linear") for layer in (0, 1)}
    missing = {claim["name"] for claim in outcome.claims if claim["reason"].startswith("this run has no")}
    assert {name for name in missing if not name.startswith("table")} == (set() if has_controls else compared)
    values = [claim["measured"]["mean"] for claim in outcome.claims if claim["name"] in compared]
    assert [value is not None for value in values] == [has_controls] * 6
    assert len(list((outcome.path / "figures").glob("*.svg"))) == 3


def test_a_cell_that_was_not_trained_is_not_judged(trajectory):
    """One of Table 1's eight cells."""
    single_cell = trajectory.isel(cell=[0]).assign_coords(cell=[cell(20, 2, (10, 20))])
    reasons = {claim.name: claim.judge(single_cell, "paper")["reason"] for claim in CLAIMS}
    missing = {name for name, reason in reasons.items() if reason.startswith("this run has no cell")}
    table = {name for name in reasons if name.startswith("table")}
    assert table - missing == {"table-20-2-10-20-s0", "table-20-2-10-20-s1"}


def test_a_seed_that_diverged_in_one_cell_is_nan_in_every_mean_over_cells(trajectory):
    diverged = trajectory.copy(deep=True)
    diverged.alignment.loc[{"arm": "trained", "cell": cell(6, 2, (4, 5)), "seed": 0, "step": slice(1, None)}] = np.nan
    for values in (gain_over_control(diverged, "frozen", 0), gain_over_start(diverged, 1)):
        np.testing.assert_array_equal(np.isnan(values), [True, False])
    assert set(verdicts(diverged).values()) == {"does not hold", "not tested"}


def test_equal_seeds_are_drawn_without_bars(trajectory):
    """Rounding places the mean of three times 0.1 above 0.1, and no bar may have a negative length."""
    equal = trajectory.isel(seed=[0, 0, 0]).assign(alignment=lambda run: 0 * run.alignment + 0.1)
    panel, _ = STUDY.figures["table"].draw(equal).axes
    _, _, (bars,) = panel.containers[0].lines
    lengths = [segment[1, 0] - segment[0, 0] for segment in bars.get_segments()]
    np.testing.assert_allclose(lengths, 0, atol=1e-12)
    assert min(lengths) >= 0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"layers": 1}, "layers"),
        ({"records": 1}, "records"),
        ({"classes": (6, 6)}, "classes"),
        ({"classes": ()}, "classes"),
        ({"children": (2, 2)}, "children"),
        ({"latents": ((4, 5), (4, 5))}, "latents"),
    ],
)
def test_bad_config_is_named_before_any_training(change, name, monkeypatch):
    monkeypatch.setattr(Context, "fit", lambda *_args, **_options: pytest.fail("trained"))
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_the_linear_arm_is_about_the_activation():
    """Only the activation differs from the arm `trained`, and the claim's statement says so."""
    statements = {claim.name: claim.statement for claim in CLAIMS}
    for layer in (0, 1):
        assert "activation" in statements[f"linear-s{layer}"]
        assert statements[f"uniform-s{layer}"].startswith("Trained attention")


@pytest.mark.parametrize(
    "change", [{"latents": ((4, 500),)}, {"length": 3}, {"steps": 0}, {"children": (9,)}, {"width": 0}, {"batch": 0}]
)
def test_bad_config_is_refused(change):
    with pytest.raises(InputError):
        run(replace(SMALL, **change), Context((0,)))
