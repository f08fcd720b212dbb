"""How parameters start: compared with torch's own modules by distribution, and across seeds, types and options."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy import stats
from torch import nn

from decoder_formulas import JOMA, WIKITEXT, draw_tokens, generators, make
from joma.models.initialisation import INITS, ParameterDraw
from joma.models.transformer import CHOICES, Decoder, DecoderConfig


@pytest.fixture
def torch_seed():
    """Fix the global generator, from which torch's modules draw, and restore it afterwards."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.random.set_rng_state(state)


@pytest.mark.usefixtures("torch_seed")
def test_linear_start_is_that_of_torch_linear_and_embedding():
    model = Decoder(DecoderConfig(vocabulary=200, width=100, hidden=300), generators=generators(0, 1))
    references = {
        "layers.0.lower": nn.Linear(100, 300),
        "layers.0.upper": nn.Linear(300, 100),
        "layers.0.attention.key": nn.Linear(100, 100),
        "head": nn.Linear(100, 200),
    }
    assert stats.kstest(model.embedding.detach().flatten().numpy(), "norm").pvalue > 0.01
    assert_same_start(model, references)


@pytest.mark.usefixtures("torch_seed")
def test_encoder_start_is_that_of_torch_encoder_layer():
    config = DecoderConfig(vocabulary=50, width=100, hidden=200, norm="post", init="encoder")
    model, reference = Decoder(config, generators=generators(0, 1)), nn.TransformerEncoderLayer(100, 1, 200)
    for part in ("query", "key", "value"):
        linear = getattr(model.layers[0].attention, part)
        assert_same_distribution(linear.weight, reference.self_attn.in_proj_weight)
        assert not linear.bias.any()
    references = {
        "attention.projection": reference.self_attn.out_proj,
        "lower": reference.linear1,
        "upper": reference.linear2,
    }
    assert_same_start(model.layers[0], references)
    for table in (model.embedding, model.head.weight):
        assert stats.kstest(table.detach().flatten().numpy(), "uniform", args=(-0.1, 0.2)).pvalue > 0.01
    assert not model.head.bias.any()


def assert_same_start(model, references):
    for name, reference in references.items():
        linear = model.get_submodule(name)
        assert_same_distribution(linear.weight, reference.weight)
        assert_same_distribution(linear.bias, reference.bias)


def assert_same_distribution(values, expected):
    values, expected = values.detach().flatten().numpy(), expected.detach().flatten().numpy()
    if not expected.any():
        assert not values.any()
        return
    assert stats.ks_2samp(values, expected).pvalue > 0.01
    assert abs(values).max() == pytest.approx(abs(expected).max(), rel=0.05)


@pytest.mark.parametrize("init", ["linear", "encoder", "small"])
def test_layers_that_start_alike_are_copies_of_the_first_and_all_else_starts_as_without(init):
    alike, different = (
        Decoder(dataclasses.replace(WIKITEXT, layers=3, init=init, alike=alike), generators=generators(0, 1))
        for alike in (True, False)
    )
    first = dict(alike.layers[0].named_parameters())
    for copied, drawn in zip(alike.layers[1:], different.layers[1:], strict=True):
        for name, parameter in copied.named_parameters():
            assert torch.equal(parameter, first[name])
            assert parameter.data_ptr() != first[name].data_ptr()
        assert not torch.equal(drawn.lower.weight, first["lower.weight"])
    for name, parameter in different.named_parameters():
        if not name.startswith(("layers.1", "layers.2")):
            assert torch.equal(parameter, alike.get_parameter(name))


def test_a_seed_starts_at_the_same_point_in_every_precision():
    single = Decoder(WIKITEXT, generators=generators(3))
    double = Decoder(WIKITEXT, generators=generators(3), dtype=torch.float64)
    assert {parameter.dtype for parameter in single.parameters()} == {torch.float32}
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert a.double().equal(b)


def test_all_else_starts_the_same_whatever_the_encoding():
    config = {"vocabulary": 5, "width": 4, "layers": 2, "heads": 2, "length": 3}
    models = [
        Decoder(DecoderConfig(**config, positions=name), generators=generators(0, 1)) for name in CHOICES["positions"]
    ]
    for name, parameter in models[0].named_parameters():
        assert all(model.get_parameter(name).equal(parameter) for model in models)


def test_uniform_attention_starts_as_trained_attention_does():
    uniform, trained = make(JOMA, attention="uniform"), make(JOMA)
    parameters = dict(trained.named_parameters())
    for name, parameter in uniform.named_parameters():
        assert parameter.equal(parameters[name])
    assert len(parameters) == len(list(uniform.parameters())) + 6
    weights = uniform.activations(draw_tokens(9, (2, 4)), ["attention"])["attention"][1]
    expected = torch.tensor([[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4]).double()
    torch.testing.assert_close(weights, expected.expand(2, 2, 1, 4, 4), rtol=1e-7, atol=0)


@pytest.mark.parametrize("init", ["linear", "encoder", "small"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_seed_of_several_arms_is_drawn_once_and_all_streams_move_on(init, bias):
    """Each row is what its generator alone would draw, also where one object stands for two models."""
    shared = torch.Generator().manual_seed(3)
    streams = [*generators(0, 1), *generators(0, 1, 1), shared, shared]
    draw, alone = ParameterDraw(INITS[init], streams, torch.float32), [*generators(0, 1, 0, 1, 1), *generators(3) * 2]
    for role in ("attention", "head"):
        values = draw(role, 4, 3, bias=bias).detach()
        rows = [ParameterDraw(INITS[init], [stream], torch.float32)(role, 4, 3, bias=bias)[0] for stream in alone]
        assert torch.equal(values, torch.stack(rows))
    states = [stream.get_state() for stream in streams]
    assert all(torch.equal(state, stream.get_state()) for state, stream in zip(states, alone, strict=True))
