"""The stable rank against singular values in float64, for spectra of every kind, flat ones among them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import joma
from joma.arguments import InputError
from joma.probes import rank
from joma.probes.rank import spectral_norm, stable_rank

SPECTRA = {
    "flat": torch.ones,
    "one above": lambda n: torch.cat([torch.tensor([1.001]), torch.ones(n - 1)]),
    "two above": lambda n: torch.cat([torch.tensor([1.0, 0.9999]), torch.full((n - 2,), 0.5)]),
    "linear": lambda n: torch.linspace(1, 0, n),
    "decaying": lambda n: torch.logspace(0, -8, n),
    "rank one": lambda n: (torch.arange(n) < 1).float(),
    "rank three": lambda n: (torch.arange(n) < 3).float(),
}


@st.composite
def matrices(draw, sizes):
    """A matrix of given singular values, or a random one, wide or tall."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows, columns = draw(sizes), draw(sizes)
    name = draw(st.sampled_from([*SPECTRA, "random"]))
    if name == "random":
        w = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    else:
        n = min(rows, columns)
        left = torch.linalg.qr(torch.randn(rows, n, generator=generator, dtype=torch.float64))[0]
        right = torch.linalg.qr(torch.randn(columns, n, generator=generator, dtype=torch.float64))[0]
        w = (left * SPECTRA[name](n).double()) @ right.mT
    return (w * draw(st.sampled_from([1e-6, 1.0, 1e6]))).to(draw(st.sampled_from([torch.float32, torch.float64])))


def by_singular_values(w):
    """Return the stable rank and the spectral norm."""
    s = torch.linalg.svdvals(w.double())
    return s.square().sum(-1) / s[..., 0].square(), s[..., 0]


def assert_agrees(w):
    expected, norm = by_singular_values(w)
    bounds = spectral_norm(w)
    assert bool(((stable_rank(w) / expected - 1).abs() <= 1e-5).all())  # far within the bound of 2e-3
    rounding = 2e-6
    assert bool((bounds.lower <= norm * (1 + rounding)).all())
    assert bool((bounds.upper >= norm * (1 - rounding)).all())
    assert bool(((bounds.upper / bounds.lower).square() - 1 <= 2e-3 + 1e-9).all())


@settings(max_examples=60)
@given(matrices(st.integers(2, 60)))
def test_small_matrices_agree_with_singular_values(w):
    assert_agrees(w)


@settings(max_examples=15)
@given(matrices(st.integers(257, 420)))
def test_large_matrices_agree_with_singular_values(w):
    assert_agrees(w)


@settings(max_examples=15)
@given(matrices(st.integers(257, 420)))
def test_the_bounds_that_a_gpu_computes_in_float32_agree_with_singular_values(w):
    w = (w / w.abs().max()).float()
    norm = torch.linalg.svdvals(w.double())[0]
    size = torch.linalg.vector_norm(w)[None, None]
    lower, upper = (float(bound.sqrt() * size) for bound in rank._medium_bounds(w, size))
    assert lower == pytest.approx(float(norm), rel=5e-6)
    assert upper >= norm * (1 - 2e-6)
    assert (upper / lower) ** 2 - 1 <= 2e-4


@settings(max_examples=15)
@given(matrices(st.integers(2, 300)), st.booleans())
def test_the_largest_eigenvalue_of_a_gram_matrix_is_that_of_lapack(w, batched):
    w = (w / w.abs().max()).float()
    gram = w @ w.mT
    true = torch.linalg.eigvalsh(gram.double())[..., -1]
    gram = gram.expand(2, -1, -1) if batched else gram
    torch.testing.assert_close(rank._squared_gram_norm(gram), true.expand(gram.shape[:-2]), rtol=2e-5, atol=0)
    assert rank._squared_gram_norm(0 * gram).eq(0).all()
    assert rank._squared_gram_norm(torch.nan * gram).isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(700, 900), (3, 300, 280), (3100, 3200), (40, 60)])
def test_a_gpu_agrees_with_singular_values(shape):
    assert_agrees(torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda())


