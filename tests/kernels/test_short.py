"""Attention over few positions, compared with the matrix of weights and autograd; on CUDA, the kernel with both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma import noise
from joma.kernels.short import MAX_POSITIONS, WeightDropout, fits, short_attention, short_attention_joined
from joma.models import layers
from joma.models.transformer import Decoder, DecoderConfig

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def draw_inputs(seed: int, queries: int, keys: int, heads: int, part: int, **kind):
    """Queries, keys and values of `heads` heads, each `part` wide."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, queries, heads * part), (2, 3, keys, heads * part), (2, 3, keys, heads * part))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(**kind) for shape in shapes]


def causal_mask(queries: int, keys: int, **kind) -> torch.Tensor:
    mask = torch.zeros(keys, keys, **kind)
    return mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), torch.finfo(mask.dtype).min)[-queries:]


def plain_attention(query, key, value, mask, heads, *, dropout=None):
    """Softmax attention, one head after the other; the mask has no axis of heads."""
    parts = [*zip(*(x.chunk(heads, dim=-1) for x in (query, key, value)), strict=True)]
    scores = [torch.einsum("bsqd,bskd->bsqk", q, k) / q.shape[-1] ** 0.5 + mask for q, k, _ in parts]
    weights = torch.stack([torch.softmax(score, dim=-1) for score in scores], dim=2)
    if dropout is not None:
        weights = noise.dropout(weights, dropout.p, key=dropout.key, site=dropout.site)
    outputs = [torch.einsum("bsqk,bskd->bsqd", weights[:, :, head], v) for head, (_, _, v) in enumerate(parts)]
    return torch.cat(outputs, dim=-1)


def weight_dropout(p, device="cpu"):
    return WeightDropout(p, noise.key(torch.tensor([5, 9], device=device), 3), site=1)


def masks_of_samples(mask, axes, seed=0):
    """The mask with another number added to each key of each sample, [*axes, 1, query, key]."""
    shift = torch.randn((*axes, 1, 1, mask.shape[-1]), generator=torch.Generator().manual_seed(seed)).to(mask)
    return (mask + shift).clamp_min(torch.finfo(mask.dtype).min)


def draw_biases(seed, width, **kind):
    return torch.randn(3, 2, width, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).to(**kind)


def add_biases(inputs, biases):
    return inputs if biases is None else [x + bias[:, None, None] for x, bias in zip(inputs, biases, strict=True)]


SIZES = st.integers(1, 7).flatmap(lambda keys: st.tuples(st.integers(1, keys), st.just(keys)))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    sizes=SIZES,
    heads=st.integers(1, 3),
    part=st.integers(1, 4),
    biased=st.booleans(),
    p=st.sampled_from([None, 0.2, 0.5]),
    axes=st.sampled_from([None, (3,), (2, 3)]),
)
def test_values_and_gradients_are_those_of_softmax_attention(seed, sizes, heads, part, biased, p, axes):  # noqa: PLR0917
    (queries, keys), mask = sizes, causal_mask(*sizes, dtype=torch.float64)
    mask = mask if axes is None else masks_of_samples(mask, axes, seed)
    dropout = None if p is None else weight_dropout(p)
    inputs = [x.requires_grad_() for x in draw_inputs(seed, queries, keys, heads, part)]
    biases = draw_biases(seed, heads * part).requires_grad_() if biased else None
    output = short_attention(*inputs, mask, heads=heads, biases=biases, dropout=dropout)
    same_for_heads = mask if axes is None else mask.squeeze(-3)
    expected = plain_attention(*add_biases(inputs, biases), same_for_heads, heads, dropout=dropout)
    inputs = inputs if biases is None else [*inputs, biases]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradients = torch.autograd.grad(output, inputs, factors)
    for gradient, expected_gradient in zip(gradients, torch.autograd.grad(expected, inputs, factors), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_the_operator_keeps_what_it_promises_the_compiler():
    inputs = [x.requires_grad_() for x in draw_inputs(0, 3, 5, 2, 4)]
    biases, dropout = draw_biases(0, 8).requires_grad_(), weight_dropout(0.2)
    results = torch.library.opcheck(
        torch.ops.joma.short_attention.default,
        (*inputs, causal_mask(3, 5, dtype=torch.float64), biases, dropout.key, 2, dropout.p, dropout.site),
    )
    assert set(results.values()) == {"SUCCESS"}


def test_the_kernel_is_for_few_positions_in_half_precision_on_cuda():
    assert not fits(torch.zeros(1, 1, 4, 32, dtype=torch.bfloat16), 2)  # on the CPU
    if torch.cuda.is_available():
        few = torch.zeros(1, 1, 4, 32, dtype=torch.bfloat16, device="cuda")
        assert fits(few, 2)
        assert not fits(few.float(), 2)
        assert not fits(few, 4)  # heads of width 8
        assert not fits(few.expand(1, 1, 4, 32).repeat(1, 1, MAX_POSITIONS, 1), 2)


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), keys=st.integers(1, 7), heads=st.integers(1, 3), p=st.sampled_from([None, 0.2]))
def test_queries_keys_and_values_may_stand_side_by_side(seed, keys, heads, p):
    inputs, mask = draw_inputs(seed, keys, keys, heads, 2), causal_mask(keys, keys, dtype=torch.float64)
    joined = torch.cat(inputs, dim=-1).requires_grad_()
    options = {"heads": heads, "dropout": None if p is None else weight_dropout(p)}
    output, expected = short_attention_joined(joined, mask, **options), short_attention(*inputs, mask, **options)
    assert output.equal(expected)
    separate = short_attention(*joined.chunk(3, dim=-1), mask, **options)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradients = [torch.autograd.grad(result, joined, factors)[0] for result in (output, separate)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("last", "dropout", "positions"), [(0, 0.0, "none"), (2, 0.3, "none"), (0, 0.3, "rotary")])
