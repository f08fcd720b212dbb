from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.models.transformer import Decoder, DecoderConfig
from joma.studies import load
from joma.studies.symmetry.permutation import (
    CLAIMS,
    GROUPS,
    MAX_INVARIANT,
    MIN_BROKEN,
    STUDY,
    TABLE,
    Config,
    cells,
    draw_cells,
    draw_highlight,
    draw_table,
    outcome,
    run,
)
from joma.study import Context

SMALL = Config(width=8, length=4, vocabulary=6, sequences=2, inputs=8)


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def test_the_table_is_as_the_theorem_says(trajectory):
    assert trajectory.largest.dims == ("seed", *TABLE)
    assert trajectory.largest.size == 2 * 144
    assert {claim.name: claim.judge(trajectory, "quick")["verdict"] for claim in CLAIMS} == {
        "full-mask": "holds",
        "one-causal-layer": "holds",
        "causal-mask": "holds",
        "encodings": "holds",
    }
    assert bool((trajectory["mean"] <= trajectory.largest).all())


def test_every_cell_is_in_one_group(trajectory):
    stacked = trajectory.largest.stack(cell=tuple(TABLE))
    by_group = [tuple(index) for group in GROUPS for index in cells(trajectory, group).cell.values]
    assert sorted(by_group, key=repr) == sorted((tuple(index) for index in stacked.cell.values), key=repr)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_one_cell_beyond_the_threshold_makes_a_claim_fail(trajectory, claim):
    group = list(GROUPS)[CLAIMS.index(claim)]
    cell = dict(zip(TABLE, cells(trajectory, group).cell.values[-1], strict=True))
    gaps = trajectory.largest.copy()
    gaps.loc[{"seed": 1, **cell}] = 1e-5  # too much for an invariant cell, too little for a broken one
    assert claim.judge(trajectory.assign(largest=gaps), "quick")["verdict"] == "does not hold"


def test_a_cell_is_measured_on_the_decoder_that_its_labels_describe(trajectory):
    """One cell of seed 1 by a loop over permutations."""
    common = {"vocabulary": 6, "width": 8, "heads": 2, "length": 4, "layers": 2, "mask": "causal"}
    model = Decoder(
        DecoderConfig(norm="post", residual=False, positions="rotary", **common),
        generators=[torch.Generator().manual_seed(1)],
        dtype=torch.float64,
    )
    changes = []
    with torch.no_grad():
        for row in ([0, 1, 2, 3], [1, 2, 3, 4]):
            orders = torch.tensor([[*order, row[-1]] for order in itertools.permutations(row[:-1])])
            logits = model(orders)[0, :, -1]
            changes.append((logits - logits[0]).norm(dim=-1))
    cell = {"seed": 1, "positions": "rotary", "mask": "causal", "layers": 2, "residual": "off", "norm": "post"}
    measured = trajectory.sel(cell)
    change = torch.stack(changes)
    np.testing.assert_allclose(measured.largest * measured.spread, change.max(), rtol=1e-10)
    np.testing.assert_allclose(measured["mean"] * measured.spread, change.mean(), rtol=1e-10)


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((1,)))
    np.testing.assert_allclose(alone.spread[0], trajectory.spread.sel(seed=1), rtol=1e-9)
    np.testing.assert_allclose(alone.largest[0], trajectory.largest.sel(seed=1), rtol=1e-9, atol=1e-10)


def test_the_table_shows_the_worst_seed_of_every_cell(trajectory):
    panel, colourbar = draw_table(trajectory).axes
    assert colourbar.get_ylabel() == "log₁₀ of the largest change / spread"
    rows = ["none, full", "none, causal", "sinusoidal, full", "sinusoidal, causal"]
    assert [label.get_text() for label in panel.get_yticklabels()][:4] == rows
    assert [label.get_text() for label in panel.get_xticklabels()] == ["pre", "post", "none"] * 6
    texts = [text.get_text() for text in panel.texts]
    assert texts[144:] == [
        "residual on", "1 layer", "residual off", "residual on", "2 layers", "residual off", "residual on", "4 layers",
        "residual off",
    ]  # fmt: skip
    image = np.asarray(panel.images[0].get_array())
    invariant = np.zeros((8, 18), bool)
    invariant[0], invariant[1, :6] = True, True  # full mask: 18 cells; one causal layer: 6
    largest = trajectory.largest.stack(row=("positions", "mask"), column=("layers", "residual", "norm"))
    largest = largest.transpose("seed", "row", "column").values
    worst = np.where(invariant, largest.max(0).clip(1e-17), largest.min(0))
    np.testing.assert_allclose(image, np.log10(worst))
    assert [float(text.replace("−", "-")) for text in texts[:144]] == pytest.approx(np.log10(worst).ravel(), abs=0.051)


