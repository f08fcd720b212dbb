"""Addition against Python's integers, its splits and batches against counts, and the ceiling against brute force."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from joma import noise
from joma.arguments import InputError
from joma.data import addition
from joma.data.addition import CHARACTERS, answer, ceiling, decode, draw, encode, sequences, split


def text(first, second, digits, reverse):
    total = str(first + second).zfill(digits + 1)
    return f"{first:0{digits}d}+{second:0{digits}d}={total[::-1] if reverse else total}"


@given(st.data(), st.integers(1, 18), st.booleans())
def test_sequences_are_what_python_adds_up(data, digits, reverse):
    numbers = st.integers(0, 10**digits - 1)
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
    tokens = sequences(torch.tensor(pairs), digits=digits, reverse=reverse)
    expected = [text(*pair, digits, reverse) for pair in pairs]
    assert decode(tokens) == expected
    assert encode(expected).equal(tokens)
    assert tokens.shape == (len(pairs), 3 * digits + 3)
    assert [row[answer(digits)] for row in expected] == decode(tokens[:, answer(digits)])


@given(st.data(), st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "int64"]), st.integers(1, 4))
def test_sums_do_not_overflow_the_integer_type_of_the_pairs(data, kind, digits):
    numbers = st.integers(0, min(10**digits - 1, np.iinfo(kind).max))
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
    expected = [text(first, second, digits, reverse=False) for first, second in pairs]
    array = np.array(pairs, dtype=kind)
    array.flags.writeable = False
    for form in (array, torch.tensor(pairs, dtype=getattr(torch, kind)), pairs):
        tokens = sequences(form, digits=digits)
        assert decode(tokens) == decode(tokens.numpy()) == decode(tokens.tolist()) == expected


def test_batches_are_drawn_from_arrays_and_lists_too():
    pairs, key = [[1, 2], [3, 4], [5, 6]], noise.key(torch.tensor([0, 7]), 3)
    drawn = draw(torch.tensor(pairs), size=9, key=key)
    assert draw(pairs, size=9, key=key).equal(drawn)
    assert draw(np.array(pairs, dtype=np.int8), size=9, key=key).equal(drawn)


def test_leading_axes_are_kept():
    pairs = torch.randint(100, (2, 3, 2), generator=torch.Generator().manual_seed(0))
    tokens = sequences(pairs, digits=2)
    assert tokens.shape == (2, 3, 9)
    assert tokens[1].equal(sequences(pairs[1], digits=2))


@given(st.integers(0, 999), st.integers(1, 2), st.floats(0.05, 0.95))
@settings(max_examples=20)
def test_a_pair_and_the_same_pair_in_the_other_order_are_on_one_side(seed, digits, share):
    pairs = split(digits, share=share, generator=torch.Generator().manual_seed(seed))
    train, test = ({tuple(pair) for pair in side.tolist()} for side in (pairs.train, pairs.test))
    count = 10**digits
    assert len(train) == len(pairs.train)
    assert train | test == set(itertools.product(range(count), repeat=2))
    assert not train & test
    assert all((b, a) in test for a, b in test)
    assert len({(min(pair), max(pair)) for pair in test}) == round(share * count * (count + 1) / 2)


def test_a_split_depends_on_the_generator_and_treats_all_pairs_alike():
    first, same, other = (split(2, share=0.3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert first.train.equal(same.train)
    assert not first.test.equal(other.test)
    code = torch.tensor([10, 1])
    splits = (split(1, share=0.3, generator=torch.Generator().manual_seed(seed)) for seed in range(400))
    counts = torch.stack([torch.bincount(pairs.test @ code, minlength=100) for pairs in splits]).sum(dim=0)
    upper = counts.view(10, 10)[tuple(torch.triu_indices(10, 10))].double().numpy()
    z = (upper - 400 * 0.3) / np.sqrt(400 * 0.3 * 0.7)
    assert np.abs(z).max() < 4.5
    assert first.to("cpu").train.equal(first.train)


def test_batches_are_a_function_of_seed_and_step():
    pairs = split(2, share=0.1, generator=torch.Generator().manual_seed(0)).train
    three_seeds = draw(pairs, size=50, key=noise.key(torch.tensor([3, 7, 11]), 5))
    one_seed = draw(pairs, size=50, key=noise.key(torch.tensor([7]), torch.tensor(5)))
    assert three_seeds.shape == (3, 50, 2)
    assert three_seeds[1].equal(one_seed[0])
    next_step = draw(pairs, size=50, key=noise.key(torch.tensor([7]), 6))
    assert not next_step.equal(one_seed)


def test_all_pairs_are_drawn_equally_often_and_independently():
    pairs = torch.tensor([[i, 2 * i] for i in range(37)])
    drawn = torch.cat([draw(pairs, size=1000, key=noise.key(torch.arange(20), step)) for step in range(10)])
    first = drawn[..., 0].flatten()
    assert bool((drawn[..., 1] == 2 * drawn[..., 0]).all())
    assert stats.chisquare(torch.bincount(first, minlength=37).numpy()).pvalue > 1e-6
    neighbours = torch.bincount((drawn[:, :-1, 0] * 37 + drawn[:, 1:, 0]).flatten(), minlength=37 * 37)
    assert stats.chisquare(neighbours.numpy()).pvalue > 1e-6


def test_a_pair_is_drawn_by_48_random_bits():
    """With 24 bits, 78% of a million pairs would each have 17 of the 2²⁴ numbers, the others 16."""
    key = noise.key(torch.tensor([1]), 0)
    high, low = ((noise.uniform((5,), key=key, site=site) * 2**24).long() for site in (0, 1))
    expected = [(int(h) * 2**24 + int(rest)) % 1_000_000 for h, rest in zip(high[0], low[0], strict=True)]
    pairs = torch.arange(2_000_000).view(-1, 2)
    assert (draw(pairs, size=5, key=key)[0, :, 0] // 2).tolist() == expected


# The ceiling


def seen_before(tokens, place):
    """Return what a permutation-invariant predictor of the token at `place` sees."""
    return tokens[place - 1], tuple(sorted(Counter(tokens[: place - 1]).items()))


def score(table, texts, digits):
    """Return the share of texts whose sum the table predicts, each digit from the digits predicted before it."""
    right = 0
    for sequence in texts:
        written = sequence[: 2 * digits + 2]
        while len(written) < len(sequence):
            written += table.get(seen_before(written + "?", len(written)), "?")
        right += written == sequence
    return right / len(texts)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("digits", [1, 2])
def test_greedy_predicts_the_likeliest_digit_from_its_own_digits(digits, reverse):
    count = 10**digits
    texts = [text(a, b, digits, reverse) for a, b in itertools.product(range(count), repeat=2)]
    votes: dict = {}
    for sequence in texts:
        for place in range(2 * digits + 2, len(sequence)):
            votes.setdefault(seen_before(sequence, place), Counter())[sequence[place]] += 1
    table = {seen: min(counts, key=lambda digit: (-counts[digit], digit)) for seen, counts in votes.items()}
    assert ceiling(digits, reverse=reverse).greedy == score(table, texts, digits)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_digits_reach_the_bound_of_one_sum_for_each_multiset(reverse):
    sums: dict = {}
    for a, b in itertools.product(range(100), repeat=2):
        sums.setdefault(tuple(sorted(f"{a:02d}{b:02d}")), Counter())[a + b] += 1
    bound = sum(max(counts.values()) for counts in sums.values()) / 10_000
    result = ceiling(2, reverse=reverse)
    assert result.bound == bound == 0.285
    assert result.exact == bound  # so writing the sum digit by digit costs nothing


def test_one_digit_needs_no_order():
    assert ceiling(1) == addition.Ceiling(1.0, 1.0, 1.0)


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_the_integer_programme_finds_the_best_choice(seed):
    """Compare with all choices of at most one node of each group; few values are used, so that nodes often collide."""
    rng = np.random.default_rng(seed)
    groups, options = rng.integers(1, 5), 3
    group = np.repeat(np.arange(groups), options)
    weight = rng.integers(1, 6, groups * options)
    digits = rng.integers(0, 2, (groups * options, 4))
    seen = rng.integers(0, 3, (groups * options, 4))
    best = 0
    for choice in itertools.product(range(options + 1), repeat=groups):
        nodes = [options * number + option for number, option in enumerate(choice) if option < options]
        agreed: dict = {}
        consistent = all(
            agreed.setdefault((t, seen[node, t]), digits[node, t]) == digits[node, t] for node in nodes for t in (2, 3)
        )
        best = max(best, weight[nodes].sum() if consistent and nodes else 0)
    assert addition._heaviest_choice(weight, group, seen, digits) == best


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_the_search_among_the_likelier_sums_finds_the_best_of_all(seed):
    """Compare both rounds of the search with all choices of any sum for each multiset, on random sums."""
    rng = np.random.default_rng(seed)
    weight = np.int64(9) ** np.arange(len(CHARACTERS))
    multiset = weight[np.sort(rng.integers(0, 2, (40, 3)), axis=1)].sum(axis=1)
    sums = rng.integers(0, 2, (40, 4)) * [1, 1, 0, 1]  # the third digit is always 0, so that the last often collides
    counts = Counter(zip(multiset.tolist(), map(tuple, sums.tolist()), strict=True))
    multisets = sorted(set(multiset.tolist()))
    choices = [[None, *(s for m, s in counts if m == number)] for number in multisets]
    best = 0
    for choice in itertools.product(*choices):
        chosen = [(m, s) for m, s in zip(multisets, choice, strict=True) if s is not None]
        agreed: dict = {}
        consistent = all(
            agreed.setdefault((t, m + weight[list(s[: t - 1])].sum(), s[t - 1]), s[t]) == s[t]
            for m, s in chosen
            for t in (2, 3)
        )
        best = max(best, sum(counts[node] for node in chosen) if consistent else 0)
    bound = sum(max(count for (m, _), count in counts.items() if m == number) for number in multisets)
    assert addition._most_right(multiset, sums, weight) == (bound, best)


def test_what_is_seen_is_the_last_token_and_the_multiset_of_the_earlier():
    """Two rows have the same number at a place if and only if they see the same by the definition."""
    rng = np.random.default_rng(0)
    pairs = torch.from_numpy(rng.integers(0, 100, (300, 2)))
    tokens = sequences(pairs, digits=2).numpy()
    weight = np.int64(6) ** np.arange(len(CHARACTERS))
    multiset = weight[tokens[:, :2]].sum(axis=1) + weight[tokens[:, 3:5]].sum(axis=1)
    numbers = addition._seen(multiset, tokens[:, 6:], weight)
    texts = decode(torch.from_numpy(tokens))
    for place in range(3):
        number = numbers[:, place].tolist()
        defined = [seen_before(sequence, 6 + place) for sequence in texts]
        assert len(set(zip(number, defined, strict=True))) == len(set(defined)) == len(set(number))


@pytest.mark.parametrize(("reverse", "exact", "greedy"), [(False, 0.053188, 0.045661), (True, 0.053176, 0.040426)])
def test_three_digits_stay_just_below_the_bound(reverse, exact, greedy):
    """The numbers of the docstring: the prefixes of a few pairs in a million collide."""
    result = ceiling(3, reverse=reverse)
    assert (result.bound, result.exact, result.greedy) == (0.053192, exact, greedy)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: encode([]), "texts"),
        (lambda: encode("1+2=03"), "texts"),
        (lambda: encode(["1+1=02", "1+1=2"]), "texts"),
        (lambda: encode(["1-1=00"]), "texts"),
        (lambda: decode(torch.tensor([1, 2])), "tokens"),
        (lambda: decode(torch.tensor([[12]])), "tokens"),
        (lambda: decode(torch.tensor([[-1]])), "tokens"),
        (lambda: sequences(torch.tensor([[1, 2, 3]]), digits=1), "pairs"),
        (lambda: sequences(torch.tensor([[1.0, 2.0]]), digits=1), "pairs"),
        (lambda: sequences([[1, 2], [3]], digits=1), "pairs"),
        (lambda: sequences("1+2", digits=1), "pairs"),
        (lambda: sequences([[True, False]], digits=1), "pairs"),
        (lambda: decode(["1+2"]), "tokens"),
        (lambda: sequences(torch.tensor([[1, 2]]), digits=0), "digits"),
        (lambda: answer(19), "digits"),
        (lambda: split(4, share=0.1, generator=torch.Generator()), "digits"),
        (lambda: split(1, share=0.0, generator=torch.Generator()), "share"),
        (lambda: split(1, share=0.999, generator=torch.Generator()), "share"),
        (lambda: split(1, share=1.5, generator=torch.Generator()), "share"),
        (lambda: draw(torch.zeros(0, 2, dtype=torch.int64), size=1, key=noise.key(torch.tensor([0]), 0)), "pairs"),
        (lambda: draw(torch.zeros(3, 2, dtype=torch.int64), size=0, key=noise.key(torch.tensor([0]), 0)), "size"),
        (lambda: ceiling(4), "digits"),
    ],
)
def test_bad_input_is_named(call, name):
    with pytest.raises(InputError, match=f"`{name}` must be"):
        call()