def test_a_decoder_gives_the_same_with_the_operator(monkeypatch, joins, last, dropout, positions):
    """The operator is forced on the CPU, where it is plain tensor code."""
    config = DecoderConfig(vocabulary=5, width=8, layers=2, heads=2, positions=positions, length=6, dropout=dropout)
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    model = Decoder(config, generators=generators, dtype=torch.float64)
    tokens = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0))
    key = noise.key(torch.tensor([5, 9]), 3) if dropout else None
    results = []
    for forced in (False, True):
        monkeypatch.setattr(layers, "fits", lambda *_, forced=forced: forced)
        monkeypatch.setattr(layers.Attention, "_joins_products", lambda _, __, at: joins and not at.last)
        logits = model(tokens, last=last, noise=key)
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        results.append([logits, *gradients])
    for by_matrix, by_operator in zip(*results, strict=True):
        torch.testing.assert_close(by_operator, by_matrix, rtol=1e-9, atol=1e-10)


def test_gradients_of_joined_weights_are_contiguous(monkeypatch):
    monkeypatch.setattr(layers, "fits", lambda *_: True)
    monkeypatch.setattr(layers.Attention, "_joins_products", lambda *_: True)
    config = DecoderConfig(vocabulary=5, width=8, layers=1, heads=2, length=6)
    model = Decoder(config, generators=[torch.Generator().manual_seed(0)])
    attention, strides = model.layers[0].attention, []
    for linear in (attention.query, attention.key, attention.value):
        linear.weight.register_hook(lambda g: strides.append(g.stride()))
    model(torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0))).square().sum().backward()
    assert strides == [(64, 8, 1)] * 3


@cuda
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "part"),
    [
        (11, 11, 6, 64),
        (4, 11, 6, 64),
        (1, 8, 2, 16),
        (38, 38, 2, 64),
        (4, 38, 1, 128),
        (35, 35, 1, 200),
        (1, 12, 1, 1024),
    ],
)
@pytest.mark.parametrize(("biased", "p", "axes"), [(False, None, None), (True, 0.2, (3,)), (True, 0.5, (2, 3))])
def test_the_kernel_is_exact_up_to_the_rounding_of_half_precision(queries, keys, heads, part, biased, p, axes):  # noqa: PLR0917
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    inputs = [x.requires_grad_() for x in draw_inputs(1, queries, keys, heads, part, **kind)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = causal_mask(queries, keys, dtype=torch.float32, device="cuda")
    biases = draw_biases(2, heads * part, dtype=torch.float32, device="cuda") / 4 if biased else None
    mask = mask if axes is None else masks_of_samples(mask, axes)
    dropout = None if p is None else weight_dropout(p, "cuda")
    output = short_attention(*inputs, mask, heads=heads, biases=biases, dropout=dropout)
    same_for_heads = (mask if axes is None else mask.squeeze(-3)).double()
    expected = plain_attention(*add_biases(exact, biases), same_for_heads, heads, dropout=dropout)
    scale = 1 if p is None else 1 / (1 - p)  # dropout multiplies what it retains, and its rounding
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=3e-2 * scale)
    factors = torch.randn_like(output)
    gradients = torch.autograd.grad(output, inputs, factors)
    expected_gradients = torch.autograd.grad(expected, exact, factors.double())
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=0, atol=6e-2 * scale)


@cuda
@pytest.mark.parametrize(("keys", "heads", "part", "p"), [(35, 1, 200, 0.2), (11, 6, 64, None)])
def test_the_kernel_takes_queries_keys_and_values_side_by_side(keys, heads, part, p):
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    joined = torch.cat(draw_inputs(1, keys, keys, heads, part, **kind), dim=-1).requires_grad_()
    mask = causal_mask(keys, keys, dtype=torch.float32, device="cuda")
    options = {"heads": heads, "dropout": None if p is None else weight_dropout(p, "cuda")}
    output = short_attention_joined(joined, mask, **options)
    separate = short_attention(*(part.contiguous() for part in joined.chunk(3, dim=-1)), mask, **options)
    assert output.equal(separate)
    factors = torch.randn_like(output)
    gradients = [torch.autograd.grad(result, joined, factors)[0] for result in (output, separate)]
    assert gradients[0].equal(gradients[1])


@cuda
@pytest.mark.parametrize("positions", ["none", "rotary"])
@pytest.mark.parametrize("last", [0, 2])
def test_a_decoder_on_cuda_gives_the_same_logits_with_the_kernel(positions, last):
    config = DecoderConfig(vocabulary=5, width=32, layers=2, heads=2, positions=positions, length=6)
    model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in range(2)]).cuda()
    tokens = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0)).cuda()
    exact = model(tokens, last=last)
    with torch.autocast("cuda", torch.bfloat16):
        by_kernel = model(tokens, last=last)
        by_matrix = model.logits(model.final_states(tokens, last=last, watched={"attention": []}))
    assert not by_kernel.equal(by_matrix)  # equal if the kernel was not used
    torch.testing.assert_close(by_kernel.float(), exact, rtol=0, atol=5e-2)
    torch.testing.assert_close(by_matrix.float(), exact, rtol=0, atol=5e-2)
