"""Theorem 5 against exact sums over all states of a tree (float64 and rational) and against mpmath near ρ = ρ_0 = 1."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.hierarchy import (
    common_depth,
    cooccurrence,
    cooccurrence_limit,
    cooccurrence_matrix,
    enumerate_cooccurrence,
    marginals,
    root_cooccurrence,
)

# Powers of two and their multiples are exact, so that the rational oracle gets the very same numbers.
eighths = st.integers(-8, 8).map(lambda number: number / 8)
chances = st.floats(0, 1)
biases = st.floats(-1, 0.99)  # below 1, or a token may never occur


@st.composite
def level_trees(draw, max_tokens=12, max_nodes=20):
    """Parents of a tree with all leaves at one depth, varying in branching."""
    parents, level = [-1], [0]
    for _ in range(draw(st.integers(1, 5))):
        below = []
        for place, node in enumerate(level):
            rest = len(level) - place - 1  # each later node of this level still needs a child
            room = min(max_nodes - len(parents), max_tokens - len(below)) - rest
            if room < 1:
                return np.array(parents)[: level[-1] + 1]
            for _ in range(draw(st.integers(1, min(3, room)))):
                below.append(len(parents))
                parents.append(node)
        level = below
    return np.array(parents)


@st.composite
def any_trees(draw, max_nodes=14):
    """Parents of any tree at all: leaves at any depth."""
    nodes = draw(st.integers(2, max_nodes))
    return np.array([-1, 0, *(draw(st.integers(0, node - 1)) for node in range(2, nodes))])


@st.composite
def dressed(draw, trees, bias=biases, rho=chances):
    """A tree with class probabilities, biases of the root's children and ρ."""
    parents = draw(trees)
    classes = draw(st.integers(1, 3))
    weight = np.array(draw(st.lists(st.integers(1, 8), min_size=classes, max_size=classes)), dtype=float)
    rows = int((parents == 0).sum())
    table = draw(st.lists(bias, min_size=rows * classes, max_size=rows * classes))
    return parents, weight / weight.sum(), np.array(table).reshape(rows, classes), draw(rho)


def rational(parents, p0, p_child, rho):
    """P[y_l = 1 and y_m = 1] as Fractions, one state at a time; the diagonal holds the marginals."""
    nodes, children = range(1, len(parents)), list(np.flatnonzero(np.asarray(parents) == 0))
    leaves = sorted(set(nodes) - set(map(int, parents)))
    both = [[Fraction(0)] * len(leaves) for _ in leaves]
    total = sum(Fraction(float(weight)) for weight in p0)
    for label, *bits in product(range(len(p0)), *[(0, 1)] * len(nodes)):
        chance = Fraction(float(p0[label])) / total
        for node in nodes:
            if parents[node] == 0:
                bias = Fraction(float(p_child[children.index(node)][label])) * (1 - 2 * bits[node - 1])
            else:
                bias = Fraction(rho) * (1 if bits[node - 1] == bits[parents[node] - 1] else -1)
            chance *= (1 + bias) / 2
        for row, leaf in enumerate(leaves):
            for column, other in enumerate(leaves):
                both[row][column] += chance * bits[leaf - 1] * bits[other - 1]
    return both


@settings(max_examples=150)
@given(dressed(level_trees()))
def test_matrix_is_the_enumeration_of_the_theorems_trees(tree):
    np.testing.assert_allclose(cooccurrence_matrix(*tree), enumerate_cooccurrence(*tree), rtol=1e-12, atol=0)


@settings(max_examples=100)
@given(dressed(any_trees()))
def test_matrix_is_the_enumeration_with_tokens_at_any_depth(tree):
    np.testing.assert_allclose(cooccurrence_matrix(*tree), enumerate_cooccurrence(*tree), rtol=1e-12, atol=0)


