"""In-context chains: predictors against marginal likelihoods, gradients against autograd, enumeration and sampling."""

from __future__ import annotations

import itertools

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import dblquad
from scipy.special import gammaln

from joma.arguments import InputError
from joma.theory.in_context_markov import (
    bayes,
    context_dependence,
    lag_dependence,
    pair_distribution,
    saddle_gradients,
    stationary,
    unigram,
    window_chain,
)

SEEDS = st.integers(0, 10**6)


def draw_kernel(rng, symbols, parents=1, batch=()):
    return rng.dirichlet(np.ones(symbols), size=(*batch, *[symbols] * parents))


def sample(rng, kernel, parents, length):
    """Draw one sequence symbol by symbol, after a long start."""
    symbols, tokens = kernel.shape[-1], list(rng.integers(kernel.shape[-1], size=max(parents)))
    for _ in range(length + 50):
        row = kernel[tuple(tokens[-lag] for lag in parents)]
        tokens.append(int(rng.choice(symbols, p=row)))
    return np.array(tokens[-length:])


def minimal_loss(tokens, r, a, *, symbols, query=1, smoothing=0.0, first=0):
    """The minimal model's loss on sequences, position by position, as its equations say."""
    w, losses = r.softmax(-1), []
    one_hot = torch.nn.functional.one_hot(torch.as_tensor(tokens), symbols).to(r.dtype)
    for x in one_hot:
        looked_up = [
            sum((w[lag - 1] * x[s - lag] for lag in range(1, len(r) + 1) if lag <= s), torch.zeros(symbols).to(r))
            for s in range(len(x) - 1)
        ]
        for t in range(first, len(x) - 1):
            scores = torch.stack([x[t + 1 - query] @ a @ looked_up[s] for s in range(t + 1)])
            p = scores.softmax(0) @ x[: t + 1]
            losses.append(-torch.log((1 - smoothing) * (p @ x[t + 1]) + smoothing / symbols))
    return torch.stack(losses).mean()


@given(SEEDS, st.integers(2, 5))
def test_the_stationary_distribution_is_that_of_a_high_power(seed, symbols):
    kernel = draw_kernel(np.random.default_rng(seed), symbols, batch=(3,))
    np.testing.assert_allclose(stationary(kernel), np.linalg.matrix_power(kernel, 2**14)[:, 0], atol=1e-9)


def exact_stationary(kernel):
    """Return π in mpmath, with each diagonal entry 1 less the others of its row."""
    states = len(kernel)
    with mp.workdps(400):
        system = mp.matrix(kernel.T.tolist())
        for state in range(states):
            system[state, state] = -mp.fsum(mp.mpf(kernel[state, other]) for other in range(states) if other != state)
        for state in range(states):
            system[0, state] = mp.mpf(1)
        solution = mp.lu_solve(system, mp.matrix([1] + [0] * (states - 1)))
        return np.array([float(solution[state]) for state in range(states)])


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(2, 6), st.floats(0, 30))
def test_rare_states_and_nearly_reducible_chains_keep_their_digits(seed, states, orders):
    """Probabilities over many orders of magnitude, against a linear system with 400 digits."""
    kernel = 10.0 ** -np.random.default_rng(seed).uniform(0, orders, size=(states, states)) / states
    np.fill_diagonal(kernel, 0.0)
    np.fill_diagonal(kernel, 1.0 - kernel.sum(axis=1))
    np.testing.assert_allclose(stationary(kernel), exact_stationary(kernel), rtol=1e-13, atol=0)


def test_chains_of_more_states_than_a_block_are_eliminated_alike():
    kernel = draw_kernel(np.random.default_rng(0), 150, batch=(2,))
    pi = stationary(kernel)
    np.testing.assert_allclose((pi[:, None] @ kernel)[:, 0], pi, rtol=1e-13)
    np.testing.assert_allclose(pi.sum(-1), 1.0, rtol=1e-14)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_transient_states_have_probability_0_wherever_they_stand(order):
    kernel = np.array([[0.2, 0.3, 0.5], [0.0, 0.4, 0.6], [0.0, 0.9, 0.1]])[np.ix_(order, order)]
    np.testing.assert_allclose(stationary(kernel), np.array([0.0, 0.6, 0.4])[list(order)], rtol=1e-15)


