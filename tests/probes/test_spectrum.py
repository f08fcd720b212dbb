"""The ranks of hidden states against singular values in float64, closed forms, and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import joma
from joma.arguments import InputError
from joma.probes import spectrum
from joma.probes.spectrum import participation_ratio, state_ranks


def by_singular_values(x):
    """Return the stable rank, and the participation ratio of the covariance, of [vector, dim]."""
    x = x.double()
    s, centred = torch.linalg.svdvals(x), torch.linalg.svdvals(x - x.mean(dim=0)).square()
    return (s.square().sum() / s[0].square()).item(), (centred.sum().square() / centred.square().sum()).item()


def orthogonal(rows, columns, generator):
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))[0]


@st.composite
def states(draw, sizes):
    """Vectors whose singular values are flat, falling, or one above the others, with or without a large mean."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size, dim = draw(sizes), draw(sizes)
    rank = min(size, dim)
    kind = draw(st.sampled_from(["flat", "linear", "falling", "one above", "random"]))
    if kind == "random":
        x = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    else:
        values = {
            "flat": torch.ones(rank),
            "linear": torch.linspace(1, 0.1, rank),
            "falling": torch.logspace(0, -6, rank),
        }
        values["one above"] = torch.cat([torch.tensor([1.01]), torch.ones(rank - 1)])
        x = (orthogonal(size, rank, generator) * values[kind].double()) @ orthogonal(dim, rank, generator).mT
    mean = draw(st.sampled_from([0.0, 1.0, 30.0])) * torch.randn(dim, generator=generator, dtype=torch.float64)
    x = (x + mean * x.square().mean().sqrt()) * draw(st.sampled_from([1e-25, 1.0, 1e25]))
    return x.to(draw(st.sampled_from([torch.float32, torch.float64])))


@settings(max_examples=60)
@given(states(st.integers(2, 40)))
def test_few_vectors_agree_with_singular_values(x):
    stable, participation = by_singular_values(x)
    ranks = state_ranks(x)
    assert ranks.stable.item() == pytest.approx(stable, rel=2e-6)
    assert ranks.participation.item() == pytest.approx(participation, rel=2e-5)
    assert participation_ratio(x).item() == ranks.participation.item()


@settings(max_examples=15)
@given(states(st.integers(257, 400)))
def test_many_vectors_agree_with_singular_values(x):
    stable, participation = by_singular_values(x)
    ranks = state_ranks(x)
    assert ranks.stable.item() == pytest.approx(stable, rel=1e-5)
    assert ranks.participation.item() == pytest.approx(participation, rel=2e-5)


