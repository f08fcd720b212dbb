"""Attention without skip connections makes all tokens equal: how fast, with the coefficient, at any depth.

Tokens x_i = m + r_i are carried as their mean m and residuals r_i (Σ r_i = 0), the residuals as a direction times
exp(log_norm). In plain arithmetic residuals end at the rounding of m after three layers. Here every layer keeps their
accuracy relative to their norm, however small that is: a norm of exp(−10^300) is a number like any other. Only where
hard attention picks tokens that agree to rounding among themselves the residual ends at −inf, as if they were equal.

    X′ = softmax(X W Xᵀ) X V,    r′ = r W C V + O(|r|⁵)

with C the covariance of the residuals under π_j ∝ exp(mᵀ W r_j): each layer cubes the residual. `attend`, `relu_mlp`
and `add` are the layers; `leading_term` is the cubic term; `diameter_bound` and `norm_bound` bound it from above.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy.special import exprel, log_softmax

from joma.arguments import InputError, broadcast, check_size, in_range, instance, real

Matrices = Float[np.ndarray, "... _ _"]  # of any batch axes, which broadcast
LARGEST_EXPONENT = 600.0  # up to which exp(D) and its products stay in the range of a double
ROUNDING = 1e-17  # below which (exp(D) − 1)/D is 1
TINY_ARGUMENT = 1e-9  # below which tanh(x) is x to rounding


class Tokens(NamedTuple):
    """Tokens as their mean and their residuals: x_i = mean + exp(log_norm) direction_i. Create them with `split`.

    Attributes:
        mean: m, [*batch, dim].
        direction: residuals of Frobenius norm 1 that sum to zero over the tokens, [*batch, token, dim].
        log_norm: logarithm of the residuals' Frobenius norm, [*batch]; −inf if all tokens are equal to rounding.
    """

    mean: Float[np.ndarray, "*batch dim"]
    direction: Float[np.ndarray, "*batch token dim"]
    log_norm: Float[np.ndarray, "*batch"]

    @property
    def log_rms(self) -> Float[np.ndarray, "*batch"]:
        """Logarithm of the root mean square of the residuals' entries."""
        return np.asarray(self.log_norm - np.log(self.direction.shape[-2] * self.direction.shape[-1]) / 2)

    @property
    def log_relative(self) -> Float[np.ndarray, "*batch"]:
        """Logarithm of ‖R‖_F / ‖X‖_F, the share of the residuals in the tokens: 0 if their mean is zero."""
        with np.errstate(divide="ignore"):
            log_mean = np.log(np.linalg.norm(self.mean, axis=-1)) + np.log(self.direction.shape[-2]) / 2
        with np.errstate(invalid="ignore"):
            log_ratio = 2 * (log_mean - self.log_norm)
        return np.where(np.isneginf(self.log_norm), -np.inf, -np.logaddexp(0.0, log_ratio) / 2)

    @property
    def log_diameter(self) -> Float[np.ndarray, "*batch"]:
        """Logarithm of the largest distance between two tokens."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.log_norm + np.log(_diameter(self.direction)))

    @property
    def residual(self) -> Float[np.ndarray, "*batch token dim"]:
        """The residuals r_i themselves; those below 1e-308 are 0."""
        with np.errstate(under="ignore"):
            return _exp(self.log_norm) * self.direction

    @property
    def x(self) -> Float[np.ndarray, "*batch token dim"]:
        """The tokens; residuals far smaller than the mean are rounded away."""
        return self.mean[..., None, :] + self.residual


def split(x: ArrayLike) -> Tokens:
    """Return tokens as their mean and their residuals.

        x_i = m + r_i,    m = (1/n) Σ x_i

    Residuals are accurate relative to their norm, also where the mean is far larger.

    Args:
        x: tokens, [*batch, token, dim]; at least two of them.

    >>> tokens = split([[1.0, 0.0], [3.0, 0.0]])
    >>> tokens.mean, tokens.residual.round(12), tokens.log_diameter.round(4)
    (array([2., 0.]), array([[-1.,  0.],
           [ 1.,  0.]]), np.float64(0.6931))
    """
    tokens = _matrices("x", x)
    if tokens.shape[-2] < 2:
        raise InputError("x", "at least 2 tokens", tokens.shape[-2], "give the tokens on the last axis but one")
    largest = np.abs(tokens).max(axis=(-2, -1), keepdims=True)
    exponent = np.frexp(largest)[1] + 1  # so that no difference and no square overflows; powers of two do not round
    scaled = np.ldexp(tokens, -exponent)
    # Differences of close tokens are exact, those with their rounded mean are not.
    first = scaled[..., :1, :]
    differences = scaled - first
    mean = first + differences.mean(axis=-2, keepdims=True)
    centred = _scaled(_centred(_centred(differences)), np.zeros(tokens.shape[:-2]))
    log_norm = np.asarray(centred.log_norm + exponent[..., 0, 0] * np.log(2.0))
    return Tokens(np.ldexp(mean, exponent)[..., 0, :], centred.direction, log_norm)


def attend(tokens: Tokens, w: ArrayLike, v: ArrayLike) -> Tokens:
    """Return the output of one head of attention, residuals accurate relative to their norm at any size.

        X ← softmax(X W Xᵀ) X V

    Terms of the scores that do not depend on the key drop out of the softmax. With π_j ∝ exp(mᵀ W r_j), r̄ = Σ π_j r_j,
    D_ij = r_iᵀ W (r_j − r̄) and any token h:

        x′_i = (m + r̄ + u_i) V,    u_i = Σ_j (P_ij − π_j)(r_j − r_h)
        P_ij − π_j = π_j (exp(D_ij) − Z_i)/Z_i,    Z_i = Σ_j π_j exp(D_ij)

    Args:
        tokens: from `split` or from the layer below.
        w: W = W_Q W_Kᵀ/√d, [*batch, dim, dim].
        v: V, [*batch, dim, out].

    >>> tokens = split([[0.1, 0.0], [0.0, 0.1], [0.0, 0.0]])
    >>> for _ in range(7):
    ...     tokens = attend(tokens, np.eye(2), np.eye(2))
    >>> tokens.log_norm.round(3)
    np.float64(-6235.327)
    """
    state, query_key, value = _layer(tokens, w, v)
    norm = _exp(state.log_norm)
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        log_pi = _log_pi(state, query_key, norm)
        common = _Common.of(state.direction, log_pi)
        factors, log_unit = _deviations(
            state.direction @ query_key @ common.centred.mT, norm**2, log_pi, common.heaviest
        )
        update = factors @ common.differences
        shift = norm * common.average + norm**3 * np.exp(log_unit) * update.mean(axis=-2, keepdims=True)
        mean = (state.mean[..., None, :] + shift) @ value
        in_range("tokens`, `w`, `v", mean, update)
        log_factor = 3 * state.log_norm + log_unit[..., 0, 0]
        return Tokens(mean[..., 0, :], *_scaled(_centred(update) @ value, log_factor)[1:])


def _log_pi(state: Tokens, query_key: Matrices, norm: Matrices) -> Float[np.ndarray, "... 1 token"]:
    """Return ln π, the logarithm of what every row of attention has in common."""
    return log_softmax(norm * (state.direction @ (state.mean[..., None, :] @ query_key).mT), axis=-2).mT


class _Common(NamedTuple):
    """What the rows of attention have in common, from differences with the token h of the largest π.

    Its own weight, nearly 1 in hard attention, then multiplies zero, and no digits of the other weights are lost.
    """

    heaviest: Bool[np.ndarray, "... 1 token"]
    differences: Matrices  # r_j − r_h
    average: Matrices  # r̄ = Σ π_j r_j
    centred: Matrices  # r_j − r̄

    @classmethod
    def of(cls, residual: Matrices, log_pi: Float[np.ndarray, "... 1 token"]) -> _Common:
        index = log_pi.argmax(axis=-1, keepdims=True)
        lead = np.broadcast_shapes(residual.shape[:-2], index.shape[:-2])
        tokens = np.broadcast_to(residual, (*lead, *residual.shape[-2:]))
        chosen = np.take_along_axis(tokens, np.broadcast_to(index.mT, (*lead, *index.mT.shape[-2:])), axis=-2)
        differences = residual - chosen
        shift = np.exp(log_pi) @ differences
        heaviest = np.arange(log_pi.shape[-1]) == index
        return cls(heaviest, differences, chosen + shift, differences - shift)


def _deviations(
    scores: Float[np.ndarray, "... row key"],
    scale: Float[np.ndarray, "... 1 1"],
    log_pi: Float[np.ndarray, "... 1 key"],
    left_out: Bool[np.ndarray, "... 1 key"],
) -> tuple[Float[np.ndarray, "... row key"], Float[np.ndarray, "... 1 1"]]:
    """Return (P − π)/(scale exp(log_unit)) and log_unit; 0 for the key that is left out.

    D = scale · scores. (exp(D) − 1)/D keeps its digits where D is tiny, also where it underflows to 0. The unit is the
    largest weight of the other keys, which hard attention makes as small as it likes.
    """
    exponent, others = scale * scores, np.where(left_out, -np.inf, log_pi)
    largest = np.abs(exponent).max()
    unit, log_p = others.max(axis=-1, keepdims=True), None
    if largest > 1.0:  # else no weight is far above π
        log_p = log_softmax(log_pi + exponent, axis=-1)
        unit = np.maximum(np.where(left_out, -np.inf, log_p).max(axis=(-2, -1), keepdims=True), unit)
    # (exp(D) − 1)/scale, which is the score itself where D is below rounding
    gains = scores if largest < ROUNDING else scores * exprel(np.minimum(exponent, LARGEST_EXPONENT))
    mean_gain = gains @ np.exp(log_pi).mT
    soft = np.exp(others - unit) * (gains - mean_gain) / (1 + scale * mean_gain)
    if log_p is not None and exponent.max() > LARGEST_EXPONENT:
        hard = exponent.max(axis=-1, keepdims=True) > LARGEST_EXPONENT
        differences = np.where(left_out, 0.0, np.exp(log_p - unit) - np.exp(others - unit))
        soft = np.where(hard, differences / np.where(scale > 0, scale, 1.0), soft)
    return soft, unit


def add(tokens: Tokens, update: Tokens) -> Tokens:
    """Return the sum of two sets of tokens, as a skip connection does: means and residuals are added.

    Args:
        tokens, update: of the same shape.

    >>> tokens = split([[1.0, 0.0], [3.0, 0.0]])
    >>> add(tokens, tokens).x
    array([[2., 0.],
           [6., 0.]])
    """
    first, second = _checked(tokens), _checked(update, "update")
    if first.direction.shape[-2:] != second.direction.shape[-2:]:
        got = f"{first.direction.shape} and {second.direction.shape}"
        raise InputError("update", "of the shape of the tokens", got, "give V as many columns as rows")
    broadcast(tokens=first.direction, update=second.direction)
    log_norm = np.asarray(np.maximum(first.log_norm, second.log_norm))
    with np.errstate(under="ignore"):
        parts = [_relative(part.log_norm, log_norm) * part.direction for part in (first, second)]
        return Tokens(first.mean + second.mean, *_scaled(parts[0] + parts[1], log_norm)[1:])


def relu_mlp(tokens: Tokens, lower: ArrayLike, upper: ArrayLike) -> Tokens:
    """Return the output of an MLP without biases, residuals accurate relative to their norm at any size.

        x_i ← max(x_i A, 0) B

    A hidden unit changes from the mean token to token i by max(b, −a) if a > 0, and by max(a + b, 0) if not, where
    a = (m A)_k and b = (r_i A)_k: no difference of large numbers is taken.

    Args:
        tokens: from `split` or from the layer below.
        lower: A, [*batch, dim, hidden].
        upper: B, [*batch, hidden, out].

    >>> tokens = split([[1.0, -1.0], [3.0, 1.0]])
    >>> bool(np.abs(relu_mlp(tokens, np.eye(2), np.eye(2)).x - [[1, 0], [3, 1]]).max() < 1e-15)
    True
    """
    state, below, above = _checked(tokens), _matrices("lower", lower), _matrices("upper", upper)
    _check_axes("lower", below, state.mean.shape[-1])
    _check_axes("upper", above, below.shape[-1])
    broadcast(tokens=state.direction[..., :1, :1], lower=below[..., :1, :1], upper=above[..., :1, :1])
    log_norm = state.log_norm[..., None, None]
    with np.errstate(under="ignore", over="ignore", divide="ignore", invalid="ignore"):
        offset = state.mean[..., None, :] @ below
        # a in units of the norm: infinite where residuals are too small to switch the unit.
        distance = np.where(offset == 0, 0.0, np.sign(offset) * np.exp(np.log(np.abs(offset)) - log_norm))
        change = state.direction @ below
        change = np.where(distance > 0, np.maximum(change, -distance), np.maximum(change + distance, 0.0))
        shift = _exp(state.log_norm) * change.mean(axis=-2, keepdims=True)
        mean = (np.maximum(offset, 0.0) + shift) @ above
        return Tokens(mean[..., 0, :], *_scaled(_centred(change) @ above, state.log_norm)[1:])


def leading_term(tokens: Tokens, w: ArrayLike, v: ArrayLike) -> Tokens:
    """Return the residuals of `attend` to leading order, which is cubic in those of the input, and its mean.

        r′_i = r_iᵀ W C V,    C = Σ_j π_j (r_j − r̄)(r_j − r̄)ᵀ,    π_j ∝ exp(mᵀ W r_j),    m′ = (m + r̄) V

    The relative error of the residuals is of the order of the residuals' square.

    Args:
        tokens, w, v: as for `attend`.

    >>> tokens = split(0.01 * np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    >>> exact, leading = (layer(tokens, np.eye(2), np.eye(2)) for layer in (attend, leading_term))
    >>> bool(abs(leading.log_norm - exact.log_norm) < 1e-4)
    True
    """
    state, query_key, value = _layer(tokens, w, v)
    norm = _exp(state.log_norm)
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        log_pi = _log_pi(state, query_key, norm)
        common = _Common.of(state.direction, log_pi)
        covariance = (common.centred * np.exp(log_pi).mT).mT @ common.centred
        mean = (state.mean[..., None, :] + norm * common.average) @ value
        residual = _centred(state.direction @ query_key @ covariance) @ value
        in_range("tokens`, `w`, `v", mean, residual)
        return Tokens(mean[..., 0, :], *_scaled(residual, 3 * state.log_norm)[1:])


def diameter_bound(diameter: ArrayLike, w_norm: ArrayLike, v_norm: ArrayLike) -> np.ndarray:
    """Return a bound on the diameter of the tokens after `attend`, for any weights and tokens (ours).

        Δ′ ≤ ‖V‖₂ Δ tanh(‖W‖₂ Δ²/4) ≤ ‖V‖₂ ‖W‖₂ Δ³/4

    A skip connection adds Δ to it, and an MLP multiplies it by its Lipschitz constant.

    Args:
        diameter: Δ, largest distance between two tokens, at least 0.
        w_norm, v_norm: spectral norms of W and V, at least 0.

    Returns:
        The bound, of the arguments' common shape.

    >>> diameter_bound([0.1, 10.0], 1.0, 1.0)
    array([2.49999479e-04, 1.00000000e+01])
    """
    size = real("diameter", diameter, low=0.0)
    with np.errstate(divide="ignore", under="ignore", over="ignore"):
        return np.asarray(np.exp(log_diameter_bound(np.log(size), w_norm, v_norm)))


def log_diameter_bound(log_diameter: ArrayLike, w_norm: ArrayLike, v_norm: ArrayLike) -> np.ndarray:
    """Return the logarithm of `diameter_bound`, for diameters of any size.

        ln Δ′ ≤ ln ‖V‖₂ + ln Δ + ln tanh(‖W‖₂ Δ²/4)

    Args:
        log_diameter: ln Δ, as of `Tokens`; −inf if all tokens are equal.
        w_norm, v_norm: spectral norms of W and V, at least 0.

    Returns:
        The bound, of the arguments' common shape.

    >>> log_diameter_bound(-1000.0, 4.0, 1.0)
    array(-3000.)
    """
    size = real("log_diameter", log_diameter, finite=False)
    query_key, value = real("w_norm", w_norm, low=0.0), real("v_norm", v_norm, low=0.0)
    broadcast(log_diameter=size, w_norm=query_key, v_norm=value)
    with np.errstate(divide="ignore", under="ignore", over="ignore", invalid="ignore"):
        log_argument = np.log(query_key / 4) + 2 * size
        argument = np.exp(log_argument)
        log_tanh = np.where(argument < TINY_ARGUMENT, log_argument, np.log(np.tanh(argument)))
        total = np.log(value) + size + log_tanh
    # Where a factor is zero the bound is zero, also beside an infinite one.
    return np.where((value == 0) | (query_key == 0) | np.isneginf(size), -np.inf, total)


def norm_bound(residual: ArrayLike, w: ArrayLike, v: ArrayLike) -> np.ndarray:
    """Return the bound of Dong, Cordonnier and Loukas (arXiv 2103.03404) on the residual after `attend`.

        ‖res X′‖_{1,∞} ≤ 4 ‖W‖₁ ‖V‖_{1,∞} ‖res X‖³_{1,∞},    ‖A‖_{1,∞} = √(‖A‖₁ ‖A‖_∞)

    with ‖A‖₁ the largest sum of a column's absolute values and ‖A‖_∞ that of a row. Its form is cited from memory.

    Args:
        residual: R, [*batch, token, dim].
        w: W, [*batch, dim, dim].
        v: V, [*batch, dim, out].

    >>> norm_bound([[0.1], [-0.1]], [[1.0]], [[1.0]]).round(6)
    np.float64(0.011314)
    """
    rows, query_key, value = _matrices("residual", residual), _matrices("w", w), _matrices("v", v)
    broadcast(residual=rows[..., :1, :1], w=query_key[..., :1, :1], v=value[..., :1, :1])
    with np.errstate(over="ignore", under="ignore"):
        column_norm = np.asarray(np.linalg.norm(query_key, ord=1, axis=(-2, -1)))
        bound = np.asarray(4 * column_norm * _mixed_norm(value) * _mixed_norm(rows) ** 3)
    in_range("residual`, `w`, `v", bound)
    return bound


def mixed_norm(matrix: ArrayLike) -> np.ndarray:
    """Return ‖A‖_{1,∞} = √(‖A‖₁ ‖A‖_∞), the norm of `norm_bound`.

    Args:
        matrix: A, [*batch, row, column].

    >>> mixed_norm([[3.0, 1.0], [0.0, 1.0]])
    array(3.46410162)
    """
    with np.errstate(over="ignore"):
        norm = _mixed_norm(_matrices("matrix", matrix))
    in_range("matrix", norm)
    return norm


def _mixed_norm(matrix: np.ndarray) -> np.ndarray:
    norms = [np.linalg.norm(matrix, ord=order, axis=(-2, -1)) for order in (1, np.inf)]
    return np.asarray(np.sqrt(norms[0]) * np.sqrt(norms[1]))


def _diameter(points: Float[np.ndarray, "*batch token dim"]) -> Float[np.ndarray, "*batch"]:
    """Return the largest distance between two points of mean zero, by |a|² + |b|² − 2 a·b.

    No point is farther from the mean than the diameter, so that the largest distance loses no digits.
    """
    gram = points @ points.mT
    squares = np.diagonal(gram, axis1=-2, axis2=-1)
    distances = squares[..., :, None] + squares[..., None, :] - 2 * gram
    return np.sqrt(np.maximum(distances.max(axis=(-2, -1)), 0.0))[...]


def _scaled(residual: Matrices, log_factor: ArrayLike) -> Tokens:
    """Return residuals times exp(log_factor) as a direction and a logarithm; the mean is left at zero."""
    largest = np.abs(residual).max(axis=(-2, -1), keepdims=True)
    shrunk = residual / np.where(largest > 0, largest, 1.0)
    norm = np.linalg.norm(shrunk, axis=(-2, -1), keepdims=True)
    with np.errstate(divide="ignore"):
        log_norm = (np.log(norm) + np.log(largest))[..., 0, 0] + log_factor
    direction = shrunk / np.where(norm > 0, norm, 1.0)
    return Tokens(np.zeros_like(direction[..., 0, :]), direction, np.asarray(log_norm))


def _centred(rows: Matrices) -> Matrices:
    return rows - rows.mean(axis=-2, keepdims=True)


def _exp(log_norm: Float[np.ndarray, "*batch"]) -> Float[np.ndarray, "*batch 1 1"]:
    with np.errstate(under="ignore"):
        return np.exp(log_norm)[..., None, None]


def _relative(log_norm: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Return exp(log_norm − unit) over the last two axes; 0 where both are −inf."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(log_norm), 0.0, np.exp(log_norm - unit))[..., None, None]


def _matrices(name: str, value: ArrayLike) -> np.ndarray:
    array = real(name, value)
    if array.ndim < 2:
        raise InputError(name, "matrices [*batch, row, column]", f"shape {array.shape}", "give at least two axes")
    return array


def _check_axes(name: str, matrix: np.ndarray, rows: int, columns: int | None = None) -> None:
    expected = (rows, matrix.shape[-1] if columns is None else columns)
    if matrix.shape[-2:] != expected:
        text = f"matrices of {rows} rows" + ("" if columns is None else f" and {columns} columns")
        raise InputError(name, text, f"shape {matrix.shape}", "match the width of the tokens")


def _layer(tokens: Tokens, w: ArrayLike, v: ArrayLike) -> tuple[Tokens, Matrices, Matrices]:
    """Check the arguments of a layer of attention."""
    state, query_key, value = _checked(tokens), _matrices("w", w), _matrices("v", v)
    dim = state.mean.shape[-1]
    _check_axes("w", query_key, dim, dim)
    _check_axes("v", value, dim)
    broadcast(tokens=state.direction[..., :1, :1], w=query_key[..., :1, :1], v=value[..., :1, :1])
    return state, query_key, value


def _checked(tokens: Tokens, name: str = "tokens") -> Tokens:
    state = instance(name, tokens, Tokens, "pass what `split` or a layer returns")
    count = state.direction.shape[-2]
    check_size(name, (*state.direction.shape[:-1], count))
    return state
