"""The worlds of `ladder`: what a token says in each of them, by hand, and that a planted entropy is the optimum's."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from joma.arguments import InputError
from joma.studies.theorems.ladder_worlds import (
    KINDS,
    WORLDS,
    WorldConfig,
    check,
    draw_exponents,
    named_worlds,
    noisy_sources,
    planted_world,
    random_worlds,
    relative_entropy,
    short_worlds,
)
from joma.theory.optimum import block_optimum

seeds = st.integers(0, 2**32 - 1)


def rng(seed=0):
    return np.random.default_rng(seed)


def log_odds(world, token):
    """ln P(1 | context) − ln P(0 | context) of the context that repeats a token, for each length."""
    counts = world.counts
    rows = np.flatnonzero(counts[:, token] == counts.sum(axis=1))
    return {int(counts[row].sum()): float(np.diff(np.log(world.posterior[row]))[0]) for row in rows}


def test_common_tokens_have_one_exponent_in_all_classes():
    exponents = draw_exponents(3, 6, 0.7, 2, rng())
    assert (exponents[:, 4:] == exponents[0, 4:]).all()
    assert (np.ptp(exponents[:, :4], axis=0) > 0).all()
    assert (np.ptp(draw_exponents(3, 6, 0.7, 0, rng()), axis=0) > 0).all()


@settings(max_examples=10)
@given(seed=seeds)
def test_the_named_worlds_say_what_their_names_say(seed):
    config = WorldConfig()
    worlds, p = named_worlds(config, rng(seed))
    assert tuple(worlds) == WORLDS
    ratio = np.log(p[1] / p[0])
    for token in range(6):
        assert log_odds(worlds["overlap"], token) == pytest.approx({4: 4 * ratio[token]})
        assert log_odds(worlds["lengths"], token) == pytest.approx({1: ratio[token], 5: 5 * ratio[token]})
    separated = worlds["separable"]
    exclusive = separated.counts[:, :4].sum(axis=1) > 0
    assert set(np.unique(separated.posterior[exclusive])) == {0.0, 1.0}
    assert (separated.joint[~exclusive] > 0).all()
    assert 0 < separated.bayes_risk < worlds["overlap"].bayes_risk


@settings(max_examples=10)
@given(seed=seeds)
def test_in_noisy_contexts_a_third_of_the_tokens_has_the_same_exponent(seed):
    exponents = draw_exponents(2, 6, 0.7, 2, rng(seed))
    clear, noisy = noisy_sources(exponents, 4, 0.3)
    assert (clear.share, noisy.share, clear.length, noisy.length) == (0.7, 0.3, 4, 4)
    np.testing.assert_allclose(np.asarray(clear.p), softmax(exponents, axis=1))
    odds = np.diff(np.log(np.asarray(noisy.p)), axis=0)[0]
    assert odds[0] == pytest.approx(odds[1])  # what is left is the classes' normalisation, which common tokens show too
    assert odds[0] == pytest.approx(odds[5])
    assert odds[2] != pytest.approx(odds[5])


def test_shares_mix_contexts_of_one_token_with_long_ones():
    config = replace(WorldConfig(), shares=(0.0, 0.25))
    _, p = named_worlds(config, rng())
    none, quarter = (world.population for world in short_worlds(config, p))
    assert set(none.counts.sum(axis=1)) == {5}
    assert quarter.weight[quarter.counts.sum(axis=1) == 1].sum() == pytest.approx(0.25)


@settings(max_examples=8)
@given(seed=seeds, entropy=st.sampled_from([0.4, 0.75, 1.0]))
def test_a_planted_entropy_is_that_of_the_optimum(seed, entropy):
    world = planted_world((2, 4, 3), 0.5, entropy, rng(seed))
    assert world.planted is not None
    assert relative_entropy(world.planted) == pytest.approx(entropy, abs=1e-9)
    optimum = block_optimum(world.population, rng(seed), starts=4)
    assert optimum.loss == pytest.approx(world.population.bayes_risk, abs=1e-8)
    assert relative_entropy(optimum.z) == pytest.approx(entropy, abs=0.01)


def test_random_worlds_are_of_all_kinds_and_only_their_number_is_configured():
    worlds = random_worlds(replace(WorldConfig(), draws=60), rng())
    assert {world.kind for world in worlds} == set(KINDS)
    assert {world.population.counts.shape[1] for world in worlds} == {4, 5, 6, 7}
    assert {world.population.joint.shape[1] for world in worlds} == {2, 3}
    for world in worlds:
        lengths = set(world.population.counts.sum(axis=1))
        assert (1 in lengths) == ("lengths" in world.kind)
        assert (world.planted is not None) == (world.kind == "planted")
    first = random_worlds(replace(WorldConfig(), draws=5), rng())
    np.testing.assert_array_equal(first[4].population.joint, worlds[4].population.joint)


def test_relative_entropy_by_hand():
    np.testing.assert_allclose(relative_entropy(np.zeros((2, 3))), 1.0)
    p = np.array([0.9, 0.1])
    assert relative_entropy(np.log(p)) == pytest.approx(-(p * np.log(p)).sum() / np.log(2))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 2}, {"classes": 1}, {"length": 1}, {"long_length": 1}, {"scale": 0.0}, {"short": 1.1},
        {"noisy": -0.1}, {"shares": (0.5, 1.0)}, {"planted": (0.0,)}, {"planted": (1.2,)}, {"draws": 0},
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        check(replace(WorldConfig(), **change))
