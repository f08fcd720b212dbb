"""Combination trees against set arithmetic and the enumeration of all trees; counts against explicit minibatches."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations, product
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare, fisher_exact
from torch.nn import functional

from joma.arguments import InputError
from joma.data.combinations import CombinationTree, minibatch_counts


def streams(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@st.composite
def shapes(draw):
    """Draw arguments of a `CombinationTree` that exists."""
    children, layers = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    below = draw(st.integers(children + 1, 8))
    vocabulary, sizes = below + 1, []
    for _ in range(layers + 1):
        assume(below >= children)
        below = draw(st.integers(1, min(7, comb(below, children))))
        sizes.append(below)
    longest = min(children ** (layers + 1), vocabulary - 1)
    length = draw(st.integers(longest, longest + 5))
    return sizes[-1], children, tuple(sizes[:-1]), vocabulary, length


def sets(table):
    """Return the columns that are true in each row of a table."""
    return [frozenset(torch.nonzero(row)[:, 0].tolist()) for row in table]


@given(shape=shapes(), seed=st.integers(0, 2**31))
def test_what_a_class_reaches_is_the_union_over_its_members(shape, seed):
    tree = CombinationTree(*shape)
    drawn = tree.draw(streams(seed))
    layers = []  # for each lower layer from the tokens up: the nodes of it that each node of this layer reaches
    for table, number in zip(drawn.members, (*tree.latents, tree.classes), strict=True):
        nodes = sets(table[0])
        assert len(nodes) == len(set(nodes)) == number
        assert {len(members) for members in nodes} == {tree.children}
        layers = [[frozenset().union(*(lower[m] for m in members)) for members in nodes] for lower in layers] + [nodes]
    tokens, *latents = layers
    assert tokens == sets(drawn.token[0])
    assert latents == [sets(table[0]) for table in drawn.reached]
    for tokens_of_class, sequence in zip(tokens, drawn.sequence[0].tolist(), strict=True):
        assert sequence == [drawn.padding] * (tree.length - len(tokens_of_class)) + sorted(tokens_of_class)
    assert drawn.padding == tree.vocabulary - 1


@given(shape=shapes(), seed=st.integers(0, 2**31))
def test_twins_are_classes_of_the_same_sequence_and_cap_the_accuracy(shape, seed):
    tree = CombinationTree(*shape)
    drawn = tree.draw(streams(seed, seed + 1))
    per_seed = zip(drawn.sequence.tolist(), drawn.twins.tolist(), drawn.accuracy_cap.tolist(), strict=True)
    for sequences, twins, cap in per_seed:
        counts = Counter(map(tuple, sequences))
        assert twins == [counts[tuple(sequence)] > 1 for sequence in sequences]
        assert cap == pytest.approx(len(counts) / tree.classes, abs=1e-15)


@given(shape=shapes(), seeds=st.lists(st.integers(0, 999), min_size=1, max_size=4))
def test_a_seeds_tree_does_not_depend_on_the_other_seeds(shape, seeds):
    tree = CombinationTree(*shape)
    all_seeds = tree.draw(streams(*seeds))
    for index, seed in enumerate(seeds):
        one_seed = tree.draw(streams(seed))
        assert torch.equal(all_seeds.sequence[index], one_seed.sequence[0])
        for name in ("reached", "members"):
            for table, expected in zip(getattr(all_seeds, name), getattr(one_seed, name), strict=True):
                assert torch.equal(table[index], expected[0])


SMALL = CombinationTree(classes=3, children=2, latents=(3,), vocabulary=5, length=4)


def every_small_tree():
    """Yield all equally likely trees of `SMALL`: the tokens of each latent, and those of each class."""
    pairs = list(combinations(range(4), 2))
    for latents, classes in product(permutations(pairs, 3), permutations(combinations(range(3), 2), 3)):
        yield latents, tuple(frozenset(latents[a] + latents[b]) for a, b in classes)


def small_trees(count, **options):
    drawn = SMALL.draw(streams(*range(count)), **options)
    for members, token in zip(drawn.members[0], drawn.token, strict=True):
        yield tuple(tuple(sorted(tokens)) for tokens in sets(members)), tuple(sets(token))


def test_all_trees_are_equally_likely_and_so_are_all_without_twins():
    every = list(every_small_tree())
    expected = Counter(every)
    drawn = Counter(small_trees(6000))
    assert set(drawn) <= set(expected)
    probability = np.array(list(expected.values())) / len(every)
    assert chisquare([drawn[tree] for tree in expected], 6000 * probability).pvalue > 1e-3
    without_twins = Counter(tree for tree in every if len(set(tree[1])) == 3)
    assert 0 < len(without_twins) < len(expected)  # the test would otherwise say nothing
    drawn = Counter(small_trees(3000, twins=False))
    assert set(drawn) <= set(without_twins)
    probability = np.array(list(without_twins.values())) / without_twins.total()
    assert chisquare([drawn[tree] for tree in without_twins], 3000 * probability).pvalue > 1e-3


def test_twins_are_as_frequent_as_in_the_enumeration():
    has_twins = [len(set(classes)) < 3 for _, classes in every_small_tree()]
    drawn = SMALL.draw(streams(*range(3000)))
    assert binomtest(int(drawn.twins.any(-1).sum()), 3000, np.mean(has_twins)).pvalue > 1e-3


@pytest.mark.parametrize(("classes", "children", "counted"), [(20, 2, 112), (30, 3, 283)])
def test_trees_of_table_1_have_twins_as_often_as_was_counted(classes, children, counted):
    drawn = CombinationTree(classes, children, (10, 20)).draw(streams(*range(300)))
    with_twins = int(drawn.twins.any(-1).sum())
    assert fisher_exact([[with_twins, 300 - with_twins], [counted, 300 - counted]]).pvalue > 1e-3
    assert torch.equal(drawn.twins.any(-1), drawn.accuracy_cap < 1)


@pytest.mark.parametrize("children", [2, 3])
def test_trees_without_twins_exist_for_every_cell_of_table_1(children):
    for classes, latents in product((20, 30), ((10, 20), (20, 30))):
        drawn = CombinationTree(classes, children, latents).draw(streams(*range(5)), twins=False)
        for sequences in drawn.sequence.tolist():
            assert len(set(map(tuple, sequences))) == classes


def decoder(multiplicity, width=6, seed=0):
    """Return a causal decoder of two layers without positions, whose attention weighs keys by their multiplicity."""
    generator = torch.Generator().manual_seed(seed)
    embed, *weights = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in [(100, width)] + 8 * [(width, width)]
    )

    def run(sequence):
        x, hidden = embed[sequence], []
        key_weight = multiplicity[..., None, :].double()
        causal = torch.ones(sequence.shape[-1], sequence.shape[-1], dtype=torch.float64).tril()
        for q, k, v, w in (weights[:4], weights[4:]):
            score = ((x @ q) @ (x @ k).mT / width).exp() * causal * key_weight
            total = score.sum(-1, keepdim=True)
            x = x + torch.where(total > 0, score / total, 0.0) @ (x @ v)
            hidden.append((x @ w).relu())
            x = functional.layer_norm(x + hidden[-1], (width,))
        return x, torch.cat(hidden, dim=-1)

    return run


@given(shape=shapes(), seed=st.integers(0, 999), fill=st.booleans())
@settings(max_examples=50)
def test_a_collapsed_sequence_gives_the_activations_of_the_full_one(shape, seed, fill):
    tree = CombinationTree(*shape)
    drawn = tree.draw(streams(seed, seed + 1))
    short = drawn.collapsed(fill=fill)
    full_output, full_hidden = decoder(torch.ones_like(drawn.sequence))(drawn.sequence)
    output, hidden = decoder(short.multiplicity)(short.sequence)
    torch.testing.assert_close(output[..., -1, :], full_output[..., -1, :], rtol=1e-12, atol=1e-12)
    absent = short.multiplicity[..., None] == 0
    highest = hidden.masked_fill(absent, -torch.inf).amax(-2)
    torch.testing.assert_close(highest, full_hidden.amax(-2), rtol=1e-12, atol=1e-12)


@given(shape=shapes(), seed=st.integers(0, 999))
def test_multiplicities_count_every_position_once(shape, seed):
    tree = CombinationTree(*shape)
    drawn = tree.draw(streams(seed, seed + 1))
    plain, filled = drawn.collapsed(), drawn.collapsed(fill=True)
    assert torch.equal(plain.sequence, filled.sequence)
    assert bool((filled.multiplicity > 0).all())
    for short in (plain, filled):
        assert short.sequence.shape[-1] == min(tree.length, 1 + int(drawn.token.sum(-1).max()))
        for full, sequence, multiplicity in zip(
            drawn.sequence.flatten(0, 1).tolist(),
            short.sequence.flatten(0, 1).tolist(),
            short.multiplicity.flatten(0, 1).tolist(),
            strict=True,
        ):
            repeated = [token for token, times in zip(sequence, multiplicity, strict=True) for _ in range(times)]
            assert repeated == full
    pads = (plain.sequence == drawn.padding) & (plain.multiplicity > 0)
    assert int(pads.sum(-1).max()) <= 1


@given(
    classes=st.integers(1, 6),
    batch=st.integers(1, 20),
    steps=st.integers(1, 8),
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3),
)
def test_counts_are_those_of_the_batches_that_the_generator_draws(classes, batch, steps, seeds):
    counts = minibatch_counts(classes, batch=batch, steps=steps, generators=streams(*seeds))
    assert counts.shape == (steps, len(seeds), classes)
    for index, generator in enumerate(streams(*seeds)):
        for step in range(steps):
            label = torch.randint(classes, (batch,), generator=generator)
            assert torch.equal(counts[step, index], torch.bincount(label, minlength=classes))


@given(first=st.integers(1, 9), second=st.integers(1, 9), chunk=st.integers(1, 64))
def test_counts_drawn_in_two_parts_are_those_drawn_at_once(first, second, chunk):
    options = {"classes": 5, "batch": 7}
    at_once = minibatch_counts(**options, steps=first + second, generators=streams(3, 4))
    generators = streams(3, 4)
    with pytest.MonkeyPatch.context() as patch:  # the size of a chunk does not matter either
        patch.setattr("joma.data.combinations.CHUNK", chunk)
        parts = [minibatch_counts(**options, steps=steps, generators=generators) for steps in (first, second)]
    assert torch.equal(torch.cat(parts), at_once)


def test_counts_are_multinomial():
    classes, batch, steps = 5, 16, 20_000
    counts = minibatch_counts(classes, batch=batch, steps=steps, generators=streams(0, 1)).double()
    assert bool((counts.sum(-1) == batch).all())
    for of_seed in counts.unbind(1):
        assert chisquare(of_seed.sum(0).numpy()).pvalue > 1e-3
        frequency = np.bincount(of_seed[:, 0].long().numpy(), minlength=batch + 1)
        binomial = np.array([comb(batch, k) * 0.2**k * 0.8 ** (batch - k) for k in range(batch + 1)])
        bins = [*range(8), slice(8, None)]
        assert chisquare([frequency[b].sum() for b in bins], [steps * binomial[b].sum() for b in bins]).pvalue > 1e-3
        correlation = np.corrcoef(of_seed.numpy().T)[~np.eye(classes, dtype=bool)]
        np.testing.assert_allclose(correlation, -1 / (classes - 1), atol=4 / np.sqrt(steps))
        assert abs(np.corrcoef(of_seed[1:, 0], of_seed[:-1, 0])[0, 1]) < 4 / np.sqrt(steps)  # steps are independent
    assert abs(np.corrcoef(counts[:, 0, 0], counts[:, 1, 0])[0, 1]) < 4 / np.sqrt(steps)  # so are seeds


@given(st.lists(st.integers(-(2**20), 2**20), min_size=4, max_size=4), st.integers(0, 999))
def test_the_weighted_loss_is_that_of_the_batch_bit_for_bit_if_sums_are_exact(losses, seed):
    loss = torch.tensor(losses, dtype=torch.float64)  # integers are added without rounding, and 128 divides exactly
    counts = minibatch_counts(4, batch=128, steps=1, generators=streams(seed))[0, 0]
    label = torch.randint(4, (128,), generator=streams(seed)[0])
    assert float((counts / 128 * loss).sum()) == float(loss[label].mean())


def test_sixty_adam_steps_on_counts_are_those_on_batches():
    tree, batch, steps = CombinationTree(classes=20), 128, 60
    drawn = tree.draw(streams(0))
    inputs = drawn.token[0].double()
    counts = minibatch_counts(20, batch=batch, steps=steps, generators=streams(1))[:, 0]
    labels = torch.randint(20, (steps, batch), generator=streams(1)[0])

    def train(loss):
        generator = torch.Generator().manual_seed(2)
        sizes = [(99, 16), (16, 20)]
        weights = [torch.randn(size, generator=generator, dtype=torch.float64).div(4) for size in sizes]
        lower, upper = (weight.requires_grad_() for weight in weights)
        optimiser, losses = torch.optim.Adam([lower, upper], lr=0.01), []
        for step in range(steps):
            optimiser.zero_grad()
            losses.append(loss(lambda x: (x @ lower).tanh() @ upper, step))
            losses[-1].backward()
            optimiser.step()
        return torch.stack(losses).detach(), weights

    def batched(model, step):
        return functional.cross_entropy(model(inputs[labels[step]]), labels[step])

    def weighted(model, step):
        each = functional.cross_entropy(model(inputs), torch.arange(20), reduction="none")
        return (counts[step] / batch * each).sum()

    (batch_losses, batch_weights), (count_losses, count_weights) = train(batched), train(weighted)
    assert float(batch_losses[-1]) < 0.5 * float(batch_losses[0])
    torch.testing.assert_close(count_losses, batch_losses, rtol=1e-11, atol=0)
    for weight, expected in zip(count_weights, batch_weights, strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"latents": (10, 46)}, ["`latents[1]`", "at most 45", "2 out of the 10", "46"]),
        ({"latents": (4852, 20)}, ["`latents[0]`", "at most 4851", "4852"]),
        ({"classes": 191}, ["`classes`", "at most 190", "191"]),
        ({"latents": (1, 1)}, ["`latents[1]`", "at most 0"]),
        ({"children": 100}, ["`latents[0]`", "at most 0"]),
        ({"children": 0}, ["`children`", "at least 1"]),
        ({"classes": 0}, ["`classes`"]),
        ({"latents": (10, 0)}, ["`latents[1]`", "at least 1"]),
        ({"vocabulary": 1}, ["`vocabulary`", "at least 2"]),
        ({"length": 0}, ["`length`"]),
    ],
)
def test_bad_trees_are_named(change, parts):
    with pytest.raises(InputError) as caught:
        CombinationTree(**change)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_layer_may_have_all_combinations_that_exist():
    drawn = CombinationTree(classes=10, children=2, latents=(5,), vocabulary=30).draw(streams(0))
    assert set(sets(drawn.members[-1][0])) == {frozenset(pair) for pair in combinations(range(5), 2)}


def test_a_sequence_longer_than_the_length_is_refused():
    longest = int(CombinationTree().draw(streams(0)).token.sum(-1).max())
    assert CombinationTree(length=longest).draw(streams(0)).sequence.shape[-1] == longest
    with pytest.raises(InputError, match=rf"`length` must be at least {longest}.*got {longest - 1}"):
        CombinationTree(length=longest - 1).draw(streams(0))


def test_twins_that_cannot_be_avoided_are_refused():
    tree = CombinationTree(classes=3, children=2, latents=(3,), vocabulary=4)  # three tokens: each class has them all
    with pytest.raises(InputError, match=r"`twins=False`.*50 trees.*seed number 0.*more `latents`"):
        tree.draw(streams(0), twins=False, tries=50)
    assert float(tree.draw(streams(0)).accuracy_cap) == pytest.approx(1 / 3, abs=1e-15)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: CombinationTree().draw([]), "generators"),
        (lambda: CombinationTree().draw(streams(0), twins=False, tries=0), "tries"),
        (lambda: minibatch_counts(0, batch=2, steps=2, generators=streams(0)), "classes"),
        (lambda: minibatch_counts(2, batch=0, steps=2, generators=streams(0)), "batch"),
        (lambda: minibatch_counts(2, batch=2, steps=0, generators=streams(0)), "steps"),
        (lambda: minibatch_counts(2, batch=2, steps=2, generators=[]), "generators"),
    ],
)
def test_bad_draws_are_named(call, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        call()
