"""The comparison of logits with a law: exact where the law holds, inside its null where nothing is related."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

from joma.models.block import Block, BlockConfig
from joma.studies.text.law_comparison import COMPARED, LAWS, at_end, compare, compare_laws, final_error
from joma.train import Optimiser, Record, fit
from made_up_logits import unrelated


@pytest.mark.parametrize("law", LAWS)
def test_a_law_that_holds_predicts_the_logits(law):
    rng = np.random.default_rng(0)
    trajectory, counts = unrelated(rng)
    growth = trajectory.squares - trajectory.squares.isel(step=0)
    total = growth.sum("token") + trajectory.rest - trajectory.rest.isel(step=0)
    change = growth - xr.DataArray(counts[:-1] / counts.sum(), dims="token") * total if law == "softmax" else growth
    shift = xr.DataArray(rng.normal(size=trajectory.z.shape[:3]), dims=trajectory.z.dims[:3])  # softmax does not see it
    by_query = xr.DataArray([0.5, 2.0, 0.5], dims="query")
    trajectory["z"] = trajectory.z.isel(step=0) + 0.7 / 2 * change * by_query + shift
    trajectory["z_all"] = trajectory.z.sum("query")
    measures = compare(trajectory, counts, law, permutations=99, generator=rng).isel(step=slice(1, None))
    np.testing.assert_allclose(measures.correlation, 1.0, rtol=1e-9)
    np.testing.assert_allclose(measures.each, 1.0, rtol=1e-9)
    np.testing.assert_allclose(measures.error, 0.0, atol=1e-9)
    np.testing.assert_allclose(measures.scale, 0.7 * 3, rtol=1e-9)
    np.testing.assert_allclose(measures.fitted, 0.7 * 3, rtol=1e-9)
    np.testing.assert_allclose(measures.moved, measures.predicted, atol=1e-9)
    np.testing.assert_allclose(measures.partial, 1.0, rtol=1e-9)
    assert float(measures.null.sel(side="high").max()) < 0.6


def test_unrelated_quantities_lie_inside_the_null():
    """Of 300 made-up comparisons about 5 % lie outside of 95 % bounds."""
    rng = np.random.default_rng(1)
    trajectory, counts = unrelated(rng, seeds=150, steps=3)
    measures = compare(trajectory, counts, "exp", permutations=199, generator=rng).isel(step=slice(1, None))
    nulls = ((measures.correlation.sel(sum=COMPARED), measures.null), (measures.partial, measures.partial_null))
    for correlation, null in nulls:
        outside = (correlation < null.sel(side="low")) | (correlation > null.sel(side="high"))
        assert 5 <= int(outside.sum()) <= 27  # 15 expected; fewer or more have a chance of 2e-3 together
        assert abs(float(null.sel(side="high").mean()) - 1.96 / np.sqrt(39)) < 0.03
    # The one scale explains one of the 2 · 39 directions in which the changes of two steps vary.
    assert float((measures.error**2).mean()) == pytest.approx(1 - 1 / 78, abs=0.01)


def test_the_theorys_block_obeys_the_law():
    """Exp attention, three queries, small steps of SGD: the law holds up to the steps' squares, with scale κ."""
    tokens, queries, kappa = 12, 3, 0.5
    config = BlockConfig(tokens=tokens, hidden=4, queries=queries, attention="exp", activation="tanh", scale=0.3)
    block = Block(config, generators=[torch.Generator().manual_seed(seed) for seed in (0, 1)])
    generator = torch.Generator().manual_seed(9)
    x = torch.rand(60, tokens, generator=generator, dtype=torch.float64)
    query, target = torch.arange(60) % queries, torch.randn(60, 4, generator=generator, dtype=torch.float64)

    def loss(block, _step):
        return (block(x, query) - target).square().mean(dim=(1, 2))

    def measure(block, _step):
        return {"z": block.z, "squares": block.v.square().sum(dim=-1)}

    trajectory = fit(
        block,
        loss,
        optimiser=Optimiser("sgd", 0.02, rates={"z": 0.02 * kappa}),
        steps=400,
        record=Record(measure, at=[0, 200, 400], dims={"z": ("query", "token"), "squares": ("token",)}),
    )
    trajectory = trajectory.assign(z_all=trajectory.z.sum("query"), rest=0 * trajectory.loss)
    counts = np.arange(1, tokens + 2)
    measures = compare(trajectory, counts, "exp", permutations=99, generator=np.random.default_rng(0))
    final = measures.isel(step=-1)
    assert float(final.error.max()) < 2e-3
    np.testing.assert_allclose(final.scale, kappa, rtol=5e-3)
    assert float((final.correlation.sel(sum="asked") - final.null.sel(side="high")).min()) > 0.1
    assert float(final.correlation.min()) > 1 - 1e-5


@pytest.mark.parametrize(("factor", "error"), [(0.7, 0.0), (-0.7, 1.0)])
def test_a_law_with_the_wrong_sign_predicts_nothing(factor, error):
    """With a negative scale the reversed law would fit exactly; the best scale from 0 on is 0."""
    rng = np.random.default_rng(4)
    trajectory, counts = unrelated(rng)
    z = trajectory.z.isel(step=0) + factor * (trajectory.squares - trajectory.squares.isel(step=0))
    trajectory = trajectory.assign(z=z.transpose(*trajectory.z.dims), z_all=z.sum("query"))
    measures = compare_laws(trajectory, counts, permutations=9, generator=rng)
    np.testing.assert_allclose(measures.error.sel(law="exp").isel(step=-1), 0.0, atol=1e-9)
    np.testing.assert_allclose(final_error(measures, "exp"), error, atol=1e-9)
    diverged = measures.assign(error=measures.error.where(measures.seed == 0))
    assert final_error(diverged, "exp").isnull().values.tolist() == [False, True]


def test_a_diverged_seed_has_no_correlation():
    rng = np.random.default_rng(2)
    trajectory, counts = unrelated(rng)
    for name in trajectory.data_vars:
        trajectory[name] = trajectory[name].where((trajectory.seed == 0) | (trajectory.step < 2))
    measures = compare(trajectory, counts, "softmax", permutations=19, generator=rng)
    assert measures.correlation.isel(step=-1).isnull().any("sum").values.tolist() == [False, True]


def test_every_law_is_compared_and_read_at_a_share_of_the_training():
    trajectory, counts = unrelated(np.random.default_rng(3), steps=5)
    measures = compare_laws(trajectory, counts, permutations=9, generator=np.random.default_rng(0))
    assert measures.law.values.tolist() == list(LAWS)
    again = compare(trajectory, counts, "softmax", permutations=9, generator=np.random.default_rng(0))
    assert measures.sel(law="softmax", drop=True).equals(again)
    for share, step in ((1.0, 4), (0.5, 2), (0.3, 1)):
        value = at_end(measures, "exp", "partial", "partial_null", share=share)
        expected = measures.partial - measures.partial_null.sel(side="high")
        np.testing.assert_array_equal(value, expected.sel(law="exp", step=step))
