"""Samples of a tree against exact probabilities: those of its description and of the enumeration of Theorem 5."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.data.trees import HBLT
from joma.theory.hierarchy import cooccurrence_matrix, enumerate_cooccurrence, marginals

P0, P_CHILD = [0.2, 0.3, 0.5], [[0.9, -0.4, 0.3], [0.1, 0.8, -1.0]]
TREES = {
    "regular": HBLT.regular((2, 3, 2), p0=P0, p_child=P_CHILD, rho=0.8),
    "irregular": HBLT(((2,), (1, 3), (2, 1, 3, 2)), p0=P0, p_child=P_CHILD, rho=0.6),
    "shallow": HBLT(((2,),), p0=P0, p_child=P_CHILD, rho=0.5),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def standard_errors(hits: np.ndarray, trials: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """Return how far each number of hits is from its expectation; with probability 0 or 1 it must be exact."""
    certain = (probability == 0) | (probability == 1)
    expectation = trials * probability
    assert (hits[certain] == expectation[certain]).all()
    deviation = np.sqrt(np.where(certain, 1.0, expectation * (1 - probability)))
    return np.abs(np.where(certain, 0.0, hits - expectation)) / deviation


@pytest.mark.parametrize("name", TREES)
def test_frequencies_are_within_four_standard_errors_of_the_enumeration(name):
    tree, count = TREES[name], 100_000
    token = tree.sample(count, generator=seeded(1)).token.numpy().astype(np.float64)
    both, once = token.T @ token, token.sum(axis=0)
    arguments = (tree.parents, tree.p0, tree.p_child, tree.rho)
    assert standard_errors(once, np.full(tree.tokens, float(count)), marginals(*arguments)).max() < 4
    oracle = enumerate_cooccurrence(*arguments)
    pairs = ~np.eye(tree.tokens, dtype=bool)
    assert standard_errors(both[pairs], np.tile(once, (tree.tokens, 1))[pairs], oracle[pairs]).max() < 4


def test_tokens_are_noisy_copies_of_their_latents():
    tree, count = TREES["irregular"], 100_000
    drawn = tree.sample(count, generator=seeded(2))
    bits = torch.cat([torch.zeros(count, 1, dtype=torch.bool), *drawn.latents, drawn.token], dim=1).numpy()
    edges = np.arange(3, tree.parents.size)  # without the root and its two children
    copied = (bits[:, edges] == bits[:, tree.parents[edges]]).sum(axis=0)
    assert standard_errors(copied, np.full(edges.size, float(count)), np.full(edges.size, 0.8)).max() < 4
    flips = bits[:, edges] != bits[:, tree.parents[edges]]
    assert np.abs(np.corrcoef(flips.T) - np.eye(edges.size)).max() < 4 / np.sqrt(count)  # edges flip independently


def test_labels_and_first_level_have_their_probabilities():
    tree, count = TREES["regular"], 100_000
    drawn = tree.sample(count, generator=seeded(3))
    sizes = drawn.label.bincount(minlength=3).numpy().astype(np.float64)
    assert standard_errors(sizes, np.full(3, float(count)), np.array(P0)).max() < 4
    for child, row in enumerate(P_CHILD):
        ones = drawn.label[drawn.latents[0][:, child]].bincount(minlength=3).numpy()
        assert standard_errors(ones, sizes, (1 - np.array(row)) / 2).max() < 4


def test_shapes_and_numbering():
    tree = TREES["irregular"]
    drawn = tree.sample(7, generator=seeded(0))
    assert drawn.label.shape == (7,)
    assert [tuple(level.shape) for level in drawn.latents] == [(7, 2), (7, 4)]
    assert drawn.token.shape == (7, tree.tokens) == (7, 8)
    assert tree.depth == 3
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6]
    assert TREES["regular"].child_counts == ((2,), (3, 3), (2,) * 6)
    assert TREES["shallow"].sample(3, generator=seeded(0)).latents == ()


def test_samples_are_determined_by_the_seed():
    tree = TREES["regular"]
    first, again, other = (tree.sample(200, generator=seeded(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.token, again.token)
    assert torch.equal(first.label, again.label)
    assert not torch.equal(first.token, other.token)


@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(4, 20), st.integers(1, 4))
@settings(max_examples=50)
def test_random_trees_are_within_their_bounds(seed, max_tokens, max_nodes, classes):
    tree = HBLT.random(generator=seeded(seed), classes=classes, max_tokens=max_tokens, max_nodes=max_nodes)
    assert 2 <= tree.tokens <= max_tokens
    assert tree.parents.size <= max_nodes
    assert np.shape(tree.p0) == (classes,)
    assert cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho).shape == (tree.tokens,) * 2


def test_without_noise_every_token_is_determined():
    tree = HBLT.regular((2, 2, 2), p0=[1.0], p_child=[[1.0], [-1.0]], rho=1.0)
    assert tree.sample(500, generator=seeded(0)).token.sum(dim=0).tolist() == [0] * 4 + [500] * 4


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"child_counts": ()}, ["`child_counts`", "at least one level"]),
        ({"child_counts": ((2,), (1,))}, ["`child_counts[1]`", "2 nodes at depth 1", "1 numbers"]),
        ({"child_counts": ((1, 1),)}, ["`child_counts[0]`", "1 nodes at depth 0"]),
        ({"child_counts": ((2,), (1, 0))}, ["`child_counts[1]`", "at least 1", "0"]),
        ({"child_counts": ((3,),)}, ["`p_child`", "3 children", "(2, 3)"]),
        ({"p0": [0.2, 0.3, 0.6]}, ["`p0`", "to 1", "1.1"]),
        ({"p0": [0.5, 0.5]}, ["`p_child`", "2 classes"]),
        ({"p0": []}, ["`p0`", "non-empty"]),
        ({"p_child": [[0.9, np.nan, 0.3], [0.1, 0.8, -1.0]]}, ["`p_child`", "NaN"]),
        ({"p_child": [[0.9, 1.1, 0.3], [0.1, 0.8, -1.0]]}, ["`p_child`", "[-1, 1]", "1.1"]),
        ({"rho": 1.2}, ["`rho`", "[0, 1]", "1.2"]),
        ({"rho": -0.2}, ["`rho`", "[0, 1]", "-0.2"]),
        ({"rho": np.nan}, ["`rho`", "NaN"]),
    ],
)
def test_bad_descriptions_are_named(change, parts):
    good = {"child_counts": ((2,), (1, 3)), "p0": P0, "p_child": P_CHILD, "rho": 0.9}
    with pytest.raises(InputError) as caught:
        HBLT(**(good | change))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_bad_counts_are_named():
    with pytest.raises(InputError, match="`count`"):
        TREES["regular"].sample(0, generator=seeded(0))
    with pytest.raises(InputError, match="`branching"):
        HBLT.regular((2, 0), p0=P0, p_child=P_CHILD, rho=0.9)
    with pytest.raises(InputError, match="`branching`"):
        HBLT.regular((), p0=P0, p_child=P_CHILD, rho=0.9)
    with pytest.raises(InputError, match="`max_nodes`"):
        HBLT.random(generator=seeded(0), max_nodes=3)