@settings(max_examples=40)
@given(dressed(any_trees(max_nodes=6), bias=eighths.filter(lambda number: number < 1), rho=eighths.map(abs)))
@example((np.array([-1, 0, 0, 1, 1, 2, 2]), np.array([0.25, 0.75]), np.array([[0.5, -1.0], [-1.0, 0.75]]), 0.875))
def test_matrix_enumeration_and_marginals_are_the_rational_sum(tree):
    both = rational(*tree)
    once = [float(row[place]) for place, row in enumerate(both)]
    conditional = [[float(entry / both[m][m]) for m, entry in enumerate(row)] for row in both]
    np.testing.assert_allclose(marginals(*tree), once, rtol=1e-14, atol=0)
    np.testing.assert_allclose(cooccurrence_matrix(*tree), conditional, rtol=1e-14, atol=0)
    np.testing.assert_allclose(enumerate_cooccurrence(*tree), conditional, rtol=1e-14, atol=0)


@settings(max_examples=100)
@given(dressed(level_trees()))
def test_scalar_forms_are_entries_of_the_enumeration(tree):
    parents, p0, p_child, rho = tree
    oracle, common = enumerate_cooccurrence(*tree), common_depth(parents)
    depth = int(common.max())
    tops = np.repeat(np.arange(len(p_child)), _tokens_below_each_child(parents))
    same = np.argwhere((common > 0) & (common < depth)).T
    if same.size:
        closed = cooccurrence(depth - common[tuple(same)], depth, rho, (p_child @ p0)[tops[same[1]]])
        np.testing.assert_allclose(closed, oracle[tuple(same)], rtol=2e-12, atol=0)
    apart = np.argwhere(common == 0).T
    if apart.size:
        closed = root_cooccurrence(depth, rho, p0, p_child[tops[apart[0]]], p_child[tops[apart[1]]])
        np.testing.assert_allclose(closed, oracle[tuple(apart)], rtol=1e-12, atol=0)


def _tokens_below_each_child(parents):
    """How many leaves each child of the root has, by walking up from every leaf."""
    counts = dict.fromkeys(np.flatnonzero(parents == 0).tolist(), 0)
    for leaf in sorted(set(range(len(parents))) - set(parents.tolist())):
        node = leaf
        while parents[node] != 0:
            node = int(parents[node])
        counts[node] += 1
    return list(counts.values())


def literal(height, depth, rho, rho0):
    """The formula as the theorem prints it."""
    k = rho ** (depth - 1)
    return (1 + rho ** (2 * height) - 2 * k * rho0) / (2 * (1 - k * rho0))


def literal_root(depth, rho, p0, p_l, p_m):
    k = rho ** (depth - 1)
    joint, once = mp.fsum(w * a * b for w, a, b in zip(p0, p_l, p_m, strict=True)), mp.fsum(p0)
    rho_l, rho_m = (mp.fsum(w * a for w, a in zip(p0, p, strict=True)) for p in (p_l, p_m))
    return (once + k**2 * joint - k * rho_l - k * rho_m) / (2 * (once - k * rho_m))


heights_and_depths = st.integers(2, 12).flatmap(lambda depth: st.tuples(st.integers(1, depth - 1), st.just(depth)))


def exactly(value, expected, rtol):
    assert abs(mp.mpf(float(value)) - expected) <= rtol * abs(expected), (value, expected)


@given(heights_and_depths, st.floats(0, 1), st.floats(-1, 1))
def test_closed_form_is_accurate_for_every_float(place, rho, rho0):
    if rho == rho0 == 1:
        return
    with mp.workdps(700):  # 1 − ρ^n may be as small as 1e-308 · n
        expected = literal(*place, mp.mpf(rho), mp.mpf(rho0))
        exactly(cooccurrence(*place, rho, rho0), expected, 5e-15)