@pytest.mark.parametrize("shape", [(2, 3, 20, 30), (3, 300, 280)])
def test_leading_axes_are_a_batch(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 5, shape[-1])
    assert_agrees(w)
    apart = torch.stack([stable_rank(matrix) for matrix in w.flatten(0, -3)]).view(shape[:-2])
    torch.testing.assert_close(stable_rank(w), apart, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_in_float32(dtype):
    w = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_agrees(w)


def test_enough_fixed_steps_give_the_same():
    w = torch.randn(2, 300, 310, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stable_rank(w, iterations=16), by_singular_values(w)[0], rtol=1e-5, atol=0)
    few = spectral_norm(w, iterations=1)
    norm = by_singular_values(w)[1]
    assert bool((few.lower < 0.99 * norm).all())
    assert bool((few.upper > norm).all())


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_the_bounds_hold_after_any_number_of_steps(seed, steps):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(260, 260, generator=generator) * torch.rand(260, generator=generator)
    bounds = spectral_norm(w, iterations=steps)
    norm = by_singular_values(w)[1]
    assert bool(bounds.lower <= norm * (1 + 1e-6))
    assert bool(bounds.upper >= norm * (1 - 1e-6))


@pytest.mark.parametrize("shape", [(30, 40), (260, 300)])
@given(exponent=st.integers(-145, 122))
@settings(max_examples=25)
def test_the_scale_of_a_matrix_does_not_change_its_rank(shape, exponent):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    tiny = torch.ldexp(w, torch.tensor(exponent)).float()  # below 2^-126 some digits are lost
    expected, norm = by_singular_values(tiny.double() * 2.0**-exponent)
    torch.testing.assert_close(stable_rank(tiny), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(spectral_norm(tiny).lower * 2.0**-exponent, norm, rtol=1e-5, atol=0)
    wide = torch.ldexp(w, torch.tensor(7 * exponent))
    torch.testing.assert_close(stable_rank(wide), by_singular_values(w)[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [4, 270])
def test_the_default_dtype_and_the_size_of_other_matrices_change_nothing(size):
    w = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
    expected = stable_rank(w)
    torch.testing.assert_close(stable_rank(w * torch.tensor([1e-30, 1.0])[:, None, None]), expected, rtol=1e-5, atol=0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert stable_rank(w).equal(expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [4, 270])
def test_zeros_have_no_stable_rank_and_nan_changes_no_other_matrix(size):
    w = torch.randn(3, size, size, generator=torch.Generator().manual_seed(0))
    good = stable_rank(w[2])
    w[0], w[1, 0, 0] = 0, torch.nan
    ranks = stable_rank(w)
    assert ranks.isnan().tolist() == [True, True, False]
    torch.testing.assert_close(ranks[2], good, rtol=1e-6, atol=0)
    assert spectral_norm(w).upper[0] == 0


@pytest.mark.parametrize("size", [4, 270])
@given(seed=st.integers(0, 99), value=st.sampled_from([torch.nan, torch.inf, -torch.inf]), everywhere=st.booleans())
@settings(max_examples=10)
def test_a_diverged_seed_is_nan_and_changes_no_other(size, seed, value, everywhere):
    w = torch.randn(3, size, size, generator=torch.Generator().manual_seed(seed))
    before = stable_rank(w), *spectral_norm(w)
    w[(1,) if everywhere else (1, 2, 3)] = value
    for values, expected in zip((stable_rank(w), *spectral_norm(w)), before, strict=True):
        assert values.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(values[::2], expected[::2], rtol=2e-3, atol=0)  # steps depend on the slowest matrix


def test_the_rank_is_deterministic_and_leaves_the_global_generator_alone():
    w = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    assert torch.equal(joma.stable_rank(w), rank.stable_rank(w))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"weight": torch.ones(3)}, "weight"),
        ({"weight": torch.ones(3, 3, dtype=torch.int64)}, "weight"),
        ({"weight": torch.ones(0, 3)}, "weight"),
        ({"tolerance": 1e-6}, "tolerance"),
        ({"iterations": 0}, "iterations"),
    ],
)
def test_bad_input_is_named(change, name):
    options = {"weight": torch.ones(3, 3), **change}
    with pytest.raises(InputError, match=f"`{name}` must be"):
        stable_rank(options.pop("weight"), **options)


def test_autocast_has_no_effect():
    weight = torch.randn(300, 320, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        inside = stable_rank(weight)
    assert inside.equal(stable_rank(weight))
