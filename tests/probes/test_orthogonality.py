"""Cosines against the whole matrix in NumPy, and against what is known for random and for orthogonal vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.kernels import cosines
from joma.probes.orthogonality import cosine_orthogonality


def by_matrix(x, centred):
    """Return the five fields from all cosines in NumPy."""
    x = x - x.mean(axis=0) if centred else x
    x = x[np.linalg.norm(x, axis=-1) > 0]
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    cosine = np.abs(unit @ unit.T)[~np.eye(len(x), dtype=bool)]
    square = (cosine**2).mean()
    return [cosine.mean(), np.sqrt(square), cosine.max(), x.shape[1] ** -0.5, square * x.shape[1]]


@given(st.integers(0, 2**32), st.integers(3, 40), st.integers(1, 12), st.booleans(), st.booleans())
def test_cosines_agree_with_the_whole_matrix(seed, count, dim, centred, blocked):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, count, dim)) + rng.choice([0.0, 2.0])
    if not centred:
        x[..., 2, :] = 0
    with pytest.MonkeyPatch.context() as patch:
        if blocked:
            patch.setattr(cosines, "_BLOCK_COSINES", 30)
        ours = cosine_orthogonality(torch.from_numpy(x), centred=centred)
    expected = np.array([[by_matrix(vectors, centred) for vectors in layer] for layer in x])
    for n, field in enumerate(ours):
        np.testing.assert_allclose(field.numpy(), expected[..., n], rtol=0, atol=2e-7 if n == 1 else 1e-12)


@given(st.integers(0, 2**32), st.integers(4, 64))
def test_random_directions_have_an_excess_of_about_one(seed, dim):
    x = torch.randn(400, dim, generator=torch.Generator().manual_seed(seed))
    ours = cosine_orthogonality(x)
    # The mean square has a relative deviation of about √2 √(2/n²): pairs are uncorrelated.
    assert ours.excess.item() == pytest.approx(1, abs=10 * 2 / 400)
    assert ours.random.item() == pytest.approx(dim**-0.5)


@given(st.integers(0, 2**32), st.integers(2, 30))
def test_orthogonal_vectors_have_no_cosine_and_twice_as_many_the_least_possible(seed, dim):
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    lengths = 0.1 + torch.rand(dim, 1, generator=generator, dtype=torch.float64)
    assert cosine_orthogonality(q * lengths).largest.item() < 1e-12
    twice = cosine_orthogonality(torch.cat([q, -q]))
    assert twice.excess.item() == pytest.approx(dim / (2 * dim - 1))
    assert twice.largest.item() == pytest.approx(1)


@pytest.mark.parametrize("x", [torch.ones(1, 4), torch.tensor([[0.0, 0.0], [1.0, 2.0]])])
def test_a_single_vector_has_no_cosines(x):
    fields = cosine_orthogonality(x)
    assert [bool(field.isnan()) for field in fields] == [True, True, True, False, True]


@given(st.integers(0, 999), st.sampled_from([torch.nan, torch.inf]), st.sampled_from([(), (2,), (2, 3)]), st.booleans())
def test_a_diverged_seed_is_nan_and_changes_no_other(seed, value, part, centred):
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed))
    before = cosine_orthogonality(x, centred=centred)
    x[(1, *part)] = value
    after = cosine_orthogonality(x, centred=centred)
    for name, values, expected in zip(after._fields, after, before, strict=True):
        assert name == "random" or values.isnan().tolist() == [False, True, False]
        assert torch.equal(values[::2], expected[::2])


@pytest.mark.parametrize("vectors", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.ones(0, 2)])
def test_bad_input_is_named(vectors):
    with pytest.raises(InputError, match="`vectors` must be"):
        cosine_orthogonality(vectors)