def test_a_path_too_improbable_for_a_float_is_refused():
    with pytest.raises(InputError, match="`transition` must be chains whose paths have probabilities that are floats"):
        stationary([[0.5, 0.5, 0.0], [0.0, 1.0, 1e-200], [1e-200, 1.0, 0.0]])  # from 1 to 0: 1e-400


def test_a_chain_with_two_stationary_distributions_is_refused():
    with pytest.raises(InputError, match="`transition` must be chains with one stationary distribution"):
        stationary(np.eye(3))


@settings(max_examples=20)
@given(SEEDS, st.sampled_from([(1,), (2,), (1, 2), (1, 3)]))
def test_pairs_are_those_of_all_windows_enumerated(seed, parents):
    """P[x_0 = l, x_δ = j] by a sum over every path from the stationary windows."""
    kernel, lag = draw_kernel(np.random.default_rng(seed), 2, len(parents)), 3
    start, length = stationary(window_chain(kernel, parents)), max(parents)
    expected = np.zeros((2, 2))
    for number, path in itertools.product(range(2**length), itertools.product(range(2), repeat=lag)):
        tokens = [number // 2 ** (length - 1 - place) % 2 for place in range(length)]
        chance = start[number]
        for symbol in path:
            chance *= kernel[tuple(tokens[-parent] for parent in parents)][symbol]
            tokens.append(symbol)
        expected[tokens[length - 1], tokens[-1]] += chance
    np.testing.assert_allclose(pair_distribution(kernel, [lag], parents)[0], expected, atol=1e-12)


@settings(max_examples=30)
@given(SEEDS, st.integers(2, 4), st.integers(1, 5))
def test_the_dependence_of_a_chain_is_its_formula(seed, symbols, lag):
    kernel = draw_kernel(np.random.default_rng(seed), symbols)
    pi, power = stationary(kernel), np.linalg.matrix_power(kernel, lag)
    expected = np.einsum("i,l,ij,lj->il", pi, pi, kernel, power / pi - 1)
    np.testing.assert_allclose(lag_dependence(kernel, [lag])[0], expected, atol=1e-12)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_two_symbols_have_a_closed_form(lag):
    """c_δ = 2 E[π_0 π_1 (1 − p − q)^(δ+1)]: by quadrature over uniform p and q, and over a grid of chains."""

    def integrand(q, p):
        return 2 * p * q / (p + q) ** 2 * (1 - p - q) ** (lag + 1)

    expected, _ = dblquad(integrand, 0, 1, 0, 1)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    p, q = np.meshgrid((nodes + 1) / 2, (nodes + 1) / 2)
    kernels = np.stack([np.stack([1 - p, p], -1), np.stack([q, 1 - q], -1)], -2)
    traces = np.trace(lag_dependence(kernels, [lag])[..., 0, :, :], axis1=-2, axis2=-1)
    assert np.einsum("ij,i,j->", traces, weights / 2, weights / 2) == pytest.approx(expected, abs=1e-5)
    assert (expected > 0) == (lag != 2)


def test_a_chain_of_lag_2_has_the_dependence_of_a_chain_at_every_other_lag():
    kernel = draw_kernel(np.random.default_rng(0), 3)
    far, near = lag_dependence(kernel, [1, 2, 3, 4], parents=(2,), query=2), lag_dependence(kernel, [1, 2])
    np.testing.assert_allclose(far[[1, 3]], near, atol=1e-12)
    np.testing.assert_allclose(far[[0, 2]], 0.0, atol=1e-12)


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.sampled_from([0.01, 0.2]), st.integers(1, 2))
def test_the_gradient_in_short_contexts_is_that_of_autograd(seed, smoothing, query):
    rng = np.random.default_rng(seed)
    tokens, symbols, first = rng.integers(3, size=(2, 9)), 3, 3
    r = torch.from_numpy(rng.normal(size=4)).requires_grad_()
    a = torch.zeros(symbols, symbols, dtype=torch.float64, requires_grad=True)
    options = {"symbols": symbols, "query": query, "smoothing": smoothing, "first": first}
    minimal_loss(tokens, r, a, **options).backward()
    dependence = context_dependence(tokens, range(1, 5), **options)
    weights = torch.softmax(r, -1).detach().numpy()
    predicted = saddle_gradients(dependence, weights, np.zeros((symbols, symbols)))
    np.testing.assert_allclose(predicted.second_layer, -a.grad.numpy(), atol=1e-12)
    np.testing.assert_array_equal(predicted.first_layer, 0.0)
    np.testing.assert_allclose(r.grad.numpy(), 0.0, atol=1e-15)


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_the_first_layers_gradient_is_exact_to_first_order_in_a(seed):
    """By the derivative of autograd's −∂L/∂r along A, from a difference of two small multiples of it."""
    rng = np.random.default_rng(seed)
    tokens, direction, weights = rng.integers(2, size=(2, 10)), rng.normal(size=(2, 2)), rng.normal(size=3)
    options = {"symbols": 2, "smoothing": 0.05, "first": 4}
    slopes, step = [], 1e-5
    for sign in (-1, 1):
        r = torch.from_numpy(weights).requires_grad_()
        minimal_loss(tokens, r, torch.from_numpy(sign * step * direction), **options).backward()
        slopes.append(-r.grad.numpy())
    dependence = context_dependence(tokens, range(1, 4), **options)
    share = np.exp(weights) / np.exp(weights).sum()
    predicted = saddle_gradients(dependence, share, direction).first_layer
    np.testing.assert_allclose((slopes[1] - slopes[0]) / (2 * step), predicted, atol=1e-8)


