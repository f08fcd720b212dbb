"""Layers compared with torch's own modules, seed by seed; gradients by differences; positions and query positions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decoder_formulas import JOMA, draw_tokens, make
from joma import noise
from joma.models.layers import QueryKeyOverride, QueryPositions
from joma.models.transformer import CHOICES, DecoderConfig

PROJECTIONS = ("query", "key", "value")


def torch_layer(config, p):
    """Return torch's layer with the parameters `p` of one layer of one seed."""
    layer = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        config.hidden,
        dropout=0.0,
        activation=config.activation,
        batch_first=True,
        norm_first=config.norm == "pre",
        dtype=torch.float64,
    )
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([p[f"attention.{part}.weight"].T for part in PROJECTIONS]),
            "self_attn.in_proj_bias": torch.cat([p[f"attention.{part}.bias"] for part in PROJECTIONS]),
            "self_attn.out_proj.weight": p["attention.projection.weight"].T,
            "self_attn.out_proj.bias": p["attention.projection.bias"],
            "linear1.weight": p["lower.weight"].T,
            "linear1.bias": p["lower.bias"],
            "linear2.weight": p["upper.weight"].T,
            "linear2.bias": p["upper.bias"],
            "norm1.weight": p["norms.0.gain"],
            "norm1.bias": p["norms.0.offset"],
            "norm2.weight": p["norms.1.gain"],
            "norm2.bias": p["norms.1.offset"],
        }
    )
    return layer


def torch_decoder(model, seed):
    """Return torch's modules with the parameters of one seed: embedding, layers, final norm or identity, head."""
    config, p = model.config, {name: parameter[seed].detach() for name, parameter in model.named_parameters()}
    layers = []
    for number in range(config.layers):
        prefix = f"layers.{number}."
        layers.append(torch_layer(config, {name.removeprefix(prefix): values for name, values in p.items()}))
    embedding = nn.Embedding.from_pretrained(p["embedding"].clone(), freeze=False)
    head = nn.Linear(config.width, config.outputs or config.vocabulary, dtype=torch.float64)
    head.load_state_dict({"weight": p["head.weight"].T, "bias": p["head.bias"]})
    norm = nn.Identity()
    if config.norm == "pre":
        norm = nn.LayerNorm(config.width, dtype=torch.float64)
        norm.load_state_dict({"weight": p["norm.gain"], "bias": p["norm.offset"]})
    return nn.ModuleDict({"embedding": embedding, "layers": nn.ModuleList(layers), "norm": norm, "head": head})


def gradient_pairs(model, seed, reference):
    """Yield pairs of gradients: of one seed, and of the same parameter in torch's modules."""
    gradients = {name: parameter.grad[seed] for name, parameter in model.named_parameters()}
    width = model.config.width
    yield gradients["embedding"], reference["embedding"].weight.grad
    yield gradients["head.weight"], reference["head"].weight.grad.T
    for number, layer in enumerate(reference["layers"]):
        attention, name = layer.self_attn, f"layers.{number}"
        for weight, bias, part in zip(
            attention.in_proj_weight.grad.split(width),
            attention.in_proj_bias.grad.split(width),
            PROJECTIONS,
            strict=True,
        ):
            yield gradients[f"{name}.attention.{part}.weight"], weight.T
            yield gradients[f"{name}.attention.{part}.bias"], bias
        yield gradients[f"{name}.attention.projection.weight"], attention.out_proj.weight.grad.T
        yield gradients[f"{name}.lower.weight"], layer.linear1.weight.grad.T
        yield gradients[f"{name}.upper.bias"], layer.linear2.bias.grad
        yield gradients[f"{name}.norms.0.gain"], layer.norm1.weight.grad
        yield gradients[f"{name}.norms.1.offset"], layer.norm2.bias.grad


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_forward_and_gradients_are_those_of_torch_encoder_layers(norm, mask, activation):
    config = DecoderConfig(vocabulary=9, width=8, layers=2, heads=2, hidden=5, norm=norm, mask=mask, init="encoder")
    model = make(config, activation=activation)
    tokens, target = draw_tokens(9, (2, 3, 5)), draw_tokens(9, (2, 3, 5), 1)
    logits = model(tokens)
    losses = nn.functional.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none").view(2, -1).mean(1)
    losses.sum().backward()
    future = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if mask == "causal" else None
    for seed in range(2):
        reference = torch_decoder(model, seed)
        x = reference["embedding"](tokens[seed])
        for layer in reference["layers"]:
            x = layer(x, src_mask=future)
        expected = reference["head"](reference["norm"](x))
        torch.testing.assert_close(logits[seed], expected, rtol=0, atol=1e-12)
        nn.functional.cross_entropy(expected.flatten(0, 1), target[seed].flatten()).backward()
        for gradient, expected_gradient in gradient_pairs(model, seed, reference):
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "rotary", "heads": 2, "norm": "pre", "activation": "silu"},
        {"positions": "learned", "norm": "none", "tied": True, "activation": "gelu"},
        {"attention": "uniform", "mask": "full", "activation": "tanh"},
    ],
)
def test_gradients_by_differences(changes):
    config = DecoderConfig(vocabulary=4, width=4, hidden=3, length=3, norm="post", init="encoder", dropout=0.2)
    model = make(config, **changes)
    tokens, count = draw_tokens(4, (2, 3)), torch.tensor([[1, 2, 1], [0, 3, 1]])
    names = [name for name, _ in model.named_parameters()]

    def logits(*values):
        options = {"multiplicity": count, "noise": noise.key(torch.tensor([0, 1]), 3)}
        everywhere = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (tokens,), options)
        return everywhere[:, count > 0]

    values = [parameter.detach().requires_grad_() for parameter in model.parameters()]
    assert torch.autograd.gradcheck(logits, values)


