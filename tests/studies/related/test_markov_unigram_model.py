"""The transformer on binary symbols: causality, tied weights, and its Hessian at the unigram against autograd."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from joma.arguments import InputError
from joma.studies.related.markov_unigram_model import ChainTransformer, ChainTransformerConfig, unigram_hessian
from joma.theory import markov

P, Q = torch.tensor([0.5, 0.2], dtype=torch.float64), torch.tensor([0.8, 0.3], dtype=torch.float64)


def generators(count=2):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def built(*, tied=(True, True), scale=0.7, **options):
    config = ChainTransformerConfig(length=4, width=3, **options)
    return ChainTransformer(
        config, generators=generators(), tied=list(tied), scale=[scale] * len(tied), dtype=torch.float64
    )


def enumerated(p, q, length):
    """Return all sequences and their probabilities in a stationary chain."""
    symbols = torch.tensor(list(itertools.product([0.0, 1.0], repeat=length)), dtype=torch.float64)
    share = p / (p + q)
    probability = torch.where(symbols[:, 0] > 0, share, 1 - share)
    for n in range(length - 1):
        change = torch.where(symbols[:, n] > 0, 1 - q, p)
        probability = probability * torch.where(symbols[:, n + 1] > 0, change, 1 - change)
    return symbols, probability


@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"norm": True}, {"layers": 2, "norm": True}])
def test_the_hessian_at_the_unigram_is_that_of_autograd_on_all_sequences(options):
    model = built(**options)
    hessian = unigram_hessian(model, P, Q, positions=99)
    for index in range(2):
        p, q = P[index], Q[index]
        symbols, probability = enumerated(p, q, 4)
        share = p / (p + q)

        def loss(point, *, index=index, p=p, q=q, symbols=symbols, probability=probability):
            e, b = point[:-1], point[-1]
            with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
                states = model.layers(symbols[None, ..., None] * e + model.position[:, None])
            logits = states[index] @ e + b
            change = torch.where(symbols > 0, 1 - q, p)
            return (probability[:, None] * (F.softplus(logits) - change * logits)).sum(0).mean()

        point = torch.cat([torch.zeros(3, dtype=torch.float64), (share / (1 - share)).log()[None]])
        full = torch.autograd.functional.hessian(loss, point)
        torch.testing.assert_close(torch.autograd.functional.jacobian(loss, point), torch.zeros_like(point))
        without_bias = full[:3, :3] - torch.outer(full[:3, 3], full[3, :3]) / full[3, 3]
        torch.testing.assert_close(hessian[index], without_bias, rtol=0, atol=1e-12)


def test_the_hessian_is_the_formula_of_the_theory():
    model = built()
    x = model.position.detach()[:, None]
    for index in range(2):
        states, jacobian = model.layers(x)[index, 0], torch.autograd.functional.jacobian(model.layers, x)
        derivative = jacobian[index, 0, :, :, index, 0].permute(0, 2, 1, 3)  # [n, m, output, input]
        expected = markov.unigram_hessian(float(P[index]), float(Q[index]), states.detach(), derivative)
        np.testing.assert_allclose(unigram_hessian(model, P, Q, positions=4)[index], expected, atol=1e-12)


def test_small_weights_have_the_curvature_of_the_residual_path():
    hessian = unigram_hessian(built(scale=1e-3), P, Q, positions=4)
    for index in range(2):
        rate = markov.unigram_rates(float(P[index]), float(Q[index]))
        np.testing.assert_allclose(hessian[index], -rate * np.eye(3), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"layers": 2, "norm": True}])
def test_a_logit_depends_on_no_later_symbol(options):
    model = built(**options)
    symbols = torch.tensor([[[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]]).double().repeat(2, 1, 1)
    logits = model(symbols)
    torch.testing.assert_close(logits[:, 0, :2], logits[:, 1, :2], rtol=0, atol=0)
    assert (logits[:, 0, 2:] != logits[:, 1, 2:]).all()


def test_tied_models_use_the_embedding_as_head_and_leave_a_alone():
    model = built(tied=(True, False))
    torch.testing.assert_close(model.head, torch.stack([model.e[0], model.a[1]]))
    model(torch.ones(2, 1, 4, dtype=torch.float64)).sum().backward()
    assert (model.a.grad[0] == 0).all()
    assert (model.a.grad[1] != 0).any()


def test_attention_is_causal_and_sums_to_one():
    attention = built().attention(torch.ones(2, 3, 4, dtype=torch.float64))
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))
    assert (attention.triu(1) == 0).all()


def test_models_of_different_scale_have_the_same_draws():
    config = ChainTransformerConfig(length=2)
    same = [torch.Generator().manual_seed(3) for _ in range(2)]
    model = ChainTransformer(config, generators=same, tied=[True] * 2, scale=[0.1, 0.2])
    torch.testing.assert_close(2 * model.W_1[0], model.W_1[1])


def test_numbers_of_models_must_agree():
    with pytest.raises(InputError, match="of one length"):
        ChainTransformer(ChainTransformerConfig(length=2), generators=generators(), tied=[True], scale=[0.1] * 2)
    with pytest.raises(InputError, match="`width` must"):
        ChainTransformerConfig(length=2, width=0)


@pytest.mark.parametrize("options", [{}, {"layers": 2, "norm": True}])
def test_fused_attention_is_that_of_the_weights(options):
    model = built(**options)
    x = torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = x
    for layer in range(model.config.layers):
        query, key, value = model._project(expected, layer)
        scores = query @ key.mT / 3**0.5
        weights = scores.masked_fill(~model.causal, -torch.inf).softmax(-1)
        expected = expected + torch.einsum("bnqk,bnkd,bde->bnqe", weights, value, model.W_O[:, layer])
        units = torch.relu(model._normed(expected, 2 * layer + 1) @ model.W_1[:, None, layer])
        expected = expected + units @ model.W_2[:, None, layer]
    torch.testing.assert_close(model.layers(x), model._normed(expected, 2 * model.config.layers))
