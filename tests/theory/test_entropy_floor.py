"""The least entropy of a row and of a matrix: against mpmath, random rows and matrices, and the definition."""

from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from joma.arguments import InputError
from joma.theory.entropy_floor import (
    identity_entropy,
    identity_threshold,
    mean_floor,
    peak_entropy,
    row_floor,
    softmax_entropy,
    softmax_entropy_gradient,
)

SEEDS = st.integers(0, 2**32 - 1)


def exact_entropy(logits):
    """Return the entropy of softmax by its definition, in mpmath's working precision."""
    powers = [mp.exp(logit) for logit in logits]
    weights = [power / mp.fsum(powers) for power in powers]
    return -mp.fsum(weight * mp.log(weight) for weight in weights)


def exact_peaks(norm, keys, peaks):
    """Return k high logits of T of a centred norm, in mpmath's working precision."""
    norm, keys, peaks = mp.mpf(norm), mp.mpf(keys), mp.mpf(peaks)
    high, low = norm * mp.sqrt((keys - peaks) / (keys * peaks)), -norm * mp.sqrt(peaks / (keys * (keys - peaks)))
    return [high] * int(peaks) + [low] * int(keys - peaks)


@pytest.mark.parametrize("norm", [1e-6, 0.1, 1.0, 16.0, 300.0])
@pytest.mark.parametrize(("keys", "peaks"), [(2, 1), (3, 1), (3, 2), (10, 1), (10, 4), (50, 1)])
def test_the_entropy_of_peaks_is_that_of_their_softmax(norm, keys, peaks):
    with mp.workdps(400):
        logits = exact_peaks(norm, keys, peaks)
        assert float(mp.norm(logits)) == pytest.approx(norm)
        exact = float(exact_entropy(logits))
    assert float(peak_entropy(norm, keys, peaks)) == pytest.approx(exact, rel=1e-13)
    if peaks == 1:
        assert float(row_floor(norm, keys)) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("norm", [0.0, 1e-8, 0.5, 4.0, 40.0, 300.0, 740.0])
@pytest.mark.parametrize("keys", [1, 2, 3, 50, 10**6, 10**15])
def test_the_entropy_of_an_identity_is_that_of_one_logit_among_zeros(norm, keys):
    """ln(1 + x) + σ x/(1 + x) with x = (T−1) e^−σ, to full relative accuracy, down to the smallest floats."""
    with mp.workdps(60):
        x = (keys - 1) * mp.exp(-mp.mpf(norm))
        exact = float(mp.log1p(x) + norm * x / (1 + x))
    assert float(identity_entropy(norm, keys)) == pytest.approx(exact, rel=4e-15, abs=1e-320)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("keys", [1, 2, 10**6])
def test_an_endless_norm_leaves_no_entropy(keys):
    assert identity_entropy(np.inf, keys) == row_floor(np.inf, keys) == 0.0


def test_the_floor_of_many_keys_does_not_underflow_early():
    with mp.workdps(60):
        gap = 740 * mp.sqrt(mp.mpf(10**6) / (10**6 - 1))
        x = (10**6 - 1) * mp.exp(-gap)
        exact = float(mp.log1p(x) + gap * x / (1 + x))
    assert float(row_floor(740.0, 10**6)) == pytest.approx(exact, rel=1e-12)


def test_the_printed_form_of_the_bound():
    """As Zhai et al. state it, with β and σ √(T(T−1)), where it does not lose digits."""
    norm, keys = np.array([0.5, 1.0, 4.0]), 7
    beta = np.exp(-norm * np.sqrt(keys / (keys - 1)))
    total = 1 + (keys - 1) * beta
    printed = np.log(total) + norm * np.sqrt(keys * (keys - 1)) * beta / total
    np.testing.assert_allclose(row_floor(norm, keys), printed, rtol=1e-14)


@given(SEEDS, st.integers(2, 30), st.floats(-5, 4), st.floats(1, 6))
def test_no_row_is_lower(seed, keys, exponent, power):
    """Random rows of all kinds: flat ones, and ones with a few large logits."""
    draw = np.random.default_rng(seed).normal(size=(20, keys))
    logits = np.exp(exponent) * np.sign(draw) * np.abs(draw) ** power
    norms = np.linalg.norm(logits - logits.mean(axis=-1, keepdims=True), axis=-1)
    floor = row_floor(norms, keys)
    assert (softmax_entropy(logits) >= floor * (1 - 1e-9) - 1e-300).all()


