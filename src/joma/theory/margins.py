"""Hard-margin support vector machines, to which trained attention tends: with least Euclidean or least nuclear norm.

Attention that is trained alone selects a token in each sequence: its logits grow without bound. The direction in which
they grow is that of the support vector machine that separates each selected token from the others of its sequence,

    p̂ = argmin ‖p‖    subject to    (x_i,selected − x_it) · p ≥ 1    for every sequence i and every other token t

(Tarzanagh, Li, Zhang & Oymak 2023, arXiv 2306.13596; Tarzanagh, Li, Thrampoulidis & Oymak 2023, arXiv 2308.16898). For
logits x_itᵀ W z_i the differences are the matrices (x_i,selected − x_it) z_iᵀ: to train W gives the least Frobenius
norm, and to train the factors of W = K Qᵀ gives the least nuclear norm.

Both problems are convex, and both solutions come with multipliers that prove them: a lower bound of the norm that the
solution attains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import minimize, nnls

from joma.arguments import InputError, in_range, real, whole_array

MIN_COSINE = 1e-6  # of a difference with the best direction; below it rounding decides whether a margin exists
MAX_RATIO = 1e12  # of the lengths of differences; beyond it rounding decides whether the longest have a margin
_ITERATIONS = 30  # of NNLS, for each difference
_TOLERANCE = 1e-15  # of half the squared norm, at which SLSQP stops
_MAX_STEPS = 1000  # of SLSQP

Differences = Float[np.ndarray, "constraint dim"]
Matrices = Float[np.ndarray, "constraint row column"]
Multipliers = Float[np.ndarray, " constraint"]


def max_margin(differences: ArrayLike) -> Float[np.ndarray, " dim"]:
    """Return the shortest vector that has a product of at least 1 with every difference: the hard-margin SVM.

        p̂ = argmin ‖p‖    subject to    A p ≥ 1,    A the rows of differences

    One call of non-negative least squares solves it: let a ≥ 0 minimise ‖Aᵀa‖² + (1ᵀa − 1)² and δ = 1 − 1ᵀa. The
    optimality of a says that A Aᵀa ≥ δ, with equality where a > 0, and that δ = ‖Aᵀa‖² + δ². Hence p̂ = Aᵀa/δ, its
    multipliers are a/δ, and δ = 1/(1 + ‖p̂‖²); no such p exists if δ = 0.

    Args:
        differences: what must be positive, [constraint, dim]: selected token less another one.

    Returns:
        p̂, [dim]. The largest margin that a unit vector can have is 1/‖p̂‖.

    Raises:
        InputError: no vector has a positive product with all differences.

    >>> max_margin([[1.0, 0.0], [1.0, 2.0], [3.0, 1.0]])
    array([1., 0.])
    >>> max_margin([[1.0, 0.0], [-1.0, 0.0]])
    Traceback (most recent call last):
    joma.arguments.InputError: `differences` must be on one side of a hyperplane, ...
    """
    rows = real("differences", differences, ndim=2)
    return _least_norm(rows)[0]


def margin_multipliers(differences: ArrayLike) -> Multipliers:
    """Return the multipliers of `max_margin`, which prove that no shorter vector has all margins.

        p̂ = Σ_c λ_c A_c,    λ ≥ 0,    λ_c (A_c · p̂ − 1) = 0,    Σ_c λ_c = ‖p̂‖²

    For any p with A p ≥ 1 these give ‖p̂‖² = Σ λ_c ≤ Σ λ_c A_c · p = p̂ · p, hence ‖p‖ ≥ ‖p̂‖.

    Args:
        differences: as for `max_margin`, [constraint, dim].

    Returns:
        λ, [constraint]; positive for support vectors.

    >>> margin_multipliers([[1.0, 0.0], [1.0, 2.0], [3.0, 1.0]])
    array([1., 0., 0.])
    """
    rows = real("differences", differences, ndim=2)
    multipliers = _least_norm(rows)[1]
    in_range("differences", multipliers)  # they are squares of what `max_margin` returns
    return multipliers


def _least_norm(rows: Differences) -> tuple[Float[np.ndarray, " dim"], Multipliers]:
    """Return the shortest p with rows @ p ≥ 1, and its multipliers."""
    # Rows of length 1 with unequal margins: squares of very long or very short ones would overflow or vanish.
    lengths = _lengths(rows)
    in_range("differences", lengths)
    unit = float(lengths.min())
    if unit == 0.0:
        raise _not_separable(rows)
    with np.errstate(under="ignore"):
        directions, margins = rows / lengths[:, None], unit / lengths
    weights = _nonnegative(np.vstack([directions.T, margins]), np.append(np.zeros(rows.shape[1]), 1.0))
    support = weights > 0.0
    gap = 1.0 - float(margins @ weights)
    if gap < MIN_COSINE**2:
        raise _not_separable(rows)
    if float(margins.min()) < 1.0 / MAX_RATIO:
        got = f"lengths from {unit:.3g} to {lengths.max():.3g}"
        remedy = "rescale the longest: only whether they are positive counts"
        raise InputError("differences", f"of lengths within a factor of {MAX_RATIO:g}", got, remedy)
    # On the support p solves a linear system, which is more exact than the quotient by a small gap.
    p = np.linalg.lstsq(directions[support], margins[support], rcond=None)[0]
    with np.errstate(over="ignore"):
        p, multipliers = p / unit, weights / gap / unit / lengths
    in_range("differences", p)
    return p, multipliers


def _lengths(rows: Differences) -> Float[np.ndarray, " constraint"]:
    """Return the norm of each row, none of whose squares overflows or vanishes."""
    largest = np.abs(rows).max(axis=1)
    with np.errstate(over="ignore", under="ignore"):
        return largest * np.linalg.norm(rows / np.where(largest > 0.0, largest, 1.0)[:, None], axis=1)


def _not_separable(rows: Differences) -> InputError:
    expected = "on one side of a hyperplane, or no direction has a margin"
    remedy = "select other tokens, or raise their dimension: above the number of differences it always exists"
    return InputError("differences", expected, f"{len(rows)} vectors of dimension {rows.shape[1]}", remedy)


def _nonnegative(matrix: Float[np.ndarray, "row column"], target: Float[np.ndarray, " row"]) -> np.ndarray:
    """Return the a ≥ 0 that minimises ‖matrix a − target‖."""
    try:
        return nnls(matrix, target, maxiter=_ITERATIONS * matrix.shape[1])[0]
    except RuntimeError as cause:
        got, remedy = f"{matrix.shape[1]} that need too many iterations", "give fewer of them"
        raise InputError("differences", "separable by non-negative least squares", got, remedy) from cause


class NuclearMargin(NamedTuple):
    """The matrix of least nuclear norm with all margins, and the proof of it.

    Attributes:
        w: W*, [row, column].
        multipliers: a ≥ 0, [constraint], with ‖Σ_c a_c B_c‖_op = 1.
        norm: ‖W*‖_*, the sum of singular values.
        bound: Σ_c a_c, a lower bound of the nuclear norm of every matrix with all margins. W* is proved to be optimal
            as far as the two numbers agree.
    """

    w: Float[np.ndarray, "row column"]
    multipliers: Multipliers
    norm: float
    bound: float


def nuclear_max_margin(differences: ArrayLike) -> NuclearMargin:
    """Return the matrix of least nuclear norm that has a product of at least 1 with every difference.

        W* = argmin ‖W‖_*    subject to    ⟨B_c, W⟩ ≥ 1,    ‖W‖_* = min over W = K Qᵀ of ½(‖K‖² + ‖Q‖²)

    The factors are found by sequential quadratic programming from the solution of least Frobenius norm. For any W with
    all margins and any a ≥ 0, Σ a_c ≤ ⟨Σ a_c B_c, W⟩ ≤ ‖Σ a_c B_c‖_op ‖W‖_*; multipliers from the conditions
    K = (Σ a_c B_c) Q and Q = (Σ a_c B_c)ᵀ K make the two ends meet.

    Args:
        differences: B_c, what must be positive, [constraint, row, column]: for logits xᵀ W z, the outer products of
            (selected token less another one) with z.

    Returns:
        A `NuclearMargin`. W* lies in the span of the differences' columns and rows.

    Raises:
        InputError: no matrix has a positive product with all differences.

    >>> solution = nuclear_max_margin([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]])
    >>> solution.w.round(6) + 0.0, round(solution.norm, 6), round(solution.bound, 6)
    (array([[1. , 0. ],
           [0. , 0.5]]), 1.5, 1.5)
    """
    matrices = real("differences", differences, ndim=3)
    least = _least_norm(matrices.reshape(len(matrices), -1))[0].reshape(matrices.shape[1:])
    unit = float(_lengths(least.reshape(1, -1))[0])
    with np.errstate(over="ignore", under="ignore"):
        scaled = matrices * unit
    in_range("differences", unit, scaled)
    left, right = _orthonormal(np.hstack(list(scaled))), _orthonormal(np.vstack(list(scaled)).T)
    inner = left.T @ scaled @ right
    k, q = _least_factors(inner, left.T @ (least / unit) @ right)
    margin = float(np.einsum("cij,ij->c", inner, k @ q.T).min())
    if not margin > 0.0:
        got = f"{len(matrices)} for which SLSQP found no factors"
        raise InputError("differences", "matrices that SLSQP can separate", got, "give fewer or rescale them")
    k, q = k / np.sqrt(margin), q / np.sqrt(margin)
    multipliers = unit * _factor_multipliers(inner, k, q)
    w = unit * left @ k @ q.T @ right.T
    return NuclearMargin(w, multipliers, nuclear_norm(w), float(multipliers.sum()))


def nuclear_norm(w: ArrayLike) -> float:
    """Return the sum of the singular values of a matrix.

    >>> nuclear_norm([[3.0, 0.0], [0.0, -4.0]])
    7.0
    """
    return float(np.linalg.norm(real("w", w, ndim=2), ord="nuc"))


def margin_shares(w: ArrayLike, differences: ArrayLike) -> tuple[float, float]:
    """Return the margin of a matrix as a share of the largest, among matrices of its Frobenius and of its nuclear norm.

        min_c ⟨B_c, W⟩ / ‖W‖  ·  ‖Ŵ‖,    Ŵ of least norm with all margins

    Args:
        w: W, [row, column], not zero.
        differences: B_c, [constraint, row, column].

    Returns:
        The share in Frobenius norm and the share in nuclear norm; 1 is the most, negative if a margin is.

    >>> shares = margin_shares([[1.0, 0.0], [0.0, 1.0]], [[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]])
    >>> [round(share, 4) for share in shares]
    [0.7906, 0.75]
    """
    matrices, weight = real("differences", differences, ndim=3), real("w", w, ndim=2)
    if weight.shape != matrices.shape[1:]:
        raise InputError("w", f"of shape {matrices.shape[1:]}", weight.shape, "match the axes of `differences`")
    if not weight.any():
        raise InputError("w", "other than zero", "zeros", "give a matrix that has a direction")
    weight = weight / np.abs(weight).max()
    margin = float(np.einsum("crk,rk->c", matrices, weight).min())
    least = float(np.linalg.norm(_least_norm(matrices.reshape(len(matrices), -1))[0]))
    frobenius = margin / float(np.linalg.norm(weight)) * least
    return frobenius, margin / nuclear_norm(weight) * nuclear_max_margin(matrices).norm


def token_differences(x: ArrayLike, selected: ArrayLike) -> Differences:
    """Return each sequence's selected token less each of its others: the differences that `max_margin` separates.

    Args:
        x: tokens, [sequence, token, dim], at least two in a sequence.
        selected: index of the selected token of each sequence, [sequence].

    Returns:
        x_i,selected − x_it, [sequence · (tokens − 1), dim], sequence by sequence, the others in their order.

    >>> token_differences([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], [0])
    array([[ 1., -1.],
           [ 1.,  0.]])
    """
    tokens = real("x", x, ndim=3)
    sequences, count, dim = tokens.shape
    if count < 2:
        raise InputError("x", "at least two tokens in a sequence", f"shape {tokens.shape}", "give what to select from")
    index = whole_array("selected", selected, ndim=1, low=0, high=count - 1)
    if len(index) != sequences:
        raise InputError("selected", f"one index for each of {sequences} sequences", len(index), "match `x`")
    with np.errstate(over="ignore"):
        differences = tokens[np.arange(sequences), index][:, None] - tokens
    in_range("x", differences)
    others = np.arange(count) != index[:, None]
    return differences[others].reshape(-1, dim)


def enforced_differences(x: ArrayLike, g: ArrayLike, selected: ArrayLike) -> Differences:
    """Return each sequence's selected token less each token of lower score: the margins that training enforces.

    Tokens of equal score exert no force on each other, and one of higher score pulls the other way. A selection lasts
    if every token of higher score has a margin above 1 with `max_margin` of these differences.

    Args:
        x: tokens, [sequence, token, dim].
        g: scores, [sequence, token].
        selected: index of the selected token of each sequence, [sequence].

    Returns:
        x_i,selected − x_it where g_it < g_i,selected, [constraint, dim], sequence by sequence. A sequence that selects
        a token of the lowest score has none.

    >>> enforced_differences([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], [[0.5, 1.0, 0.0]], [0])
    array([[1., 0.]])
    """
    differences, tokens = token_differences(x, selected), real("x", x, ndim=3)
    scores, index = real("g", g, ndim=2), np.asarray(selected, dtype=np.int64)
    if scores.shape != tokens.shape[:2]:
        raise InputError("g", f"of shape {tokens.shape[:2]}", scores.shape, "give one for each token of `x`")
    others = np.arange(scores.shape[1]) != index[:, None]
    lower = (scores < np.take_along_axis(scores, index[:, None], axis=1))[others]
    if not lower.any():
        remedy = "select at least one token that is better than another of its sequence"
        raise InputError("selected", "such that a margin is enforced", "tokens of the lowest scores", remedy)
    return differences[lower]


def _orthonormal(columns: Float[np.ndarray, "row column"]) -> Float[np.ndarray, "row rank"]:
    """Return an orthonormal basis of the span of the columns."""
    basis, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return basis[:, sizes > max(columns.shape) * np.finfo(np.float64).eps * sizes[0]]


def _least_factors(matrices: Matrices, start: Float[np.ndarray, "row column"]) -> tuple[np.ndarray, np.ndarray]:
    """Return K and Q of least ½(‖K‖² + ‖Q‖²) such that ⟨B_c, K Qᵀ⟩ ≥ 1, from a start near the given product."""
    rows, columns = start.shape
    basis, sizes, other = np.linalg.svd(start, full_matrices=False)
    rank = len(sizes)
    roots = np.sqrt(sizes + 0.1 * sizes[0])  # where both factors vanish, neither would ever grow
    first = np.concatenate([(basis * roots).ravel(), (other.T * roots).ravel()])

    def factors(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return flat[: rows * rank].reshape(rows, rank), flat[rows * rank :].reshape(columns, rank)

    def margins(flat: np.ndarray) -> np.ndarray:
        k, q = factors(flat)
        return np.einsum("cij,ir,jr->c", matrices, k, q, optimize=True) - 1

    def slopes(flat: np.ndarray) -> np.ndarray:
        k, q = factors(flat)
        count = len(matrices)
        return np.hstack([(matrices @ q).reshape(count, -1), (matrices.transpose(0, 2, 1) @ k).reshape(count, -1)])

    constraint = {"type": "ineq", "fun": margins, "jac": slopes}
    options = {"ftol": _TOLERANCE, "maxiter": _MAX_STEPS}
    result = minimize(
        lambda flat: flat @ flat / 2,
        first,
        jac=lambda flat: flat,
        method="SLSQP",
        constraints=constraint,
        options=options,
    )
    return factors(result.x)


def _factor_multipliers(matrices: Matrices, k: np.ndarray, q: np.ndarray) -> Multipliers:
    """Return a ≥ 0 with ‖Σ a_c B_c‖_op = 1 that best meets the conditions of optimality.

    They are (Σ a_c B_c) Q = K, (Σ a_c B_c)ᵀ K = Q, and Σ a_c (margin_c − 1) = 0: a_c = 0 where a margin is above 1.
    """
    count = len(matrices)
    slack = np.einsum("cij,ij->c", matrices, k @ q.T) - 1
    pushes = [(matrices @ q).reshape(count, -1), (matrices.transpose(0, 2, 1) @ k).reshape(count, -1), slack[:, None]]
    multipliers = _nonnegative(np.hstack(pushes).T, np.concatenate([k.ravel(), q.ravel(), [0.0]]))
    return multipliers / np.linalg.norm(np.einsum("c,cij->ij", multipliers, matrices), ord=2)