def test_frozen_attention_has_no_gradient_and_changes_nothing_else():
    models = [make(JOMA, attention=attention) for attention in ("trained", "frozen")]
    for model in models:
        model(draw_tokens(9, (3, 5)), last=1).square().sum().backward()
    frozen = set()
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert a.equal(b)
        if b.grad is None:
            frozen.add(name)
        else:
            assert a.grad.equal(b.grad)
    assert frozen == {f"layers.{number}.attention.{part}.weight" for number in range(3) for part in ("query", "key")}


def shuffled(tokens, seed):
    order = torch.randperm(tokens.shape[-1] - 1, generator=torch.Generator().manual_seed(seed))
    return torch.cat([tokens[..., order], tokens[..., -1:]], dim=-1)


@pytest.mark.parametrize("positions", sorted(CHOICES["positions"]))
@pytest.mark.parametrize("mask", sorted(CHOICES["mask"]))
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("norm", sorted(CHOICES["norm"]))
def test_which_decoders_depend_on_the_order_of_earlier_tokens(positions, mask, layers, norm):
    """Without positions, a full mask or a single causal layer cannot depend on it."""
    config = DecoderConfig(vocabulary=20, width=8, layers=layers, heads=2, length=8, norm=norm, positions=positions)
    model, tokens = make(config, mask=mask), torch.arange(16).view(2, 8)
    change = (model(shuffled(tokens, 1), last=1) - model(tokens, last=1)).abs().max()
    if positions == "none" and (mask == "full" or layers == 1):
        assert change < 1e-12
    else:
        assert change > 1e-3


def test_rotary_attention_depends_on_distances_alone():
    config = DecoderConfig(vocabulary=5, width=8, heads=2, length=9, positions="rotary", mask="full")
    weights = make(config).activations(torch.full((1, 9), 3), ["attention"])["attention"][0].log()
    ratio = weights[..., 1:] - weights[..., :-1]  # of neighbouring keys, [.., query, key]
    torch.testing.assert_close(ratio[..., 1:, 1:], ratio[..., :-1, :-1], rtol=0, atol=1e-12)
    assert ratio.abs().max() > 1e-2


def test_query_positions_are_the_last_of_each_packed_sequence():
    positions, x = QueryPositions((3, 4), 2), torch.arange(14).view(2, 7)
    assert positions.select(x, dim=1).tolist() == [[1, 2, 5, 6], [8, 9, 12, 13]]
    assert positions.select(x.T, dim=0).tolist() == positions.select(x, dim=1).T.tolist()
    assert positions.all.select(x, dim=1) is x
    assert QueryPositions((7,), 1).select(x, dim=1).tolist() == [[6], [13]]


def test_each_packed_sequence_starts_at_row_0_of_a_table_of_positions():
    table = torch.arange(5)[:, None]
    assert QueryPositions((3, 4), 2).pack(table, dim=0).flatten().tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert QueryPositions((2,), 0).pack(table, dim=0).flatten().tolist() == [0, 1]


def test_an_override_replaces_queries_and_keys_of_the_seeds_that_do_not_compute_theirs():
    query, key = torch.full((2, 1, 3, 4), 1.0), torch.full((2, 1, 5, 4), 2.0)
    override = QueryKeyOverride(torch.tensor([True, False]), -query.double(), -key.double())
    new_query, new_key = override.apply(query, key)
    assert new_query[:, 0, 0, 0].tolist() == [1.0, -1.0]
    assert new_key[:, 0, 0, 0].tolist() == [2.0, -2.0]
    assert new_query.dtype == new_key.dtype == torch.float32