@given(st.integers(1, 300), st.floats(0, 1e3))
def test_no_number_of_peaks_is_lower_and_the_floor_falls_with_the_norm(keys, norm):
    assert (peak_entropy(norm, keys, np.arange(1, keys + 1)) >= row_floor(norm, keys) * (1 - 1e-13)).all()
    assert row_floor(norm + 1.0, keys) <= row_floor(norm, keys) <= np.log(keys) * (1 + 1e-15)


def test_limits_of_the_floor():
    np.testing.assert_array_equal(row_floor([0.0, 3.0, np.inf], 1), 0.0)
    np.testing.assert_array_equal(row_floor(np.inf, [2, 5]), 0.0)
    np.testing.assert_allclose(row_floor(0.0, [2, 5]), np.log([2, 5]))
    assert row_floor(600.0, 5) > 0


@given(SEEDS, st.integers(2, 8))
def test_entropy_of_softmax_and_its_gradient(seed, keys):
    logits = 3 * np.random.default_rng(seed).normal(size=keys)
    with mp.workdps(50):
        assert float(softmax_entropy(logits)) == pytest.approx(float(exact_entropy(logits)), rel=1e-13)
    numerical: Any = approx_fprime(logits, lambda z: float(softmax_entropy(z)), 1e-7)
    np.testing.assert_allclose(softmax_entropy_gradient(logits), numerical, atol=1e-6)


def test_a_nearly_hot_row_keeps_its_digits():
    with mp.workdps(100):
        exact = float(exact_entropy([90.0, 0.0, 1.0]))
    assert float(softmax_entropy([90.0, 0.0, 1.0])) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("norm", [0.3, 2.0, 9.0])
@pytest.mark.parametrize("keys", [2, 3, 12])
def test_the_entropy_of_the_identity(norm, keys):
    np.testing.assert_allclose(softmax_entropy(norm * np.eye(keys)), identity_entropy(norm, keys), rtol=1e-13)


@given(SEEDS, st.integers(2, 12), st.floats(0.05, 12), st.booleans())
def test_no_matrix_has_a_lower_mean(seed, keys, norm, orthogonal):
    draw = np.random.default_rng(seed).normal(size=(keys, keys)) + 3 * np.eye(keys)
    left, _, right = np.linalg.svd(draw)
    logits = left @ right if orthogonal else draw / np.linalg.norm(draw, 2)
    assert softmax_entropy(norm * logits).mean() >= mean_floor(norm, keys) - 1e-12


@given(st.integers(2, 60), st.floats(0.01, 20))
def test_the_mean_floor_is_the_convex_envelope(keys, norm):
    """Against the lower hull of b(s) = B(√s, T) on a fine grid: least value on any chord above s = σ² (T−1)/T."""
    squares, at = np.linspace(0, norm**2, 4001), norm**2 * (keys - 1) / keys
    values = row_floor(np.sqrt(squares), keys)
    left, right = squares <= at, squares > at
    slopes = (values[right][None] - values[left][:, None]) / (squares[right][None] - squares[left][:, None])
    hull = (values[left][:, None] + slopes * (at - squares[left][:, None])).min()
    assert float(mean_floor(norm, keys)) == pytest.approx(float(min(hull, row_floor(np.sqrt(at), keys))), abs=3e-6)


@pytest.mark.parametrize("keys", [3, 5, 20, 200])
def test_the_identity_attains_the_floor_from_its_threshold_on(keys):
    threshold = identity_threshold(keys)
    above, below = threshold * np.array([1.0, 1.1, 3.0]), threshold * np.array([0.5, 0.9, 0.999])
    np.testing.assert_allclose(mean_floor(above, keys), identity_entropy(above, keys), rtol=1e-14)
    assert (mean_floor(below, keys) < identity_entropy(below, keys)).all()
    assert identity_threshold(2) == 0.0
    assert mean_floor(1.0, 1) == 0.0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: row_floor(-1.0, 3), "logit_norm"),
        (lambda: row_floor(1.0, 0), "keys"),
        (lambda: row_floor(1.0, 2.5), "keys"),
        (lambda: row_floor([1.0, 2.0], [1, 2, 3]), "logit_norm`, `keys"),
        (lambda: peak_entropy(1.0, 3, 4), "peaks"),
        (lambda: softmax_entropy(1.0), "logits"),
        (lambda: identity_entropy(-1.0, 3), "spectral_norm"),
        (lambda: mean_floor(-1.0, 3), "spectral_norm"),
        (lambda: identity_threshold(1), "keys"),
    ],
)
def test_bad_input_is_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()
