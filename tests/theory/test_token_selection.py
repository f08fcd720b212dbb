"""The flow of attention that is trained alone: autograd, quadrature, mpmath, and the two ways to solve it."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from joma.arguments import InputError
from joma.theory.integration import Solver
from joma.theory.margins import max_margin, token_differences
from joma.theory.token_selection import (
    attention_push,
    attention_weights,
    factor_path,
    outer_tokens,
    vector_flow,
    vector_path,
)

seeds = st.integers(0, 2**32 - 1)


def draw(seed, sequences=3, tokens=4, dim=12):
    """Unit tokens, uniform scores and unit queries."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(sequences, tokens, dim)), rng.normal(size=(sequences, dim))
    x, z = (array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (x, z))
    return rng, x, rng.uniform(size=(sequences, tokens)), z


def logistic(logits, g):
    f = (torch.softmax(logits, dim=-1) * torch.as_tensor(g)).sum(dim=-1)
    return torch.nn.functional.softplus(-f).mean()


def push(logits, g):
    array, log_factor = attention_push(logits, g)
    return array * np.exp(log_factor)


@given(seed=seeds, sequences=st.integers(1, 4), tokens=st.integers(1, 5))
def test_the_push_is_the_gradient_by_autograd(seed, sequences, tokens):
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(sequences, tokens))
    logits = torch.tensor(rng.normal(size=(sequences, tokens)), requires_grad=True)
    (gradient,) = torch.autograd.grad(logistic(logits, g), logits)
    np.testing.assert_allclose(push(logits.detach(), g), -gradient, rtol=0, atol=1e-15)


@settings(max_examples=10)
@given(seed=seeds, size=st.floats(40.0, 300.0))
def test_the_push_is_exact_where_attention_is_saturated(seed, size):
    """Against mpmath with 400 digits; the plain form in float64 is zero there."""
    rng = np.random.default_rng(seed)
    logits, g = np.append(size, rng.normal(size=3)), rng.uniform(size=4)
    with mpmath.workdps(400):
        weights = [mpmath.exp(mpmath.mpf(logit)) for logit in logits]
        q = [weight / mpmath.fsum(weights) for weight in weights]
        f = mpmath.fsum(share * score for share, score in zip(q, map(mpmath.mpf, g), strict=True))
        exact = [share * (mpmath.mpf(score) - f) / (1 + mpmath.exp(f)) for share, score in zip(q, g, strict=True)]
        expected = np.array([float(value) for value in exact])
    np.testing.assert_allclose(push(logits[None], g[None])[0], expected, rtol=1e-11)


@settings(max_examples=10)
@given(seed=seeds)
def test_a_short_path_goes_down_the_gradient_and_its_time_is_length_over_slope(seed):
    rng, x, g, _ = draw(seed)
    p0, length = rng.normal(size=12), 1e-4
    p = torch.tensor(p0, requires_grad=True)
    (gradient,) = torch.autograd.grad(logistic(torch.tensor(x) @ p, g), p)
    path = vector_path(x, g, p0, [0.0, length])
    slope = gradient.numpy()
    np.testing.assert_allclose((path.p[1] - p0) / length, -slope / np.linalg.norm(slope), atol=1e-3)
    np.testing.assert_allclose(np.expm1(path.log_time[1]), length / np.linalg.norm(slope), rtol=1e-3)


@settings(max_examples=10)
@given(seed=seeds, gap=st.floats(0.1, 2.0))
def test_with_two_tokens_the_path_is_straight_and_its_time_an_integral(seed, gap):
    rng = np.random.default_rng(seed)
    x, g, p0 = rng.normal(size=(1, 2, 4)), np.array([[gap, 0.0]]), rng.normal(size=4)
    difference = x[0, 0] - x[0, 1]
    size = np.linalg.norm(difference)

    def slope(s):
        q = 1 / (1 + np.exp(-(difference @ p0 + s * size)))
        return size * q * (1 - q) * gap / (1 + np.exp(q * gap))

    path = vector_path(x, g, p0, [0.0, 1.0, 5.0])
    for length, p, log_time in zip([1.0, 5.0], path.p[1:], path.log_time[1:], strict=True):
        np.testing.assert_allclose(p, p0 + length * difference / size, atol=1e-7)
        time = quad(lambda s: 1 / slope(s), 0.0, length, epsabs=0, epsrel=1e-11)[0]
        assert log_time == pytest.approx(np.log1p(time), rel=1e-7)


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_the_path_over_length_passes_through_the_flow_in_time(seed):
    rng, x, g, _ = draw(seed)
    p0 = rng.normal(size=12)
    path = vector_path(x, g, p0, [0.0, 2.0, 6.0])
    states = vector_flow(x, g, p0, np.expm1(path.log_time))
    np.testing.assert_allclose(states, path.p, atol=1e-5)


@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_explicit_and_implicit_methods_give_the_same_long_path(seed):
    _, x, g, _ = draw(seed)
    explicit = Solver("DOP853", rtol=1e-10, atol=1e-12)
    paths = [
        vector_path(x, g, np.zeros(12), [0.0, 80.0], solver=solver) for solver in (explicit, Solver("Radau", 1e-9))
    ]
    np.testing.assert_allclose(paths[0].p[-1], paths[1].p[-1], atol=1e-4)
    assert paths[0].log_time[-1] == pytest.approx(paths[1].log_time[-1], abs=1e-4)