def test_the_mean_over_all_short_sequences_is_the_gradient_of_the_population():
    """Every sequence of 6 symbols: the mean of Ĉ by their probabilities is autograd's gradient of the mean loss."""
    kernel, length = draw_kernel(np.random.default_rng(1), 2), 6
    pi = stationary(kernel)
    a = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    loss, mean, r = torch.zeros((), dtype=torch.float64), np.zeros((2, 2)), torch.zeros(2, dtype=torch.float64)
    options = {"symbols": 2, "smoothing": 0.1, "first": 2}
    for tokens in itertools.product(range(2), repeat=length):
        chance = pi[tokens[0]] * np.prod([kernel[pair] for pair in itertools.pairwise(tokens)])
        loss = loss + chance * minimal_loss([tokens], r, a, **options)
        mean += chance * context_dependence([tokens], [1, 2], **options).mean(0)
    loss.backward()
    np.testing.assert_allclose(mean, -a.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("parents", [(1,), (1, 2)])
def test_long_contexts_have_the_dependence_of_the_law(parents):
    rng = np.random.default_rng(2)
    kernel = draw_kernel(rng, 2, len(parents))
    tokens = np.stack([sample(rng, kernel, parents, 2000) for _ in range(8)])
    options = {"query": 1, "smoothing": 0.01}
    finite = context_dependence(tokens, [1, 2, 3], symbols=2, first=1000, **options)
    np.testing.assert_allclose(finite, lag_dependence(kernel, [1, 2, 3], parents=parents, **options), atol=6e-3)


def log_evidence(tokens, alpha, symbols, parents):
    """ln P(tokens | first ones) with rows from Dirichlet(α): the Dirichlet-multinomial likelihood of each row."""
    counts: dict[tuple, np.ndarray] = {}
    for t in range(max(parents), len(tokens)):
        state = tuple(tokens[t - lag] for lag in parents)
        counts.setdefault(state, np.zeros(symbols))[tokens[t]] += 1
    return sum(
        gammaln(symbols * alpha) - gammaln(symbols * alpha + n.sum()) + (gammaln(alpha + n) - gammaln(alpha)).sum()
        for n in counts.values()
    )


@settings(max_examples=40)
@given(SEEDS, st.integers(2, 4), st.floats(0.1, 5.0), st.sampled_from([(1,), (2,), (1, 2), (1, 3)]))
def test_bayes_predicts_by_the_ratio_of_marginal_likelihoods(seed, symbols, alpha, parents):
    tokens = np.random.default_rng(seed).integers(symbols, size=12)
    prediction = bayes(tokens, symbols=symbols, alpha=alpha, parents=parents)
    for t in range(12):
        before = log_evidence(tokens[: t + 1], alpha, symbols, parents)
        if t + 1 < max(parents):
            np.testing.assert_allclose(prediction[t], 1 / symbols)
            continue
        after = [log_evidence([*tokens[: t + 1], symbol], alpha, symbols, parents) for symbol in range(symbols)]
        np.testing.assert_allclose(prediction[t], np.exp(np.array(after) - before), rtol=1e-9)


def test_no_prediction_beats_bayes_over_all_sequences():
    """Enumerated: the mean loss of Bayes over chains of Dirichlet rows is least among predictors by pseudo-counts."""
    losses = dict.fromkeys((0.3, 1.0, 3.0, "unigram"), 0.0)
    sequences = np.array(list(itertools.product(range(2), repeat=7)))
    chances = np.array([np.exp(log_evidence(tokens, 1.0, 2, (1,))) / 2 for tokens in sequences])
    assert chances.sum() == pytest.approx(1.0)
    for alpha in losses:
        p = unigram(sequences, symbols=2) if alpha == "unigram" else bayes(sequences, symbols=2, alpha=float(alpha))
        chosen = np.take_along_axis(p[:, -2], sequences[:, -1:], -1)[:, 0]
        losses[alpha] = -(chances * np.log(np.maximum(chosen, 1e-3))).sum()
    assert min(losses, key=losses.get) == 1.0


@given(SEEDS, st.integers(2, 4))
def test_the_unigram_counts_symbols(seed, symbols):
    tokens = np.random.default_rng(seed).integers(symbols, size=(2, 8))
    prediction = unigram(tokens, symbols=symbols)
    for row, t in itertools.product(range(2), range(8)):
        counts = np.bincount(tokens[row, : t + 1], minlength=symbols)
        np.testing.assert_allclose(prediction[row, t], counts / (t + 1))


def test_doubly_stochastic_chains_have_uniform_symbols():
    kernel = 0.5 * np.eye(3) + 0.3 * np.eye(3)[[1, 2, 0]] + 0.2 * np.eye(3)[[2, 1, 0]]
    np.testing.assert_allclose(stationary(kernel), 1 / 3)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: stationary([[0.5, 0.6], [0.5, 0.5]]), "transition"),
        (lambda: stationary([0.5, 0.5]), "transition"),
        (lambda: window_chain([[0.5, 0.5], [0.5, 0.5]], (2, 1)), "parents"),
        (lambda: window_chain([[0.5, 0.5], [0.5, 0.5]], (13,)), "parents"),
        (lambda: window_chain([[0.5, 0.5], [0.5, 0.5]], (1, 2)), "kernel"),
        (lambda: pair_distribution([[0.5, 0.5], [0.5, 0.5]], []), "lags"),
        (lambda: lag_dependence([[0.5, 0.5], [0.5, 0.5]], [1], smoothing=1.0), "smoothing"),
        (lambda: context_dependence([[0, 0, 1]], [1], symbols=2), "tokens"),
        (lambda: context_dependence([[0, 1, 0]], [1], symbols=2, first=2), "first"),
        (lambda: saddle_gradients(np.zeros((2, 3, 3)), [1.0], np.zeros((3, 3))), "dependence"),
        (lambda: saddle_gradients(np.zeros((1, 3, 3)), [1.0], np.zeros((2, 2))), "a"),
        (lambda: unigram([0, 3], symbols=3), "tokens"),
        (lambda: unigram([0.5], symbols=3), "tokens"),
        (lambda: bayes([0, 1], symbols=2, alpha=0.0), "alpha"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()
