"""Attention on prompts: against explicit sums over examples, explicit gradient descent, and the exact loss."""

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.noise import key
from joma.studies.related.icl_regression_model import (
    BLOCKS,
    PromptAttention,
    PromptConfig,
    PromptSource,
    free_entries,
    normal,
)
from joma.theory import in_context

SPECTRUM = (1.6, 0.8, 0.3)


def generators(count):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def built(blocks="whole", seeds=2, **options):
    return PromptAttention(
        PromptConfig(3, scale=0.4, **options), blocks, generators=generators(seeds), dtype=torch.float64
    )


def prompts(seeds=2, count=4, length=5):
    source = PromptSource(SPECTRUM, length, range(seeds))
    drawn = source.draw(3, count)
    return drawn.tokens.double(), drawn.target.double()


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_the_answer_is_that_of_sums_over_examples(attention, layers):
    model, (tokens, _) = built(layers=layers, heads=2, attention=attention), prompts()
    answers = model(tokens)
    for seed in range(2):
        for prompt in range(4):
            z = tokens[seed, prompt]
            for layer in range(layers):
                new = z.clone()
                for head in range(2):
                    P, Q = model.P[seed, layer, head], model.Q[seed, layer, head]
                    for reader in range(6):
                        scores = torch.stack([z[reader] @ Q @ z[i] for i in range(5)])
                        weights = scores / 5 if attention == "linear" else scores.softmax(0)
                        new[reader] = new[reader] + sum(weights[i] * (P @ z[i]) for i in range(5))
                z = new
            assert float(answers[seed, prompt]) == pytest.approx(float(-z[-1, -1]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_descent_blocks_are_steps_of_gradient_descent(layers):
    model, (tokens, _) = built("descent", layers=layers, value=1.3), prompts()
    answers, steps = model(tokens).detach(), model.steps().detach()
    for seed in range(2):
        for prompt in range(4):
            x, y, query = tokens[seed, prompt, :-1, :-1], tokens[seed, prompt, :-1, -1], tokens[seed, prompt, -1, :-1]
            w = torch.zeros(3, dtype=torch.float64)
            residual = y.clone()
            for step in steps[seed]:  # with P_yy = 1.3 as a part of it
                w = w + step @ (x.T @ residual) / len(x)
                residual = y - x @ w
            assert float(answers[seed, prompt]) == pytest.approx(float(query @ w), rel=1e-9)


def test_the_odd_part_of_a_whole_layer_is_steps_and_rank_one():
    """Prompts with w and −w have opposite odd parts and equal even parts."""
    model, (tokens, _) = built(), prompts()
    mirrored = tokens.clone()
    mirrored[..., -1] *= -1
    odd = (model(tokens) - model(mirrored)) / 2
    x, y, query = tokens[:, :, :-1, :-1], tokens[:, :, :-1, -1], tokens[:, :, -1, :-1]
    h = torch.einsum("spn,spnd->spd", y, x) / x.shape[2]
    matrix = (model.steps() + model.rank_one())[:, 0]
    torch.testing.assert_close(odd, torch.einsum("spi,sij,spj->sp", query, matrix, h))
    assert bool((torch.linalg.matrix_rank(model.rank_one()) == 1).all())


def test_blocks_that_are_not_trained_are_zero_and_get_no_gradient():
    model, (tokens, target) = built(list(BLOCKS), seeds=3, layers=2), prompts(seeds=3)
    (model(tokens) - target).square().sum().backward()
    for index, name in enumerate(BLOCKS):
        free = free_entries(name, 3).bool()
        for parameter, mask in zip((model.P, model.Q), free, strict=True):
            assert not parameter[index][..., ~mask].any()
            assert parameter.grad is not None
            assert not parameter.grad[index][..., ~mask].any()


def test_two_softmax_heads_of_opposite_sign_are_linear_attention_on_centred_examples():
    """For small scores the difference of two softmaxes is linear, and its loss that of one example less."""
    length, small = 8, 1e-3
    source = PromptSource(SPECTRUM, length, (0,))
    drawn = source.draw(0, 40_000)
    gain = in_context.preconditioner(SPECTRUM, length - 1) * length / (length - 1)
    model = PromptAttention(
        PromptConfig(3, heads=2, attention="softmax", scale=0.0), generators=generators(1), dtype=torch.float64
    )
    with torch.no_grad():
        for head, sign in enumerate((1.0, -1.0)):
            model.P[0, 0, head, -1, -1] = sign / (2 * small)
            model.Q[0, 0, head, :-1, :-1] = -sign * small * torch.diag(torch.from_numpy(gain))
        errors = model(drawn.tokens.double()) - drawn.target.double()
    losses = (errors.square() / 2).numpy()
    expected = in_context.least_loss(SPECTRUM, length - 1)
    assert abs(losses.mean() - expected) < 4 * losses.std() / np.sqrt(losses.size)


def test_prompts_have_their_covariance_and_labels():
    drawn = PromptSource(SPECTRUM, 6, (0, 1)).draw(0, 20_000)
    x = drawn.tokens[..., :-1].flatten(1, 2)
    np.testing.assert_allclose((x.mT @ x / x.shape[1])[0], np.diag(SPECTRUM), atol=0.03)
    assert not drawn.tokens[:, :, -1, -1].any()
    solved = torch.linalg.lstsq(drawn.tokens[:, :50, :-1, :-1], drawn.tokens[:, :50, :-1, -1:]).solution[..., 0]
    answers = (solved * drawn.tokens[:, :50, -1, :-1]).sum(-1)
    torch.testing.assert_close(answers, drawn.target[:, :50], rtol=1e-2, atol=1e-2)


def test_noise_is_added_to_the_examples_labels_alone():
    clean, noisy = (PromptSource(SPECTRUM, 6, (0, 1), label_noise=noise).draw(0, 20_000) for noise in (0.0, 0.7))
    torch.testing.assert_close(noisy.tokens[..., :-1], clean.tokens[..., :-1], rtol=0, atol=0)
    torch.testing.assert_close(noisy.target, clean.target, rtol=0, atol=0)
    assert not noisy.tokens[:, :, -1, -1].any()
    added = ((noisy.tokens - clean.tokens)[:, :, :-1, -1] / 0.7).double()
    for power, moment in {1: 0.0, 2: 1.0, 4: 3.0}.items():
        values = added**power
        assert abs(values.mean() - moment) < 4 * values.std() / np.sqrt(values.numel())
    with_labels = added * clean.tokens[:, :, :-1, -1]  # independent of the labels themselves
    assert abs(with_labels.mean()) < 4 * with_labels.std() / np.sqrt(with_labels.numel())


def test_prompts_depend_on_seed_and_step_alone():
    alone, both = PromptSource(SPECTRUM, 6, (1,)).draw(5, 3), PromptSource(SPECTRUM, 6, (0, 1)).draw(5, 3)
    torch.testing.assert_close(alone.tokens[0], both.tokens[1], rtol=0, atol=0)
    assert not torch.equal(both.tokens[0], both.tokens[1])
    assert not torch.equal(both.tokens, PromptSource(SPECTRUM, 6, (0, 1)).draw(6, 3).tokens)
    repeated = both.repeat(2)
    torch.testing.assert_close(repeated.tokens[2:], both.tokens)
    torch.testing.assert_close(repeated.target[:2], both.target)


def test_normal_numbers_have_the_moments_of_a_normal():
    draws = normal((7, 9001), key=key(torch.tensor([0, 1]), 0)).double()
    assert draws.shape == (2, 7, 9001)
    for power, moment in {1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0}.items():
        values = draws**power
        assert abs(values.mean() - moment) < 4 * values.std() / np.sqrt(values.numel())
    assert abs((draws[0] * draws[1]).mean()) < 4 / np.sqrt(draws[0].numel())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: PromptConfig(0), "directions"),
        (lambda: PromptConfig(2, attention="cosine"), "attention"),
        (lambda: PromptAttention(PromptConfig(2), "half", generators=generators(1)), "blocks"),
        (lambda: PromptAttention(PromptConfig(2), ["whole"], generators=generators(2)), "blocks"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()
