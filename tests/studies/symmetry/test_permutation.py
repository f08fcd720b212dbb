from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.models.transformer import Decoder, DecoderConfig
from joma.studies import load
from joma.studies.symmetry.permutation import CLAIMS, KINDS, STUDY, TABLE, Config, cells, draw_cells, draw_table, run
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


def test_every_cell_is_of_one_kind(trajectory):
    stacked = trajectory.largest.stack(cell=tuple(TABLE))
    found = [tuple(index) for kind in KINDS for index in cells(trajectory, kind).cell.values]
    assert sorted(found, key=repr) == sorted((tuple(index) for index in stacked.cell.values), key=repr)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_one_cell_on_the_wrong_side_is_seen(trajectory, claim):
    kind = dict(zip((each.name for each in CLAIMS), KINDS, strict=True))[claim.name]
    cell = dict(zip(TABLE, cells(trajectory, kind).cell.values[-1], strict=True))
    spoilt = trajectory.largest.copy()
    spoilt.loc[{"seed": 1, **cell}] = 1e-5  # above what an invariant cell may be, below what a broken one must
    assert claim.judge(trajectory.assign(largest=spoilt), "quick")["verdict"] == "does not hold"


def test_a_cell_is_a_decoder_of_its_parts(trajectory):
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
            y = model(orders)[0, :, -1]
            changes.append((y - y[0]).norm(dim=-1))
    cell = {"seed": 1, "positions": "rotary", "mask": "causal", "layers": 2, "residual": "off", "norm": "post"}
    found = trajectory.sel(cell)
    change = torch.stack(changes)
    np.testing.assert_allclose(found.largest * found.spread, change.max(), rtol=1e-10)
    np.testing.assert_allclose(found["mean"] * found.spread, change.mean(), rtol=1e-10)


def test_seeds_do_not_depend_on_their_neighbours(trajectory):
    alone = run(SMALL, Context((1,)))
    np.testing.assert_allclose(alone.spread[0], trajectory.spread.sel(seed=1), rtol=1e-9)
    np.testing.assert_allclose(alone.largest[0], trajectory.largest.sel(seed=1), rtol=1e-9, atol=1e-10)


def test_it_is_drawn_from_the_dataset_alone(trajectory):
    table = draw_table(trajectory)
    assert len(table.axes) == 2
    shown = [label.get_text() for label in table.axes[0].texts]
    assert sum(text.startswith("-1") for text in shown) == 24  # 18 with a full mask, 6 with one causal layer
    assert len(draw_cells(trajectory).axes) == 2


@pytest.mark.parametrize(
    "change",
    [{"length": 2}, {"vocabulary": 3}, {"sequences": 0}, {"inputs": 1}, {"width": 0}, {"heads": 3}, {"width": 2}],
)
def test_bad_config_is_named(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_presets_are_configs_of_this_study():
    assert load("permutation") is STUDY
    assert all(isinstance(preset.config, Config) for preset in STUDY.presets.values())
