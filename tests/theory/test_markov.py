"""The binary chain against enumeration, matrix powers and autograd; the reduced model against its linearisation."""

from __future__ import annotations

import itertools

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from joma.arguments import InputError
from joma.theory import markov

chains = st.tuples(st.floats(0.02, 0.98), st.floats(0.02, 0.98))


def matrix(p, q):
    return np.array([[1 - p, p], [q, 1 - q]])


def sequences(p, q, length):
    """Return all sequences of 0 and 1 of a length, and their probabilities."""
    symbols = np.array(list(itertools.product([0, 1], repeat=length)))
    share = markov.stationary(p, q)
    probability = np.where(symbols[:, 0] == 1, share, 1 - share)
    for first, second in itertools.pairwise(range(length)):
        probability = probability * matrix(p, q)[symbols[:, first], symbols[:, second]]
    return symbols, probability


@given(chain=chains)
def test_the_stationary_distribution_is_the_left_eigenvector(chain):
    share = markov.stationary(*chain)
    pi = np.array([1 - share, share])
    np.testing.assert_allclose(pi @ matrix(*chain), pi, atol=1e-15)


probability = st.one_of(
    st.floats(0.02, 0.98),
    st.floats(-300, -1).map(lambda power: 10.0**power),
    st.floats(-16, -1).map(lambda x: 1 - 10**x),
).filter(lambda x: 0 < x < 1)