@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 2**32))
def test_closed_forms(dim, rank, seed):
    """±√(variance) on each axis has these variances; one direction fills one, orthogonal directions fill all."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(rank, dim)
    variances = 0.1 + torch.rand(rank, generator=generator, dtype=torch.float64)
    axes = torch.cat([variances.sqrt().diag(), torch.zeros(rank, dim - rank, dtype=torch.float64)], dim=1)
    turned = torch.cat([axes, -axes]) @ orthogonal(dim, dim, generator)
    expected = (variances.sum().square() / variances.square().sum()).item()
    assert participation_ratio(turned).item() == pytest.approx(expected)
    assert participation_ratio(turned + 3.0).item() == pytest.approx(expected)
    assert state_ranks(turned).stable.item() == pytest.approx((variances.sum() / variances.max()).item())
    assert participation_ratio(torch.eye(dim), centred=False).item() == pytest.approx(dim)
    assert participation_ratio(torch.eye(dim)).item() == pytest.approx(dim - 1)  # the mean takes one direction
    line = torch.randn(7, 1, generator=generator) * torch.randn(1, dim, generator=generator)
    assert participation_ratio(line).item() == pytest.approx(1, rel=1e-6)
    assert state_ranks(line).stable.item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("size", "dim"), [(40, 25), (25, 40), (600, 8)])
def test_random_vectors_have_the_expected_ratio(size, dim):
    """With n = size − 1, the scatter matrix S has E (tr S)² = nd (nd + 2) and E tr S² = nd (n + d + 1)."""
    x = torch.randn(4000, size, dim, generator=torch.Generator().manual_seed(0))
    ratios, n = participation_ratio(x), size - 1
    expected = (n * dim + 2) / (n + dim + 1)
    deviation = ratios.std().item() / expected
    # A mean of ratios differs from the ratio of means by about the square of the relative deviation.
    allowed = 5 * deviation / 4000**0.5 + deviation**2
    assert ratios.mean().item() == pytest.approx(expected, rel=allowed)
    assert allowed < 0.01


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9)), min_size=3, max_size=8))
def test_a_mean_a_million_times_the_spread_costs_few_digits(rows):
    """Whole numbers above a million, which float32 holds exactly, against exact fractions."""
    exact = [[Fraction(value + 2**22) for value in row] for row in rows]
    means = [sum(column) / len(exact) for column in zip(*exact, strict=True)]
    centred = [[value - mean for value, mean in zip(row, means, strict=True)] for row in exact]
    products = [[sum(row[i] * row[j] for row in centred) for j in range(3)] for i in range(3)]
    square = sum(value**2 for row in products for value in row)
    result = participation_ratio(torch.tensor(rows, dtype=torch.float32) + 2**22).item()
    if square == 0:
        assert np.isnan(result)
    else:
        assert result == pytest.approx(float(sum(products[i][i] for i in range(3)) ** 2 / square), rel=1e-4)


def test_the_ratio_agrees_with_eigenvalues_of_fifty_digits():
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.logspace(0, -3, 5)
    with mpmath.workdps(50):
        matrix = mpmath.matrix(x.tolist())
        means = [sum(matrix[i, j] for i in range(12)) / 12 for j in range(5)]
        centred = mpmath.matrix(12, 5)
        for i in range(12):
            for j in range(5):
                centred[i, j] = matrix[i, j] - means[j]
        values = mpmath.eigsy(centred.T * centred, eigvals_only=True)
        expected = float(sum(values) ** 2 / sum(value**2 for value in values))
    assert participation_ratio(x).item() == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 999), st.integers(2, 30), st.integers(2, 30), st.sampled_from([0.0, torch.nan, 1e30]))
def test_rows_that_do_not_count_change_nothing(seed, size, dim, value):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, size, dim, generator=generator)
    rows = torch.rand(2, size, generator=generator) < 0.6
    rows[:, :2] = True
    ranks = state_ranks(x.masked_fill(~rows[..., None], value), rows)
    for index in range(2):
        alone = state_ranks(x[index, rows[index]])
        torch.testing.assert_close(ranks.stable[index], alone.stable, rtol=2e-6, atol=0)
        torch.testing.assert_close(ranks.participation[index], alone.participation, rtol=2e-5, atol=0)


@pytest.mark.parametrize("shape", [(50, 30), (30, 50)])
def test_parts_give_what_the_whole_gives(shape, monkeypatch):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) + 1
    whole = state_ranks(x)
    monkeypatch.setattr(spectrum, "_MAX_COPIED", 3 * 30 * 7)
    for values, expected in zip(state_ranks(x), whole, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_in_float32_and_autocast_has_no_effect(dtype):
    x = (torch.randn(60, 40, generator=torch.Generator().manual_seed(0)) + 2).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ranks = state_ranks(x)
    stable, participation = by_singular_values(x)
    assert ranks.stable.item() == pytest.approx(stable, rel=1e-6)
    assert ranks.participation.item() == pytest.approx(participation, rel=1e-6)


@given(st.integers(0, 999), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.booleans())
def test_a_diverged_seed_is_nan_and_changes_no_other(seed, value, everywhere):
    x = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(seed))
    before = state_ranks(x)
    x[(1,) if everywhere else (1, 2, 3)] = value
    for values, expected in zip(state_ranks(x), before, strict=True):
        assert values.isnan().tolist() == [False, True, False]
        assert values[::2].equal(expected[::2])


def test_states_without_spread_have_no_participation_ratio():
    assert participation_ratio(torch.full((3, 4), 0.1)).isnan()
    zeros = state_ranks(torch.zeros(3, 4))
    assert zeros.stable.isnan()
    assert zeros.participation.isnan()
    none = state_ranks(torch.ones(3, 4), torch.zeros(3, dtype=torch.bool))
    assert none.stable.isnan()
    assert none.participation.isnan()
    assert state_ranks(torch.ones(1, 4)).stable.item() == pytest.approx(1)


def test_lists_and_arrays_are_taken_and_the_name_is_public():
    rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    assert joma.participation_ratio(rows).equal(participation_ratio(torch.tensor(rows)))
    assert joma.participation_ratio is participation_ratio


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.ones(0, 2)])
def test_bad_states_are_named(bad):
    for function in (participation_ratio, state_ranks):
        with pytest.raises(InputError, match="`states` must be"):
            function(bad)


def test_bad_rows_are_named():
    with pytest.raises(InputError, match="`rows` must be"):
        state_ranks(torch.ones(2, 2), torch.ones(3, dtype=torch.bool))
