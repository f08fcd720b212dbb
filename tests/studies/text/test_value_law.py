"""The law of the value path: exact where its premises hold, and optional in the study on text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.models.transformer import Decoder, DecoderConfig
from joma.studies.text import value_law
from joma.studies.text.invariant_text import CLAIMS, Config, draw_training, outcome, run
from joma.studies.text.law_comparison import LAWS, at_end, compare
from joma.study import Context, NotInRun

SMALL = Config(
    width=8, hidden=12, length=8, batch=4, steps=12, every=4, rate=1e-2, dropout=0.0, glance=60, tokens=20, queries=5,
    permutations=39,
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


@pytest.fixture(scope="module")
def without_values():
    return run(replace(SMALL, value_path=False), Context((0, 1)))


def test_squares_are_those_of_the_models_value_vectors():
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    config = DecoderConfig(vocabulary=7, width=6, hidden=9, length=2, norm="post", scale_embedding=True)
    model = Decoder(config, generators=generators, dtype=torch.float64)
    layer = model.layers[0].attention.value
    with torch.no_grad():
        values = layer((model.embedding * 6**0.5)[:, None])[:, 0]  # [seed, type, width], with the bias
        values = values - (0 if layer.bias is None else layer.bias[:, None])
        measures = value_law.read(model, tokens=torch.tensor([5, 1, 2]))
    squares = values.square().sum(dim=-1)
    torch.testing.assert_close(measures["value_squares"], squares[:, [5, 1, 2]], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(measures["value_rest"], squares[:, [0, 3, 4, 6]].sum(dim=1), rtol=1e-10, atol=1e-12)


def train_value_path(*, kappa, rate=0.01, steps=600, tokens=12, queries=3):
    """Train free logits of exp attention, W_V, W_O, a tanh layer and its readout by plain SGD, two seeds at once."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, query = torch.rand(60, tokens, generator=generator, dtype=torch.float64), torch.arange(60) % queries
    target = draw(60, 2)
    shapes = {"z": (queries, tokens), "value": (tokens, 4), "output": (4, 5), "hidden": (5, 6), "readout": (6, 2)}
    parameters = {name: (0.3 * draw(2, *shape)).requires_grad_() for name, shape in shapes.items()}
    records = []
    for step in range(steps + 1):
        if step % (steps // 3) == 0:
            records.append({name: parameters[name].detach().clone() for name in ("z", "value")})
        weights = x * parameters["z"][:, query].exp() / tokens  # exp attention; orthonormal embeddings are unit vectors
        f = weights @ parameters["value"] @ parameters["output"]
        loss = ((torch.tanh(f @ parameters["hidden"]) @ parameters["readout"] - target) ** 2).mean(dim=(1, 2)).sum()
        slopes = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for (name, parameter), slope in zip(parameters.items(), slopes, strict=True):
                parameter.sub_(rate * (kappa if name == "z" else 1.0) * slope)
    z, value = (torch.stack([record[name] for record in records], dim=1) for name in ("z", "value"))
    return xr.Dataset(
        {
            "z": (("seed", "step", "query", "token"), z),
            "z_all": (("seed", "step", "token"), z.sum(dim=2)),
            "squares": (("seed", "step", "token"), torch.zeros_like(value[..., 0])),  # of hidden units: not to be used
            "rest": (("seed", "step"), torch.zeros(z.shape[:2])),
            "value_squares": (("seed", "step", "token"), value.square().sum(dim=-1)),
            "value_rest": (("seed", "step"), torch.zeros(z.shape[:2], dtype=torch.float64)),
        },
        {"seed": [0, 1], "step": np.arange(len(records))},
    )


def test_the_law_is_exact_where_its_premises_hold():
    """With layers above attention that are trained too: an error of the order of the steps, and the scale is κ."""
    trajectory, counts = train_value_path(kappa=0.5), np.arange(1, 14)
    options = {"permutations": 99, "generator": np.random.default_rng(0)}
    final = compare(value_law.as_squares(trajectory), counts, "exp", **options).isel(step=-1)
    assert float(final.error.max()) < 5e-3
    np.testing.assert_allclose(final.scale, 0.5, rtol=0.01)
    assert float(final.correlation.min()) > 1 - 1e-4
    assert float((final.correlation.sel(sum="asked") - final.null.sel(side="high")).min()) > 0.1


@pytest.mark.parametrize(("attention", "holds"), [("softmax", True), ("exp", False)])
def test_a_value_bias_is_harmless_with_softmax_attention_alone(attention, holds):
    """Σ_m ζ_m = p·ġ less softmax's pull, with the slopes of autograd and value vectors p without their bias."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.rand(9, 5, generator=generator).double(), torch.randn(9, 2, generator=generator).double()
    shapes = {"z": (5,), "value": (5, 3), "bias": (3,), "output": (3, 4), "readout": (4, 2)}
    parameters = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    z, value = (parameters[name].requires_grad_() for name in ("z", "value"))
    weights = x * z.exp()
    if attention == "softmax":
        weights = weights / weights.sum(dim=1, keepdim=True)
    f = weights @ (value + parameters["bias"]) @ parameters["output"]
    loss = (torch.tanh(f) @ parameters["readout"] - target).square().mean()
    slope_z, slope_value, slope_f = torch.autograd.grad(loss, (z, value, f))
    y = weights * (slope_f @ (value @ parameters["output"]).T)
    pull = (weights * y.sum(dim=1, keepdim=True)).sum(dim=0) if attention == "softmax" else 0.0
    difference = slope_z - ((value * slope_value).sum(dim=1) - pull)
    assert (float(difference.detach().abs().max()) < 1e-14) == holds
    assert float(slope_z.abs().max()) > 1e-3


def test_the_rest_of_the_run_does_not_change(trajectory, without_values):
    """What a run without the value path stores is the same to the bit: stored runs stay what they are."""
    assert not value_law.is_in(without_values)
    assert trajectory[list(without_values.data_vars)].identical(without_values)
    added = set(trajectory.data_vars) - set(without_values.data_vars)
    assert all(name.startswith(value_law.PREFIX) for name in added)


def test_every_claim_about_the_value_path_is_measured_or_not_in_the_run(trajectory, without_values):
    claims = [claim for claim in CLAIMS if claim.name.startswith("value-")]
    assert len(claims) == 10
    for claim in claims:
        assert claim.kind == "control"
        if not claim.name.startswith("value-lead"):  # decided only where value vectors predict anything
            assert claim.judge(trajectory, "quick")["measured"]["mean"] is not None
        record = claim.judge(without_values, "paper")
        assert (record["verdict"], record["reason"]) == ("not tested", "this run has no value path")
    with pytest.raises(NotInRun, match="value path"):
        value_law.as_laws(without_values)


@pytest.mark.parametrize("law", LAWS)
def test_measures_are_read_at_their_times(trajectory, law):
    partial, bound = (trajectory[f"value_{name}"].sel(law=law) for name in ("partial", "partial_null"))
    beyond = partial - bound.sel(side="high")
    times = [1, 4, 12]  # the recorded steps nearest to a tenth, a third and all of 12 steps
    assert set(times) <= set(trajectory.step.values.tolist())
    np.testing.assert_allclose(value_law.least_partial(trajectory, law), beyond.sel(step=times).min("step"))
    np.testing.assert_allclose(value_law.measure(trajectory, law, "partial", "partial_null"), beyond.isel(step=-1))
    lead = partial.isel(step=-1) - at_end(trajectory, law, "partial")
    clear = trajectory.assign(value_partial_null=xr.full_like(trajectory.value_partial_null, -1.0))
    np.testing.assert_allclose(value_law.lead(clear, law), lead)
    with pytest.raises(NotInRun, match="beyond chance in every seed"):
        value_law.lead(trajectory.assign(value_partial_null=xr.ones_like(trajectory.value_partial_null)), law)


def test_the_outcome_says_what_value_vectors_predict(trajectory, without_values):
    value = float(trajectory.value_correlation.isel(step=-1).sel(law="exp", sum="asked").mean())
    assert f"{value:.2f} (law for exp, error" in outcome(trajectory)
    assert outcome(trajectory).startswith(outcome(without_values))
    assert "value vectors" not in outcome(without_values)


def test_a_run_without_the_value_path_is_drawn_without_its_row(trajectory, without_values):
    assert (len(draw_training(trajectory).axes), len(draw_training(without_values).axes)) == (6, 4)