@given(heights_and_depths, st.floats(1, 300), st.floats(1, 300))
def test_complements_are_accurate_arbitrarily_near_one(place, nines, nines0):
    gap, gap0 = 10.0**-nines, 10.0**-nines0
    with mp.workdps(1300):
        expected = literal(*place, 1 - mp.mpf(gap), 1 - mp.mpf(gap0))
        exactly(cooccurrence(*place, gap, gap0, complement=True), expected, 5e-15)


@given(st.integers(1, 8), st.floats(1, 300), st.lists(st.floats(1, 300), min_size=4, max_size=4))
def test_root_complements_are_accurate_arbitrarily_near_one(depth, nines, all_nines):
    gap, gaps = 10.0**-nines, 10.0 ** -np.array(all_nines).reshape(2, 2)
    with mp.workdps(1300):
        p_l, p_m = ([1 - mp.mpf(float(value)) for value in row] for row in gaps)
        expected = literal_root(depth, 1 - mp.mpf(gap), [mp.mpf("0.25"), mp.mpf("0.75")], p_l, p_m)
        exactly(root_cooccurrence(depth, gap, [0.25, 0.75], *gaps, complement=True), expected, 5e-15)


@given(st.integers(1, 8), chances, st.lists(biases, min_size=6, max_size=6))
def test_root_form_is_accurate_for_every_float(depth, rho, table):
    p_l, p_m, p0 = table[:3], table[3:], [0.125, 0.25, 0.625]
    with mp.workdps(60):
        expected = literal_root(depth, mp.mpf(rho), *([mp.mpf(value) for value in row] for row in (p0, p_l, p_m)))
        exactly(root_cooccurrence(depth, rho, p0, p_l, p_m), expected, 1e-14)


@given(heights_and_depths, st.floats(0, 50), st.floats(18, 290))
def test_limit_is_reached_from_every_direction(place, c, nines):
    gap = 10.0**-nines
    reached = cooccurrence(*place, gap, c * gap, complement=True)
    np.testing.assert_allclose(reached, cooccurrence_limit(*place, c), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("height", "depth"), [(1, 2), (1, 4), (3, 4), (2, 9)])
def test_the_two_printed_limits(height, depth):
    assert cooccurrence_limit(height, depth, 1) == pytest.approx(1 - height / depth, abs=1e-15)
    assert cooccurrence_limit(height, depth, 0) == pytest.approx(1 - height / (depth - 1), abs=1e-15)
    assert cooccurrence_limit(height, depth, np.inf) == 1
    gap = 1e-4  # ρ_0 = ρ tends to the first, ρ_0 = 1 to the second, at a distance of the order of 1 − ρ
    assert abs(cooccurrence(height, depth, 1 - gap, 1 - gap) - (1 - height / depth)) < depth * gap
    assert abs(cooccurrence(height, depth, 1 - gap, 1.0) - (1 - height / (depth - 1))) < depth * gap


@given(st.integers(2, 6), st.floats(0.3, 0.95), st.floats(-0.95, 0.95))
def test_with_equal_rho0_a_lower_ancestor_means_more_cooccurrence(depth, rho, rho0):
    joined = cooccurrence(np.arange(1, depth), depth, rho, rho0)
    apart = root_cooccurrence(depth, rho, [0.5, 0.5], [rho0, rho0], [rho0, rho0])
    assert (np.diff(np.append(joined, apart)) < 0).all()


def test_unequal_rho0_can_reverse_the_order():
    # Tokens 0 and 1 are siblings in a rare branch; token 2 lies in a common one, and accompanies token 0 more often.
    parents, p_child = [-1, 0, 0, 1, 2, 3, 3, 4], [[0.9], [-0.9]]
    matrix = cooccurrence_matrix(parents, [1.0], p_child, 0.9)
    np.testing.assert_allclose(matrix, enumerate_cooccurrence(parents, [1.0], p_child, 0.9), rtol=1e-14)
    assert common_depth(parents)[0].tolist() == [3, 2, 0]
    assert matrix[2, 0] > matrix[1, 0] + 0.15
    # The same between branches: height 1 in the rare one, height 2 in the common one.
    assert cooccurrence(1, 3, 0.9, 0.9) < cooccurrence(2, 3, 0.9, -0.9) - 0.15


