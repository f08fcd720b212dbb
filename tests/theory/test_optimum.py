"""The optimum of the block: gradients against torch's autograd, naive Bayes, planted optima, the block's flow."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from joma.arguments import InputError
from joma.theory.activations import Activation
from joma.theory.block_flow import Architecture, Training, block
from joma.theory.integration import Solver
from joma.theory.losses import cross_entropy
from joma.theory.optimum import block_logits, block_optimum, gradient_flow, loss_gradient, naive_bayes, planted
from joma.theory.populations import Source, multisets, population

seeds = st.integers(0, 2**32 - 1)


def draw_p(rng, classes, tokens, scale=0.7):
    return softmax(scale * rng.normal(size=(classes, tokens)), axis=1)


def draw_world(rng, classes=2, tokens=4, lengths=(3,)):
    p = draw_p(rng, classes, tokens)
    return population([Source(p, length, 1 / len(lengths)) for length in lengths])


def spread(v):
    """Weights up to a number for each token, which changes nothing."""
    return v - v.mean(axis=1, keepdims=True)


ACTIVATIONS = {"linear": lambda y: y, "gelu": torch.nn.functional.gelu, "tanh": torch.tanh}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(seed=seeds, classes=st.integers(2, 4), tokens=st.integers(1, 5), lengths=st.sampled_from([(1,), (3,), (1, 4)]))
def test_the_gradient_is_that_of_autograd(activation, seed, classes, tokens, lengths):
    rng = np.random.default_rng(seed)
    world, v, z = draw_world(rng, classes, tokens, lengths), rng.normal(size=(tokens, classes)), rng.normal(size=tokens)
    weights, logits = (torch.tensor(array, requires_grad=True) for array in (v, z))
    b = torch.softmax(logits + torch.tensor(world.x).log(), dim=-1)
    h = ACTIVATIONS[activation](b @ weights)
    loss = -(torch.tensor(world.joint) * torch.log_softmax(h, dim=-1)).sum()
    expected = torch.autograd.grad(loss, (weights, logits))
    point = loss_gradient(world, v, z, activation=activation)
    assert point.loss == pytest.approx(loss.item(), abs=1e-13)
    np.testing.assert_allclose(point.v, expected[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(point.z, expected[1], rtol=0, atol=1e-13)


@given(seed=seeds)
def test_extreme_logits_select_one_token_and_divide_nothing_by_zero(seed):
    x, v = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), np.random.default_rng(seed).normal(size=(3, 2))
    logits = block_logits(x, v, [-2000.0, -3000.0, 0.0])
    np.testing.assert_allclose(logits[1], v[2])
    assert np.isfinite(logits).all()


@given(
    seed=seeds, size=st.floats(0, 1e6), gaps=st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3), rare=st.booleans()
)
def test_attention_at_large_logits_is_softmax_over_the_tokens_of_a_context(seed, size, gaps, rare):
    """Against mpmath, with tokens that a context does not have far above those that it has."""
    rng = np.random.default_rng(seed)
    x, v = rng.dirichlet(np.ones(3), size=4) * (rng.random((4, 3)) < 0.7), size * rng.normal(size=(3, 2))
    x[x.sum(axis=1) == 0] = 1e-200 if rare else 1.0
    with mp.workdps(60):
        powers = [[mp.mpf(share) * mp.exp(mp.mpf(gap)) for share, gap in zip(row, gaps, strict=True)] for row in x]
        expected = [
            [float(mp.fsum(p * mp.mpf(w) for p, w in zip(row, column, strict=True)) / mp.fsum(row)) for column in v.T]
            for row in powers
        ]
    np.testing.assert_allclose(block_logits(x, v, gaps), expected, rtol=1e-11, atol=1e-12 * size)


def test_the_loss_of_large_logits_keeps_its_digits():
    """Two classes whose logits are 1e9 and 1e9 + 1: the loss is that of logits 0 and 1."""
    world = population([Source([[0.5, 0.5], [0.5, 0.5]], length=2)])
    point = loss_gradient(world, np.array([[1e9, 1e9 + 1]] * 2), np.zeros(2))
    assert point.loss == pytest.approx(np.log1p(np.e) - 0.5, rel=1e-15)


@given(seed=seeds, classes=st.integers(2, 3), tokens=st.integers(2, 5), length=st.integers(1, 4))
def test_naive_bayes_is_the_posterior_and_attains_the_bayes_risk(seed, classes, tokens, length):
    rng = np.random.default_rng(seed)
    p, prior = draw_p(rng, classes, tokens), draw_p(rng, 1, classes)[0]
    world, v = population([Source(p, length)], prior), naive_bayes(p, length, prior)
    np.testing.assert_allclose(softmax(block_logits(world.x, v, np.zeros(tokens)), axis=1), world.posterior, rtol=1e-9)
    point = loss_gradient(world, v + rng.normal(size=(tokens, 1)), np.zeros(tokens))
    assert point.loss == pytest.approx(world.bayes_risk, abs=1e-13)
    assert max(np.abs(point.v).max(), np.abs(point.z).max()) < 1e-13


@settings(max_examples=10)
@given(seed=seeds, classes=st.integers(2, 3), tokens=st.integers(3, 5), length=st.integers(2, 3))
def test_the_search_finds_naive_bayes_under_uniform_attention(seed, classes, tokens, length):
    rng = np.random.default_rng(seed)
    p = draw_p(rng, classes, tokens)
    world = population([Source(p, length)])
    optimum = block_optimum(world, rng, starts=3)
    assert optimum.loss == pytest.approx(world.bayes_risk, abs=1e-9)
    assert optimum.losses.min() == optimum.loss
    assert optimum.slope < 1e-6
    np.testing.assert_allclose(spread(optimum.v), spread(naive_bayes(p, length)), atol=0.02)
    np.testing.assert_allclose(softmax(optimum.z), 1 / tokens, atol=0.02)


@settings(max_examples=10)
@given(seed=seeds, tokens=st.integers(3, 5), length=st.integers(2, 3))
def test_the_search_finds_what_was_planted(seed, tokens, length):
    rng = np.random.default_rng(seed)
    v, z, counts = rng.normal(size=(tokens, 2)), rng.normal(size=tokens), multisets(tokens, length)
    world = planted(counts, np.full(len(counts), 1 / len(counts)), v, z)
    optimum = block_optimum(world, rng, starts=4)
    assert optimum.loss == pytest.approx(world.bayes_risk, abs=1e-9)
    assert loss_gradient(world, v, z).loss == pytest.approx(world.bayes_risk, abs=1e-13)
    np.testing.assert_allclose(spread(optimum.v), spread(v), atol=0.02)
    np.testing.assert_allclose(softmax(optimum.z), softmax(z), atol=0.02)


def test_gelu_units_attain_the_bayes_risk_too_where_they_are_shifted_to_where_they_are_linear():
    rng = np.random.default_rng(2)
    p = draw_p(rng, 2, 4)
    world = population([Source(p, 3)])
    optimum = block_optimum(world, rng, activation="gelu")
    assert optimum.loss == pytest.approx(world.bayes_risk, abs=1e-8)
    np.testing.assert_allclose(softmax(optimum.z), 0.25, atol=0.02)
    shifted = naive_bayes(p, 3) + 100.0
    assert loss_gradient(world, shifted, np.zeros(4), activation="gelu").loss == pytest.approx(world.bayes_risk)


def test_with_two_lengths_the_optimum_is_better_than_uniform_attention_and_sparser():
    rng = np.random.default_rng(0)
    p = draw_p(rng, 2, 5)
    world = population([Source(p, 1, 0.5), Source(p, 5, 0.5)])
    optimum = block_optimum(world, rng)
    uniform = min(loss_gradient(world, naive_bayes(p, length), np.zeros(5)).loss for length in range(1, 6))
    assert world.bayes_risk < optimum.loss < uniform
    assert softmax(optimum.z).max() > 0.3


def block_path(world, times, v, z, rate_z):
    """The block's flow with every pair of context and class as one sample."""
    contexts, classes = world.joint.shape
    flow = block(
        "softmax",
        "linear",
        cross_entropy(np.tile(np.arange(classes), contexts)),
        np.repeat(world.x, classes, axis=0),
        weight=world.joint.ravel(),
        training=Training(rate_z=rate_z),
        architecture=Architecture(residual=False),
    )
    return flow.solve(times, np.concatenate([v, np.zeros((1, classes))]), z[None])


