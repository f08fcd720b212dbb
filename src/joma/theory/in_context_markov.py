"""Chains drawn anew for every sequence: what can be predicted in context, and where attention's gradient points.

Every sequence has its own law, x_{s+1} ~ kernel[x_{s+1−δ_1}, x_{s+1−δ_2}, …], with the lags δ of its parents; a Markov
chain has the one parent (1,). A predictor sees the sequence alone. It can answer uniformly, by the counts of single
symbols (`unigram`), or by the counts of symbols after the same parents (`bayes`).

The minimal model that learns to do so has two layers of attention. The first looks back by position alone, the second
compares symbols (x is one-hot, and the parent of the next symbol asks):

    w = softmax(r),   m_s = Σ_δ w_δ x_{s−δ},   p_t = Σ_{s≤t} softmax_s(x_parentᵀ A m_s) x_s

At A = 0 it predicts by single symbols. Its gradient there is a sum of the dependence between symbols at each lag,
`lag_dependence` in long contexts and `context_dependence` in a context of any length: `saddle_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from scipy.sparse.csgraph import connected_components

from joma.arguments import (
    InputError,
    broadcast,
    check_size,
    probabilities,
    real,
    scalar,
    sequence,
    whole,
    whole_numbers,
)

MAX_ALPHA = 1e100
MAX_SYMBOLS = 10**4
MAX_LAG = 10**4
MAX_WINDOWS = 2**12
_BLOCK = 64  # states that are eliminated together


def stationary(transition: ArrayLike) -> Float[np.ndarray, "*batch state"]:
    """Return the stationary distribution of Markov chains.

        π P = π,    Σ_i π_i = 1

    Args:
        transition: P[i, j], the probability of j after i, [..., state, state]; each chain has one stationary
            distribution. What a row lacks of 1 by rounding is taken to be missing on the diagonal.

    Returns:
        π, [..., state], each probability to full relative accuracy, however rare the state is.

    >>> stationary([[0.9, 0.1], [0.3, 0.7]]).round(4)
    array([0.75, 0.25])
    """
    chains = _square("transition", transition)
    flat = chains.reshape(-1, *chains.shape[-2:])
    distribution, is_connected = _eliminate(flat)
    for index in np.flatnonzero(~is_connected):
        distribution[index] = _on_recurrent_states(flat[index])
    return distribution.reshape(chains.shape[:-1])


def _eliminate(
    chains: Float[np.ndarray, "chain state state"],
) -> tuple[Float[np.ndarray, "chain state"], Bool[np.ndarray, " chain"]]:
    """Return the distributions by elimination of states, and whether all states of a chain lead to its first one.

    Each step leaves a state out and adds the ways through it to those between the others (Grassmann, Taksar & Heyman
    1985). It only adds, multiplies and divides positive numbers: a state that is hardly ever left, or hardly ever
    entered, costs no digits. The diagonal is not read. States go in blocks, so that most of the work is in products.
    """
    ways, states = chains.copy(), chains.shape[-1]
    is_connected = np.ones(len(ways), dtype=bool)
    with np.errstate(under="ignore", over="ignore", divide="ignore", invalid="ignore"):
        for end in range(states, 1, -_BLOCK):
            begin = max(1, end - _BLOCK)
            for state in range(end - 1, begin - 1, -1):
                leaving = ways[:, state, :state].sum(axis=-1)
                is_connected &= leaving > 0.0
                ways[:, :state, state] /= leaving[:, None]
                through = ways[:, begin:state, state, None] * ways[:, state, None, :state]
                ways[:, begin:state, :state] += through
                ways[:, :begin, begin:state] += ways[:, :begin, state, None] * ways[:, state, None, begin:state]
            ways[:, :begin, :begin] += ways[:, :begin, begin:end] @ ways[:, begin:end, :begin]
        weights = np.zeros(chains.shape[:-1])
        weights[:, 0] = 1.0
        for state in range(1, states):
            weights[:, state] = (weights[:, :state] * ways[:, :state, state]).sum(axis=-1)
            weights /= weights.max(axis=-1, keepdims=True)
        weights /= weights.sum(axis=-1, keepdims=True)
    return weights, is_connected & np.isfinite(weights).all(axis=-1)


def _on_recurrent_states(chain: Float[np.ndarray, "state state"]) -> Float[np.ndarray, " state"]:
    """Return the distribution of a chain in which not all states lead to the first: zero outside its recurrent ones."""
    count, label = connected_components(chain > 0.0, connection="strong")
    source, target = np.nonzero(chain)
    left = label[source][label[source] != label[target]]
    recurrent = np.setdiff1d(np.arange(count), left)
    if len(recurrent) != 1:
        got, remedy = "a chain with several", "make every state reachable from every other"
        raise InputError("transition", "chains with one stationary distribution", got, remedy)
    members = np.flatnonzero(label == recurrent[0])
    inner, is_connected = _eliminate(chain[None][:, members[:, None], members])
    if not is_connected[0]:
        got, remedy = f"probabilities down to {chain[chain > 0.0].min():.3g}", "leave out what is that improbable"
        raise InputError("transition", "chains whose paths have probabilities that are floats", got, remedy)
    distribution = np.zeros(len(chain))
    distribution[members] = inner[0]
    return distribution


def window_chain(kernel: ArrayLike, parents: Sequence[int] = (1,)) -> Float[np.ndarray, "*batch window window"]:
    """Return the Markov chain of the last d symbols, d being the longest lag of a parent.

    Args:
        kernel: probability of the next symbol given its parents, [..., parent, (parent, …,) symbol], in the order of
            `parents`.
        parents: lags of the parents, from the nearest to the farthest.

    Returns:
        The transition matrix [..., kᵈ, kᵈ]. A window is a number in base k whose last digit is the newest symbol.

    >>> window_chain([[0.9, 0.1], [0.3, 0.7]], parents=(2,))
    array([[0.9, 0.1, 0. , 0. ],
           [0. , 0. , 0.9, 0.1],
           [0.3, 0.7, 0. , 0. ],
           [0. , 0. , 0.3, 0.7]])
    """
    lags = _parents(parents)
    law = _law(kernel, lags)
    symbols, length = law.shape[-1], lags[-1]
    windows = symbols**length
    if windows > MAX_WINDOWS:
        raise InputError("parents", f"such that there are at most {MAX_WINDOWS} windows", windows, "give shorter lags")
    batch = law.shape[: law.ndim - len(lags) - 1]
    check_size("kernel", (*batch, windows, windows))
    numbers = np.arange(windows)
    digits = [numbers // symbols ** (lag - 1) % symbols for lag in lags]
    following = numbers[:, None] * symbols % windows + np.arange(symbols)
    chain = np.zeros((*batch, windows, windows))
    chain[..., numbers[:, None], following] = law[(..., *digits, slice(None))]
    return chain


def pair_distribution(
    kernel: ArrayLike, lags: Sequence[int], parents: Sequence[int] = (1,)
) -> Float[np.ndarray, "*batch lag symbol symbol"]:
    """Return the joint distribution of two symbols of a stationary sequence, for each lag between them.

        J_δ[l, j] = P[x_{s−δ} = l, x_s = j];    π_l (P^δ)_lj for a Markov chain

    Args:
        kernel, parents: the law of the sequence, as for `window_chain`.
        lags: δ ≥ 0.

    Returns:
        [..., lag, earlier symbol, later symbol].

    >>> pair_distribution([[0.9, 0.1], [0.3, 0.7]], [1, 50]).round(4)
    array([[[0.675 , 0.075 ],
            [0.075 , 0.175 ]],
           [[0.5625, 0.1875],
            [0.1875, 0.0625]]])
    """
    distances = _lags("lags", lags, low=0)
    chain = window_chain(kernel, parents)
    symbols = np.shape(kernel)[-1]
    newest = np.arange(chain.shape[-1])[:, None] % symbols == np.arange(symbols)
    check_size("lags", (*chain.shape[:-2], len(distances), symbols, symbols))
    occupied = stationary(chain)[..., :, None] * newest
    later = np.broadcast_to(newest.astype(np.float64), (*chain.shape[:-1], symbols))
    pairs = {}
    for distance in range(max(distances) + 1):
        if distance in distances:
            pairs[distance] = np.swapaxes(occupied, -1, -2) @ later
        later = chain @ later
    return np.stack([pairs[distance] for distance in distances], axis=-3)


def lag_dependence(
    kernel: ArrayLike,
    lags: Sequence[int],
    *,
    parents: Sequence[int] = (1,),
    query: int = 1,
    smoothing: float = 0.0,
) -> Float[np.ndarray, "*batch lag symbol symbol"]:
    """Return how much the symbol at each lag before a key tells about the next symbol, in long contexts.

        C_δ[i, l] = Σ_j J_q[i, j] (J_δ[l, j] − π_l π_j) / π_j
                  = π_i π_l Σ_j P_ij ((P^δ)_lj / π_j − 1)    for a Markov chain and q = 1

    The mean of C_δ over chains is what the minimal model's gradient is made of: `saddle_gradients`. A loss
    −ln[(1 − ε) p + ε/k] replaces 1/π_j by (1 − ε)/((1 − ε) π_j + ε/k).

    Args:
        kernel, parents: the law of the sequence, as for `window_chain`.
        lags: δ ≥ 0, at which the first layer looks back from a key.
        query: q, the lag of the symbol that queries, counted from the symbol that is predicted.
        smoothing: ε of the loss, in [0, 1).

    Returns:
        [..., lag, symbol of the query, symbol of the key].

    >>> dependence = lag_dependence([[0.9, 0.1], [0.3, 0.7]], [1, 2])
    >>> np.trace(dependence, axis1=-2, axis2=-1).round(4)
    array([0.135, 0.081])
    """
    share = _smoothing(smoothing)
    distances, asked = _lags("lags", lags, low=0), whole("query", query, high=MAX_LAG)
    pairs = pair_distribution(kernel, [asked, 0, *distances], parents)
    asking, frequency = pairs[..., 0, :, :], np.diagonal(pairs[..., 1, :, :], axis1=-2, axis2=-1)
    excess = pairs[..., 2:, :, :] - frequency[..., None, :, None] * frequency[..., None, None, :]
    slope = _loss_slope(frequency, share)
    return (asking * slope[..., None, :])[..., None, :, :] @ np.swapaxes(excess, -1, -2)


def context_dependence(
    tokens: ArrayLike,
    lags: Sequence[int],
    *,
    symbols: int,
    query: int = 1,
    smoothing: float = 0.0,
    first: int = 0,
) -> Float[np.ndarray, "lag symbol symbol"]:
    """Return what `lag_dependence` is in sequences of finite length: the minimal model's gradient at A = 0, exactly.

        Ĉ_δ[i, l] = mean over t of  1[x_{t+1−q} = i] (Ĵ_δ[l, j] − m̂_δ[l] π̂_j) / π̂_j,    j = x_{t+1}

    The averages Ĵ_δ[l, j] of 1[x_{s−δ} = l, x_s = j], m̂_δ[l] of 1[x_{s−δ} = l] and π̂_j of 1[x_s = j] are over the
    keys s ≤ t; before its first symbol a sequence has none.

    Args:
        tokens: symbols 0 to `symbols` − 1, [..., position]; the mean is over sequences too.
        lags, query, smoothing: as for `lag_dependence`. Without smoothing, each predicted symbol occurs before.
        symbols: number k of different symbols.
        first: the first t, counted from 0, from which the next symbol is predicted.

    Returns:
        [lag, symbol of the query, symbol of the key].

    >>> context_dependence([[0, 1, 0, 1, 0, 1, 0]], [1], symbols=2, first=3).round(3)
    array([[[ 0.2  , -0.133],
            [-0.333,  0.194]]])
    """
    share, distances, asked = _smoothing(smoothing), _lags("lags", lags, low=0), whole("query", query, high=MAX_LAG)
    symbols = _count(symbols)
    number = _tokens(tokens, symbols, least=2)
    begin = whole("first", first, low=max(0, asked - 1), high=number.shape[-1] - 2)
    check_size("tokens", (*number.shape, symbols, symbols))
    seen = _one_hot(number[..., :-1], symbols)
    visible = np.arange(1, number.shape[-1])[:, None]
    frequency = (seen.cumsum(-2) / visible)[..., begin:, :]
    target = number[..., begin + 1 :]
    positions = np.arange(begin + 1, number.shape[-1])
    asking = _one_hot(number[..., positions - asked], symbols)
    chosen = np.take_along_axis(frequency, target[..., None], -1)
    if share == 0.0 and not chosen.all():
        got, remedy = "a sequence in which it does not", "raise `first`, or give `smoothing`"
        raise InputError("tokens", "sequences in which each predicted symbol occurs before", got, remedy)
    slope = _loss_slope(chosen, share, symbols)
    dependence = []
    for distance in distances:
        earlier = _shifted(seen, distance)
        joint = (earlier[..., :, None] * seen[..., None, :]).cumsum(-3)[..., begin:, :, :] / visible[begin:, None]
        at_target = np.take_along_axis(joint, target[..., None, None], -1)[..., 0]
        excess = at_target - chosen * (earlier.cumsum(-2) / visible)[..., begin:, :]
        dependence.append(np.einsum("ni,nl->il", *(_rows(part) for part in (asking, slope * excess))))
    return np.stack(dependence) / target.size


class SaddleGradients(NamedTuple):
    """The negative gradients −∂L/∂A [symbol, symbol] and −∂L/∂r [lag] of the minimal model near A = 0."""

    second_layer: Float[np.ndarray, "*batch symbol symbol"]
    first_layer: Float[np.ndarray, "*batch lag"]


def saddle_gradients(dependence: ArrayLike, weights: ArrayLike, a: ArrayLike) -> SaddleGradients:
    """Return the minimal model's negative gradients at small A.

        −∂L/∂A = Σ_δ w_δ C_δ,    −∂L/∂r_δ = w_δ ⟨A, C_δ − Σ_δ' w_δ' C_δ'⟩

    Both vanish in the other's direction: while A = 0 the first layer does not move at all, and with A = aI it turns to
    the lag of the largest trace of C_δ.

    Args:
        dependence: C_δ, the mean over chains of `lag_dependence`, or `context_dependence`, [..., lag, symbol, symbol].
        weights: w, attention of the first layer to each lag, [..., lag]; sums to 1.
        a: A, [..., symbol, symbol], small.

    Returns:
        `second_layer` to zeroth and `first_layer` to first order in A.

    >>> dependence = lag_dependence([[0.9, 0.1], [0.3, 0.7]], [1, 2])
    >>> saddle_gradients(dependence, [0.5, 0.5], 0.1 * np.eye(2)).first_layer.round(5)
    array([ 0.00135, -0.00135])
    """
    matrices, share, product = real("dependence", dependence), probabilities("weights", weights), real("a", a)
    if matrices.ndim < 3 or matrices.shape[-3] != share.shape[-1]:
        expected = f"[..., lag, symbol, symbol] with {share.shape[-1]} lags, as `weights`"
        raise InputError("dependence", expected, f"shape {matrices.shape}", "give one matrix for each lag")
    if product.ndim < 2 or product.shape[-2:] != matrices.shape[-2:]:
        expected = f"[..., symbol, symbol] of shape {matrices.shape[-2:]}"
        raise InputError("a", expected, f"shape {product.shape}", "match `dependence`")
    broadcast(dependence=matrices, weights=share[..., None, None], a=product[..., None, :, :])
    mean = (share[..., None, None] * matrices).sum(-3)
    along = (product[..., None, :, :] * (matrices - mean[..., None, :, :])).sum((-2, -1))
    return SaddleGradients(np.broadcast_to(mean, np.broadcast_shapes(mean.shape, product.shape)).copy(), share * along)


def unigram(tokens: ArrayLike, *, symbols: int) -> Float[np.ndarray, "*batch position symbol"]:
    """Predict the next symbol by the counts of single symbols so far.

        p_t[j] = n_j(t) / (t + 1)

    Args:
        tokens: symbols 0 to `symbols` − 1, [..., position].
        symbols: number k of different symbols.

    Returns:
        The prediction after each position, [..., position, symbol].

    >>> unigram([0, 1, 1, 2], symbols=3).round(3)
    array([[1.   , 0.   , 0.   ],
           [0.5  , 0.5  , 0.   ],
           [0.333, 0.667, 0.   ],
           [0.25 , 0.5  , 0.25 ]])
    """
    symbols = _count(symbols)
    number = _tokens(tokens, symbols)
    check_size("tokens", (*number.shape, symbols))
    return _one_hot(number, symbols).cumsum(-2) / np.arange(1, number.shape[-1] + 1)[:, None]


def bayes(
    tokens: ArrayLike, *, symbols: int, alpha: float = 1.0, parents: Sequence[int] = (1,)
) -> Float[np.ndarray, "*batch position symbol"]:
    """Predict the next symbol by the counts of symbols after the same parents, as Bayes' rule says under Dirichlet(α).

        p_t[j] = (n_ij(t) + α) / (Σ_j' n_ij'(t) + k α),    i: the parents of x_{t+1}

    This is the posterior mean of the kernel if its rows are independent draws from Dirichlet(α) and the first symbols
    do not depend on the kernel; with a stationary start it is nearly so. Where the parents lie before the first symbol
    the prediction is uniform.

    Args:
        tokens: symbols 0 to `symbols` − 1, [..., position].
        symbols: number k of different symbols.
        alpha: α > 0.
        parents: lags of the parents, as for `window_chain`.

    Returns:
        The prediction after each position, [..., position, symbol].

    >>> bayes([0, 1, 1, 0], symbols=2).round(3)
    array([[0.5  , 0.5  ],
           [0.5  , 0.5  ],
           [0.333, 0.667],
           [0.333, 0.667]])
    """
    symbols, lags, prior = _count(symbols), _parents(parents), scalar("alpha", alpha, above=0.0, high=MAX_ALPHA)
    number = _tokens(tokens, symbols)
    states, longest, positions = symbols ** len(lags), lags[-1], number.shape[-1]
    if states > MAX_WINDOWS:
        raise InputError("parents", f"such that they have at most {MAX_WINDOWS} values", states, "give fewer")
    check_size("tokens", (*number.shape, states, symbols))
    prediction = np.full((*number.shape, symbols), 1 / symbols)
    if positions < longest:
        return prediction
    # State number s is that of the parents of position s + longest; the last one is that of the symbol to come.
    digits = [number[..., longest - lag : positions - lag + 1] * symbols**place for place, lag in enumerate(lags)]
    state = np.sum(digits, axis=0)
    pair = state[..., :-1] * symbols + number[..., longest:]
    counts = _one_hot(pair, states * symbols).cumsum(-2).reshape(*pair.shape, states, symbols)
    counts = np.concatenate([np.zeros_like(counts, shape=(*number.shape[:-1], 1, states, symbols)), counts], axis=-3)
    after = np.take_along_axis(counts, state[..., None, None], -2)[..., 0, :] + prior
    prediction[..., longest - 1 :, :] = after / after.sum(-1, keepdims=True)
    return prediction


def _law(kernel: ArrayLike, lags: list[int]) -> Float[np.ndarray, ...]:
    law = probabilities("kernel", kernel)
    axes = len(lags) + 1
    if law.ndim < axes or len({*law.shape[law.ndim - axes :]}) > 1:
        expected = f"an array whose last {axes} axes are as long as there are symbols"
        raise InputError("kernel", expected, f"shape {law.shape}", "give one axis for each parent, then the symbol's")
    return law


def _square(name: str, matrix: ArrayLike) -> Float[np.ndarray, "*batch state state"]:
    array = probabilities(name, matrix)
    if array.ndim < 2 or array.shape[-1] != array.shape[-2]:
        raise InputError(name, "square, [..., state, state]", f"shape {array.shape}", "give one row for each state")
    check_size(name, array.shape)
    return array


def _parents(parents: Sequence[int]) -> list[int]:
    lags = _lags("parents", parents, low=1)
    if lags != sorted({*lags}):
        raise InputError("parents", "lags from the nearest to the farthest", lags, "sort them, and give each once")
    return lags


def _lags(name: str, lags: Sequence[int], *, low: int) -> list[int]:
    listed = sequence(name, lags, "whole numbers")
    if not listed:
        raise InputError(name, "at least one lag", "none", "give a list of whole numbers")
    return [whole(name, lag, low=low, high=MAX_LAG) for lag in listed]


def _smoothing(smoothing: float) -> float:
    share = scalar("smoothing", smoothing, low=0.0)
    if share >= 1.0:
        raise InputError("smoothing", "below 1", share, "give the share of the uniform distribution")
    return share


def _loss_slope(frequency: np.ndarray, smoothing: float, symbols: int | None = None) -> np.ndarray:
    """Return d/dp ln[(1 − ε) p + ε/k] at each frequency p; 0 where it is infinite, for symbols that never occur."""
    size = frequency.shape[-1] if symbols is None else symbols
    mixed = (1 - smoothing) * frequency + smoothing / size
    return np.divide(1 - smoothing, mixed, out=np.zeros_like(mixed), where=mixed > 0)


def _count(symbols: int) -> int:
    return whole("symbols", symbols, low=2, high=MAX_SYMBOLS)


def _tokens(tokens: ArrayLike, size: int, *, least: int = 1) -> Int[np.ndarray, "*batch position"]:
    array = whole_numbers("tokens", tokens, low=0, high=size - 1)
    if array.ndim == 0 or array.shape[-1] < least:
        got = f"shape {array.shape}"
        raise InputError("tokens", f"[..., position] with at least {least} positions", got, "give whole sequences")
    return array.astype(np.int64)


def _one_hot(number: Int[np.ndarray, "*batch"], size: int) -> Float[np.ndarray, "*batch size"]:
    return (number[..., None] == np.arange(size)).astype(np.float64)


def _shifted(seen: Float[np.ndarray, "*batch position symbol"], distance: int) -> np.ndarray:
    """Return what stood `distance` positions earlier, and zeros where nothing did."""
    shifted = np.zeros_like(seen)
    if distance < seen.shape[-2]:
        shifted[..., distance:, :] = seen[..., : seen.shape[-2] - distance, :]
    return shifted


def _rows(array: np.ndarray) -> Float[np.ndarray, "row column"]:
    return array.reshape(-1, array.shape[-1])
