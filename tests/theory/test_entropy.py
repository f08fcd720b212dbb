"""Entropies against their definition in mpmath, and the identity of the two entropies of the theory."""

import mpmath as mp
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma import probes
from joma.theory.entropy import entropy_of_drops, shannon_entropy
from joma.theory.entropy_floor import softmax_entropy
from joma.theory.growth import attention_entropy

SEEDS = st.integers(0, 2**32 - 1)


@given(seed=SEEDS, tokens=st.integers(1, 6))
def test_the_entropy_is_that_of_the_definition_and_of_the_probe(seed, tokens):
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.ones(tokens), size=3)
    p[0] = np.eye(tokens)[generator.integers(tokens)]
    exact = [-mp.fsum(mp.mpf(x) * mp.log(x) for x in row if x > 0) for row in p]
    np.testing.assert_allclose(shannon_entropy(p), np.array(exact, dtype=float), rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(shannon_entropy(p), probes.shannon_entropy(torch.from_numpy(p)), rtol=1e-14)


@given(seed=SEEDS, tokens=st.integers(1, 6), scale=st.sampled_from([0.1, 3.0, 300.0]))
def test_the_entropy_of_drops_keeps_its_digits(seed, tokens, scale):
    drop = scale * np.random.default_rng(seed).exponential(size=tokens)
    drop -= drop.min()
    with mp.workdps(400):  # ln of a weight that is 1 but for the entropy
        weights = [mp.exp(-mp.mpf(d)) for d in drop]
        total = mp.fsum(weights)
        exact = -mp.fsum(w / total * mp.log(w / total) for w in weights)
    np.testing.assert_allclose(entropy_of_drops(drop), float(exact), rtol=1e-13, atol=1e-300)


@given(seed=SEEDS, temperature=st.floats(0.5, 4.0))
def test_entropies_of_logits_and_of_weights_agree_where_weights_are_finite(seed, temperature):
    v = np.random.default_rng(seed).normal(scale=3.0, size=(4, 5))
    np.testing.assert_allclose(attention_entropy(v, temperature), softmax_entropy(v**2 / temperature), rtol=1e-12)