@settings(max_examples=5)
@given(seed=seeds, rate_z=st.sampled_from([0.0, 1.0, 4.0]))
def test_the_gradient_flow_is_that_of_the_block(seed, rate_z):
    rng = np.random.default_rng(seed)
    world, v, z = draw_world(rng, lengths=(1, 3)), 0.5 * rng.normal(size=(4, 2)), 0.5 * rng.normal(size=4)
    times = np.array([0.0, 1.0, 20.0])
    path, expected = gradient_flow(world, times, v, z, rate_z=rate_z), block_path(world, times, v, z, rate_z)
    np.testing.assert_allclose(path.v, expected.v, atol=1e-8)
    np.testing.assert_allclose(path.z, expected.z[:, 0], atol=1e-8)
    states = zip(path.v, path.z, strict=True)
    np.testing.assert_allclose(path.loss, [loss_gradient(world, v, z).loss for v, z in states])
    assert (np.diff(path.loss) < 0).all()


def test_the_flow_ends_at_the_bayes_risk_with_uniform_attention():
    rng = np.random.default_rng(1)
    world = draw_world(rng)
    start = 0.05 * rng.normal(size=(4, 2)), rng.normal(size=4)
    path = gradient_flow(world, [0.0, 1e5], *start, rate_z=4.0, solver=Solver("LSODA", rtol=1e-8))
    assert path.loss[-1] == pytest.approx(world.bayes_risk, abs=1e-8)
    np.testing.assert_allclose(softmax(path.z[-1]), 0.25, atol=1e-3)


