"""The stable rank of weights, without a singular value decomposition and with a known error.

The largest eigenvalue λ of A = W Wᵀ (or Wᵀ W, whichever is smaller) is bounded from both sides.

- A small A is squared p times: with P = A^(2^p), tr(A P)/tr(P) ≤ λ ≤ tr(P)^(1/2^p), which for n rows are within a
  factor of n^(1/2^p) of each other whatever the spectrum: 1e-4 for p = 16 and 256 rows. Nothing is random, and nothing
  waits for the device. A GPU squares so fast that this is the better way up to 3,072 rows.
- A large A is used only in products with a block of vectors: block Lanczos gives A U = U T + U' R' with T block
  tridiagonal, and λ is at least T's largest eigenvalue. For the top eigenvector e, with e_1 its part in the first
  block, ‖e_1‖ ≤ ‖M(λ)‖, M(t) = E_1ᵀ (t − T)⁻¹ E_k R'ᵀ. As the first block is random, ‖e_1‖ is below δ with a
  probability of only 1e-9, where δ² is a quantile of the Beta distribution; so λ is not a t with ‖M(t)‖ < δ. (The same
  idea with one vector: M. Hochstenbach, Probabilistic upper bounds for the matrix two-norm, 2013; a block makes δ, and
  with it the bound, far better.) M decreased beyond T's eigenvalues in all cases that we tried; it is evaluated up to
  tr(A) on a grid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import betaincinv
from torch import Tensor

from joma.arguments import InputError, scalar, whole
from joma.kernels.products import exact_products, thin_product
from joma.probes.states import floating

_MAX_SQUARED = 256  # rows up to which A itself is squared in float64
_MAX_SQUARED_CUDA = 3072  # and in float32 on a GPU: at 4,096 rows Lanczos takes less time
_MAX_GRAM_CUDA = 4096  # rows up to which a given A is squared there
_SQUARINGS, _SQUARINGS_PER_SCALING = 16, 4
_FLOAT32_SQUARINGS_PER_SCALING = 2  # of 3,072 rows: a trace of 1 falls to no less than 1e-11
_BLOCK = 16  # vectors in a block
_FIRST_CHECK = 8  # block steps before the bounds are computed for the first time
_MAX_STEPS = 40  # block steps, if the bounds are not tight enough before
_RISK = 1e-9  # probability that the upper bound is wrong
_GRID = 32  # number of t at which ‖M(t)‖ is evaluated
_SAFE_RANGE = (1e-12, 1e12)  # of the largest entry: the sum of squares is far from both ends of float32


class Bounds(NamedTuple):
    """A lower and an upper bound for each matrix, [*batch] in float64."""

    lower: Tensor
    upper: Tensor


def stable_rank(weight: ArrayLike | Tensor, *, tolerance: float = 2e-3, iterations: int | None = None) -> Tensor:
    """Return the stable rank ‖W‖_F² / ‖W‖_2² of each matrix: from 1 to its rank.

    The spectral norm comes from `spectral_norm`, without a singular value decomposition.

    Args:
        weight: [*batch, row, column], floating; a tensor, an array or nested lists.
        tolerance: bound on the relative error of the result.
        iterations: a fixed number of steps instead of a tolerance; nothing then waits for the device.

    Returns:
        [*batch] in float64; NaN for a matrix of zeros, and for one that holds NaN or an infinity, as the weights of a
        diverged seed do.

    >>> stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0])))
    tensor(1.5000, dtype=torch.float64)
    """
    total, bounds = _norms(weight, tolerance, iterations)
    return (total / bounds.lower).square()


def spectral_norm(weight: ArrayLike | Tensor, *, tolerance: float = 2e-3, iterations: int | None = None) -> Bounds:
    """Return bounds of the largest singular value ‖W‖_2 of each matrix.

    Up to 256 rows or columns (3,072 on a GPU) the bounds are certain, above that the upper one is wrong with
    probability 1e-9 (over the random start, whose seed is fixed); both up to float32 rounding. The lower one is by far
    the closer one.

    Args:
        weight: [*batch, row, column], floating; a tensor, an array or nested lists.
        tolerance: (upper/lower)² − 1 at which to stop, at least 2e-4.
        iterations: a fixed number of steps instead of a tolerance; nothing then waits for the device.

    Returns:
        Lower and upper bounds, each [*batch] in float64; NaN where the matrix holds NaN or an infinity.

    >>> norm = spectral_norm(torch.ones(2, 8))
    >>> norm.lower, bool(norm.upper / norm.lower < 1.0005)
    (tensor(4., dtype=torch.float64), True)
    """
    return _norms(weight, tolerance, iterations)[1]


def small_grams(weight: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch side side"]:
    """Return W Wᵀ in float64, or Wᵀ W if that is smaller, of matrices in float32 or less.

    No square of a float32 number leaves the range of float64, so nothing is rescaled; neither autocast nor TF32 applies
    to float64. That leaves few operations: a probe of a small model would notice each.

    >>> small_grams(torch.tensor([[2.0], [1.0]]))
    tensor([[5.]], dtype=torch.float64)
    """
    w = weight.detach().double()
    w = w if w.shape[-2] <= w.shape[-1] else w.mT
    return w @ w.mT


def stable_rank_from_gram(gram: Float[Tensor, "*batch side side"]) -> Float[Tensor, "*batch"]:
    """Return the stable rank of each matrix from its Gram matrix, one of `small_grams`.

    >>> stable_rank_from_gram(torch.diag(torch.tensor([4.0, 2.0], dtype=torch.float64)))
    tensor(1.5000, dtype=torch.float64)
    """
    frobenius, bounds = _norms_from_gram(gram)
    return (frobenius / bounds.lower).square()


def gram_norm(gram: Float[Tensor, "*batch side side"], *, iterations: int) -> Float[Tensor, "*batch"]:
    """Return the spectral norm, the largest eigenvalue, of Gram matrices.

    A GPU squares them up to 4,096 rows, and nothing waits for it; all else takes `iterations` steps of block Lanczos.

    >>> gram_norm(torch.diag(torch.tensor([3.0, 1.0])), iterations=4).round(decimals=3)
    tensor(3., dtype=torch.float64)
    """
    if not gram.is_cuda or gram.shape[-1] > _MAX_GRAM_CUDA:
        return spectral_norm(gram, iterations=iterations).lower
    return _squared_gram_norm(gram)


def _squared_gram_norm(gram: Float[Tensor, "*batch side side"]) -> Float[Tensor, "*batch"]:
    """Return the norm by repeated squaring."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1, dtype=torch.float64)
    unit = torch.where(trace > 0, trace, 1)[..., None, None].to(gram.dtype)
    with exact_products(gram.device), torch.autocast(gram.device.type, enabled=False):
        return _squaring_bounds(gram / unit, _FLOAT32_SQUARINGS_PER_SCALING).lower * unit[..., 0, 0]