@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_the_slope_over_ln_t_tends_to_the_max_margin_vector(seed):
    _, x, _, _ = draw(seed)
    g = np.zeros((3, 4))
    g[:, 1] = 1.0
    path = vector_path(x, g, np.zeros(12), [0.0, 80.0, 160.0, 320.0])
    solution = max_margin(token_differences(x, [1, 1, 1]))
    slopes = np.diff(path.p, axis=0) / np.diff(path.log_time)[:, None]
    errors = np.linalg.norm(slopes - solution, axis=-1) / np.linalg.norm(solution)
    assert errors[-1] < 0.03
    assert errors[-1] < errors[0]


@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_nothing_underflows_along_a_path_to_times_beyond_float64(seed):
    _, x, g, _ = draw(seed, sequences=1, tokens=2)
    path = vector_path(x, g, np.zeros(12), [0.0, 5000.0])
    assert path.log_time[-1] > 710.0
    assert np.linalg.norm(path.p[-1]) == pytest.approx(5000.0)


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_the_flow_of_a_matrix_is_that_of_autograd(seed):
    rng, x, g, z = draw(seed, dim=5)
    w = torch.tensor(rng.normal(size=(5, 5)), requires_grad=True)
    logits = torch.einsum("itd,de,ie->it", torch.tensor(x), w, torch.tensor(z))
    (gradient,) = torch.autograd.grad(logistic(logits, g), w)
    path = vector_path(outer_tokens(x, z), g, w.detach().numpy().ravel(), [0.0, 1e-4])
    step = (path.p[1] - path.p[0]).reshape(5, 5) / 1e-4
    np.testing.assert_allclose(step, -gradient.numpy() / np.linalg.norm(gradient.numpy()), atol=1e-3)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, rank=st.integers(1, 5))
def test_the_flow_of_the_factors_is_that_of_autograd_and_conserves_their_balance(seed, rank):
    rng, x, g, z = draw(seed, dim=5)
    k, q = (torch.tensor(rng.normal(size=(5, rank)), requires_grad=True) for _ in range(2))
    logits = torch.einsum("itd,dr,er,ie->it", torch.tensor(x), k, q, torch.tensor(z))
    gradients = torch.autograd.grad(logistic(logits, g), (k, q))
    size = np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    start = k.detach().numpy(), q.detach().numpy()
    path = factor_path(x, z, g, *start, lengths=[0.0, 1e-4, 3.0])
    for states, gradient in zip((path.k, path.q), gradients, strict=True):
        np.testing.assert_allclose((states[1] - states[0]) / 1e-4, -gradient.numpy() / size, atol=1e-3)
    balance = [k.T @ k - q.T @ q for k, q in zip(path.k, path.q, strict=True)]
    np.testing.assert_allclose(balance[-1], balance[0], atol=1e-6)


def test_queries_may_have_another_dimension_than_tokens():
    rng, x, g, _ = draw(1, dim=5)
    z, k0, q0 = rng.normal(size=(3, 2)), rng.normal(size=(5, 2)), rng.normal(size=(2, 2))
    path = factor_path(x, z, g, k0, q0, lengths=[0.0, 1.0])
    assert path.q.shape == (2, 2, 2)
    padded = factor_path(x, np.pad(z, ((0, 0), (0, 3))), g, k0, np.pad(q0, ((0, 3), (0, 0))), lengths=[0.0, 1.0])
    np.testing.assert_allclose(path.k, padded.k, atol=1e-6)
    assert outer_tokens(x, z).shape == (3, 4, 10)


def test_equal_scores_push_nothing():
    np.testing.assert_array_equal(push([[0.0, 1.0]], [[0.5, 0.5]]), [[0.0, 0.0]])


@given(seed=seeds)
def test_attention_weights_are_a_softmax(seed):
    rng, x, _, _ = draw(seed)
    p = rng.normal(size=(2, 12))
    expected = torch.softmax(torch.einsum("itd,pd->pit", torch.tensor(x), torch.tensor(p)), dim=-1)
    np.testing.assert_allclose(attention_weights(x, p), expected, atol=1e-15)


X, G, Z, P = [[[1.0, 0.0], [0.0, 1.0]]], [[1.0, 0.0]], [[1.0, 2.0]], [0.0, 0.0]
K = [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: attention_push([1.0], [[1.0]]), "logits"),
        (lambda: attention_push([[1.0]], [[1.0, 2.0]]), "g"),
        (lambda: vector_path(X, [[1.0]], P, [1.0]), "g"),
        (lambda: vector_path(X, [[1.0, 1.0]], P, [1.0]), "g"),
        (lambda: vector_path([[[1.0], [1.0]]], G, [0.0], [1.0]), "x"),
        (lambda: vector_path(X, G, [0.0], [1.0]), "p0"),
        (lambda: vector_path(X, G, P, [-1.0]), "lengths"),
        (lambda: vector_path(X, G, P, [2.0, 1.0]), "lengths"),
        (lambda: vector_flow(X, G, P, [-1.0]), "times"),
        (lambda: vector_flow(X, G, P, [[1.0]]), "times"),
        (lambda: factor_path(X, [[1.0, 0.0]] * 2, G, K, K, lengths=[1.0]), "z"),
        (lambda: factor_path(X, [[1.0]], G, K, K, lengths=[1.0]), "q0"),
        (lambda: factor_path(X, Z, G, [[1.0]], K, lengths=[1.0]), "k0"),
        (lambda: factor_path(X, Z, G, K, [[1.0, 0.0], [0.0, 1.0]], lengths=[1.0]), "q0"),
        (lambda: factor_path(X, Z, G, [[0.0], [0.0]], [[0.0], [0.0]], lengths=[1.0]), "k0`, `q0"),
        (lambda: factor_path(X, Z, G, [[1e200], [0.0]], [[1e200], [0.0]], lengths=[1.0]), "k0`, `q0"),
        (lambda: outer_tokens(X, [1.0]), "z"),
        (lambda: attention_weights(X, [1.0]), "p"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()
