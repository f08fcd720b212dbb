"""Searches for low entropy: they end at stationary points inside their sets, and meet the bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.entropy_floor import identity_entropy, mean_floor, row_floor, softmax_entropy, softmax_entropy_gradient
from joma.theory.entropy_search import lowest_matrix, lowest_row


@pytest.mark.parametrize("keys", [2, 4, 11])
@pytest.mark.parametrize("norm", [0.2, 1.0, 5.0, 20.0])
def test_the_lowest_row_has_the_entropy_of_the_floor(norm, keys):
    rows = lowest_row(norm, keys, starts=6, generator=np.random.default_rng(0))
    np.testing.assert_allclose(np.linalg.norm(rows.logits, axis=-1), norm)
    np.testing.assert_allclose(rows.logits.mean(axis=-1), 0.0, atol=1e-12 * norm)
    np.testing.assert_allclose(rows.entropy, softmax_entropy(rows.logits), rtol=1e-14)
    assert rows.entropy.min() == pytest.approx(float(row_floor(norm, keys)), rel=1e-8)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.floats(0.3, 6))
def test_matrices_stay_in_the_ball_and_end_where_the_gradient_points_out_of_it(seed, keys, norm):
    matrices = lowest_matrix(norm, keys, starts=4, generator=np.random.default_rng(seed))
    assert matrices.converged.all()
    assert np.linalg.norm(matrices.logits, ord=2, axis=(-2, -1)).max() <= norm * (1 + 1e-12)
    np.testing.assert_allclose(matrices.entropy, softmax_entropy(matrices.logits).mean(axis=-1), rtol=1e-13)
    assert matrices.entropy.min() >= mean_floor(norm, keys) - 1e-9
    for logits in matrices.logits:  # no matrix of the ball lies downhill: ⟨∇, B − A⟩ ≥ 0 for the steepest B
        gradient = softmax_entropy_gradient(logits) / keys
        steepest = -norm * np.linalg.norm(gradient, ord="nuc")
        assert steepest - (gradient * logits).sum() >= -1e-4 * norm


def test_searches_find_the_identity():
    matrices = lowest_matrix(3.0, 4, starts=16, generator=np.random.default_rng(1))
    best = matrices.logits[matrices.entropy.argmin()]
    assert matrices.entropy.min() == pytest.approx(float(identity_entropy(3.0, 4)), rel=1e-9)
    centred = best - best.mean(axis=-1, keepdims=True)
    assert len({int(column) for column in centred.argmax(axis=-1)}) == 4  # a permutation of the identity
    np.testing.assert_allclose(centred.max(axis=-1), 3.0 * 3 / 4, atol=1e-4)


def test_the_same_generator_gives_the_same_searches():
    first, second = (lowest_matrix(1.0, 3, starts=2, generator=np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(first.logits, second.logits)
    few = lowest_matrix(1.0, 3, starts=2, generator=np.random.default_rng(5), iterations=1)
    assert not few.converged.any()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda generator: lowest_row(0.0, 3, starts=1, generator=generator), "logit_norm"),
        (lambda generator: lowest_row(1.0, 1, starts=1, generator=generator), "keys"),
        (lambda generator: lowest_row(1.0, 3, starts=0, generator=generator), "starts"),
        (lambda generator: lowest_matrix(0.0, 3, starts=1, generator=generator), "spectral_norm"),
        (lambda generator: lowest_matrix(1.0, 3, starts=1, generator=generator, iterations=0), "iterations"),
    ],
)
def test_bad_input_is_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call(np.random.default_rng(0))
