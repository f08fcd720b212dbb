"""All binary sequences up to a length, and one attention layer that reads them: even pairs, parity, chain of thought.

A sequence is an *even pair* if its first and its last symbol are equal, and *even* if it has an even number of ones. A
token is a position with a symbol. The layer attends from the last token, and a linear layer reads what attention puts
together (Huang, Liang & Yang 2025, arXiv 2505.00926; the model as we remember it):

    f = Σ_l b_l u[x_l],    b = softmax over positions l of W[x_last, x_l],    loss = Σ 2^−length ln(1 + e^{−label f})

That is the softmax block of `block_flow` with one hidden unit, one query for each last token and no residual
connection: W are the logits z [query, token] and u the weights v. All expectations are sums over all sequences.

Parity of a sequence of length n is that of the sequence of length n − 1 whose first symbol is the exclusive or of the
first and the last symbol: a chain of n − 1 decisions about even pairs (`docs/related/even-pairs.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from scipy.special import expit, softmax

from joma.arguments import InputError, instance, real, whole
from joma.theory.block_flow import Architecture, BlockFlow, Training, block
from joma.theory.margins import max_margin

MAX_LENGTH = 16  # 131,070 sequences

Samples = Float[np.ndarray, " sample"]


@dataclass(frozen=True, eq=False)
class Sequences:
    """All binary sequences of lengths 1 to `max_length`, in the order of length, then as binary numbers.

    Token 2l + s is the symbol s at position l, counted from 0.

    Attributes:
        length: of each sequence.
        present: 1 for the tokens of a sequence, else 0.
        first, last: the first and the last token of each sequence.
        even_pair: 1 if the first and the last symbol are equal, else −1.
        even: 1 if the number of ones is even, else −1.
        number: the symbols as a binary number; the first symbol is the most significant.
    """

    max_length: int
    length: Int[np.ndarray, " sample"]
    present: Float[np.ndarray, "sample token"]
    first: Int[np.ndarray, " sample"]
    last: Int[np.ndarray, " sample"]
    even_pair: Samples
    even: Samples
    number: Int[np.ndarray, " sample"]

    @property
    def tokens(self) -> int:
        """Return the number of tokens, twice the largest length."""
        return 2 * self.max_length

    @property
    def weight(self) -> Samples:
        """Return 2^−length of each sequence: every length has the same total weight."""
        return 0.5**self.length

    @property
    def chain_weight(self) -> Samples:
        """Return how often a sequence is a state in the chains of thought of all sequences, each weighted as above.

        A decision leads from two sequences of length n to one of length n − 1. So states of length n have the weight
        (max_length − n + 1) 2^−n. Those of length 1 are the ends of the chains.
        """
        return (self.max_length - self.length + 1) * self.weight

    @property
    def decision_weight(self) -> Samples:
        """Return `chain_weight` without the ends of the chains, where nothing is left to decide."""
        return np.where(self.length > 1, self.chain_weight, 0.0)


def all_sequences(max_length: int) -> Sequences:
    """Return all binary sequences of lengths 1 to `max_length`.

    >>> world = all_sequences(2)
    >>> world.length.tolist(), world.even_pair.tolist(), world.even.tolist()
    ([1, 1, 2, 2, 2, 2], [1.0, 1.0, 1.0, -1.0, -1.0, 1.0], [1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    """
    longest = whole("max_length", max_length, high=MAX_LENGTH)
    length = np.repeat(np.arange(1, longest + 1), 2 ** np.arange(1, longest + 1))
    number = np.concatenate([np.arange(2**n) for n in range(1, longest + 1)])
    position = np.arange(longest)
    inside = position < length[:, None]
    symbol = (number[:, None] >> np.maximum(length[:, None] - 1 - position, 0)) & 1
    token = 2 * position + symbol
    present = np.zeros((len(length), 2 * longest))
    present[np.nonzero(inside)[0], token[inside]] = 1.0
    last = token[np.arange(len(length)), length - 1]
    ones = np.where(inside, symbol, 0).sum(axis=1)
    even_pair = np.where(symbol[:, 0] == last % 2, 1.0, -1.0)
    return Sequences(longest, length, present, token[:, 0], last, even_pair, np.where(ones % 2 == 0, 1.0, -1.0), number)


def pair_flow(world: Sequences, label: ArrayLike, weight: ArrayLike | None = None) -> BlockFlow:
    """Return the gradient flow of the layer on all sequences, for labels 1 and −1 of each.

        loss = Σ_i weight_i ln(1 + exp(−label_i f_i))

    The weights need not sum to 1: the learning rates of the flow are their sum, so that its time is that of this loss.

    Args:
        world: the sequences.
        label: 1 or −1 for each sequence, such as `world.even_pair`.
        weight: of each sequence; `world.weight` by default.

    Returns:
        A `BlockFlow`; `pair_start` is its zero start.

    >>> world = all_sequences(2)
    >>> path = pair_flow(world, world.even_pair).solve([0.0, 20.0], *pair_start(world))
    >>> path.v[-1, :, 0].round(2)  # the first position says yes, the second no
    array([ 2.17,  2.17, -0.85, -0.85])
    """
    _check(world)
    sign, weights = _labels(world, label), world.weight if weight is None else real("weight", weight, ndim=1, low=0.0)
    if weights.shape != sign.shape or not weights.sum() > 0.0:
        expected = f"one number for each of {len(sign)} sequences, not all 0"
        raise InputError("weight", expected, f"shape {weights.shape}", "match `world`")
    total = float(weights.sum())
    return block(
        "softmax",
        "linear",
        lambda f: sign[:, None] * expit(-sign[:, None] * f),
        world.present,
        query=world.last,
        weight=weights / total,
        training=Training(rate_w=total, rate_z=total),
        architecture=Architecture(residual=False),
    )


def pair_start(world: Sequences) -> tuple[Float[np.ndarray, "dim 1"], Float[np.ndarray, "query token"]]:
    """Return zero weights and zero logits in the shapes that the flow of `pair_flow` asks for.

    >>> [array.shape for array in pair_start(all_sequences(3))]
    [(12, 1), (6, 6)]
    """
    _check(world)
    return np.zeros((2 * world.tokens, 1)), np.zeros((world.tokens, world.tokens))


def pair_attention(world: Sequences, logits: ArrayLike) -> Float[np.ndarray, "*lead sample token"]:
    """Return the attention of each sequence over its tokens, from its last token.

    Args:
        world: the sequences.
        logits: W, [..., query, token].

    >>> pair_attention(all_sequences(1), np.zeros((2, 2)))
    array([[1., 0.],
           [0., 1.]])
    """
    _check(world)
    z = real("logits", logits)
    if z.ndim < 2 or z.shape[-2:] != (world.tokens, world.tokens):
        expected = f"[..., query, token] with {world.tokens} of each"
        raise InputError("logits", expected, f"shape {z.shape}", "match `world`")
    return softmax(np.where(world.present > 0, z[..., world.last, :], -np.inf), axis=-1)


def pair_margins(world: Sequences, label: ArrayLike, u: ArrayLike, logits: ArrayLike) -> np.ndarray:
    """Return label times f for each sequence; a positive number is a right answer.

    Args:
        world: the sequences.
        label: 1 or −1 for each sequence.
        u: weights of the linear layer, [..., token].
        logits: W, [..., query, token].

    Returns:
        The margins, [..., sample].

    >>> world = all_sequences(2)
    >>> pair_margins(world, world.even_pair, [1.0, 1.0, -1.0, -1.0], np.zeros((4, 4)))
    array([ 1.,  1.,  0., -0., -0.,  0.])
    """
    _check(world)
    weights = real("u", u)
    if weights.shape[-1:] != (world.tokens,):
        raise InputError("u", f"[..., token] with {world.tokens} tokens", f"shape {weights.shape}", "match `world`")
    return _labels(world, label) * (pair_attention(world, logits) * weights[..., None, :]).sum(axis=-1)


def pair_svm(world: Sequences, label: ArrayLike, logits: ArrayLike) -> Float[np.ndarray, " token"]:
    """Return the shortest u that has margin 1 on all sequences, with attention as it is: the hard-margin SVM.

    The linear layer alone, on separable outputs of attention, grows as ln t along it: d‖u‖/d ln t → ‖û‖.

    Args:
        world: the sequences.
        label: 1 or −1 for each sequence.
        logits: W, [query, token].

    Raises:
        InputError: no u separates the outputs of attention, as with uniform attention.

    >>> world = all_sequences(2)
    >>> logits = np.zeros((4, 4))
    >>> logits[2:, :2] = [[9.0, -9.0], [-9.0, 9.0]]  # look at the first symbol if it is the last one too
    >>> pair_svm(world, world.even_pair, logits).round(2)
    array([ 1.,  1., -1., -1.])
    """
    _check(world)
    outputs = _labels(world, label)[:, None] * pair_attention(world, real("logits", logits, ndim=2))
    try:
        return max_margin(outputs)
    except InputError as problem:
        expected, remedy = "such that some u separates the outputs of attention", "train it further, or check `label`"
        raise InputError("logits", expected, problem.got, remedy) from None


def phase_boundary(times: ArrayLike, least_margin: ArrayLike) -> float:
    """Return the time at which the least margin first becomes positive, interpolated; infinite if it never does.

    Args:
        times: increasing.
        least_margin: the least of all margins at these times.

    >>> phase_boundary([0.0, 1.0, 2.0], [-1.0, -0.5, 0.5])
    1.5
    """
    grid, least = real("times", times, ndim=1), real("least_margin", least_margin, ndim=1)
    if grid.shape != least.shape or (np.diff(grid) <= 0).any():
        expected, got = "increasing, with one margin each", f"{grid.size} times and {least.size} margins"
        raise InputError("times", expected, got, "match the two")
    positive = np.flatnonzero(least > 0.0)
    if not positive.size:
        return math.inf
    after = int(positive[0])
    if after == 0:
        return float(grid[0])
    before = after - 1
    share = -least[before] / (least[after] - least[before])
    return float(grid[before] + share * (grid[after] - grid[before]))


def parity_by_chain(world: Sequences, odd_pair: np.ndarray) -> Bool[np.ndarray, " sample"]:
    """Return which sequences are judged odd by a chain of thought that asks for even pairs at every length.

        (x_1, x_2, …, x_n)  →  (x_1 xor x_n, x_2, …, x_{n−1}),    x_1 xor x_n = "this is an odd pair"

    Args:
        world: the sequences.
        odd_pair: whether the model calls each sequence an odd pair, of all lengths.

    Returns:
        True where the chain ends with the symbol 1.

    >>> world = all_sequences(3)
    >>> chain = parity_by_chain(world, world.even_pair < 0)
    >>> bool((chain == (world.even < 0)).all())
    True
    """
    decisions = _decisions(_check(world), odd_pair)
    length, number = world.length.copy(), world.number.copy()
    for _ in range(world.max_length - 1):
        longer = length > 1
        decision = decisions[_index(length, number)]
        middle = (number & ((1 << np.maximum(length - 1, 0)) - 1)) >> 1  # without the first and the last symbol
        shorter = np.maximum(length - 1, 1)
        number = np.where(longer, middle | (decision << (shorter - 1)), number)
        length = shorter
    return number == 1


def parity_by_pairs(world: Sequences, odd_pair: np.ndarray) -> Bool[np.ndarray, " sample"]:
    """Return which sequences are judged odd by a chain of thought over neighbours, which asks at length 2 only.

        s_1 = x_1,    s_{i+1} = "(s_i, x_{i+1}) is an odd pair"

    Args:
        world: the sequences.
        odd_pair: whether the model calls each sequence an odd pair; only those of length 2 are read.

    Returns:
        True where the last s is 1.

    >>> world = all_sequences(3)
    >>> chain = parity_by_pairs(world, world.even_pair < 0)
    >>> bool((chain == (world.even < 0)).all())
    True
    """
    if _check(world).max_length < 2:
        raise InputError("world", "of sequences up to length 2 or more", world.max_length, "raise `max_length`")
    pairs = _decisions(world, odd_pair)[2:6]
    state = (world.number >> (world.length - 1)) & 1
    for position in range(1, world.max_length):
        symbol = (world.number >> np.maximum(world.length - 1 - position, 0)) & 1
        state = np.where(position < world.length, pairs[2 * state + symbol], state)
    return state == 1


def _index(length: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return the place of a sequence among all: 2^n − 2 sequences are shorter than n."""
    return 2**length - 2 + number


def _check(world: Sequences) -> Sequences:
    return instance("world", world, Sequences, "pass what `all_sequences` returns")


def _decisions(world: Sequences, odd_pair: np.ndarray) -> Int[np.ndarray, " sample"]:
    instance("odd_pair", odd_pair, np.ndarray, "pass an array of True and False")
    decisions = np.asarray(odd_pair)
    if decisions.shape != world.length.shape or decisions.dtype != np.bool_:
        expected = f"True or False for each of {len(world.length)} sequences"
        raise InputError("odd_pair", expected, f"{decisions.dtype} of shape {decisions.shape}", "match `world`")
    return decisions.astype(np.int64)


def _labels(world: Sequences, label: ArrayLike) -> Samples:
    sign = real("label", label, ndim=1)
    if sign.shape != world.length.shape or (abs(sign) != 1.0).any():
        expected = f"1 or −1 for each of {len(world.length)} sequences"
        raise InputError("label", expected, f"shape {sign.shape}", "match `world`")
    return sign
