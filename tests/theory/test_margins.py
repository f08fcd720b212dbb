"""Hard-margin support vector machines: optimality conditions, bounds by duality, and other solvers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from joma.arguments import InputError
from joma.theory.margins import (
    enforced_differences,
    margin_multipliers,
    margin_shares,
    max_margin,
    nuclear_max_margin,
    nuclear_norm,
    token_differences,
)

seeds = st.integers(0, 2**32 - 1)
sizes = {"constraints": st.integers(1, 30), "dim": st.integers(1, 12)}


def drawn(seed, constraints, dim, shift=1.0):
    """Gaussian differences, shifted to one side: some sets of them have a margin, some have none."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(constraints, dim)) + shift * rng.normal(size=dim)


def separable(rows, bound=1e4):
    """Whether a p in a box has all margins, by linear programming."""
    result = linprog(np.zeros(rows.shape[1]), A_ub=-rows, b_ub=-np.ones(len(rows)), bounds=(-bound, bound))
    return result.status == 0


@given(seed=seeds, **sizes)
def test_the_vector_and_its_multipliers_are_optimal(seed, constraints, dim):
    rows = drawn(seed, constraints, dim)
    assume(separable(rows))
    p, multipliers = max_margin(rows), margin_multipliers(rows)
    scale = float(np.linalg.norm(p))
    assert (rows @ p).min() == pytest.approx(1.0, abs=1e-8)
    assert multipliers.min() >= 0.0
    np.testing.assert_allclose(rows.T @ multipliers, p, rtol=0, atol=1e-8 * scale)
    assert multipliers.sum() == pytest.approx(scale**2, rel=1e-8)
    np.testing.assert_allclose(multipliers * (rows @ p - 1), 0, atol=1e-8 * scale**2)


@given(seed=seeds, **sizes)
def test_it_is_refused_exactly_where_a_linear_program_finds_no_margin(seed, constraints, dim):
    rows = drawn(seed, constraints, dim, shift=0.7)
    if separable(rows):
        assert (rows @ max_margin(rows)).min() > 0.999
    else:
        with pytest.raises(InputError, match="select other tokens"):
            max_margin(rows)
        with pytest.raises(InputError, match="raise their dimension"):
            margin_multipliers(rows)


@given(seed=seeds, constraints=st.integers(1, 6), dim=st.integers(6, 9))
def test_a_general_solver_finds_the_same_vector(seed, constraints, dim):
    rows = drawn(seed, constraints, dim)
    options = {"ftol": 1e-14, "maxiter": 500}
    constraint = {"type": "ineq", "fun": lambda p: rows @ p - 1, "jac": lambda _: rows}
    start = np.linalg.lstsq(rows, np.full(constraints, 2.0), rcond=None)[0]
    result = minimize(lambda p: p @ p / 2, start, jac=lambda p: p, constraints=constraint, options=options)
    np.testing.assert_allclose(max_margin(rows), result.x, atol=1e-5 * float(np.linalg.norm(result.x)))


@given(seed=seeds, exponent=st.integers(-100, 100), repeats=st.integers(1, 3), long=st.floats(1.0, 1e6))
def test_scales_repetitions_and_longer_differences_change_nothing_else(seed, exponent, repeats, long):
    rows = drawn(seed, 5, 8)
    p = max_margin(rows)
    np.testing.assert_allclose(
        max_margin(np.repeat(rows, repeats, axis=0)), p, rtol=0, atol=1e-8 * float(np.linalg.norm(p))
    )
    np.testing.assert_allclose(max_margin(rows * 2.0**exponent) * 2.0**exponent, p, rtol=1e-12)
    longer = np.vstack([rows, long * 2 * p / (p @ p)])  # has the margin 2 · long already
    np.testing.assert_allclose(max_margin(longer), p, rtol=0, atol=1e-8 * float(np.linalg.norm(p)))


@given(seed=seeds, dim=st.integers(1, 6))
def test_one_difference_gives_its_inverse(seed, dim):
    row = drawn(seed, 1, dim)
    np.testing.assert_allclose(max_margin(row), row[0] / (row[0] @ row[0]), rtol=1e-12)


@given(angle=st.floats(0.01, 1.57))
def test_two_differences_in_the_plane_give_the_bisector(angle):
    rows = np.array([[np.cos(angle), np.sin(angle)], [np.cos(angle), -np.sin(angle)]])
    np.testing.assert_allclose(max_margin(rows), [1 / np.cos(angle), 0.0], rtol=1e-9, atol=1e-9 / np.cos(angle))


