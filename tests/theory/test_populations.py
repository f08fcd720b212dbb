"""Enumerated contexts against all sequences, one by one, and the Bayes risk against its definition."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multinomial

from joma.arguments import InputError
from joma.theory.populations import (
    Population,
    Source,
    class_probabilities,
    multiset_probabilities,
    multisets,
    population,
)


def draw_p(rng, classes, tokens):
    p = rng.random((classes, tokens)) + 0.01
    return p / p.sum(axis=1, keepdims=True)


def by_sequences(sources, prior):
    """P(counts, class) by listing every sequence of tokens of every source."""
    joint = defaultdict(float)
    for source, (label, chance) in itertools.product(sources, list(enumerate(prior))):
        tokens = source.p.shape[1]
        for sequence in itertools.product(range(tokens), repeat=source.length):
            counts = tuple(sequence.count(token) for token in range(tokens))
            joint[counts, label] += chance * source.share * math.prod(source.p[label, token] for token in sequence)
    return joint


@given(tokens=st.integers(1, 6), length=st.integers(1, 5))
def test_multisets_are_all_counts_of_that_sum_each_once(tokens, length):
    rows = {tuple(row) for row in multisets(tokens, length).tolist()}
    grid = itertools.product(range(length + 1), repeat=tokens)
    assert rows == {counts for counts in grid if sum(counts) == length}
    assert len(multisets(tokens, length)) == len(rows)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), classes=st.integers(1, 3), tokens=st.integers(1, 4), mixed=st.booleans())
def test_the_population_is_that_of_all_sequences(seed, classes, tokens, mixed):
    rng = np.random.default_rng(seed)
    shares = [0.2, 0.5, 0.3] if mixed else [1.0]
    lengths = (1, 3, 3)  # the last two may give the same counts
    sources = [Source(draw_p(rng, classes, tokens), n, share) for n, share in zip(lengths, shares, strict=False)]
    prior = draw_p(rng, 1, classes)[0]
    world, expected = population(sources, prior), by_sequences(sources, prior)
    listed = {
        (tuple(counts), label): world.joint[row, label]
        for row, counts in enumerate(world.counts.tolist())
        for label in range(classes)
    }
    assert listed.keys() == expected.keys()
    assert all(listed[key] == pytest.approx(expected[key], rel=1e-12) for key in listed)
    assert world.joint.sum() == pytest.approx(1, abs=1e-12)


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 5), length=st.integers(1, 6))
def test_multiset_probabilities_are_multinomial(seed, tokens, length):
    p, counts = draw_p(np.random.default_rng(seed), 2, tokens), multisets(tokens, length)
    expected = np.stack([multinomial.pmf(counts, length, row) for row in p], axis=1)
    np.testing.assert_allclose(multiset_probabilities(counts, p), expected, rtol=1e-10)


def test_impossible_contexts_are_left_out_and_a_certain_class_has_no_risk():
    separated = population([Source([[1.0, 0.0], [0.0, 1.0]], length=3)])
    assert separated.counts.tolist() == [[3, 0], [0, 3]]
    assert separated.bayes_risk == 0.0


@given(seed=st.integers(0, 2**32 - 1))
def test_no_other_prediction_has_less_risk(seed):
    rng = np.random.default_rng(seed)
    world = population([Source(draw_p(rng, 3, 4), 2)])
    assert -(world.joint * np.log(world.posterior)).sum() == pytest.approx(world.bayes_risk, rel=1e-12)
    other = world.posterior * np.exp(0.1 * rng.normal(size=world.joint.shape))
    other = other / other.sum(axis=1, keepdims=True)
    assert -(world.joint * np.log(other)).sum() > world.bayes_risk


def test_the_risk_of_tokens_that_say_nothing_is_that_of_the_prior():
    world = population([Source([[0.3, 0.7], [0.3, 0.7]], length=2)], prior=[0.2, 0.8])
    assert world.bayes_risk == pytest.approx(-0.2 * math.log(0.2) - 0.8 * math.log(0.8))


def test_frequencies_weights_and_posteriors_follow_from_counts():
    world = Population(np.array([[1, 3]]), np.array([[0.25, 0.75]]))
    np.testing.assert_array_equal(world.x, [[0.25, 0.75]])
    assert world.weight == pytest.approx([1.0])
    np.testing.assert_array_equal(world.posterior, [[0.25, 0.75]])


HALF = [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Source([[0.5, 0.6]], 2), "`p` must sum to 1"),
        (lambda: Source(HALF, 0), "`length` must be a whole number"),
        (lambda: Source(HALF, 2, 1.5), "`share` must be in"),
        (lambda: population([]), "`sources` must be at least one"),
        (lambda: population([Source(HALF, 2, 0.5)]), "shares` must sum to 1"),
        (lambda: population([Source(HALF, 2, 0.5), Source([[1.0]], 2, 0.5)]), "`sources` must be of the same"),
        (lambda: population([Source(HALF, 2)], prior=[0.5, 0.5]), "`prior` must be one number"),
        (lambda: population([Source([[0.5, 0.5]] * 2, 2)], prior=[0.0, 1.0]), "`prior` must be above 0 everywhere"),
        (lambda: multisets(60, 60), "`length` must be such that there are at most"),
        (lambda: multiset_probabilities([[1, 1, 1]], HALF), "`counts` must be"),
        (lambda: multiset_probabilities([[1.5, 0.5]], HALF), "`counts` must be whole numbers, got 1.5"),
        (lambda: multiset_probabilities([[-1, 1]], HALF), "`counts` must be in"),
        (lambda: multiset_probabilities([[1e300, 1]], HALF), "`counts` must be in"),
        (lambda: multiset_probabilities([["1", "2"]], HALF), "`counts` must be an array of real numbers"),
        (lambda: class_probabilities(None, 0), "`classes` must be a whole number"),
        (lambda: class_probabilities(None, 2**62), "`classes` must be of a size"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
