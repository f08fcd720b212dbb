"""Addition at character level, as in `123+456=0579`: sequences, a split of the pairs, and the ceiling without order.

Addition is impossible without knowing the order of the tokens. `ceiling` returns the best exact match that a predictor
can reach without it: one that sees the last token, and how often each of the earlier tokens occurs.
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

from joma import memory
from joma.arguments import InputError, flag, scalar, sequence, whole
from joma.noise import check_generator, uniform
from joma.tensors import as_tensor

CHARACTERS = "0123456789+="  # a character's index is its token number, so a digit's token number is the digit
PLUS, EQUALS = CHARACTERS.index("+"), CHARACTERS.index("=")
MAX_DIGITS = 18  # of each number: the sum must fit into int64
MAX_ENUMERATED_DIGITS = 3  # of each number where all pairs are listed: 10⁶ pairs


def encode(texts: Sequence[str]) -> Int[Tensor, "text position"]:
    """Return the token numbers of texts that have the same length and consist of `CHARACTERS`.

    >>> encode(["12+34=046"])
    tensor([[ 1,  2, 10,  3,  4, 11,  0,  4,  6]])
    """
    expected = "a list of texts of one length"
    texts = sequence("texts", texts, expected)
    lengths = {len(text) if isinstance(text, str) else 0 for text in texts}
    if len(lengths) != 1 or 0 in lengths:
        got = f"{len(texts)} items of lengths {sorted(lengths)[:5]}"
        raise InputError("texts", expected, got, "give at least one text, none of them empty")
    if unknown := sorted(set("".join(texts)) - set(CHARACTERS)):
        raise InputError("texts", f"made of {CHARACTERS}", repr("".join(unknown)), "leave other characters out")
    return torch.tensor([[CHARACTERS.index(character) for character in text] for text in texts])


def decode(tokens: ArrayLike | Tensor) -> list[str]:
    """Return the texts of token numbers [text, position].

    >>> decode(torch.tensor([[1, 10, 9, 11, 1, 0]]))
    ['1+9=10']
    """
    numbers = _as_integers("tokens", tokens, "[text, position]")
    if numbers.ndim != 2:
        got = f"shape {tuple(numbers.shape)}"
        raise InputError("tokens", "whole numbers [text, position]", got, "flatten the leading axes")
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(CHARACTERS):
        got = f"{int(numbers.min())} to {int(numbers.max())}"
        raise InputError("tokens", f"in [0, {len(CHARACTERS) - 1}]", got, "give token numbers of this vocabulary")
    return ["".join(CHARACTERS[number] for number in row) for row in numbers.tolist()]


def sequences(pairs: ArrayLike | Tensor, *, digits: int, reverse: bool = False) -> Int[Tensor, "*batch position"]:
    """Return the tokens of first + second = sum for pairs of numbers, on the device of the pairs.

        d digits, plus, d digits, equals, d + 1 digits of the sum; all padded with zeros, 3d + 3 positions

    Args:
        pairs: [*batch, 2], below 10^digits. Values are not checked: that would wait for the GPU, and a training step
            in a CUDA graph could not call this function.
        digits: number of digits of each number.
        reverse: whether the sum's last digit comes first, so that carries run along the sequence.

    >>> decode(sequences(torch.tensor([[123, 456], [7, 999]]), digits=3))
    ['123+456=0579', '007+999=1006']
    >>> decode(sequences(torch.tensor([[123, 456]]), digits=3, reverse=True))
    ['123+456=9750']
    """
    digits, reverse = _digits(digits), flag("reverse", reverse)
    numbers = _as_integers("pairs", pairs, "[..., 2]")
    if numbers.ndim < 1 or numbers.shape[-1] != 2:
        got = f"shape {tuple(numbers.shape)}"
        raise InputError("pairs", "whole numbers [..., 2]", got, "give the two numbers to add along the last axis")
    first, second = numbers.unbind(-1)
    total = _expand(first + second, digits + 1)
    zero = torch.zeros_like(total[..., :1])
    parts = [_expand(first, digits), zero + PLUS, _expand(second, digits), zero + EQUALS]
    return torch.cat([*parts, total.flip(-1) if reverse else total], dim=-1)


def answer(digits: int) -> slice:
    """Return the positions of the sum's digits in a sequence.

    >>> "123+456=0579"[answer(3)]
    '0579'
    """
    return slice(2 * _digits(digits) + 2, None)


@dataclass(frozen=True)
class Pairs:
    """Ordered pairs of numbers [pair, 2]: those to train on and those held out for the test."""

    train: Int[Tensor, "train 2"]
    test: Int[Tensor, "test 2"]

    def to(self, device: str | torch.device) -> Pairs:
        """Return the pairs on another device."""
        return Pairs(self.train.to(device), self.test.to(device))


def split(digits: int, *, share: float, generator: torch.Generator) -> Pairs:
    """Split all pairs into training and test pairs; a + b and b + a are always on the same side.

    Pairs are held out regardless of order: a model that ignores the order of the summands (as a permutation-invariant
    one must) would otherwise have seen almost every test pair in the other order. Of the n(n + 1)/2 unordered pairs of
    n = 10^digits numbers round(share · n(n + 1)/2) are held out at random. Both orders of each are returned, in
    ascending order.

    Args:
        digits: number of digits of each number, at most 3.
        share: part of the unordered pairs to hold out, above 0 and below 1.
        generator: on the CPU.

    >>> pairs = split(2, share=0.1, generator=torch.Generator().manual_seed(0))
    >>> pairs.train.shape, pairs.test.shape
    (torch.Size([9004, 2]), torch.Size([996, 2]))
    """
    count = 10 ** whole("digits", digits, high=MAX_ENUMERATED_DIGITS)
    share, generator = scalar("share", share, low=0.0, high=1.0), check_generator(generator, required=True)
    first, second = torch.triu_indices(count, count)
    test_count = round(share * len(first))
    if not 0 < test_count < len(first):
        expected = f"a share that leaves some of the {len(first)} pairs on each side"
        raise InputError("share", expected, share, "give one nearer to a half")
    chosen = torch.randperm(len(first), generator=generator)[:test_count]
    is_test = torch.zeros(count, count, dtype=torch.bool)
    is_test[first[chosen], second[chosen]] = True
    is_test = is_test | is_test.mT
    return Pairs(train=is_test.logical_not().nonzero(), test=is_test.nonzero())


def draw(pairs: ArrayLike | Tensor, *, size: int, key: Int[Tensor, "2 seed"]) -> Int[Tensor, "seed sample 2"]:
    """Draw a batch of pairs with replacement for each seed; the batch depends on the key only.

    A seed's batch does not depend on the other seeds, and a training step in a CUDA graph may draw it, as the key's
    step can be a tensor on the device. All pairs are equally likely, to within 2⁻²⁴ of their probability.

    Args:
        pairs: [pair, 2], such as `split(...).train`, on the key's device.
        size: number of pairs for each seed.
        key: seeds and step, made by `joma.noise.key`.

    >>> from joma.noise import key
    >>> draw(torch.tensor([[1, 2], [3, 4], [5, 6]]), size=2, key=key(torch.tensor([0, 7]), 3)).shape
    torch.Size([2, 2, 2])
    """
    numbers = _as_integers("pairs", pairs, "[pair, 2]")
    if numbers.ndim != 2 or numbers.shape[-1] != 2 or len(numbers) == 0:
        raise InputError("pairs", "[pair, 2] and non-empty", f"shape {tuple(numbers.shape)}", "pass `split(...).train`")
    size = whole("size", size)
    memory.check("size", 64 * size, "draw fewer pairs at once")
    # Two numbers of 24 bits: with one alone some of 10⁶ pairs would be 6% more likely than others.
    high, low = ((uniform((size,), key=key, site=site) * 2**24).long() for site in (0, 1))
    return numbers[((high << 24) + low) % len(numbers)]


@dataclass(frozen=True)
class Ceiling:
    """The best exact match of predictors without order: the share of all pairs whose sum has every digit right.

    Attributes:
        bound: if the sum may be any function of the multiset of the operands' digits.
        exact: if the sum is written digit by digit, each a function of the last token and of the multiset of the
            earlier tokens. This is the ceiling of a permutation-invariant model.
        greedy: if each digit is the most frequent one given what is seen, and the smaller of two equally frequent ones.
            This is what a model reaches that has learnt every conditional probability and predicts the likeliest digit.
    """

    bound: float
    exact: float
    greedy: float


def ceiling(digits: int, *, reverse: bool = False) -> Ceiling:
    """Return the best exact match on all pairs of numbers that a permutation-invariant predictor can reach.

    Without positional encoding and with a full attention mask every prefix is one example, and its last position makes
    the prediction: a function of the last token and the multiset of the earlier tokens. The sum c_0 … c_d of operands
    with multiset M is right if all its digits are:

        c_0 = f_0(M),    c_t = f_t(M + {c_0, …, c_{t−2}}, c_{t−1})

    whether the predictor's own digits are fed back or the true ones: they are the same as long as all are right.
    `bound` is Σ_M max_c N(M, c) / 10^2d, with N the number of pairs of multiset M and sum c. It is not always reached:
    what is seen at t ≥ 2 may be the same for operands of different multisets, and then the digit must be the same.
    Choosing one sum for each M without such contradictions is a maximum-weight independent set. It is solved exactly
    as an integer programme: first among the likeliest sums only; the distance of that solution from the bound limits
    how much less likely the other sums may be. It is the optimum for the whole sum; the optimum for one digit at a
    time is `greedy`.

    For 2 digits `exact` is 0.2850 plain and reversed; for 3 it is 0.053188 plain and 0.053176 reversed, 4 and 16
    pairs in a million below the bound.

    Args:
        digits: number of digits of each number, at most 3.
        reverse: whether the sum's last digit comes first.

    >>> ceiling(2)
    Ceiling(bound=0.285, exact=0.285, greedy=0.2834)
    """
    digits = whole("digits", digits, high=MAX_ENUMERATED_DIGITS)
    count = 10**digits
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    tokens = sequences(pairs, digits=digits, reverse=reverse).numpy()
    sums = tokens[:, answer(digits)]
    # The number of a multiset has the counts of the characters as its digits in base 3d. No count is higher than
    # 3d - 1: 2d digits of the operands and d - 1 of the sum.
    weight = np.int64(3 * digits) ** np.arange(len(CHARACTERS))
    multiset = weight[tokens[:, :digits]].sum(axis=1) + weight[tokens[:, digits + 1 : 2 * digits + 1]].sum(axis=1)
    seen = _seen(multiset, sums, weight)
    greedy = np.logical_and.reduce([_is_likeliest(seen[:, t], sums[:, t]) for t in range(digits + 1)]).sum()
    return Ceiling(*(float(right) / count**2 for right in (*_most_right(multiset, sums, weight), greedy)))


def _most_right(
    multiset: Int[np.ndarray, " pair"], sums: Int[np.ndarray, "pair place"], weight: Int[np.ndarray, " character"]
) -> tuple[int, int]:
    """Return how many pairs can be right: first if each multiset has one sum, then if sums are written digit by digit.

    Args:
        multiset: number of each pair's multiset of digits.
        sums: digits of each pair's sum, in the order in which they are written.
        weight: what one more of a character adds to the number of a multiset.
    """
    _, first, counts = np.unique(
        multiset * 10 ** sums.shape[1] + sums @ 10 ** np.arange(sums.shape[1]), return_index=True, return_counts=True
    )
    multiset, sums = multiset[first], sums[first]
    group = np.unique(multiset, return_inverse=True)[1]
    highest = np.zeros(group.max() + 1, dtype=np.int64)
    np.maximum.at(highest, group, counts)
    bound, seen = int(highest.sum()), _seen(multiset, sums, weight)

    def best(gap: int) -> int:
        near = counts >= highest[group] - gap
        return _heaviest_choice(counts[near], group[near], seen[near], sums[near])

    exact = best(0)
    # In a better choice, no multiset's sum is rarer than its likeliest one by more than bound - exact.
    return bound, exact if exact == bound else best(bound - exact)


def _seen(
    multiset: Int[np.ndarray, " row"], sums: Int[np.ndarray, "row place"], weight: Int[np.ndarray, " character"]
) -> Int[np.ndarray, "row place"]:
    """Return a number for what is seen before each digit of the sum: the last token, and the multiset before it."""
    written = np.cumsum(weight[sums], axis=1)[:, :-2]
    zero = np.zeros((len(sums), 1), dtype=np.int64)
    earlier = multiset[:, None] + np.concatenate([zero, zero, written], axis=1)
    last = np.concatenate([zero + EQUALS, sums[:, :-1]], axis=1)
    return earlier * len(CHARACTERS) + last


def _is_likeliest(seen: Int[np.ndarray, " row"], digit: Int[np.ndarray, " row"]) -> Bool[np.ndarray, " row"]:
    """Return for each row whether its digit is the most frequent one among all rows that see the same."""
    states, state = np.unique(seen, return_inverse=True)
    counts = np.bincount(state * 10 + digit, minlength=10 * len(states)).reshape(-1, 10)
    return counts.argmax(axis=1)[state] == digit


def _heaviest_choice(
    weight: Int[np.ndarray, " node"],
    group: Int[np.ndarray, " node"],
    seen: Int[np.ndarray, "node place"],
    digits: Int[np.ndarray, "node place"],
) -> int:
    """Return the greatest weight of nodes, at most one of each group, that agree on a digit wherever they see the same.

    Variables: a 0 or 1 for each node, and for each pair of a thing seen and a digit. A node is at most each of its
    digits, and the digits of a thing seen sum to at most 1. What is seen at the first two places belongs to one group
    alone, so these places need no such rows.
    """
    count = len(weight)
    node = np.arange(count)
    rows, columns = int(group.max()) + 1, count
    entries, upper = [(group, node, 1)], [np.ones(rows)]
    for place in range(2, digits.shape[1]):
        states, state = np.unique(seen[:, place], return_inverse=True)
        options, option = np.unique(state * 10 + digits[:, place], return_inverse=True)
        entries += [(rows + node, node, 1), (rows + node, columns + option, -1)]
        entries += [(rows + count + options // 10, columns + np.arange(len(options)), 1)]
        upper += [np.zeros(count), np.ones(len(states))]
        rows, columns = rows + count + len(states), columns + len(options)
    indices = tuple(np.concatenate([entry[axis] for entry in entries]) for axis in (0, 1))
    values = np.concatenate([np.full(len(entry[0]), entry[2]) for entry in entries])
    matrix = coo_array((values, indices), shape=(rows, columns)).tocsr()
    gain = np.concatenate([weight, np.zeros(columns - count)])
    bounds: Any = np.concatenate(upper)  # SciPy's stubs allow a single number only
    limits = LinearConstraint(matrix, ub=bounds)
    solution = milp(-gain, constraints=limits, integrality=1, bounds=Bounds(0, 1), options={"mip_rel_gap": 0})
    if solution.status != 0:
        raise RuntimeError(f"SciPy did not solve the integer programme: {solution.message}")
    return round(-solution.fun)


def _as_integers(name: str, value: ArrayLike | Tensor, axes: str) -> Int[Tensor, "*axes"]:
    """Return `value` as an int64 tensor, in which sums of numbers of up to 18 digits do not overflow."""
    expected, remedy = f"whole numbers {axes}", "give whole numbers, in rows of one length"
    tensor = as_tensor(name, value, expected=expected, remedy=remedy)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(name, expected, f"{tensor.dtype} of shape {tuple(tensor.shape)}", remedy)
    return tensor.long()


def _digits(digits: int) -> int:
    return whole("digits", digits, high=MAX_DIGITS)


def _expand(numbers: Int[Tensor, "*batch"], digits: int) -> Int[Tensor, "*batch digit"]:
    """Return the digits of whole numbers, the highest first."""
    place_value = 10 ** torch.arange(digits - 1, -1, -1, device=numbers.device)
    return numbers[..., None] // place_value % 10