@pytest.mark.parametrize(
    "rows", [[[1.0, 0.0], [-1.0, 0.0]], [[0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]], [[1.0], [1e-300], [-1e-300]]]
)
def test_opposite_and_zero_differences_have_no_margin(rows):
    with pytest.raises(InputError, match="`differences` must be on one side of a hyperplane"):
        max_margin(rows)


@pytest.mark.parametrize("rows", [[1.0, 2.0], [[np.nan]], [], [[True]], [[1e-310]], [[1.5e308, 1.5e308]]])
def test_bad_differences_are_refused_by_name(rows):
    with pytest.raises(InputError, match="`differences` must"):
        max_margin(rows)


def outer_differences(seed, sequences=3, tokens=4, dim=8):
    """(Selected token less another) zᵀ of random sequences."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(sequences, tokens, dim)), rng.normal(size=(sequences, dim))
    x, z = (array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (x, z))
    return np.einsum("itd,ie->itde", x[:, :1] - x[:, 1:], z).reshape(-1, dim, dim)


@given(seed=seeds, sequences=st.integers(1, 4), tokens=st.integers(2, 5), dim=st.integers(4, 8))
def test_the_nuclear_solution_attains_its_lower_bound(seed, sequences, tokens, dim):
    differences = outer_differences(seed, sequences, tokens, dim)
    solution = nuclear_max_margin(differences)
    assert np.einsum("cij,ij->c", differences, solution.w).min() == pytest.approx(1.0, abs=1e-12)
    assert solution.multipliers.min() >= 0.0
    combined = np.einsum("c,cij->ij", solution.multipliers, differences)
    assert np.linalg.norm(combined, ord=2) == pytest.approx(1.0, abs=1e-12)
    assert solution.norm == pytest.approx(np.linalg.svd(solution.w, compute_uv=False).sum(), abs=1e-12)
    assert solution.norm * (1 - 1e-6) <= solution.bound <= solution.norm * (1 + 1e-12)


@given(seed=seeds)
def test_no_other_matrix_with_all_margins_has_a_smaller_nuclear_norm(seed):
    differences, rng = outer_differences(seed), np.random.default_rng(seed)
    least = nuclear_max_margin(differences).norm
    for scale in (1e-3, 0.1, 1.0):
        other = nuclear_max_margin(differences).w + scale * rng.normal(size=(8, 8))
        margin = np.einsum("cij,ij->c", differences, other).min()
        if margin > 0:
            assert nuclear_norm(other / margin) >= least * (1 - 1e-7)
    frobenius = max_margin(differences.reshape(-1, 64)).reshape(8, 8)
    assert nuclear_norm(frobenius) >= least * (1 - 1e-7)


@given(seed=seeds, sequences=st.integers(1, 4))
def test_with_one_other_token_and_orthonormal_queries_each_sequence_has_its_own_direction(seed, sequences):
    """With orthonormal z_i the columns of W decouple. If the differences are orthonormal too, W = Σ d_i z_iᵀ."""
    rng = np.random.default_rng(seed)
    basis, other = (np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(2))
    differences = np.einsum("di,ei->ide", basis[:, :sequences], other[:, :sequences])
    solution = nuclear_max_margin(differences)
    np.testing.assert_allclose(solution.w, differences.sum(axis=0), atol=1e-6)
    assert solution.norm == pytest.approx(sequences, rel=1e-7)


@given(seed=seeds, exponent=st.integers(-60, 60))
def test_the_nuclear_solution_scales_inversely_and_turns_with_its_differences(seed, exponent):
    differences, rng = outer_differences(seed), np.random.default_rng(seed)
    solution = nuclear_max_margin(differences)
    scaled = nuclear_max_margin(differences * 2.0**exponent)
    assert scaled.norm * 2.0**exponent == pytest.approx(solution.norm, rel=1e-6)
    turn, other = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
    turned = nuclear_max_margin(turn @ differences @ other.T)
    assert turned.norm == pytest.approx(solution.norm, rel=1e-6)


def test_margin_shares_are_one_for_the_solutions_and_less_for_others():
    differences = outer_differences(3)
    least, nuclear = max_margin(differences.reshape(-1, 64)).reshape(8, 8), nuclear_max_margin(differences).w
    assert margin_shares(3 * least, differences)[0] == pytest.approx(1.0, abs=1e-9)
    assert margin_shares(1e-9 * nuclear, differences)[1] == pytest.approx(1.0, abs=1e-9)
    assert margin_shares(nuclear, differences)[0] < 0.99
    assert margin_shares(least, differences)[1] < 0.99
    assert margin_shares(-least, differences)[0] < 0.0


@given(seed=seeds, sequences=st.integers(1, 3), tokens=st.integers(2, 4))
def test_token_differences_are_those_of_a_loop(seed, sequences, tokens):
    rng = np.random.default_rng(seed)
    x, selected = rng.normal(size=(sequences, tokens, 3)), rng.integers(tokens, size=sequences)
    expected = [x[i, selected[i]] - x[i, t] for i in range(sequences) for t in range(tokens) if t != selected[i]]
    np.testing.assert_array_equal(token_differences(x, selected), expected)


@given(seed=seeds, sequences=st.integers(1, 3), tokens=st.integers(2, 5))
def test_enforced_differences_are_those_to_lower_scores(seed, sequences, tokens):
    rng = np.random.default_rng(seed)
    x, g = rng.normal(size=(sequences, tokens, 3)), rng.integers(3, size=(sequences, tokens)) + 0.0
    g[0, 0], g[0, 1], selected = 3.0, 0.0, np.append(0, rng.integers(tokens, size=sequences - 1))
    expected = [
        x[i, selected[i]] - x[i, t] for i in range(sequences) for t in range(tokens) if g[i, t] < g[i, selected[i]]
    ]
    np.testing.assert_array_equal(enforced_differences(x, g, selected), expected)


@given(seed=seeds)
def test_without_ties_a_selection_that_lasts_has_the_solution_of_all_margins(seed):
    """If tokens of higher score have margins above 1 anyway, to leave them out changes nothing, and conversely."""
    rng = np.random.default_rng(seed)
    x, g, selected = rng.normal(size=(3, 4, 12)), rng.uniform(size=(3, 4)), rng.integers(4, size=3)
    assume((g[np.arange(3), selected] > g.min(axis=1)).any())
    enforced = max_margin(enforced_differences(x, g, selected))
    margins = token_differences(x, selected) @ enforced
    lasts, every = margins.min() > 1 - 1e-9, max_margin(token_differences(x, selected))
    assert lasts == np.allclose(enforced, every, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: enforced_differences([[[1.0], [0.0]]], [[1.0]], [0]), "g"),
        (lambda: enforced_differences([[[1.0], [0.0]]], [[1.0, 0.0]], [1]), "selected"),
        (lambda: enforced_differences([[[1.0], [0.0]]], [[1.0, 0.0]], [2]), "selected"),
        (lambda: nuclear_max_margin([[1.0]]), "differences"),
        (lambda: nuclear_max_margin([[[1.0]], [[-1.0]]]), "differences"),
        (lambda: nuclear_max_margin([[[0.0]]]), "differences"),
        (lambda: nuclear_norm([1.0]), "w"),
        (lambda: margin_shares([[1.0, 0.0]], [[[1.0]]]), "w"),
        (lambda: margin_shares([[0.0]], [[[1.0]]]), "w"),
        (lambda: token_differences([[[1.0]]], [0]), "x"),
        (lambda: token_differences([[[1.0], [0.0]]], [2]), "selected"),
        (lambda: token_differences([[[1.0], [0.0]]], [0, 1]), "selected"),
    ],
)
def test_bad_matrices_and_selections_are_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("power", [-290, -160, 160, 290])
def test_margins_do_not_depend_on_the_unit_of_the_differences(power):
    """Also where squares of the differences overflow or vanish."""
    rows = np.random.default_rng(0).normal(size=(3, 4)) + 2.0
    np.testing.assert_allclose(max_margin(rows * 10.0**power) * 10.0**power, max_margin(rows), rtol=1e-12)
    matrices = rows.reshape(3, 2, 2)
    scaled, plain = nuclear_max_margin(matrices * 10.0**power), nuclear_max_margin(matrices)
    np.testing.assert_allclose(scaled.w * 10.0**power, plain.w, rtol=1e-6, atol=1e-6)
    assert scaled.bound * 10.0**power == pytest.approx(scaled.norm * 10.0**power, rel=1e-6)


@pytest.mark.parametrize("solve", [max_margin, lambda rows: nuclear_max_margin([[row] for row in rows])])
def test_differences_of_incomparable_lengths_are_refused_as_such(solve):
    """They are separable: the refusal does not say that they are not, and no answer without a margin comes back."""
    with pytest.raises(InputError, match="`differences` must be of lengths within a factor of"):
        solve([[1e-200, 0.0], [0.0, 1e200]])
