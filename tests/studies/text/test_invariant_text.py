"""Logits and value path read from a model, their comparison with Theorem 1, and the study on a small text."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.models.layers import QueryPositions
from joma.models.transformer import Decoder, DecoderConfig
from joma.studies.text.invariant_text import (
    CLAIMS,
    Config,
    draw_tokens,
    draw_training,
    outcome,
    read,
    run,
    scale_loss,
)
from joma.studies.text.law_comparison import LAWS, compare
from joma.study import Context
from made_up_logits import unrelated

SMALL = Config(
    width=8, hidden=12, length=8, batch=4, steps=12, every=4, rate=1e-2, dropout=0.0, glance=60, tokens=20, queries=5,
    permutations=39,
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def build_model(**changes):
    parts = {"vocabulary": 7, "width": 6, "hidden": 9, "length": 2, "norm": "post", "scale_embedding": True} | changes
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    return Decoder(DecoderConfig(**parts), generators=generators, dtype=torch.float64)


def attend(model, tokens):
    """Return the attention weights of the second position, and the residual stream there after attention."""
    layer, watched, positions = model.layers[0], {"attention": []}, QueryPositions((2,), 0)
    with torch.no_grad():
        x, _ = model.input_stage(model._embed(tokens, model.embedding), model.position_encoding, None)
        mask = model._mask(x, None, positions)
        y = x + layer.attention(x, mask, query_positions=positions, noise=None, watched=watched)
    return watched["attention"][0][:, :, 0, 1], y[:, :, 1]


def test_logits_are_those_of_the_model():
    """Query q at the second position sees token l and itself: the log ratio of the two weights is z_ql − z_qq."""
    model, tokens = build_model(), torch.arange(7)
    with torch.no_grad():
        z = read(model, tokens=tokens, queries=tokens)["z"]
    for q in range(7):
        weights, _ = attend(model, torch.tensor([[token, q] for token in range(7)]))
        ratio = weights[..., 0].log() - weights[..., 1].log()
        torch.testing.assert_close(ratio, z[:, q] - z[:, q, q, None], rtol=1e-9, atol=1e-9)


def test_logits_are_averaged_over_positions():
    model, tokens = build_model(positions="sinusoidal", length=5), torch.arange(7)
    attention, embeddings = model.layers[0].attention, model.embedding * 6**0.5
    with torch.no_grad():
        z = read(model, tokens=tokens, queries=tokens)["z"]
        x = embeddings[:, :, None] + model.position_encoding[:, None]  # [seed, type, position, width]
        logits = torch.einsum("sqiw,sljw->sqlij", attention.query(x), attention.key(x)) / 6**0.5
    mean = logits.mean(dim=(-2, -1))
    centred = [logit - logit.mean(dim=-1, keepdim=True) for logit in (z, mean)]
    torch.testing.assert_close(*centred, rtol=1e-9, atol=1e-9)


def test_the_sum_over_all_types_is_a_sum():
    model, tokens = build_model(positions="sinusoidal"), torch.tensor([1, 5, 2])
    with torch.no_grad():
        logits = read(model, tokens=tokens, queries=torch.arange(7))
    torch.testing.assert_close(logits["z_all"], logits["z"].sum(dim=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["post", "none"])
def test_the_value_path_is_what_attention_adds_to_hidden_units(norm):
    """Before its activation a unit has Σ_l a_l v_l over the norm's standard deviation, plus the query's own part."""
    model = build_model(norm=norm)
    layer, tokens = model.layers[0], torch.arange(7)
    if norm == "post":
        layer.norms[0].gain.data += torch.linspace(-0.5, 0.5, 6, dtype=torch.float64)
    pairs = torch.tensor([[token, 3] for token in range(7)])
    weights, y = attend(model, pairs)
    with torch.no_grad():
        x = y
        if norm == "post":
            size = (y.var(dim=-1, unbiased=False) + 1e-5).sqrt()[..., None]
            x = (layer.norms[0](y[:, :, None])[:, :, 0] - layer.norms[0].offset[:, None]) * size
        x = x @ layer.lower.weight
        # Next to itself the query has all attention on type 3: the difference is a_l (v_l − v_3).
        difference = (x - x[:, 3:4]) / weights[..., :1]
        path = model.embedding[:, 3:4] * 6**0.5 @ layer.attention.value.weight @ layer.attention.projection.weight
        if norm == "post":
            path = (path - path.mean(dim=-1, keepdim=True)) * layer.norms[0].gain[:, None]
        v = difference + path @ layer.lower.weight
        measures = read(model, tokens=tokens, queries=tokens)
    torch.testing.assert_close(v.square().sum(dim=-1), measures["squares"], rtol=1e-8, atol=1e-8)
    assert measures["rest"].abs().max() < 1e-9


def test_the_rest_is_all_other_types():
    model = build_model()
    with torch.no_grad():
        all_types = read(model, tokens=torch.arange(7), queries=torch.tensor([0]))
        two_types = read(model, tokens=torch.tensor([6, 2]), queries=torch.tensor([0]))
    torch.testing.assert_close(two_types["squares"].sum(dim=1) + two_types["rest"], all_types["squares"].sum(dim=1))
    torch.testing.assert_close(two_types["squares"], all_types["squares"][:, [6, 2]])


@pytest.mark.parametrize("factors", [(2.0, 2.0), (2.0, 1.0), (1.0, -1.0), (1e-9, -1e-9)])
def test_one_scale_is_judged_by_what_it_explains(factors):
    """The change is a factor of the prediction, one a third of the way and one at the end, and noise."""
    rng = np.random.default_rng(2)
    trajectory, counts = unrelated(rng, seeds=2, steps=4)
    growth = trajectory.squares - trajectory.squares.isel(step=0)
    factor = xr.DataArray([0.0, factors[0], factors[1], factors[1]], dims="step")
    noise = xr.DataArray(rng.normal(size=growth.shape), dims=growth.dims)
    z = (factor * growth / 2 + noise).expand_dims(query=3, axis=2)
    measures = compare(trajectory.assign(z=z, z_all=z.sum("query")), counts, "exp", permutations=9, generator=rng)
    run = xr.concat([measures], xr.Variable("law", ["exp"]))
    change = (3 * (factor * growth / 2 + noise)).transpose("seed", "step", "token").values
    change = change - change[:, :1]
    prediction = growth.values / 2
    change, prediction = (values - values.mean(-1, keepdims=True) for values in (change, prediction))
    for seed, value in enumerate(scale_loss(run, "exp").values):
        scale = (change[seed] * prediction[seed]).sum() / (prediction[seed] ** 2).sum()
        differences = []
        for step in (1, 3):
            y, x = change[seed, step], prediction[seed, step]
            explained = 1 - ((y - scale * x) ** 2).sum() / (y**2).sum()
            best_explained = 1 - ((y - (y @ x) / (x @ x) * x) ** 2).sum() / (y**2).sum()
            differences.append(explained - best_explained / 2)
        assert value == pytest.approx(min(differences), rel=1e-9)
    if factors == (2.0, 2.0):
        assert float(scale_loss(run, "exp").min()) > 0.1
    if factors == (1.0, -1.0):
        assert float(scale_loss(run, "exp").max()) < 0


def test_the_outcome_gives_both_laws(trajectory):
    final = trajectory.isel(step=-1).sel(law="softmax")
    correlation, error = float(final.correlation.sel(sum="asked").mean()), float(final.error.mean())
    by_law = f"by {correlation:.2f} (law for softmax attention, relative error {error:.2f}) and "
    assert f"correlates with the change of the logits {by_law}" in outcome(trajectory)


def test_it_runs_on_text(trajectory):
    assert dict(trajectory.correlation.sizes) == {"seed": 2, "step": 7, "law": 2, "sum": 2}
    assert bool(trajectory.correlation.isel(step=0).isnull().all())
    assert not bool(trajectory.correlation.isel(step=slice(1, None)).isnull().any())
    assert trajectory.token.values[:3].tolist() == [".", "the", ","]
    assert "z" not in trajectory
    records = [claim.judge(trajectory, "quick") for claim in CLAIMS]
    undecided = {record["name"] for record in records if record["measured"]["mean"] is None}
    assert undecided <= {"value-lead-softmax", "value-lead-exp"}  # where value vectors predict nothing


def test_correlations_error_and_orthogonality_are_drawn_over_training(trajectory):
    softmax, exp, value_softmax, value_exp, error, orthogonality = draw_training(trajectory).axes
    late = trajectory.isel(step=slice(1, None))
    panels = {(softmax, "softmax"): "correlation", (exp, "exp"): "correlation"}
    panels |= {(value_softmax, "softmax"): "value_correlation", (value_exp, "exp"): "value_correlation"}
    for (panel, law), name in panels.items():
        by_queries, by_all_types, *others, zero = panel.lines
        correlation = late[name].sel(law=law).mean("seed")
        np.testing.assert_allclose(
            by_queries.get_xydata(), np.stack([late.step, correlation.sel(sum="asked")], axis=-1)
        )
        np.testing.assert_allclose(by_all_types.get_ydata(), correlation.sel(sum="all"))
        assert [line.get_label() for line in others] == [
            "single queries, mean", "frequency regressed out", "log frequency in place of the law",
        ]  # fmt: skip
        assert set(zero.get_ydata()) == {0.0}
        assert panel.get_ylim() == (-1, 1)
    names = [(name, law) for name in ("error", "value_error") for law in LAWS]
    for (name, law), line in zip(names, error.lines, strict=False):
        np.testing.assert_allclose(line.get_ydata(), late[name].sel(law=law).mean("seed"))
    assert [line.get_label() for line in error.lines] == [
        "law for softmax", "law for exp", "softmax, from value vectors", "exp, from value vectors",
        "predicting no change",
    ]  # fmt: skip
    np.testing.assert_allclose(orthogonality.lines[0].get_ydata(), late.excess.sel(vectors="embedding").mean("seed"))
    assert (orthogonality.get_ylim()[0], orthogonality.get_xlim()) == (0, (0.8, 1.2 * SMALL.steps))


def test_each_token_is_drawn_against_its_prediction(trajectory):
    figure = draw_tokens(trajectory)
    figure.draw_without_rendering()
    panels = np.reshape(figure.axes, (2, 2))
    for row, law in zip(panels, LAWS, strict=True):
        for panel, seed in zip(row, (0, 1), strict=True):
            predicted, change = (trajectory[name].sel(law=law, seed=seed) for name in ("predicted", "moved"))
            points, equality = panel.lines
            np.testing.assert_allclose(points.get_xydata(), np.stack([predicted, change], axis=-1))
            np.testing.assert_array_equal(equality.get_xdata(), equality.get_ydata())
            largest = trajectory.token.values[np.argsort(-abs(change.values))[:5]]
            assert panel.texts[0].get_text() == largest[0].replace("$", r"\$")
            assert {text.get_text() for text in panel.texts} <= {token.replace("$", r"\$") for token in largest}
            boxes = [text.get_window_extent() for text in panel.texts]
            assert not any(box.overlaps(other) for box, other in itertools.combinations(boxes, 2))
            assert f"{law}, seed {seed}, scale" in panel.get_title(loc="left")


def test_a_dollar_sign_in_a_token_is_no_formula(trajectory):
    named = trajectory.assign_coords(token=[f"${number}$" for number in range(trajectory.sizes["token"])])
    texts = [text.get_text() for panel in draw_tokens(named).axes for text in panel.texts]
    assert all(text.startswith(r"\$") and text.endswith(r"\$") for text in texts)
    assert 4 <= len(texts) <= 20


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"heads": 2}, "heads"),
        ({"tokens": 10**6}, "tokens"),
        ({"tokens": 2}, "tokens"),
        ({"queries": 0}, "queries"),
        ({"queries": 21}, "queries"),
        ({"permutations": 0}, "permutations"),
        ({"steps": 0}, "steps"),
    ],
)
def test_an_error_names_the_field(change, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_it_is_drawn_where_every_seed_diverged(trajectory):
    diverged = trajectory.map(lambda values: values * np.nan if values.dtype.kind == "f" else values)
    for draw in (draw_training, draw_tokens):
        figure = draw(diverged)
        figure.canvas.draw()
        assert np.isnan(figure.axes[0].lines[0].get_ydata()).all()