WORLD = population([Source([[0.5, 0.5], [0.25, 0.75]], length=2)])
SQUARE = Activation("square", np.square, lambda y: 2 * y)


def test_the_loss_of_the_largest_weights_is_that_of_certain_predictions():
    assert loss_gradient(WORLD, [[1e308, -1e308]] * 2, [0, 0]).loss == pytest.approx(1e308)  # half of 2e308


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: naive_bayes([[1.0, 0.0]], 2), "`p` must be above 0 everywhere"),
        (lambda: naive_bayes([[0.5, 0.5]], 2, prior=[0.5, 0.5]), "`prior` must be one number"),
        (lambda: naive_bayes([[0.5, 0.5]] * 2, 2, prior=[0.0, 1.0]), "`prior` must be above 0 everywhere"),
        (lambda: block_logits([[0.5, 0.5]], np.zeros((2, 2)), [0.0]), "`z`, `v` must be"),
        (lambda: planted([[1, 0]], [0.5, 0.5], np.zeros((2, 2)), [0, 0]), "`counts` must be 2 rows"),
        (lambda: planted([[0.5, 0.5]], [1.0], np.zeros((2, 2)), [0, 0]), "`counts` must be whole numbers"),
        (lambda: planted([[0, 0]], [1.0], np.zeros((2, 2)), [0, 0]), "`counts` must be 1 rows of whole"),
        (lambda: planted([[1e300, 1]], [1.0], np.zeros((2, 2)), [0, 0]), "`counts` must be in"),
        (lambda: block_logits([[0.0, 0.0]], np.zeros((2, 2)), [0, 0]), "`x` must be rows with a positive sum"),
        (lambda: loss_gradient(WORLD, np.zeros((2, 3)), [0, 0]), r"`v` must be \[token, class\]"),
        (lambda: loss_gradient(WORLD, [[1e200] * 2] * 2, [0, 0], activation=SQUARE), "`v`, `z` must be such that"),
        (lambda: block_optimum(WORLD, np.random.default_rng(0), starts=2**62), "`starts` must be of a size"),
        (lambda: gradient_flow(WORLD, [1.0], np.zeros((2, 2)), [0.0]), "`z0`, `v` must be"),
        (lambda: block_optimum(WORLD, np.random.default_rng(0), starts=0), "`starts` must be"),
        (lambda: gradient_flow(WORLD, [1.0], np.zeros((3, 2)), np.zeros(2)), r"`v0` must be \[token, class\]"),
        (lambda: gradient_flow(WORLD, [1.0], np.zeros((2, 2)), np.zeros(2), rate_z=-1), "`rate_z` must be"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


@given(seed=seeds, size=st.floats(0.1, 5))
def test_where_a_token_occurs_in_one_class_only_the_loss_has_no_minimum(seed, size):
    rng = np.random.default_rng(seed)
    p = draw_p(rng, 2, 3)
    p[1, 0] = 0.0
    world = population([Source(p / p.sum(axis=1, keepdims=True), 3)])
    v, z = rng.normal(size=(3, 2)), rng.normal(size=3)
    further = v.copy()
    further[0, 0] += size  # the token of the first class only
    assert loss_gradient(world, further, z).loss < loss_gradient(world, v, z).loss