def _norms(
    weight: ArrayLike | Tensor, tolerance: float, iterations: int | None
) -> tuple[Float[Tensor, "*batch"], Bounds]:
    """Return the Frobenius norm of each matrix, and bounds of its spectral norm."""
    tolerance = scalar("tolerance", tolerance, low=2e-4, high=1.0)
    steps = None if iterations is None else whole("iterations", iterations, low=1)
    expected, remedy = "floating [*batch, row, column] and non-empty", "pass matrices of weights"
    w = floating("weight", weight, remedy, expected=expected).detach()
    if w.ndim < 2 or w.numel() == 0:
        raise InputError("weight", expected, f"{w.dtype} of shape {tuple(w.shape)}", remedy)
    if w.dtype != torch.float64 and min(w.shape[-2:]) <= _MAX_SQUARED:
        return _norms_from_gram(small_grams(w))
    w = w if w.dtype == torch.float64 else w.float()
    w = w if w.shape[-2] <= w.shape[-1] else w.mT
    w, unit = _rescaled(w)
    frobenius = _frobenius(w)
    size = torch.where(frobenius > 0, frobenius, 1.0)[..., None, None].to(w.dtype)  # so that zeros stay zeros
    with exact_products(w.device), torch.autocast(w.device.type, enabled=False):
        if w.shape[-2] <= _MAX_SQUARED:
            squares = _small_bounds(w, size)
        elif w.is_cuda and w.dtype == torch.float32 and w.shape[-2] <= _MAX_SQUARED_CUDA and steps is None:
            squares = _medium_bounds(w, size)
        else:
            squares = _lanczos_bounds(w, size, tolerance, steps)
    lower, upper = (bound.sqrt() * size[..., 0, 0] for bound in squares)
    return frobenius * unit, Bounds(lower * unit, torch.maximum(torch.minimum(upper, frobenius), lower) * unit)


def _norms_from_gram(gram: Float[Tensor, "*batch side side"]) -> tuple[Float[Tensor, "*batch"], Bounds]:
    """Return both norms of matrices from their Gram matrices."""
    frobenius = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1).sqrt()
    squares = _largest_eigenvalue(gram)
    lower = squares.lower.sqrt()
    if squares.upper is squares.lower:
        return frobenius, Bounds(lower, lower)
    return frobenius, Bounds(lower, torch.maximum(torch.minimum(squares.upper.sqrt(), frobenius), lower))


