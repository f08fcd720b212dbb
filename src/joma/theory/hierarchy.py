"""Theorem 5: how often two tokens of a hierarchical binary latent tree, HBLT(ρ), occur together.

The root is a class label `y_0` with probabilities `p0`. Each of its children β is a bit with
`P[y_β = 0 | y_0 = c] = (1 + p_{β|0}(c))/2`; every edge below copies its parent with probability `(1+ρ)/2` and flips it
otherwise. The leaves are the tokens, and `y_l = 1` means that token `l` is in the sequence.

A tree is three plain arrays: `parents[node]` (the root is node 0 with parent −1, and parents come before their
children; the leaves in ascending order are the tokens), `p0[class]`, and `p_child[child, class]`, the table of
`p_{β|0}(c)` with one row for each child of the root, in ascending order. In the theorem all tokens have the same depth;
the functions of a whole tree do not need this.

Two tokens are independent given their lowest common ancestor. So every probability here is an average over the states
of that node, computed from sums and products of non-negative numbers: nothing cancels, not even near ρ = ρ_0 = 1, as
long as `1 − ρ` and `1 − ρ_0` are known accurately.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.special import xlog1py

from joma.arguments import InputError, broadcast, flag, probabilities, real, scalar, whole_numbers

ENUMERABLE = 20  # binary nodes: their 2^20 states are a million


def cooccurrence(
    height: ArrayLike, depth: ArrayLike, rho: ArrayLike, rho0: ArrayLike, *, complement: bool = False
) -> Float[np.ndarray, "*batch"]:
    """Return the probability that token `l` occurs given that `m` does, for tokens joined below the root (Theorem 5).

    `P[y_l = 1 | y_m = 1] = ½ (1 + ρ^{2H} − 2 ρ^{L−1} ρ_0) / (1 − ρ^{L−1} ρ_0)`

    Args (they broadcast):
        height: H, from the tokens up to their lowest common ancestor, 1 ≤ H ≤ L − 1.
        depth: L, from the root down to the tokens.
        rho: ρ in [0, 1].
        rho0: ρ_0 = Σ_c p_{β|0}(c) p_0(c) in [−1, 1], β the root's child above both.
        complement: `rho` and `rho0` are given as 1 − ρ and 1 − ρ_0. Near 1 this is the only accurate way to state them:
            at 1 − ρ = 1e-12, rounding ρ to a float64 already changes 1 − ρ by up to 5e-5 of itself.

    Returns: the probability. At ρ = ρ_0 = 1 no token ever occurs: it is 0/0, an error; use `cooccurrence_limit`.

    >>> cooccurrence([1, 2, 3], depth=4, rho=0.9, rho0=0.5)
    array([0.850..., 0.729..., 0.631...])
    """
    height, depth = _heights(height, depth)
    gap, gap0 = _gap("rho", rho, low=0.0, complement=complement), _gap("rho0", rho0, low=-1.0, complement=complement)
    broadcast(height=height, depth=depth, rho=gap, rho0=gap0)
    if ((gap == 0) & (gap0 == 0)).any():
        remedy = "no token ever occurs there; use `cooccurrence_limit(height, depth, c)` for the limit"
        raise InputError("rho`, `rho0", "exactly 1", "rho = rho0 = 1", remedy, must="not both be")
    return _given_latent(height, height, np.asarray(depth - 1 - height), gap, gap0)


def cooccurrence_limit(height: ArrayLike, depth: ArrayLike, c: ArrayLike) -> Float[np.ndarray, "*batch"]:
    """Return the limit of `cooccurrence` as ρ and ρ_0 tend to 1: `1 − H/(L−1+c)`, `c = lim (1−ρ_0)/(1−ρ)` (Theorem 5).

    Args (they broadcast):
        height, depth: H and L, 1 ≤ H ≤ L − 1.
        c: how much faster ρ tends to 1 than ρ_0, from 0 to infinity; 1 (that is ρ_0 = ρ) gives `1 − H/L`, and 0 (ρ_0
            tends to 1 faster) gives `1 − H/(L−1)`.

    Returns: the limit.

    >>> cooccurrence_limit(1, depth=4, c=[0, 1, np.inf])
    array([0.66666667, 0.75      , 1.        ])
    """
    height, depth = _heights(height, depth)
    c = real("c", c, low=0.0, finite=False)
    broadcast(height=height, depth=depth, c=c)
    return np.asarray(1 - height / (depth - 1 + c))


def root_cooccurrence(
    depth: ArrayLike, rho: ArrayLike, p0: ArrayLike, p_l: ArrayLike, p_m: ArrayLike, *, complement: bool = False
) -> Float[np.ndarray, "*batch"]:
    """Return the probability that token `l` occurs given that `m` does, for tokens joined only at the root (Theorem 5).

    `P[y_l = 1 | y_m = 1] = ½ (1 + k² Σ_c p_0(c) p_l(c) p_m(c) − k ρ_0l − k ρ_0m) / (1 − k ρ_0m)`, with `k = ρ^{L−1}`,
    `ρ_0l = Σ_c p_0(c) p_l(c)` and `ρ_0m` likewise.

    Args (their axes before the class axis broadcast with `depth` and `rho`):
        depth: L ≥ 1, from the root down to the tokens.
        rho: ρ in [0, 1].
        p0: the class probabilities, classes on the last axis.
        p_l, p_m: p_{β|0}(c) in [−1, 1] of the root's child above `l`, and of the other one, above `m`.
        complement: `rho`, `p_l` and `p_m` are given as 1 − ρ, 1 − p_l and 1 − p_m.

    Returns: the probability; an error where token `m` never occurs.

    >>> root_cooccurrence(3, rho=0.9, p0=[0.5, 0.5], p_l=[0.8, -0.2], p_m=[0.6, 0.0])
    array(0.443...)
    """
    depth, gap = whole_numbers("depth", depth, low=1), _gap("rho", rho, low=0.0, complement=complement)
    p0 = probabilities("p0", np.atleast_1d(real("p0", p0)))
    gap_l, gap_m = (
        np.atleast_1d(_gap(name, p, low=-1.0, complement=complement)) for name, p in (("p_l", p_l), ("p_m", p_m))
    )
    for name, table in (("p_l", gap_l), ("p_m", gap_m)):
        _check_classes(name, table, p0)
    broadcast(depth=depth, rho=gap, p0=p0[..., 0], p_l=gap_l[..., 0], p_m=gap_m[..., 0])
    absent_l, absent_m = (_one_minus(depth[..., None] - 1, gap[..., None], table) for table in (gap_l, gap_m))
    return np.asarray((_posterior("p_m", p0, absent_m) * absent_l).sum(axis=-1) / 2)


def cooccurrence_matrix(
    parents: ArrayLike, p0: ArrayLike, p_child: ArrayLike, rho: ArrayLike
) -> Float[np.ndarray, "token token"]:
    """Return `P[y_l = 1 | y_m = 1]` of all pairs of tokens of a tree: row `l`, column `m` (Theorem 5).

    Tokens joined below the root are as in `cooccurrence`, with the ρ_0 of the root's child above them; the others as in
    `root_cooccurrence`. The diagonal is 1. Tokens may lie at different depths (wider than the theorem): with heights
    H_l and H_m below the common ancestor, ρ^{2H} becomes ρ^{H_l+H_m}, and each token has its own ρ^{L−1}.

    Args:
        parents, p0, p_child: the tree, see the module's docstring; `p_child` in [−1, 1].
        rho: ρ in [0, 1].

    Returns: the matrix; an error if a token never occurs.

    >>> cooccurrence_matrix([-1, 0, 0, 1, 1, 2, 2], p0=[0.5, 0.5], p_child=[[0.8, -0.2], [0.6, 0.0]], rho=0.9).round(3)
    array([[1.   , 0.87 , 0.448, 0.448],
           [0.87 , 1.   , 0.448, 0.448],
           [0.448, 0.448, 1.   , 0.87 ],
           [0.448, 0.448, 0.87 , 1.   ]])
    """
    tree = _tree(parents, p0, p_child, rho)
    root = tree.absent / 2 @ _posterior("p_child", tree.p0, tree.absent).T
    common = _common_depth(tree.path).astype(np.float64)
    height = tree.depth[:, None] - common
    latent = _given_latent(height, height.T, np.maximum(common - 1, 0), np.asarray(1 - tree.rho), tree.gap0)
    return np.where(common > 0, latent, root)


def marginals(parents: ArrayLike, p0: ArrayLike, p_child: ArrayLike, rho: ArrayLike) -> Float[np.ndarray, " token"]:
    """Return the probability of each token of a tree: `P[y_l = 1] = ½ (1 − ρ^{L−1} ρ_0)`, with its own depth L and ρ_0.

    Args: as in `cooccurrence_matrix`.

    Returns: one probability for each token.

    >>> marginals([-1, 0, 0, 1, 1, 2, 2], p0=[0.5, 0.5], p_child=[[0.8, -0.2], [0.6, 0.0]], rho=0.9)
    array([0.365, 0.365, 0.365, 0.365])
    """
    tree = _tree(parents, p0, p_child, rho)
    return tree.absent @ tree.p0 / 2


def common_depth(parents: ArrayLike) -> Int[np.ndarray, "token token"]:
    """Return the depth of the lowest common ancestor of every pair of tokens; 0 is the root.

    The diagonal has the depth of each token. With all tokens at depth L, `H = L − common_depth(parents)`.

    Args:
        parents: the tree, see the module's docstring.

    Returns: a symmetric matrix of whole numbers.

    >>> common_depth([-1, 0, 0, 1, 1, 2, 2])
    array([[2, 1, 0, 0],
           [1, 2, 0, 0],
           [0, 0, 2, 1],
           [0, 0, 1, 2]])
    """
    return _common_depth(_paths(_parents(parents)))


def enumerate_cooccurrence(
    parents: ArrayLike, p0: ArrayLike, p_child: ArrayLike, rho: ArrayLike
) -> Float[np.ndarray, "token token"]:
    """Return `cooccurrence_matrix` by brute force: a sum over the joint states of all nodes.

    `P[y_l = 1 | y_m = 1] = Σ_states P[state] y_l y_m / Σ_states P[state] y_m`. It shares no code with the closed
    forms, and serves to check them. Time and memory grow as 2^nodes.

    Args: as in `cooccurrence_matrix`; at most 20 nodes below the root.

    Returns: row `l`, column `m`.

    >>> enumerate_cooccurrence([-1, 0, 1, 1], p0=[1.0], p_child=[[0.5]], rho=0.9)
    array([[1.   , 0.827...],
           [0.827..., 1.   ]])
    """
    parents, p0, p_child, rho = _checked(parents, p0, p_child, rho)
    if parents.size - 1 > ENUMERABLE:
        remedy = "use `cooccurrence_matrix`, which needs no enumeration"
        raise InputError("parents", f"at most {ENUMERABLE} nodes below the root", parents.size - 1, remedy)
    states = np.arange(2 ** (parents.size - 1))
    bits = [np.zeros_like(states, bool), *((states >> node & 1).astype(bool) for node in range(parents.size - 1))]
    joint = np.zeros(states.size)
    children = np.flatnonzero(parents == 0)
    for weight, biases in zip(p0, p_child.T, strict=True):
        chance = np.full(states.size, weight)
        for child, bias in zip(children, biases, strict=True):
            chance *= np.where(bits[child], (1 - bias) / 2, (1 + bias) / 2)
        joint += chance
    for node in np.flatnonzero(parents > 0):
        joint *= np.where(bits[node] == bits[parents[node]], (1 + rho) / 2, (1 - rho) / 2)
    tokens = np.stack([bits[leaf] for leaf in _leaves(parents)]).astype(np.float64)
    both = (tokens * joint) @ tokens.T
    return both / _occurring("p_child", np.diagonal(both))


class _Tree(NamedTuple):
    """The checked arrays of a tree, and what is derived from them for each token."""

    p0: Float[np.ndarray, " class"]
    rho: float
    path: Int[np.ndarray, "level token"]  # the token's ancestor at each depth; −1 below the token
    depth: Float[np.ndarray, " token"]
    gap0: Float[np.ndarray, " token"]  # 1 − ρ_0
    absent: Float[np.ndarray, "token class"]  # 1 − ρ^{L−1} p_{β|0}(c): twice the token's probability given the class


def _tree(parents: ArrayLike, p0: ArrayLike, p_child: ArrayLike, rho: ArrayLike) -> _Tree:
    parents, p0, p_child, rho = _checked(parents, p0, p_child, rho)
    path = _paths(parents)
    depth = (path >= 0).sum(axis=0) - 1.0
    gap_p = 1 - p_child[np.searchsorted(np.flatnonzero(parents == 0), path[1])]
    absent = _one_minus(depth[:, None] - 1, np.asarray(1 - rho), gap_p)
    return _Tree(p0, rho, path, depth, gap_p @ p0, absent)


def _checked(
    parents: ArrayLike, p0: ArrayLike, p_child: ArrayLike, rho: ArrayLike
) -> tuple[Int[np.ndarray, " node"], Float[np.ndarray, " class"], Float[np.ndarray, "child class"], float]:
    parents = _parents(parents)
    p0 = probabilities("p0", p0, ndim=1)
    p_child = real("p_child", p_child, ndim=2, low=-1.0, high=1.0)
    _check_classes("p_child", p_child, p0)
    if len(p_child) != (parents == 0).sum():
        expected = f"one row for each of the root's {(parents == 0).sum()} children"
        raise InputError("p_child", expected, f"{len(p_child)} rows", "give one row for each node whose parent is 0")
    # `probabilities` tolerates sums off by 1e-9; here P and 1 − P must agree to rounding.
    return parents, p0 / p0.sum(), p_child, scalar("rho", rho, low=0.0, high=1.0)


def _parents(parents: ArrayLike) -> Int[np.ndarray, " node"]:
    array = whole_numbers("parents", parents, low=-1, high=2**53).astype(np.int64)
    if array.ndim != 1 or array.size < 2:
        raise InputError("parents", "one row of at least 2 nodes", f"shape {array.shape}", "give the root and a child")
    if array[0] != -1 or (array[1:] < 0).any() or (array[1:] >= np.arange(1, array.size)).any():
        expected = "-1 for node 0, and for every other node an earlier one"
        raise InputError("parents", expected, array.tolist(), "number the nodes from the root down")
    return array


def _leaves(parents: Int[np.ndarray, " node"]) -> Int[np.ndarray, " token"]:
    return np.setdiff1d(np.arange(parents.size), parents)


def _paths(parents: Int[np.ndarray, " node"]) -> Int[np.ndarray, "level token"]:
    """Return the ancestor of each token at each depth; −1 below the token."""
    above, depth = parents, np.zeros_like(parents)
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parents[above], -1)
    node = _leaves(parents)
    path = np.full((depth.max() + 1, node.size), -1)
    for level in range(depth.max(), -1, -1):
        at_level = depth[node] == level
        path[level, at_level] = node[at_level]
        node = np.where(at_level, parents[node], node)
    return path


def _common_depth(path: Int[np.ndarray, "level token"]) -> Int[np.ndarray, "token token"]:
    common = np.full((path.shape[1], path.shape[1]), -1)
    for level in path:
        common += (level[:, None] == level) & (level >= 0)
    return common


def _given_latent(
    height_l: Float[np.ndarray, "*#batch"],
    height_m: Float[np.ndarray, "*#batch"],
    above: Float[np.ndarray, "*#batch"],
    gap: Float[np.ndarray, "*#batch"],
    gap0: Float[np.ndarray, "*#batch"],
) -> Float[np.ndarray, "*batch"]:
    """Return P[l | m], averaged over the common ancestor, which lies `above` edges below a child of the root."""
    ancestor = _one_minus(above, gap, gap0)  # 1 − ρ^above ρ_0 = 2 P[ancestor is 1]
    flip_l, flip_m = (_one_minus(height, gap, np.zeros(())) for height in (height_l, height_m))
    if_zero, if_one = (2 - ancestor) * flip_m, ancestor * (2 - flip_m)
    total = if_zero + if_one
    return np.asarray(((if_zero / total) * flip_l + (if_one / total) * (2 - flip_l)) / 2)


def _one_minus(
    power: Float[np.ndarray, "*#batch"],
    gap: Float[np.ndarray, "*#batch"],
    gap_p: Float[np.ndarray, "*#batch"],
) -> Float[np.ndarray, "*batch"]:
    """Return `1 − ρ^power p` from 1 − ρ and 1 − p, as `(1 − ρ^power) + ρ^power (1 − p)`: neither term is negative."""
    log_k = xlog1py(power, -gap)
    return np.asarray(np.exp(log_k) * gap_p - np.expm1(log_k))


def _posterior(
    name: str, p0: Float[np.ndarray, "*#batch class"], absent: Float[np.ndarray, "*#batch class"]
) -> Float[np.ndarray, "*#batch class"]:
    """Return P[class | token m occurs], from P[class] and `absent`, twice P[token m occurs | class]."""
    joint = p0 * absent
    return joint / _occurring(name, joint.sum(axis=-1, keepdims=True))


def _occurring(name: str, chance: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    if (chance == 0).any():
        remedy = "a token that never occurs has no co-occurrence; lower `rho` or `p_{β|0}` of its branch"
        raise InputError(name, "such that every token occurs", f"{(chance == 0).sum()} tokens that cannot", remedy)
    return chance


def _gap(name: str, value: ArrayLike, *, low: float, complement: bool) -> Float[np.ndarray, "*batch"]:
    if flag("complement", complement):
        return real(name, value, low=0.0, high=1 - low)
    return np.asarray(1 - real(name, value, low=low, high=1.0))


def _heights(height: ArrayLike, depth: ArrayLike) -> tuple[Float[np.ndarray, "*#batch"], Float[np.ndarray, "*#batch"]]:
    height, depth = whole_numbers("height", height, low=1), whole_numbers("depth", depth, low=2)
    broadcast(height=height, depth=depth)
    if (height > depth - 1).any():
        remedy = "use `root_cooccurrence` for tokens joined only at the root"
        raise InputError("height", "at most `depth` - 1", f"height - depth = {(height - depth).max():g}", remedy)
    return height, depth


def _check_classes(
    name: str, table: Float[np.ndarray, "*batch class"], p0: Float[np.ndarray, "*other classes"]
) -> None:
    if table.shape[-1] != p0.shape[-1]:
        expected = f"one value for each of the {p0.shape[-1]} classes of `p0` on its last axis"
        raise InputError(name, expected, f"shape {table.shape}", "put the classes last")
