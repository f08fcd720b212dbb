"""Attention without skips: layers against mpmath with many digits, the cubic term, and bounds on random input."""

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.rank_collapse import (
    add,
    attend,
    diameter_bound,
    leading_term,
    log_diameter_bound,
    mixed_norm,
    norm_bound,
    relu_mlp,
    split,
)

SEEDS = st.integers(0, 2**32 - 1)


def weights(generator, dim, count=1):
    return generator.normal(size=(count, 2, dim, dim)) / np.sqrt(dim)


def exact_attention(x, w, v):
    """Return softmax(X W Xᵀ) X V in mpmath's working precision."""
    scores = x * w * x.T
    rows = []
    for row in range(x.rows):
        powers = [mp.exp(scores[row, column]) for column in range(x.rows)]
        rows.append([power / mp.fsum(powers) for power in powers])
    return mp.matrix(rows) * x * v


def exact_mlp(x, lower, upper):
    """Return max(X A, 0) B in mpmath's working precision."""
    return (x * lower).apply(lambda value: max(value, mp.mpf(0))) * upper


def exact_log_rms(x):
    """Return ln of the root mean square residual in mpmath's working precision."""
    means = [mp.fsum(x[row, column] for row in range(x.rows)) / x.rows for column in range(x.cols)]
    squares = [(x[row, column] - means[column]) ** 2 for row in range(x.rows) for column in range(x.cols)]
    return mp.log(mp.sqrt(mp.fsum(squares) / len(squares)))