def _rescaled(w: Float[Tensor, "*batch row column"]) -> tuple[Tensor, Float[Tensor, "*batch"]]:
    """Return matrices whose squares fit into their dtype, and the power of two by which each was divided, exactly.

    On the CPU they are rescaled only where necessary; on a GPU this decision would have to wait for the device, and a
    copy costs little.
    """
    peak = torch.maximum(w.amax(dim=(-2, -1)), -w.amin(dim=(-2, -1)))
    low, high = _SAFE_RANGE
    if w.device.type == "cpu" and bool(((peak > low) & (peak < high) | (peak == 0)).all()):
        return w, torch.ones_like(peak, dtype=torch.float64)
    defined = (peak > 0) & peak.isfinite()
    unit = torch.where(defined, torch.exp2(peak.double().log2().floor()), 1.0)
    return w / unit[..., None, None].to(w.dtype), unit


def _frobenius(w: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch"]:
    """Return the Frobenius norm: each row in the matrix's precision, the sum over rows in float64."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(w, dim=-1).double(), dim=-1)


def _small_bounds(w: Float[Tensor, "*batch row column"], size: Float[Tensor, "*batch 1 1"]) -> Bounds:
    """Return bounds of the largest eigenvalue of w wᵀ / size²."""
    w = (w / size).double()
    return _largest_eigenvalue(w @ w.mT)


def _medium_bounds(w: Float[Tensor, "*batch row column"], size: Float[Tensor, "*batch 1 1"]) -> Bounds:
    """Return the same bounds from float32 products; for 3,072 rows they are within 1.3e-4 of each other.

    Rounding in the p-th square changes its largest eigenvalue by a part of 1e-6 or less, and the root by 2^p less.
    """
    w = w / size
    return _squaring_bounds(w @ w.mT, _FLOAT32_SQUARINGS_PER_SCALING)


def _squaring_bounds(a: Float[Tensor, "*batch row row"], per_scaling: int = _SQUARINGS_PER_SCALING) -> Bounds:
    """Bound the largest eigenvalue of positive matrices by repeated squaring, each `per_scaling`-th scaled to trace 1.

    Four squarings of n rows reduce a trace of 1 to no less than n⁻¹⁵, which is far above the least float64.
    """
    log, power = torch.zeros_like(a[..., 0, 0], dtype=torch.float64), a
    for n in range(0, _SQUARINGS + 1, per_scaling):
        trace = power.diagonal(dim1=-2, dim2=-1).sum(dim=-1, dtype=torch.float64)
        log = log + trace.log() / 2**n
        power = power / torch.where(trace > 0, trace, 1)[..., None, None].to(a.dtype)
        for _ in range(per_scaling if n < _SQUARINGS else 0):
            power = power @ power
    lower = (a * power).sum(dim=(-2, -1), dtype=torch.float64)  # both symmetric: the trace of their product
    return Bounds(lower, torch.maximum(log.exp(), lower))


def _largest_eigenvalue(a: Float[Tensor, "*batch row row"]) -> Bounds:
    """Return bounds of the largest eigenvalue: on the CPU by `eigvalsh`, in a quarter of the time of squaring.

    On a GPU `eigvalsh` would have to wait for the device.
    """
    if a.device.type != "cpu":
        return _squaring_bounds(a)
    if bool(a.sum().abs() < math.inf):  # where the sum is finite, so are all entries, and none needs a mask
        value = torch.linalg.eigvalsh(a)[..., -1].clamp(min=0)
        return Bounds(value, value)
    finite = a.isfinite().all(dim=-1).all(dim=-1)
    value = torch.linalg.eigvalsh(torch.where(finite[..., None, None], a, 0.0))[..., -1]
    value = torch.where(finite, value.clamp(min=0), torch.nan)
    return Bounds(value, value)


def _lanczos_bounds(
    w: Float[Tensor, "*batch row column"], size: Float[Tensor, "*batch 1 1"], tolerance: float, steps: int | None
) -> Bounds:
    """Run block Lanczos on A = w wᵀ / size², with full orthogonalisation, until the bounds are within `tolerance`."""
    rows, max_steps = w.shape[-2], min(steps or _MAX_STEPS, w.shape[-2] // _BLOCK)
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(rows, _BLOCK, generator=generator, dtype=torch.float64, device="cpu")
    block = torch.linalg.qr(start)[0].to(w).expand(*w.shape[:-2], rows, _BLOCK)
    space = w.new_empty(*w.shape[:-2], rows, (max_steps + 1) * _BLOCK)
    space[..., :_BLOCK] = block
    diagonal, below = [], []
    bounds, next_check, previous = None, max_steps if steps is not None else min(_FIRST_CHECK, max_steps), None
    for step in range(1, max_steps + 1):
        image = thin_product(w, thin_product(w.mT, block / size)) / size
        diagonal.append((block.mT @ image).double())
        basis = space[..., : step * _BLOCK]
        image = image - basis @ (basis.mT @ image)
        block = image
        for _ in range(2):  # in an exhausted space only rounding remains, and it must be orthogonal too
            block = torch.linalg.qr(block - basis @ (basis.mT @ block))[0]
        below.append((block.mT @ image).double())
        space[..., step * _BLOCK : (step + 1) * _BLOCK] = block
        if step == next_check:
            bounds = _bounds_from_blocks(torch.stack(diagonal, dim=-3), torch.stack(below, dim=-3), rows, tolerance)
            ratio = bounds.upper / (bounds.lower * (1 + tolerance))  # NaN for zeros, infinite for an overflow
            if step == max_steps or bool((~(ratio > 1)).all()):
                break
            current = step, math.log(min(float(ratio.nan_to_num(1.0).max()) * (1 + tolerance) - 1, 1.0) / tolerance)
            next_check, previous = min(max_steps, step + _steps_to_wait(previous, current)), current
    assert bounds is not None
    return bounds


def _steps_to_wait(previous: tuple[int, float] | None, current: tuple[int, float]) -> int:
    """Return the number of steps until the next check, from the last two checks.

    A check is (step, logarithm of the width of the bounds over the tolerance). The logarithm falls at least linearly.
    """
    if previous is None or previous[1] <= current[1]:
        return 4
    rate = (previous[1] - current[1]) / (current[0] - previous[0])
    return max(1, min(8, int(0.9 * current[1] / rate)))


def _bounds_from_blocks(
    diagonal: Float[Tensor, "*batch step block block"],
    below: Float[Tensor, "*batch step block block"],
    rows: int,
    tolerance: float,
) -> Bounds:
    """Return the largest eigenvalue of T, and the least t of a grid beyond which ‖M‖ stays below δ; tr(A) is 1."""
    inner = _largest_eigenvalue(_tridiagonal(diagonal, below))
    grid = torch.logspace(math.log10(tolerance), 0, _GRID, dtype=torch.float64, device=below.device)
    grid = inner.lower[..., None] * (1 + grid)
    delta = math.sqrt(betaincinv(_BLOCK / 2, (rows - _BLOCK) / 2, _RISK))
    excluded = (_transfer_norm(diagonal, below, grid) < delta) & (grid > inner.upper[..., None])
    beyond = excluded.flip(-1).cumprod(dim=-1).flip(-1).bool()  # where this t and all greater ones are excluded
    upper = torch.where(beyond, grid, 1.0).amin(dim=-1)
    upper = torch.maximum(upper.clamp(max=1.0), inner.lower)
    return Bounds(inner.lower, torch.where(inner.lower.isnan(), torch.nan, upper))


def _tridiagonal(
    diagonal: Float[Tensor, "*batch step block block"], below: Float[Tensor, "*batch step block block"]
) -> Float[Tensor, "*batch size size"]:
    """Return T from its blocks on and below the diagonal."""
    steps, block = diagonal.shape[-3], diagonal.shape[-1]
    matrix = diagonal.new_zeros(*diagonal.shape[:-3], steps, block, steps, block)
    for step in range(steps):
        centre = diagonal[..., step, :, :]
        matrix[..., step, :, step, :] = (centre + centre.mT) / 2
        if step:
            matrix[..., step, :, step - 1, :] = below[..., step - 1, :, :]
            matrix[..., step - 1, :, step, :] = below[..., step - 1, :, :].mT
    return matrix.flatten(-4, -3).flatten(-2, -1)


def _transfer_norm(
    diagonal: Float[Tensor, "*batch step block block"],
    below: Float[Tensor, "*batch step block block"],
    t: Float[Tensor, "*batch grid"],
) -> Float[Tensor, "*batch grid"]:
    """Return the Frobenius norm of M(t), at least its spectral norm; M is a product over the pivots of t − T."""
    identity = torch.eye(diagonal.shape[-1], dtype=t.dtype, device=t.device)
    product, carried = identity, torch.zeros_like(identity)
    for step in range(diagonal.shape[-3]):
        centre, coupling = diagonal[..., None, step, :, :], below[..., None, step, :, :]
        pivot = t[..., None, None] * identity - centre - carried
        solved = torch.linalg.solve_ex(pivot, coupling.mT.expand_as(pivot))[0]
        carried = coupling @ solved
        product = product @ solved
    return torch.linalg.matrix_norm(product)
