"""The models against loops over positions, and what they can and cannot see."""

import numpy as np
import pytest
import torch

from joma.studies.related.induction_models import AttentionOnly, Minimal, causal
from joma.studies.surprisal import mean_surprisal
from joma.theory.in_context_markov import unigram


def generators(count=2):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def minimal(scale, heads=2, lags=3, **options):
    return Minimal(3, heads, lags, generators=generators(), scale=scale, dtype=torch.float64, **options)


def tokens(length=8, samples=4):
    return torch.randint(3, (2, samples, length), generator=torch.Generator().manual_seed(5))


def test_the_minimal_model_is_its_equations():
    model, sequences, queries = minimal(0.7, smoothing=0.1), tokens(), torch.tensor([[1, 2], [1, 3]])
    prediction = model(sequences, queries, 3)
    for seed, row, place in np.ndindex(2, 4, 3):
        t, x = 5 + place, torch.eye(3, dtype=torch.float64)[sequences[seed, row]]
        scores = torch.zeros(t + 1, dtype=torch.float64)
        for s, head in np.ndindex(t + 1, 2):
            w = model.r[seed, head].softmax(-1)
            looked_up = sum((w[lag - 1] * x[s - lag] for lag in (1, 2, 3) if lag <= s), torch.zeros(3).double())
            scores[s] += x[t + 1 - queries[seed, head]] @ model.A[seed, head] @ looked_up
        p = 0.9 * scores.softmax(0) @ x[: t + 1] + 0.1 / 3
        torch.testing.assert_close(prediction.log_probability[seed, row, place].exp(), p)


def test_the_minimal_model_at_zero_is_the_unigram():
    sequences = tokens()
    prediction = minimal(0.0)(sequences, torch.ones(2, 2, dtype=torch.long), 5).log_probability.exp()
    np.testing.assert_allclose(prediction.detach(), unigram(sequences, symbols=3)[..., -5:, :], atol=1e-12)


def test_a_large_a_at_the_right_lag_counts_pairs():
    """With w at lag 1 and A = ∞ I the minimal model answers by the frequencies of what followed the same symbol."""
    model, sequences = minimal(0.0, heads=1), tokens(30)
    with torch.no_grad():
        model.r[..., 0] = 50.0
        model.A += 50.0 * torch.eye(3, dtype=torch.float64)
    p = model(sequences, torch.ones(2, 1, dtype=torch.long), 1).log_probability[..., 0, :].exp()
    for seed, row in np.ndindex(2, 4):
        context = sequences[seed, row].tolist()
        followed = [context[s] for s in range(1, 30) if context[s - 1] == context[-1]]
        expected = torch.tensor([followed.count(symbol) / len(followed) for symbol in range(3)])
        torch.testing.assert_close(p[seed, row].float(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_full_model_sees_no_later_symbols_and_no_other_seed(layers):
    model = AttentionOnly(3, layers, 6, 8, generators=generators())
    sequences = tokens()
    changed = sequences.clone()
    changed[0, :, -1] = (changed[0, :, -1] + 1) % 3
    before, after = (model(part, 4).log_probability for part in (sequences, changed))
    torch.testing.assert_close(before[:, :, :-1], after[:, :, :-1])
    torch.testing.assert_close(before[1], after[1])
    assert not torch.allclose(before[0, :, -1], after[0, :, -1])


def test_the_full_model_is_its_equations():
    model, sequences = AttentionOnly(3, 2, 4, 6, generators=generators(), dtype=torch.float64), tokens(6)
    with torch.no_grad():
        model.bias += torch.arange(6) / 5
    seed, row = 1, 2
    x = model.embedding[seed][sequences[seed, row]]
    for layer in range(2):
        h = x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
        q, k, v = (h @ weight[seed, layer] for weight in (model.W_Q, model.W_K, model.W_V))
        update = torch.zeros_like(x)
        for t in range(6):
            scores = torch.stack([q[t] @ k[s] / 2 + model.bias[seed, layer, t - s] for s in range(t + 1)])
            update[t] = scores.softmax(0) @ v[: t + 1] @ model.W_O[seed, layer]
        x = x + update
    h = x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
    expected = (h @ model.head[seed]).log_softmax(-1)[-2:]
    torch.testing.assert_close(model(sequences, 2).log_probability[seed, row], expected)


def test_one_layer_cannot_tell_the_order_of_symbols_but_for_their_distance():
    """Without biases one layer sees the last symbol and the counts of all: a permuted context gives the same answer."""
    model, sequences = AttentionOnly(3, 1, 6, 8, generators=generators()), tokens()
    permuted = torch.cat([sequences[..., :-1].flip(-1), sequences[..., -1:]], dim=-1)
    torch.testing.assert_close(model(sequences, 1).log_probability, model(permuted, 1).log_probability)


def test_surprisal_and_the_causal_mask():
    p = torch.tensor([[[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]]])
    assert float(mean_surprisal(p.log(), torch.tensor([[[0, 2]]]))) == pytest.approx(-np.log(0.5 * 0.1) / 2)
    assert causal(3, 3).tolist() == np.tri(3, dtype=bool).tolist()