@pytest.mark.parametrize("arm", ["plain", "mlp", "skip"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_layers_agree_with_many_digits(arm, scale):
    """Six layers, to residuals of 1e-200 and less, against 2,000 digits."""
    generator, depth, dim = np.random.default_rng(3), 6, 4
    with mp.workdps(2000):
        start = scale * generator.normal(size=(5, dim))
        tokens, exact = split(start), mp.matrix(start)
        for w, v in weights(generator, dim, depth):
            lower, upper = generator.normal(size=(dim, 6)), generator.normal(size=(6, dim))
            updated, output = attend(tokens, w, v), exact_attention(exact, mp.matrix(w), mp.matrix(v))
            if arm == "mlp":
                updated, output = relu_mlp(updated, lower, upper), exact_mlp(output, mp.matrix(lower), mp.matrix(upper))
            tokens, exact = (add(tokens, updated), exact + output) if arm == "skip" else (updated, output)
            assert float(tokens.log_rms) == pytest.approx(float(exact_log_rms(exact)), rel=1e-11, abs=1e-11)
            means = [float(mp.fsum(exact[row, column] for row in range(5)) / 5) for column in range(dim)]
            np.testing.assert_allclose(tokens.mean, means, rtol=1e-10, atol=1e-12)
    assert arm == "skip" or scale > 1 or tokens.log_rms < np.log(1e-200)


@pytest.mark.parametrize("spread", [40.0, 400.0, 4000.0])
def test_hard_attention_keeps_its_digits(spread):
    """Scores so far apart that nearly all rows attend to one token, and weights underflow."""
    generator = np.random.default_rng(1)
    start, (w, v) = generator.normal(size=(6, 3)) + 1.0, weights(generator, 3)[0]
    with mp.workdps(5000):
        exact = exact_attention(mp.matrix(start), mp.matrix(spread * w), mp.matrix(v))
        expected = float(exact_log_rms(exact))
    assert float(attend(split(start), spread * w, v).log_rms) == pytest.approx(expected, rel=1e-10)


@given(SEEDS, st.floats(-15, 3), st.integers(-300, 290))
def test_the_split_keeps_the_digits_of_small_residuals(seed, orders, power):
    """Beside a mean up to 1e15 times as large, in units from 1e-300 to 1e290, against 60 digits."""
    generator = np.random.default_rng(seed)
    x = (generator.normal(size=3) + generator.normal(size=(5, 3)) * 10.0**orders) * 10.0**power
    tokens = split(x)
    with mp.workdps(60):
        columns = [[mp.mpf(value) for value in column] for column in x.T.tolist()]
        means = [mp.fsum(column) / 5 for column in columns]
        residuals = [[value - mean for value in column] for column, mean in zip(columns, means, strict=True)]
        norm = mp.sqrt(mp.fsum(value**2 for column in residuals for value in column))
        direction = np.array([[float(value / norm) for value in column] for column in residuals]).T
        assert float(tokens.log_norm) == pytest.approx(float(mp.log(norm)), abs=1e-14, rel=1e-15)
    np.testing.assert_allclose(tokens.direction, direction, atol=1e-14)
    np.testing.assert_allclose(tokens.mean, [float(mean) for mean in means], rtol=0, atol=2e-16 * np.abs(x).max())


@given(SEEDS, st.floats(-12, 1))
def test_a_layer_is_softmax_attention(seed, exponent):
    """In plain arithmetic, where residuals are not small; and residuals have direction 1 and mean 0."""
    generator = np.random.default_rng(seed)
    x, (w, v) = generator.normal(size=(2, 4, 3)) * np.exp(exponent), weights(generator, 3)[0]
    powers = np.exp(x @ w @ x.mT)
    tokens = attend(split(x), w, v)
    np.testing.assert_allclose(tokens.x, powers / powers.sum(-1, keepdims=True) @ x @ v, atol=1e-12 * np.exp(exponent))
    np.testing.assert_allclose(np.linalg.norm(tokens.direction, axis=(-2, -1)), 1.0)
    np.testing.assert_allclose(tokens.direction.sum(axis=-2), 0.0, atol=1e-13)


@given(SEEDS, st.floats(-8, 2))
def test_an_mlp_is_an_mlp(seed, exponent):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=3) + generator.normal(size=(5, 3)) * np.exp(exponent)
    lower, upper = generator.normal(size=(3, 7)), generator.normal(size=(7, 2))
    expected = np.maximum(x @ lower, 0) @ upper
    np.testing.assert_allclose(relu_mlp(split(x), lower, upper).x, expected, atol=1e-13 * (1 + np.abs(x).max()))


@given(SEEDS)
def test_the_leading_term_is_cubic_and_its_error_is_of_second_order(seed):
    generator = np.random.default_rng(seed)
    mean, residual, (w, v) = generator.normal(size=3), generator.normal(size=(6, 3)), weights(generator, 3)[0]
    errors, sizes = [], []
    for size in (1e-3, 1e-4):
        tokens = split(size * residual)._replace(mean=mean)
        exact, leading = attend(tokens, w, v), leading_term(tokens, w, v)
        errors.append(np.linalg.norm(np.exp(leading.log_norm - exact.log_norm) * leading.direction - exact.direction))
        sizes.append(exact.log_norm)
    assert errors[0] < 1e-3
    assert errors[1] < 2e-2 * errors[0] + 1e-12
    assert (sizes[0] - sizes[1]) / np.log(10) == pytest.approx(3.0, abs=0.02)


def test_the_leading_term_is_the_formula():
    """R W C V, written out with the residuals themselves."""
    generator = np.random.default_rng(0)
    tokens, (w, v) = split(generator.normal(size=(5, 3))), weights(generator, 3)[0]
    pi = np.exp(tokens.residual @ w.T @ tokens.mean)
    pi /= pi.sum()
    centred = tokens.residual - pi @ tokens.residual
    covariance = sum(weight * np.outer(row, row) for weight, row in zip(pi, centred, strict=True))
    leading = leading_term(tokens, w, v)
    np.testing.assert_allclose(leading.residual, tokens.residual @ w @ covariance @ v, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(leading.mean, (tokens.mean + pi @ tokens.residual) @ v, rtol=1e-12)


@given(SEEDS, st.floats(-3, 4), st.floats(-2, 4))
def test_the_bounds_hold(seed, exponent, scores):
    """Ours for any input. That of the paper too, although its proof needs small scores, as far as we remember it."""
    generator = np.random.default_rng(seed)
    x, (w, v) = generator.normal(size=(7, 4)) * np.exp(exponent), weights(generator, 4)[0]
    w = w * np.exp(scores)
    tokens = split(x)
    after = attend(tokens, w, v)
    bound = diameter_bound(np.exp(tokens.log_diameter), *(np.linalg.norm(weight, 2) for weight in (w, v)))
    assert np.exp(after.log_diameter) <= bound * (1 + 1e-9)
    assert mixed_norm(after.residual) <= norm_bound(tokens.residual, w, v) * (1 + 1e-9)


def test_the_bound_of_tiny_and_of_large_diameters():
    """ln tanh against mpmath; a product with a zero factor is zero."""
    for log_diameter in (-800.0, -10.0, -1.0, 0.5, 4.0):
        with mp.workdps(50):
            exact = float(mp.log(3) + log_diameter + mp.log(mp.tanh(2 * mp.exp(2 * mp.mpf(log_diameter)) / 4)))
        assert float(log_diameter_bound(log_diameter, 2.0, 3.0)) == pytest.approx(exact, rel=1e-13)
    assert log_diameter_bound(-np.inf, 1.0, 1.0) == log_diameter_bound(1e300, 0.0, 1.0) == -np.inf


def test_the_diameter_bound_is_attained():
    """Two tokens on a line, symmetric about zero: both inequalities of its proof are equalities."""
    for distance in (0.1, 1.0, 5.0):
        tokens = split([[-distance / 2], [distance / 2]])
        after = attend(tokens, [[1.0]], [[1.0]])
        assert np.exp(after.log_diameter) == pytest.approx(float(diameter_bound(distance, 1.0, 1.0)))


@given(SEEDS)
def test_batches_are_many_calls(seed):
    generator = np.random.default_rng(seed)
    x, matrices = generator.normal(size=(3, 4, 2)), weights(generator, 2, 3)
    batch = attend(split(x), matrices[:, 0], matrices[:, 1])
    for number in range(3):
        single = attend(split(x[number]), *matrices[number])
        np.testing.assert_allclose(batch.log_norm[number], single.log_norm, rtol=1e-12)
        np.testing.assert_allclose(batch.direction[number], single.direction, atol=1e-12)


def test_equal_tokens_stay_equal():
    tokens = split(np.ones((3, 2)))
    after = relu_mlp(attend(tokens, np.eye(2), np.eye(2)), np.eye(2), np.eye(2))
    assert after.log_norm == tokens.log_norm == -np.inf
    assert after.log_relative == -np.inf
    np.testing.assert_allclose(add(tokens, after).x, 2.0)
    np.testing.assert_allclose(after.x, 1.0)


def test_sizes_of_residuals():
    tokens = split([[2.0, 0.0], [4.0, 0.0]])
    assert np.exp(tokens.log_rms) == pytest.approx(np.sqrt(0.5))
    assert np.exp(tokens.log_relative) == pytest.approx(np.sqrt(2 / 20))
    assert np.exp(tokens.log_diameter) == pytest.approx(2.0)


OVERFLOW = "tokens`, `w`, `v"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda _: split([1.0, 2.0]), "x"),
        (lambda _: split([[1.0, 2.0]]), "x"),
        (lambda tokens: attend(tokens, np.eye(3), np.eye(2)), "w"),
        (lambda tokens: attend(tokens, np.eye(2), np.eye(3)), "v"),
        (lambda tokens: attend(split(1e200 * tokens.x), np.eye(2), np.eye(2)), OVERFLOW),
        (lambda tokens: relu_mlp(tokens, np.eye(3), np.eye(3)), "lower"),
        (lambda tokens: relu_mlp(tokens, np.eye(2), np.eye(3)), "upper"),
        (lambda tokens: add(tokens, split(np.eye(3))), "update"),
        (lambda _: diameter_bound(-1.0, 1.0, 1.0), "diameter"),
        (lambda _: norm_bound([1.0], np.eye(2), np.eye(2)), "residual"),
        (lambda _: norm_bound(np.eye(2), np.full((2, 2), 1e308), np.eye(2)), "residual`, `w`, `v"),
        (lambda _: norm_bound(np.full((2, 2), 1e200), np.eye(2), np.eye(2)), "residual`, `w`, `v"),
        (lambda _: mixed_norm(np.full((2, 2), 1e308)), "matrix"),
        (lambda _: leading_term(split([[9.0, 2.0], [3.0, 7.0]]), np.full((2, 2), 1e308), np.eye(2)), OVERFLOW),
    ],
)
def test_bad_input_is_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call(split([[1.0, 0.0], [0.0, 1.0]]))