@given(
    p=probability, q=probability, lag=st.integers(1, 2), logits=st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
)
def test_rare_and_nearly_certain_changes_keep_their_digits(p, q, lag, logits):
    """Against 700 digits: where 1 − x rounds to 1, and ln(1 − x) to 0, the formulas themselves would lose them."""
    with mp.workdps(700):
        first, second, slope, bias = (mp.mpf(number) for number in (p, q, *logits))
        share = first / (first + second)

        def entropy(x):
            return -x * mp.log(x) - (1 - x) * mp.log(1 - x)

        def surprisal(chance, x):
            return chance * mp.log1p(mp.exp(-x)) + (1 - chance) * mp.log1p(mp.exp(x))

        expected = {
            "entropy": entropy(share),
            "rate": (1 - share) * entropy(first) + share * entropy(second),
            "covariance": share * (1 - share) * (1 - first - second) ** lag,
            "loss": (1 - share) * surprisal(first, bias) + share * surprisal(1 - second, slope + bias),
            "slope": mp.log((1 - first) * (1 - second) / (first * second)),
        }
    computed = {
        "entropy": markov.unigram_entropy(p, q),
        "rate": markov.entropy_rate(p, q),
        "covariance": markov.covariance(p, q, lag=lag),
        "loss": markov.affine_loss(p, q, *logits),
        "slope": markov.kernel_logits(p, q)[0],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(computed[name], float(value), rtol=1e-12, atol=0, err_msg=name)


def test_a_persistence_of_one_rounding_is_exact():
    half = 0.5 - 2.0**-54
    np.testing.assert_array_equal(markov.covariance(half, half), 2.0**-55)


def test_logits_whose_sum_overflows_are_refused():
    with pytest.raises(InputError, match="`slope`, `bias` must be such that the result is a finite number"):
        markov.affine_loss(0.5, 0.5, 1.5e308, 1.5e308)


@settings(max_examples=30)
@given(chain=chains, lag=st.integers(0, 4))
def test_entropies_and_covariances_agree_with_enumeration(chain, lag):
    symbols, probability = sequences(*chain, 6)
    entropy = -(probability * np.log(probability)).sum()
    expected = markov.unigram_entropy(*chain) + 5 * markov.entropy_rate(*chain)
    np.testing.assert_allclose(entropy, expected, rtol=1e-12)
    first, later = symbols[:, 0], symbols[:, lag]
    mean = probability @ (first * later) - (probability @ first) * (probability @ later)
    np.testing.assert_allclose(markov.covariance(*chain, lag=lag), mean, atol=1e-14)


@settings(max_examples=30)
@given(chain=chains, slope=st.floats(-3, 3), bias=st.floats(-3, 3))
def test_the_affine_loss_is_the_mean_surprisal_and_least_at_the_kernel(chain, slope, bias):
    p, q = chain
    symbols, probability = sequences(p, q, 2)
    logit = slope * symbols[:, 0] + bias
    surprisal = np.logaddexp(0, logit) - symbols[:, 1] * logit
    np.testing.assert_allclose(markov.affine_loss(p, q, slope, bias), probability @ surprisal, rtol=1e-12)
    np.testing.assert_allclose(
        markov.affine_loss(p, q, *markov.kernel_logits(p, q)), markov.entropy_rate(p, q), rtol=1e-12
    )
    assert markov.affine_loss(p, q, slope, bias) >= markov.entropy_rate(p, q) - 1e-15


@given(p=st.floats(0.02, 0.98))
def test_independent_symbols_have_nothing_to_learn(p):
    np.testing.assert_allclose(markov.entropy_rate(p, 1 - p), markov.unigram_entropy(p, 1 - p), rtol=1e-14)
    np.testing.assert_allclose(markov.kernel_logits(p, 1 - p)[0], 0, atol=1e-12)


@settings(max_examples=20)
@given(chain=chains)
def test_rates_are_eigenvalues_of_the_hessian_by_autograd(chain):
    p, q = chain
    share = float(markov.stationary(p, q))

    def loss(theta, *, tied):
        e, a, b = theta[0], theta[0] if tied else theta[2], theta[1]
        pi, change = torch.tensor([1 - share, share]), torch.tensor([p, 1 - q])
        logit = a * e * torch.tensor([0.0, 1.0]) + b
        return (pi * (torch.nn.functional.softplus(logit) - change * logit)).sum()

    torch.set_default_dtype(torch.float64)
    try:
        point = torch.tensor([0.0, np.log(share / (1 - share)), 0.0])
        for tied in (True, False):
            hessian = torch.autograd.functional.hessian(lambda theta, tied=tied: loss(theta, tied=tied), point)
            part = hessian[:1, :1] if tied else hessian[[0, 2]][:, [0, 2]]
            largest = -torch.linalg.eigvalsh(part)[0]
            np.testing.assert_allclose(markov.unigram_rates(p, q, tied=tied), float(largest), atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chain", [(0.5, 0.8), (0.9, 0.9), (0.2, 0.3)])
def test_the_flow_starts_at_its_rate_and_ends_where_the_theory_says(chain, tied):
    rate, sign = float(markov.unigram_rates(*chain, tied=tied)), np.sign(markov.covariance(*chain))
    times = np.array([0.0, 1.0 / abs(rate)])
    near = markov.reduced_flow(*chain, times, e0=1e-4, a0=None if tied else 1e-4 * sign)
    np.testing.assert_allclose(near.e[-1], 1e-4 * np.exp(rate * times[-1]), rtol=1e-6)
    end = markov.reduced_flow(*chain, [3000.0], e0=0.4, a0=None if tied else -0.3, b0=1.0).loss[-1]
    trapped = tied and sum(chain) > 1
    expected = markov.unigram_entropy(*chain) if trapped else markov.entropy_rate(*chain)
    np.testing.assert_allclose(end, expected, atol=1e-10)


@pytest.mark.parametrize("chain", [(0.5, 0.8), (0.2, 0.3)])
@pytest.mark.parametrize("e0", [0.4, -0.4, 0.0])
def test_the_flow_from_the_stable_plane_ends_at_the_unigram_and_from_beside_it_at_the_kernel(chain, e0):
    """a = −sign(C) e stays so, to the last bit; from 1e-6 beside it the flow leaves, by its conserved number."""
    sign = float(np.sign(markov.covariance(*chain)))
    path = markov.reduced_flow(*chain, [3000.0], e0=e0, a0=-sign * e0, b0=1.0)
    np.testing.assert_array_equal(path.a, -sign * path.e)
    np.testing.assert_allclose(path.loss[-1], markov.unigram_entropy(*chain), atol=1e-10)
    beside = markov.reduced_flow(*chain, [3000.0], e0=e0, a0=-sign * e0 + 1e-6, b0=1.0)
    np.testing.assert_allclose(beside.loss[-1], markov.entropy_rate(*chain), atol=1e-10)


@settings(max_examples=15)
@given(chain=chains, e0=st.floats(-2, 2), a0=st.one_of(st.none(), st.floats(-2, 2)), b0=st.floats(-2, 2))
def test_the_loss_falls_along_the_flow_and_a_conserved_number_stays(chain, e0, a0, b0):
    path = markov.reduced_flow(*chain, np.linspace(0, 20, 9), e0=e0, a0=a0, b0=b0)
    assert (np.diff(path.loss) <= 1e-10).all()
    np.testing.assert_allclose(path.e**2 - path.a**2, path.e[0] ** 2 - path.a[0] ** 2, atol=1e-9)


@pytest.mark.parametrize("chain", [(0.5, 0.8), (0.9, 0.9), (0.6, 0.45)])
def test_no_tied_weights_are_better_than_the_unigram_beyond_1(chain):
    """By another optimiser: the slope e² cannot be negative, where the best one is."""
    minima = [
        minimize(lambda v: float(markov.affine_loss(*chain, v[0] ** 2, v[1])), start, tol=1e-12).fun
        for start in ([1.0, 0.0], [-0.3, 2.0], [0.01, -1.0])
    ]
    np.testing.assert_allclose(minima, markov.unigram_entropy(*chain), atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(chain=chains, number=st.integers(0, 10**6))
def test_the_hessian_agrees_with_finite_differences_of_an_enumerated_loss(chain, number):
    """z_n = c_n + Σ_m J_nm x_m with random J: the loss over all sequences, minimised over the bias, by differences."""
    p, q = chain
    length, dim = 4, 2
    draw = np.random.default_rng(number)
    jacobian = np.tril(np.ones((length, length)))[..., None, None] * draw.normal(size=(length, length, dim, dim))
    states = draw.normal(size=(length, dim))
    symbols, probability = sequences(p, q, length)
    change = np.where(symbols == 1, 1 - q, p)

    def loss(e):
        z = states + np.einsum("nmij,sm,j->sni", jacobian, symbols, e)
        linear = z @ e

        def at(bias):
            logit = linear + bias[0]
            return float((probability[:, None] * (np.logaddexp(0, logit) - change * logit)).sum() / length)

        return minimize(at, [np.log(p / q)], method="BFGS", options={"gtol": 1e-11}).fun

    step, unit = 1e-2, np.eye(dim)
    hessian = markov.unigram_hessian(p, q, states, jacobian)
    for direction in (unit[0], unit[1], unit[0] + unit[1]):
        # The fourth difference, whose error is of the order of step⁴.
        values = [loss(factor * step * direction) for factor in (-2, -1, 0, 1, 2)]
        second = np.dot([-1, 16, -30, 16, -1], values) / (12 * step**2)
        np.testing.assert_allclose(
            direction @ hessian @ direction, second, atol=3e-4 * (1 + np.abs(jacobian).max() ** 3)
        )


def test_the_residual_path_alone_gives_the_rate_of_the_reduced_model():
    identity = np.einsum("nm,ij->nmij", np.eye(5), np.eye(3))
    for chain in ((0.5, 0.8), (0.2, 0.3)):
        hessian = markov.unigram_hessian(*chain, np.ones((5, 3)), identity)
        np.testing.assert_allclose(hessian, -markov.unigram_rates(*chain) * np.eye(3), atol=1e-15)


def test_chains_broadcast():
    p, q = np.array([[0.5], [0.2]]), np.array([0.8, 0.3, 0.4])
    for function in (markov.stationary, markov.unigram_entropy, markov.entropy_rate, markov.covariance):
        result = function(p, q)
        assert result.shape == (2, 3)
        np.testing.assert_allclose(result[1, 2], function(0.2, 0.4))
    states, jacobian = np.zeros((2, 3, 4, 2)), np.zeros((4, 4, 2, 2))
    assert markov.unigram_hessian(p, q, states, jacobian).shape == (2, 3, 2, 2)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: markov.stationary(0.0, 0.5), "p"),
        (lambda: markov.entropy_rate(0.5, 1.0), "q"),
        (lambda: markov.covariance(0.5, 1.5), "q"),
        (lambda: markov.covariance(0.5, 0.5, lag=-1), "lag"),
        (lambda: markov.reduced_flow(0.5, 0.8, [1.0], e0=1e101), "e0"),
        (lambda: markov.reduced_flow(0.5, 0.8, [1.0], e0=0.1, a0=-1e101), "a0"),
        (lambda: markov.reduced_flow(0.5, 0.8, [1.0], e0=0.1, b0=1e101), "b0"),
        (lambda: markov.unigram_hessian(0.5, 0.8, np.zeros(3), np.zeros((3, 3, 1, 1))), "states"),
        (lambda: markov.unigram_hessian(0.5, 0.8, np.zeros((3, 2)), np.zeros((3, 3, 1, 1))), "jacobian"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()
