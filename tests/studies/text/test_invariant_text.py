from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.models.block import Block, BlockConfig
from joma.models.layers import QueryPositions
from joma.models.transformer import Decoder, DecoderConfig
from joma.studies import load
from joma.studies.text.invariant_text import CLAIMS, LAWS, STUDY, Config, compare, read, run
from joma.study import Context
from joma.train import Optimiser, fit

SMALL = Config(
    width=8, hidden=12, length=8, batch=4, steps=12, every=4, rate=1e-2, dropout=0.0, tokens=20, queries=5,
    permutations=39,
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def model_of(**changes):
    parts = {"vocabulary": 7, "width": 6, "hidden": 9, "length": 2, "norm": "post", "scale_embedding": True} | changes
    return Decoder(
        DecoderConfig(**parts), generators=[torch.Generator().manual_seed(seed) for seed in (3, 4)], dtype=torch.float64
    )


def attend(model, tokens):
    """Return the attention weights of the second position and what enters and leaves the attention block."""
    layer, watched, positions = model.layers[0], {"attention": []}, QueryPositions((2,), 0)
    with torch.no_grad():
        x, _ = model.input_stage(model._embed(tokens, model.embedding), model.positions, None)
        mask = model._mask(x, None, positions)
        y = x + layer.attention(x, mask, query_positions=positions, noise=None, watched=watched)
    return watched["attention"][0][:, :, 0, 1], y[:, :, 1]


def test_logits_are_those_of_the_model():
    """Query q at the second place sees token l and itself: the log ratio of the two weights is z_ql − z_qq."""
    model, tokens = model_of(), torch.arange(7)
    with torch.no_grad():
        z = read(model, tokens=tokens, queries=tokens)["z"]
    for q in range(7):
        weights, _ = attend(model, torch.tensor([[one, q] for one in range(7)]))
        ratio = weights[..., 0].log() - weights[..., 1].log()
        torch.testing.assert_close(ratio, z[:, q] - z[:, q, q, None], rtol=1e-9, atol=1e-9)


def test_logits_are_averaged_over_positions():
    model, tokens = model_of(positions="sinusoidal", length=5), torch.arange(7)
    attention, rows = model.layers[0].attention, model.embedding * 6**0.5
    with torch.no_grad():
        z = read(model, tokens=tokens, queries=tokens)["z"]
        at = rows[:, :, None] + model.positions[:, None]  # [seed, type, position, width]
        logits = torch.einsum("sqiw,sljw->sqlij", attention.query(at), attention.key(at)) / 6**0.5
    mean = logits.mean(dim=(-2, -1))
    centred = [own - own.mean(dim=-1, keepdim=True) for own in (z, mean)]
    torch.testing.assert_close(*centred, rtol=1e-9, atol=1e-9)


def test_the_sum_over_all_types_is_a_sum():
    model, tokens = model_of(positions="sinusoidal"), torch.tensor([1, 5, 2])
    with torch.no_grad():
        found = read(model, tokens=tokens, queries=torch.arange(7))
    torch.testing.assert_close(found["z_all"], found["z"].sum(dim=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["post", "none"])
def test_the_value_path_is_what_attention_adds_to_hidden_units(norm):
    """Before its activation a unit has Σ_l a_l v_l, over the norm's standard deviation, and what is the query's."""
    model = model_of(norm=norm)
    layer, tokens = model.layers[0], torch.arange(7)
    if norm == "post":
        layer.norms[0].gain.data += torch.linspace(-0.5, 0.5, 6, dtype=torch.float64)
    pairs = torch.tensor([[one, 3] for one in range(7)])
    weights, y = attend(model, pairs)
    with torch.no_grad():
        given = y
        if norm == "post":
            size = (y.var(dim=-1, unbiased=False) + 1e-5).sqrt()[..., None]
            given = (layer.norms[0](y[:, :, None])[:, :, 0] - layer.norms[0].offset[:, None]) * size
        given = given @ layer.lower.weight
        # Beside itself the query has all attention on type 3: what differs is a_l (v_l − v_3).
        difference = (given - given[:, 3:4]) / weights[..., :1]
        path = model.embedding[:, 3:4] * 6**0.5 @ layer.attention.value.weight @ layer.attention.projection.weight
        if norm == "post":
            path = (path - path.mean(dim=-1, keepdim=True)) * layer.norms[0].gain[:, None]
        v = difference + path @ layer.lower.weight
        found = read(model, tokens=tokens, queries=tokens)
    torch.testing.assert_close(v.square().sum(dim=-1), found["squares"], rtol=1e-8, atol=1e-8)
    assert found["rest"].abs().max() < 1e-9


def test_the_rest_is_all_other_types():
    model = model_of()
    with torch.no_grad():
        whole = read(model, tokens=torch.arange(7), queries=torch.tensor([0]))
        part = read(model, tokens=torch.tensor([6, 2]), queries=torch.tensor([0]))
    torch.testing.assert_close(part["squares"].sum(dim=1) + part["rest"], whole["squares"].sum(dim=1))
    torch.testing.assert_close(part["squares"], whole["squares"][:, [6, 2]])


def made_up(rng, tokens=40, seeds=2, steps=4, queries=3):
    """Logits and squares that have nothing to do with each other."""
    dims = ("seed", "step", "token")
    squares = xr.DataArray(rng.gamma(2.0, size=(seeds, steps, tokens)), dims=dims)
    z = xr.DataArray(rng.normal(size=(seeds, steps, queries, tokens)), dims=("seed", "step", "query", "token"))
    rest = xr.DataArray(rng.gamma(2.0, size=(seeds, steps)), dims=dims[:2])
    made = xr.Dataset({"squares": squares, "z": z, "z_all": z.sum("query"), "rest": rest})
    return made.assign_coords(seed=range(seeds), step=range(steps)), rng.integers(1, 90, tokens + 1)


@pytest.mark.parametrize("law", LAWS)
def test_where_the_law_holds_it_is_found_to(law):
    rng = np.random.default_rng(0)
    made, counts = made_up(rng)
    grown = made.squares - made.squares.isel(step=0)
    total = grown.sum("token") + made.rest - made.rest.isel(step=0)
    change = grown - xr.DataArray(counts[:-1] / counts.sum(), dims="token") * total if law == "softmax" else grown
    shift = xr.DataArray(rng.normal(size=made.z.shape[:3]), dims=made.z.dims[:3])  # softmax does not see it
    made["z"] = made.z.isel(step=0) + 0.7 / 2 * change * xr.DataArray([0.5, 2.0, 0.5], dims="query") + shift
    made["z_all"] = made.z.sum("query")
    found = compare(made, counts, law, permutations=99, generator=rng).isel(step=slice(1, None))
    np.testing.assert_allclose(found.correlation, 1.0, rtol=1e-9)
    np.testing.assert_allclose(found.each, 1.0, rtol=1e-9)
    np.testing.assert_allclose(found.error, 0.0, atol=1e-9)
    np.testing.assert_allclose(found.scale, 0.7 * 3, rtol=1e-9)
    np.testing.assert_allclose(found.fitted, 0.7 * 3, rtol=1e-9)
    np.testing.assert_allclose(found.moved, found.predicted, atol=1e-9)
    np.testing.assert_allclose(found.partial, 1.0, rtol=1e-9)
    assert float(found.null.sel(side="high").max()) < 0.6


def test_by_chance_it_lies_inside_the_null():
    """Of 100 made-up comparisons 5 % lie outside of 95 % bounds, give or take."""
    rng = np.random.default_rng(1)
    made, counts = made_up(rng, seeds=50, steps=3)
    found = compare(made, counts, "exp", permutations=199, generator=rng).isel(step=slice(1, None))
    for own, null in ((found.correlation.sel(sum="asked"), found.null), (found.partial, found.partial_null)):
        outside = (own < null.sel(side="low")) | (own > null.sel(side="high"))
        assert 0 <= int(outside.sum()) <= 15  # 5 expected; 15 or more has a chance of 2e-4
        assert abs(float(null.sel(side="high").mean()) - 1.96 / np.sqrt(39)) < 0.03
    assert float(found.error.min()) > 0.85


def test_the_theorys_block_obeys_it():
    """Exp attention, three queries, small steps of SGD: the law holds up to the steps' squares, with scale κ."""
    tokens, queries, kappa = 12, 3, 0.5
    parts = BlockConfig(tokens=tokens, hidden=4, queries=queries, attention="exp", activation="tanh", scale=0.3)
    block = Block(parts, generators=[torch.Generator().manual_seed(seed) for seed in (0, 1)])
    generator = torch.Generator().manual_seed(9)
    x = torch.rand(60, tokens, generator=generator, dtype=torch.float64)
    query, goal = torch.arange(60) % queries, torch.randn(60, 4, generator=generator, dtype=torch.float64)

    def loss(block, _step):
        return (block(x, query) - goal).square().mean(dim=(1, 2))

    def record(block, _step):
        return {"z": block.z, "squares": block.v.square().sum(dim=-1)}

    found = fit(block, loss, optimiser=Optimiser("sgd", 0.02, rates={"z": 0.02 * kappa}), steps=400, record=record,
                at=[0, 200, 400], dims={"z": ("query", "token"), "squares": ("token",)})  # fmt: skip
    found = found.assign(z_all=found.z.sum("query"), rest=0 * found.loss)
    law = compare(found, np.arange(1, tokens + 2), "exp", permutations=99, generator=np.random.default_rng(0))
    end = law.isel(step=-1)
    assert float(end.error.max()) < 2e-3
    np.testing.assert_allclose(end.scale, kappa, rtol=5e-3)
    assert float((end.correlation.sel(sum="asked") - end.null.sel(side="high")).min()) > 0.1
    assert float(end.correlation.min()) > 1 - 1e-5


def test_it_runs_on_text(trajectory):
    assert dict(trajectory.correlation.sizes) == {"seed": 2, "step": 7, "law": 2, "sum": 2}
    assert bool(trajectory.correlation.isel(step=0).isnull().all())
    assert not bool(trajectory.correlation.isel(step=slice(1, None)).isnull().any())
    assert trajectory.token.values[:3].tolist() == [".", "the", ","]
    assert "z" not in trajectory
    records = [claim.judge(trajectory, "quick") for claim in CLAIMS]
    assert all(record["measured"]["mean"] is not None for record in records)
    for drawing in STUDY.figures.values():
        assert drawing.draw(trajectory).axes


def test_a_seed_that_is_lost_has_no_correlation():
    rng = np.random.default_rng(2)
    made, counts = made_up(rng)
    for name in made.data_vars:
        made[name] = made[name].where((made.seed == 0) | (made.step < 2))
    found = compare(made, counts, "softmax", permutations=19, generator=rng)
    assert found.correlation.isel(step=-1).isnull().any("sum").values.tolist() == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 2},
        {"tokens": 10**6},
        {"tokens": 2},
        {"queries": 0},
        {"queries": 21},
        {"permutations": 0},
        {"steps": 0},
    ],
)
def test_bad_config(change):
    with pytest.raises(InputError):
        run(replace(SMALL, **change), Context((0,)))


def test_presets_are_configs_of_this_study():
    assert load("invariant-text") is STUDY
    assert all(isinstance(preset.config, Config) for preset in STUDY.presets.values())


def test_it_is_drawn_where_every_seed_was_lost(trajectory):
    lost = trajectory.map(lambda own: own * np.nan if own.dtype.kind == "f" else own)
    for drawing in STUDY.figures.values():
        drawing.draw(lost).canvas.draw()
