"""Addition at character level, as `123+456=0579`: sequences, pairs that are held out, and what order is worth.

A task that cannot be done without knowing the order of its tokens. `ceiling` says how far one gets without: the best
exact match of any predictor that sees its last token and, of the earlier ones, only how often each occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor

from joma.arguments import InputError, scalar, whole
from joma.noise import uniform
from joma.tensors import as_tensor

CHARACTERS = "0123456789+="  # a character's place is its token number: a digit is its own
PLUS, EQUALS = CHARACTERS.index("+"), CHARACTERS.index("=")
MOST = 18  # digits: sums are kept in int64
ENUMERATED = 3  # digits whose pairs are enumerated, 10⁶


def encode(texts: Sequence[str]) -> Int[Tensor, "text position"]:
    """Return the token numbers of texts of one length, characters of `CHARACTERS`.

    >>> encode(["12+34=046"])
    tensor([[ 1,  2, 10,  3,  4, 11,  0,  4,  6]])
    """
    if isinstance(texts, str) or not texts or len({len(text) for text in texts}) != 1 or not texts[0]:
        raise InputError("texts", "a list of texts of one length", repr(texts), "give at least one, none of them empty")
    if strange := sorted(set("".join(texts)) - set(CHARACTERS)):
        raise InputError("texts", f"made of {CHARACTERS}", repr("".join(strange)), "leave other characters out")
    return torch.tensor([[CHARACTERS.index(character) for character in text] for text in texts])


def decode(tokens: ArrayLike | Tensor) -> list[str]:
    """Return the texts of token numbers [text, position].

    >>> decode(torch.tensor([[1, 10, 9, 11, 1, 0]]))
    ['1+9=10']
    """
    given = _numbers("tokens", tokens, "[text, position]")
    if given.ndim != 2:
        got = f"shape {tuple(given.shape)}"
        raise InputError("tokens", "whole numbers [text, position]", got, "flatten the leading axes")
    if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < len(CHARACTERS):
        got = f"{int(given.min())} to {int(given.max())}"
        raise InputError("tokens", f"in [0, {len(CHARACTERS) - 1}]", got, "give token numbers of this vocabulary")
    return ["".join(CHARACTERS[number] for number in row) for row in given.tolist()]


def sequences(pairs: ArrayLike | Tensor, *, digits: int, reverse: bool = False) -> Int[Tensor, "*batch position"]:
    """Return the sequences of pairs of numbers: first + second = sum, on the pairs' device.

        d digits, plus, d digits, equals, d + 1 digits of the sum, padded with zeros; position runs over 3d + 3

    Args:
        pairs: [*batch, 2], below 10^digits; values are not looked at, so that a captured step may call this.
        digits: of each number.
        reverse: whether the sum's last digit comes first, so that carries run along the sequence.

    >>> decode(sequences(torch.tensor([[123, 456], [7, 999]]), digits=3))
    ['123+456=0579', '007+999=1006']
    >>> decode(sequences(torch.tensor([[123, 456]]), digits=3, reverse=True))
    ['123+456=9750']
    """
    digits = _digits(digits)
    given = _numbers("pairs", pairs, "[..., 2]")
    if given.ndim < 1 or given.shape[-1] != 2:
        got = f"shape {tuple(given.shape)}"
        raise InputError("pairs", "whole numbers [..., 2]", got, "give the two numbers to add along the last axis")
    first, second = given.unbind(-1)
    total = _expand(first + second, digits + 1)
    sign = torch.zeros_like(total[..., :1])
    parts = [_expand(first, digits), sign + PLUS, _expand(second, digits), sign + EQUALS]
    return torch.cat([*parts, total.flip(-1) if reverse else total], dim=-1)


def answer(digits: int) -> slice:
    """Return where in a sequence the digits of the sum stand.

    >>> "123+456=0579"[answer(3)]
    '0579'
    """
    return slice(2 * _digits(digits) + 2, None)


@dataclass(frozen=True)
class Pairs:
    """Ordered pairs of numbers [pair, 2], those to train on and those never seen."""

    train: Int[Tensor, "train 2"]
    test: Int[Tensor, "test 2"]

    def to(self, device: str | torch.device) -> Pairs:
        """Return the pairs on another device."""
        return Pairs(self.train.to(device), self.test.to(device))


def split(digits: int, *, share: float, generator: torch.Generator) -> Pairs:
    """Hold out a share of all pairs, so that neither a + b nor b + a of a test pair is ever trained on.

    Pairs are held out regardless of order: a model that has learnt to ignore the order of the summands (as a
    permutation-invariant one must) would otherwise have seen the twin of almost every test pair. Of n(n + 1)/2
    unordered pairs of n = 10^digits numbers round(share · n(n + 1)/2) are held out, chosen at random; both orders of
    each are then listed, in ascending order.

    Args:
        digits: of each number, at most 3.
        share: of unordered pairs to hold out, above 0 and below 1.
        generator: on the CPU.

    >>> pairs = split(2, share=0.1, generator=torch.Generator().manual_seed(0))
    >>> pairs.train.shape, pairs.test.shape
    (torch.Size([9004, 2]), torch.Size([996, 2]))
    """
    count = 10 ** whole("digits", digits, high=ENUMERATED)
    share = scalar("share", share, low=0.0, high=1.0)
    first, second = torch.triu_indices(count, count)
    held = round(share * len(first))
    if not 0 < held < len(first):
        raise InputError("share", f"a share that leaves some of {len(first)} pairs on each side", share, "change it")
    chosen = torch.randperm(len(first), generator=generator)[:held]
    away = torch.zeros(count, count, dtype=torch.bool)
    away[first[chosen], second[chosen]] = True
    away = away | away.mT
    return Pairs(train=away.logical_not().nonzero(), test=away.nonzero())


def draw(pairs: ArrayLike | Tensor, *, size: int, key: Int[Tensor, "2 seed"]) -> Int[Tensor, "seed sample 2"]:
    """Draw a batch of pairs with replacement for each seed: a function of the key alone.

    A seed's batch does not depend on the seeds beside it, and a captured step may draw it, as the key's step can be a
    number on the device. Every pair is as likely as any other to within 2⁻²⁴ of its probability.

    Args:
        pairs: [pair, 2], such as `split(...).train`, on the key's device.
        size: number of pairs for each seed.
        key: of `joma.noise.key`.

    >>> from joma.noise import key
    >>> draw(torch.tensor([[1, 2], [3, 4], [5, 6]]), size=2, key=key(torch.tensor([0, 7]), 3)).shape
    torch.Size([2, 2, 2])
    """
    given = _numbers("pairs", pairs, "[pair, 2]")
    if given.ndim != 2 or given.shape[-1] != 2 or len(given) == 0:
        raise InputError("pairs", "[pair, 2] and non-empty", f"shape {tuple(given.shape)}", "pass `split(...).train`")
    # A number of 24 bits alone would make some of 10⁶ pairs 6% more likely than others.
    high, low = ((uniform((whole("size", size),), key=key, site=site) * 2**24).long() for site in (0, 1))
    return given[((high << 24) + low) % len(given)]


@dataclass(frozen=True)
class Ceiling:
    """How much of addition can be had without order: shares of all pairs whose whole sum is right.

    Attributes:
        bound: if the sum may be any function of the multiset of the operands' digits.
        exact: if it is written digit by digit, each a function of the last token and the multiset of the earlier ones.
            This is the ceiling of a permutation-invariant model.
        greedy: if each digit is the most frequent one given what is seen, the smaller in ties: what a model reaches
            that has learnt every conditional probability and takes the likeliest.
    """

    bound: float
    exact: float
    greedy: float


def ceiling(digits: int, *, reverse: bool = False) -> Ceiling:
    """Return the best exact match on all pairs of numbers that a permutation-invariant predictor can reach.

    With no positional encoding and a full mask every prefix is an example of its own and its last position predicts.
    That prediction is a function of the last token and the multiset of the earlier tokens. The sum c_0 … c_d of
    operands with multiset M is right if all its digits are:

        c_0 = f_0(M),    c_t = f_t(M + {c_0, …, c_{t−2}}, c_{t−1})

    (by free running or with the true digits given: as long as all are right, these are the same). `bound` is
    Σ_M max_c N(M, c) / 10^2d, with N the number of pairs of multiset M and sum c. It is not always reached: operands
    of different multisets may share what is seen at t ≥ 2, and so must share the digit. Choosing one sum for each M
    without such contradictions is a maximum-weight independent set. It is solved exactly as an integer programme:
    first among the likeliest sums alone; what that falls short of the bound limits how much less likely the others
    may be. It is the optimum for the whole sum, not digit by digit, which is `greedy`.

    For 2 digits `exact` is 0.2850 plain and reversed; for 3 it is 0.053188 plain and 0.053176 reversed, 4 and 16
    pairs in a million below the bound.

    Args:
        digits: of each number, at most 3.
        reverse: whether the sum's last digit comes first.

    >>> ceiling(2)
    Ceiling(bound=0.285, exact=0.285, greedy=0.2834)
    """
    count = 10 ** whole("digits", digits, high=ENUMERATED)
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    tokens = sequences(pairs, digits=digits, reverse=reverse).numpy()
    sums = tokens[:, answer(digits)]
    # A multiset's number has its counts as figures; none is above 2d operands and d - 1 digits of the sum.
    weight = np.int64(3 * digits) ** np.arange(len(CHARACTERS))
    multiset = weight[tokens[:, :digits]].sum(axis=1) + weight[tokens[:, digits + 1 : 2 * digits + 1]].sum(axis=1)
    seen = _seen(multiset, sums, weight)
    greedy = np.logical_and.reduce([_likeliest(seen[:, t], sums[:, t]) for t in range(digits + 1)]).sum()
    return Ceiling(*(float(right) / count**2 for right in (*_jointly(multiset, sums, weight), greedy)))


def _jointly(
    multiset: Int[np.ndarray, " pair"], sums: Int[np.ndarray, "pair place"], weight: Int[np.ndarray, " character"]
) -> tuple[int, int]:
    """Return how many pairs can be right if each multiset has one sum, and if the sums are written digit by digit."""
    _, first, times = np.unique(
        multiset * 10 ** sums.shape[1] + sums @ 10 ** np.arange(sums.shape[1]), return_index=True, return_counts=True
    )
    multiset, sums = multiset[first], sums[first]
    owner = np.unique(multiset, return_inverse=True)[1]
    most = np.zeros(owner.max() + 1, dtype=np.int64)
    np.maximum.at(most, owner, times)
    bound, seen = int(most.sum()), _seen(multiset, sums, weight)

    def best(short: int) -> int:
        near = times >= most[owner] - short
        return _independent(times[near], owner[near], seen[near], sums[near])

    exact = best(0)
    # A better choice is within bound - exact of the likeliest sum for every multiset: no other sums need be looked at.
    return bound, exact if exact == bound else best(bound - exact)


def _seen(
    multiset: Int[np.ndarray, " row"], sums: Int[np.ndarray, "row place"], weight: Int[np.ndarray, " character"]
) -> Int[np.ndarray, "row place"]:
    """Return a number for what is seen before each digit of the sum: the last token, and the multiset before it."""
    before = np.cumsum(weight[sums], axis=1)[:, :-2]
    zero = np.zeros((len(sums), 1), dtype=np.int64)
    earlier = multiset[:, None] + np.concatenate([zero, zero, before], axis=1)
    last = np.concatenate([zero + EQUALS, sums[:, :-1]], axis=1)
    return earlier * len(CHARACTERS) + last


def _likeliest(seen: Int[np.ndarray, " row"], figure: Int[np.ndarray, " row"]) -> Bool[np.ndarray, " row"]:
    """Return where the digit is the most frequent one of all rows that see the same."""
    states, state = np.unique(seen, return_inverse=True)
    counts = np.bincount(state * 10 + figure, minlength=10 * len(states)).reshape(-1, 10)
    return counts.argmax(axis=1)[state] == figure


def _independent(
    weight: Int[np.ndarray, " node"],
    owner: Int[np.ndarray, " node"],
    seen: Int[np.ndarray, "node place"],
    figures: Int[np.ndarray, "node place"],
) -> int:
    """Return the greatest weight of nodes, at most one of each owner, that agree on a digit wherever they see the same.

    Variables: a 0 or 1 for each node, and for each thing seen and digit. A node is at most each of its digits, and the
    digits of a thing seen sum to at most 1. The first two places belong to one owner alone and need no such rows.
    """
    count = len(weight)
    node = np.arange(count)
    entries, right, rows, columns = [(owner, node, 1)], [np.ones(owner.max() + 1)], int(owner.max()) + 1, count
    for t in range(2, figures.shape[1]):
        states, state = np.unique(seen[:, t], return_inverse=True)
        options, option = np.unique(state * 10 + figures[:, t], return_inverse=True)
        entries += [(rows + node, node, 1), (rows + node, columns + option, -1)]
        entries += [(rows + count + options // 10, columns + np.arange(len(options)), 1)]
        right += [np.zeros(count), np.ones(len(states))]
        rows, columns = rows + count + len(states), columns + len(options)
    where = tuple(np.concatenate([entry[axis] for entry in entries]) for axis in (0, 1))
    values = np.concatenate([np.full(len(entry[0]), entry[2]) for entry in entries])
    matrix = coo_array((values, where), shape=(rows, columns)).tocsr()
    gain = np.concatenate([weight, np.zeros(columns - count)])
    ends: Any = np.concatenate(right)  # the stubs know single numbers alone
    limits = LinearConstraint(matrix, ub=ends)
    solved = milp(-gain, constraints=limits, integrality=1, bounds=Bounds(0, 1), options={"mip_rel_gap": 0})
    if solved.status != 0:
        raise RuntimeError(f"the integer programme was not solved: {solved.message}")
    return round(-solved.fun)


def _numbers(name: str, value: ArrayLike | Tensor, axes: str) -> Int[Tensor, "*axes"]:
    """Return whole numbers in int64, in which sums of up to 18 digits do not overflow."""
    expected, remedy = f"whole numbers {axes}", "give whole numbers, in rows of one length"
    given = as_tensor(name, value, expected=expected, remedy=remedy)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise InputError(name, expected, f"{given.dtype} of shape {tuple(given.shape)}", remedy)
    return given.long()


def _digits(digits: int) -> int:
    return whole("digits", digits, high=MOST)


def _expand(numbers: Int[Tensor, "*batch"], digits: int) -> Int[Tensor, "*batch digit"]:
    """Return the digits of whole numbers, the highest first."""
    place = 10 ** torch.arange(digits - 1, -1, -1, device=numbers.device)
    return numbers[..., None] // place % 10