@given(dressed(any_trees(max_nodes=20)))
def test_joint_probability_is_symmetric(tree):
    both = cooccurrence_matrix(*tree) * marginals(*tree)
    np.testing.assert_allclose(both, both.T, rtol=1e-13)
    assert (np.diagonal(cooccurrence_matrix(*tree)) == 1).all()


@given(any_trees(max_nodes=20))
def test_common_depth_is_the_longest_common_path(parents):
    def path(node):
        return [*path(parents[node]), node] if node else [0]

    leaves = sorted(set(range(len(parents))) - set(parents.tolist()))
    expected = [[len(set(path(a)) & set(path(b))) - 1 for b in leaves] for a in leaves]
    assert common_depth(parents).tolist() == expected


def test_arguments_broadcast_and_scalars_stay_scalars():
    rho = np.array([[0.2], [0.9]])
    grid = cooccurrence([1, 2, 3], 4, rho, 0.5)
    assert grid.shape == (2, 3)
    assert grid[1, 2] == cooccurrence(3, 4, 0.9, 0.5)
    assert isinstance(cooccurrence(3, 4, 0.9, 0.5), np.ndarray)
    assert cooccurrence(3, 4, 0.9, 0.5).shape == cooccurrence_limit(3, 4, 1).shape == ()
    p_l = np.zeros((5, 1, 2))
    assert root_cooccurrence([2, 3, 4], 0.9, [0.5, 0.5], p_l, [0.1, 0.2]).shape == (5, 3)


