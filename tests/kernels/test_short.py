"""Attention over few positions: against the matrix of weights and autograd; on CUDA, the kernel against both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels.short import MOST, fits, short_attention
from joma.models.transformer import Decoder, DecoderConfig

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def drawn(seed: int, asks: int, keys: int, heads: int, part: int, **kind):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, asks, heads * part), (2, 3, keys, heads * part), (2, 3, keys, heads * part))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(**kind) for shape in shapes]


def causal(asks: int, keys: int, **kind) -> torch.Tensor:
    reach = torch.zeros(keys, keys, **kind)
    return reach.masked_fill(torch.ones_like(reach, dtype=torch.bool).triu(1), torch.finfo(reach.dtype).min)[-asks:]


def plainly(query, key, value, reach, heads):
    """Head by head and query by query, in words of softmax alone."""
    rows = []
    for part, shared, own in zip(*(x.chunk(heads, dim=-1) for x in (query, key, value)), strict=True):
        scores = torch.einsum("bsqd,bskd->bsqk", part, shared) / part.shape[-1] ** 0.5 + reach
        rows.append(torch.einsum("bsqk,bskd->bsqd", torch.softmax(scores, dim=-1), own))
    return torch.cat(rows, dim=-1)


def shifts(seed, width, **kind):
    return torch.randn(3, 2, width, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).to(**kind)


def shifted(inputs, biases):
    return inputs if biases is None else [x + own[:, None, None] for x, own in zip(inputs, biases, strict=True)]


SIZES = st.integers(1, 7).flatmap(lambda keys: st.tuples(st.integers(1, keys), st.just(keys)))


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), sizes=SIZES, heads=st.integers(1, 3), part=st.integers(1, 4), biased=st.booleans())
def test_it_is_softmax_attention_and_so_are_its_slopes(seed, sizes, heads, part, biased):
    (asks, keys), reach = sizes, causal(*sizes, dtype=torch.float64)
    inputs = [own.requires_grad_() for own in drawn(seed, asks, keys, heads, part)]
    biases = shifts(seed, heads * part).requires_grad_() if biased else None
    found = short_attention(*inputs, reach, heads=heads, biases=biases)
    expected = plainly(*shifted(inputs, biases), reach, heads)
    inputs = inputs if biases is None else [*inputs, biases]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    above = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for own, other in zip(
        torch.autograd.grad(found, inputs, above), torch.autograd.grad(expected, inputs, above), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_the_operator_keeps_what_it_promises_the_compiler():
    inputs = [own.requires_grad_() for own in drawn(0, 3, 5, 2, 4)]
    found = torch.library.opcheck(
        torch.ops.joma.short_attention.default,
        (*inputs, causal(3, 5, dtype=torch.float64), shifts(0, 8).requires_grad_(), 2),
    )
    assert set(found.values()) == {"SUCCESS"}


def test_the_kernel_is_for_few_positions_in_half_precision_on_cuda():
    assert not fits(torch.zeros(1, 1, 4, 32, dtype=torch.bfloat16), 2)  # on the CPU
    if torch.cuda.is_available():
        few = torch.zeros(1, 1, 4, 32, dtype=torch.bfloat16, device="cuda")
        assert fits(few, 2)
        assert not fits(few.float(), 2)
        assert not fits(few, 4)  # 8 units a head
        assert not fits(few.expand(1, 1, 4, 32).repeat(1, 1, MOST, 1), 2)


@cuda
@pytest.mark.parametrize(
    ("asks", "keys", "heads", "part"),
    [(11, 11, 6, 64), (4, 11, 6, 64), (1, 8, 2, 16), (38, 38, 2, 64), (4, 38, 1, 128)],
)
@pytest.mark.parametrize("biased", [False, True])
def test_the_kernel_is_exact_up_to_the_rounding_of_half_precision(asks, keys, heads, part, biased):
    inputs = [own.requires_grad_() for own in drawn(1, asks, keys, heads, part, dtype=torch.bfloat16, device="cuda")]
    exact = [own.detach().double().requires_grad_() for own in inputs]
    reach = causal(asks, keys, dtype=torch.float32, device="cuda")
    biases = shifts(2, heads * part, dtype=torch.float32, device="cuda") / 4 if biased else None
    found = short_attention(*inputs, reach, heads=heads, biases=biases)
    expected = plainly(*shifted(exact, biases), reach.double(), heads)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-2)
    above = torch.randn_like(found)
    slopes = torch.autograd.grad(found, inputs, above)
    for own, other in zip(slopes, torch.autograd.grad(expected, exact, above.double()), strict=True):
        torch.testing.assert_close(own.double(), other, rtol=0, atol=6e-2)


@cuda
@pytest.mark.parametrize("positions", ["none", "rotary"])
@pytest.mark.parametrize("last", [0, 2])
def test_a_decoder_on_cuda_says_the_same_with_the_kernel(positions, last):
    config = DecoderConfig(vocabulary=5, width=32, layers=2, heads=2, positions=positions, length=6)
    model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in range(2)]).cuda()
    tokens = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0)).cuda()
    exact = model(tokens, last=last)
    with torch.autocast("cuda", torch.bfloat16):
        short = model(tokens, last=last)
        matrix = model.logits(model.final_states(tokens, last=last, watched={"attention": []}))
    assert not short.equal(matrix)  # else the kernel was not there
    torch.testing.assert_close(short.float(), exact, rtol=0, atol=5e-2)
    torch.testing.assert_close(matrix.float(), exact, rtol=0, atol=5e-2)