def test_every_cell_is_drawn_by_group_with_the_thresholds(trajectory):
    gaps, spread = draw_cells(trajectory).axes
    assert [text.get_text() for text in gaps.get_legend().get_texts()] == list(GROUPS)
    assert [len(bars.lines[0].get_xdata()) for bars in gaps.containers] == [18, 6, 12, 108]
    for bars, group in zip(gaps.containers, GROUPS, strict=True):
        means = np.sort(cells(trajectory, group).clip(1e-17).mean("seed"))
        np.testing.assert_allclose(np.sort(bars.lines[0].get_ydata()), means)
    thresholds = [line.get_ydata()[0] for line in gaps.lines if len(line.get_xdata()) == 2]
    assert thresholds == [MAX_INVARIANT, MIN_BROKEN]
    assert (gaps.get_yscale(), spread.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in spread.get_legend().get_texts()] == [
        "residual on, norm pre", "residual off, norm pre", "residual off, norm none",
    ]  # fmt: skip
    expected = trajectory.spread.sel(positions="none", mask="full", residual="off", norm="none").mean("seed")
    np.testing.assert_allclose(spread.containers[2].lines[0].get_ydata(), expected)
    np.testing.assert_array_equal(spread.containers[2].lines[0].get_xdata(), [1, 2, 4])


def test_the_highlight_answers_for_each_encoding_mask_and_depth_by_its_weakest_decoder(trajectory):
    (panel,) = draw_highlight(trajectory).axes
    texts = [text.get_text() for text in panel.texts]
    assert [text.partition(":")[0] for text in texts] == ["no"] * 4 + ["yes"] * 8
    causal = trajectory.largest.sel(positions="none", mask="causal")
    assert texts[4] == f"yes: {float(causal.sel(layers=2).min()):.1g}"
    assert texts[3] == f"no: {float(causal.sel(layers=1).max()):.0e}"
    broken = trajectory.largest.copy()
    broken.loc[{"seed": 1, "positions": "none", "mask": "full", "layers": 4, "residual": "on", "norm": "pre"}] = 0.5
    texts = [text.get_text() for text in draw_highlight(trajectory.assign(largest=broken)).axes[0].texts]
    assert texts[2] == "in some"


def test_the_outcome_states_the_largest_and_smallest_changes_of_the_run(trajectory):
    largest = trajectory.largest.copy()
    largest[{}] = 0.75
    full, causal = {"positions": "none", "mask": "full"}, {"positions": "none", "mask": "causal"}
    largest.loc[full], largest.loc[{**causal, "layers": 1}], largest.loc[{**causal, "layers": [2, 4]}] = (
        2e-12,
        3e-15,
        1.5,
    )
    largest.loc[{**full, "seed": 1, "layers": 2, "norm": "pre", "residual": "on"}] = 4e-12
    assert outcome(trajectory.assign(largest=largest)) == (
        "Without an encoding, reordering the earlier tokens changes the prediction by at most 4e-12 of its spread "
        "under a full mask and 3e-15 in one causal layer, but by at least 1.5 in two or four causal layers; with an "
        "encoding, by at least 0.75 (2 seeds)."
    )


@pytest.mark.parametrize(
    "change",
    [{"length": 2}, {"vocabulary": 3}, {"sequences": 0}, {"inputs": 1}, {"width": 0}, {"heads": 3}, {"width": 2}],
)
def test_a_config_that_cannot_be_run_is_refused_by_field(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_the_paper_preset_tries_all_permutations_of_six_tokens():
    assert load("permutation") is STUDY
    assert STUDY.presets["paper"].config.length == 7