def test_edges_of_the_parameters():
    np.testing.assert_array_equal(cooccurrence([1, 2], 3, 0.0, [-1.0, 1.0]), 0.5)  # ρ = 0: coins
    np.testing.assert_array_equal(cooccurrence([1, 2], 3, 1.0, [-1.0, 0.9]), 1.0)  # ρ = 1: copies
    assert cooccurrence(1, 3, 5e-324, 0.0, complement=True) == 0.5  # the least 1 − ρ there is
    matrix = cooccurrence_matrix([-1, 0, 0], [0.5, 0.5], [[0.5, 1.0], [-1.0, 1.0]], 0.3)  # tokens right below the root
    np.testing.assert_allclose(matrix, [[1, 0.25], [1, 1]], rtol=1e-15)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 4, 1.5, 0.5), ["`rho`", "[0, 1]", "1.5"]),
        ((1, 4, -0.1, 0.5), ["`rho`", "[0, 1]", "-0.1"]),
        ((1, 4, 0.5, 1.5), ["`rho0`", "[-1, 1]", "1.5"]),
        ((1, 4, np.nan, 0.5), ["`rho`", "NaN"]),
        ((1, 4, 0.5, []), ["`rho0`", "non-empty"]),
        ((4, 4, 0.5, 0.5), ["`height`", "`depth` - 1", "root_cooccurrence"]),
        ((0, 4, 0.5, 0.5), ["`height`", "at least 1"]),
        ((1.5, 4, 0.5, 0.5), ["`height`", "whole", "1.5"]),
        ((1, 1, 0.5, 0.5), ["`depth`", "at least 2"]),
        (([1, 2], 4, [0.1, 0.2, 0.3], 0.5), ["broadcast", "height (2,)", "rho (3,)"]),
        ((1, 4, 1.0, [0.5, 1.0]), ["`rho`, `rho0`", "rho = rho0 = 1", "cooccurrence_limit"]),
    ],
)
def test_bad_scalars_are_named(arguments, words):
    with pytest.raises(InputError) as caught:
        cooccurrence(*arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bad_limits_and_complements_are_named():
    with pytest.raises(InputError, match="`c` must be at least 0"):
        cooccurrence_limit(1, 3, -1)
    with pytest.raises(InputError, match="`height`"):
        cooccurrence_limit(3, 3, 1)
    with pytest.raises(InputError, match=r"`rho` must be in \[0, 1\]"):
        cooccurrence(1, 3, 1.1, 0.5, complement=True)
    with pytest.raises(InputError, match="rho = rho0 = 1"):
        cooccurrence(1, 3, 0.0, 0.0, complement=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p0": [0.5, 0.6]}, ["`p0`", "to 1", "1.1"]),
        ({"p0": [0.5, np.nan]}, ["`p0`", "NaN"]),
        ({"p0": [1.5, -0.5]}, ["`p0`", "-0.5"]),
        ({"p0": [0.2, 0.3, 0.5]}, ["`p_l`", "3 classes", "(2,)"]),
        ({"p_m": [0.5, 1.2]}, ["`p_m`", "[-1, 1]", "1.2"]),
        ({"p_l": [0.5, 0.5, 0.5]}, ["`p_l`", "2 classes"]),
        ({"depth": 0}, ["`depth`", "at least 1"]),
        ({"rho": 1.0, "p_m": [1.0, 1.0]}, ["`p_m`", "occurs"]),
        ({"depth": [1, 2], "p_l": np.zeros((3, 2))}, ["broadcast"]),
    ],
)
def test_bad_root_arguments_are_named(change, words):
    good = {"depth": 3, "rho": 0.9, "p0": [0.5, 0.5], "p_l": [0.8, -0.2], "p_m": [0.6, 0.0]}
    with pytest.raises(InputError) as caught:
        root_cooccurrence(**(good | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("function", [cooccurrence_matrix, enumerate_cooccurrence])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parents": []}, ["`parents`", "non-empty"]),
        ({"parents": [-1]}, ["`parents`", "at least 2 nodes"]),
        ({"parents": [[-1, 0], [0, 0]]}, ["`parents`", "(2, 2)"]),
        ({"parents": [0, 0, 1]}, ["`parents`", "-1 for node 0"]),
        ({"parents": [-1, 2, 0]}, ["`parents`", "earlier"]),
        ({"parents": [-1, 0, -1]}, ["`parents`", "earlier"]),
        ({"parents": [-1, 0, 0.5]}, ["`parents`", "whole", "0.5"]),
        ({"parents": [-1, 0, 0, 1, 2]}, ["`p_child`", "2 children", "1 rows"]),
        ({"p0": [0.5, 0.6]}, ["`p0`", "to 1", "1.1"]),
        ({"p0": [[0.5, 0.5]]}, ["`p0`", "1-dimensional"]),
        ({"p_child": [0.5, 0.5]}, ["`p_child`", "2-dimensional"]),
        ({"p_child": [[0.5, 0.5, 0.5]]}, ["`p_child`", "2 classes"]),
        ({"p_child": [[0.5, 1.5]]}, ["`p_child`", "[-1, 1]"]),
        ({"p_child": [[1.0, 1.0]], "rho": 1.0}, ["`p_child`", "every token occurs", "2 tokens that cannot"]),
        ({"rho": 1.01}, ["`rho`", "[0, 1]", "1.01"]),
        ({"rho": [0.5, 0.6]}, ["`rho`", "0-dimensional"]),
        ({"rho": np.nan}, ["`rho`", "NaN"]),
    ],
)
def test_bad_trees_are_named(function, change, words):
    good = {"parents": [-1, 0, 1, 1], "p0": [0.5, 0.5], "p_child": [[0.5, 0.2]], "rho": 0.9}
    with pytest.raises(InputError) as caught:
        function(**(good | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_too_large_an_enumeration_is_refused():
    with pytest.raises(InputError, match="at most 20 nodes below the root"):
        enumerate_cooccurrence([-1, *range(21)], [1.0], [[0.5]], 0.9)
