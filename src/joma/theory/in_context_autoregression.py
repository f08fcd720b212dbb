"""Linear attention that estimates W of s_{t+1} = W s_t from its context: the best parameters and their loss.

In the common eigenbasis W = diag(λ), with every λ_j and every phase of s_1 uniform on the unit circle and |s_1j| = 1.
One layer of linear attention on augmented tokens (s_{t−1}, s_t) predicts s_{T+1} as

    out = B Σ_{t=2}^{T} (s_{t−1}* A s_T) s_t,    loss = mean_i E |out_i − s_{T+1,i}|²

Best are A and B that are multiples of the identity, with a b = 1/(T + d − 2): one step of gradient descent from zero,
with that step size, on the context's own regression Σ_t ‖s_{t+1} − W s_t‖².

The loss of any A and B is exact: `out` is a sum of monomials in the independent phases, and different monomials are
uncorrelated, so that `population_loss` adds the squares of their coefficients.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Int
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.optimize import minimize

from joma.arguments import InputError, broadcast, check_size, choice, described, in_range, instance, real, whole

PROCESSES = {
    "unitary": "independent eigenvalues, a start of independent phases",
    "fixed": "independent eigenvalues, the start (1, …, 1)",
    "rotations": "eigenvalues in conjugate pairs, as of real rotations, a start of independent phases",
}
Matrix = Complex[np.ndarray, "dim dim"]
MAX_STARTS = 10_000


def best_step(length: ArrayLike, dim: ArrayLike) -> np.ndarray:
    """Return the best product a b of the parameters a I and b I: the step size of gradient descent.

        a b = 1 / (T + d − 2)

    Args:
        length: T, the number of tokens s_1 to s_T of the context, at least 2.
        dim: d, the number of coordinates, at least 1.

    Returns:
        a b, of the common shape of the arguments.

    >>> best_step([3, 5, 10, 20], 4).round(4)
    array([0.2   , 0.1429, 0.0833, 0.0455])
    """
    tokens, coordinates = real("length", length, low=2.0), real("dim", dim, low=1.0)
    broadcast(length=tokens, dim=coordinates)
    return np.asarray(1 / (tokens + coordinates - 2))


def best_loss(length: ArrayLike, dim: ArrayLike) -> np.ndarray:
    """Return the least loss of one layer of linear attention on augmented tokens.

        L* = (d − 1) / (T + d − 2)

    Args:
        length, dim: T and d, as in `best_step`.

    Returns:
        L*, of the common shape of the arguments; 1 is the loss of the prediction 0.

    >>> best_loss([3, 5, 10, 20], 4).round(4)
    array([0.6   , 0.4286, 0.25  , 0.1364])
    """
    step = best_step(length, dim)
    return np.asarray((real("dim", dim, low=1.0) - 1) * step)


def diagonal_loss(a: ArrayLike, b: ArrayLike, length: int) -> float:
    """Return the loss of diagonal parameters A = diag(a), B = diag(b).

        mean_i [ |b_i a_i (T − 1) − 1|² + (T − 1) |b_i|² Σ_{j≠i} |a_j|² ]

    Args:
        a, b: the diagonals, real or complex, of one length.
        length: T, at least 2.

    >>> round(diagonal_loss([0.2, 0.2], [0.5, 0.5], length=10), 4)
    0.1
    """
    first, second = _complex("a", a, 1), _complex("b", b, 1)
    if first.shape != second.shape:
        raise InputError("b", f"of the length of `a`, {first.size}", second.size, "give one number for each coordinate")
    pairs = whole("length", length, low=2) - 1
    with np.errstate(all="ignore"):
        sizes = np.abs(first) ** 2
        signal = np.abs(second * first * pairs - 1) ** 2
        loss = float(np.mean(signal + pairs * np.abs(second) ** 2 * (sizes.sum() - sizes)))
    in_range("a`, `b", loss)
    return loss


def population_loss(
    A: ArrayLike, B: ArrayLike, length: int, *, process: str = "unitary", positions: ArrayLike | None = None
) -> float:
    """Return the exact loss of any parameters, over all contexts of a process.

    Args:
        A, B: real or complex d × d. Those of `rotations` are in the real basis of the rotations' planes: coordinates
            0 and 1, 2 and 3, and so on; each plane has the squared norm 2.
        length: T, at least 2.
        process: a name of `PROCESSES`.
        positions: for tokens that are *not* augmented, out = B Σ_{t=1}^{T} p_t (s_t* A s_T) s_t: the T weights p_t.
            None for augmented tokens.

    >>> round(population_loss(0.1 * np.eye(4), np.eye(4), length=8), 4)
    0.3
    >>> round(population_loss(0.1 * np.eye(4), np.eye(4), length=8, process="rotations"), 4)
    0.3
    """
    first, second = _complex("A", A, 2), _complex("B", B, 2)
    dim = len(first)
    if first.shape != (dim, dim) or second.shape != (dim, dim):
        got = f"shapes {first.shape} and {second.shape}"
        raise InputError("A`, `B", "square and of one size", got, "give d × d matrices")
    tokens, known = whole("length", length, low=2), _known(process)
    check_size("length", (tokens, dim**3, 2 * dim))
    weights = _position_weights(positions, tokens)
    if known == "rotations":
        basis = rotation_basis(dim)
        first, second = basis @ first @ basis.conj().T, basis @ second @ basis.conj().T
    terms = _terms(tokens, dim, known, weights is None)
    with np.errstate(all="ignore"):
        products = (first[:, :, None] * second[:, None, None, :]).reshape(dim, dim**3)
        coefficients = terms.matrix(weights) @ products.T
        signal = coefficients[terms.target, np.arange(dim)]
        loss = float(np.mean((np.abs(coefficients) ** 2).sum(axis=0) - 2 * np.real(signal) + 1))
    in_range("A`, `B`, `positions", loss)
    return loss


class Optimum(NamedTuple):
    """The best parameters that were found, in the eigenbasis, and their exact loss."""

    loss: float
    A: Matrix
    B: Matrix


def optimum(
    length: int, dim: int, *, process: str = "unitary", starts: int = 4, generator: np.random.Generator
) -> Optimum:
    """Search for the best A and B of augmented tokens, over all complex d × d matrices, by L-BFGS on the exact loss.

    Args:
        length: T, at least 2.
        dim: d; even for `rotations`, whose matrices are in the eigenbasis here. The cost grows as d⁶.
        process: a name of `PROCESSES`.
        starts: number of random starts, of which the best end is returned.
        generator: of the starts.

    >>> round(optimum(5, 2, generator=np.random.default_rng(0)).loss, 8), best_loss(5, 2)
    (0.2, array(0.2))
    """
    tokens, size = whole("length", length, low=2), whole("dim", dim)
    instance("generator", generator, np.random.Generator, "pass `np.random.default_rng(seed)`")
    check_size("dim", (size**3, size**3))
    check_size("length", (tokens, size**3, 2 * size))
    if _known(process) == "rotations":
        _check_pairs(size)
    terms = _terms(tokens, size, process, True)
    matrix = terms.matrix()
    moments, signal = (matrix.T @ matrix).toarray(), matrix[terms.target].toarray()  # signal [coordinate, jkl]

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        first, second = flat.view(np.complex128).reshape(2, size, size)
        products = (first[:, :, None] * second[:, None, None, :]).reshape(size, size**3)
        residual = (products @ moments - signal).reshape(size, size, size, size)  # [i, j, k, l]
        loss = np.mean((products.conj() * (products @ moments - 2 * signal)).sum(axis=1).real + 1)
        slope_first = np.einsum("ijkl,il->jk", residual, second.conj())
        slope_second = np.einsum("ijkl,jk->il", residual, first.conj())
        return float(loss), 2 / size * np.stack([slope_first, slope_second]).ravel().view(np.float64)

    ends = []
    for _ in range(whole("starts", starts, high=MAX_STARTS)):
        start = generator.normal(scale=1 / np.sqrt(tokens * size), size=4 * size**2)
        options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 30}
        ends.append(minimize(objective, start, jac=True, method="L-BFGS-B", options=options))
    best = min(ends, key=lambda end: float(end.fun))
    first, second = np.asarray(best.x).view(np.complex128).reshape(2, size, size)
    return Optimum(float(best.fun), first, second)


def rotation_basis(dim: int) -> Matrix:
    """Return the unitary matrix that takes the real coordinates of planes to the eigenbasis of their rotations.

        (x, y) → ((x + i y)/√2, (x − i y)/√2)

    >>> rotation_basis(2).round(2)
    array([[0.71+0.j  , 0.  +0.71j],
           [0.71+0.j  , 0.  -0.71j]])
    """
    dim = whole("dim", dim)
    check_size("dim", (dim, dim, 2))
    _check_pairs(dim)
    return np.kron(np.eye(dim // 2), np.array([[1, 1j], [1, -1j]]) / np.sqrt(2))


class _Terms(NamedTuple):
    """Which monomial conj(s_{t',j}) s_{T,k} s_{t,l} is, for each t and jkl."""

    monomial: Int[np.ndarray, "time jkl"]
    size: int
    target: Int[np.ndarray, " coordinate"]  # the monomial of s_{T+1,i}

    def matrix(self, weights: np.ndarray | None = None) -> sparse.csr_array:
        """Return how much each product A_jk B_il contributes to each monomial, [monomial, jkl]."""
        times, products = self.monomial.shape
        values = np.repeat(np.ones(times) if weights is None else weights, products)
        columns = np.tile(np.arange(products), times)
        return sparse.csr_array((values, (self.monomial.ravel(), columns)), shape=(self.size, products))


@lru_cache(maxsize=64)
def _terms(length: int, dim: int, process: str, augmented: bool) -> _Terms:
    """Name the monomials of conj(s_{t',j}) s_{T,k} s_{t,l}; t' is t − 1, or t if tokens are not augmented.

    s_{t,j} is the phase of the start times λ^(t−1), both with the exponent −1 for the second of a conjugate pair.
    """
    coordinate, is_fixed = np.arange(dim), process == "fixed"
    variable, sign = (coordinate // 2, 1 - 2 * (coordinate % 2)) if process == "rotations" else (coordinate, 1)
    charge = np.zeros((dim, dim), dtype=np.int64)  # [coordinate, variable]
    charge[coordinate, variable] = sign
    times = np.arange(1 + augmented, length + 1)
    exponents = -(times - 1 - augmented), np.full_like(times, length - 1), times - 1
    key, query, value = (np.multiply.outer(power, charge) for power in exponents)  # [time, coordinate, variable]
    powers = key[:, :, None, None] + query[:, None, :, None] + value[:, None, None, :]
    phases = (1 - is_fixed) * (charge[None, :, None] + charge - charge[:, None, None])
    monomials = np.concatenate([np.broadcast_to(phases, powers.shape), powers], axis=-1).reshape(-1, 2 * dim)
    target = np.concatenate([(1 - is_fixed) * charge, length * charge], axis=1)
    names, index = np.unique(np.concatenate([target, monomials]), axis=0, return_inverse=True)
    index = index.reshape(-1)
    return _Terms(index[dim:].reshape(len(times), dim**3), len(names), index[:dim])


def _known(process: str) -> str:
    if not isinstance(process, str):
        raise InputError("process", "a name", described(process), f"choose from {', '.join(PROCESSES)}")
    choice("process", process, PROCESSES)
    return process


def _check_pairs(dim: int) -> None:
    if dim % 2:
        raise InputError("dim", "even for rotations", dim, "a rotation turns a plane: give two coordinates for each")


def _position_weights(positions: ArrayLike | None, length: int) -> np.ndarray | None:
    if positions is None:
        return None
    weights = real("positions", positions, ndim=1)
    if weights.size != length:
        raise InputError("positions", f"{length} weights, one for each token", weights.size, "match `length`")
    return weights


def _complex(name: str, value: ArrayLike, ndim: int) -> np.ndarray:
    """Return real or complex numbers as complex128 of `ndim` axes, or raise `InputError`."""
    try:
        array = np.asarray(value) if isinstance(value, np.ndarray | list | tuple | complex | np.generic) else None
    except ValueError:  # rows of different lengths, of which `real` says so
        array = None
    if array is None or array.dtype.kind != "c":
        return real(name, value, ndim=ndim).astype(np.complex128)
    if array.ndim != ndim or not np.isfinite(array).all() or not array.size:
        raise InputError(name, f"{ndim}-dimensional and finite", described(array), "give finite numbers")
    return array.astype(np.complex128)
