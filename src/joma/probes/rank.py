"""The stable rank of weights without a singular value decomposition, its error known.

The largest eigenvalue λ of A = W Wᵀ (or Wᵀ W, whichever is smaller) is enclosed from both sides.

- A small A is squared p times: with P = A^(2^p), tr(A P)/tr(P) ≤ λ ≤ tr(P)^(1/2^p), which for p = 16 and 256 rows are
  within 1e-4 of each other whatever the spectrum. Nothing is random, and nothing waits for the device.
- A large one is met only in products with a block of vectors: block Lanczos gives A U = U T + U' R' with T block
  tridiagonal, and λ is at least T's largest eigenvalue. For the top eigenvector e, with e_1 its part in the first
  block, ‖e_1‖ ≤ ‖M(λ)‖, M(t) = E_1ᵀ (t − T)⁻¹ E_k R'ᵀ. The first block being random, ‖e_1‖ is below δ with
  probability 1e-9 only, δ² a quantile of the Beta distribution; so λ is no t with ‖M(t)‖ < δ. (The same idea with one
  vector: M. Hochstenbach, Probabilistic upper bounds for the matrix two-norm, 2013; a block makes δ, and with it the
  bound, far better.) M falls steadily beyond T's eigenvalues wherever we looked; it is looked at up to tr(A) on a grid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.special import betaincinv
from torch import Tensor

from joma.arguments import InputError, scalar, whole
from joma.kernels.products import exact_products, thin_product

_SMALL = 256  # rows up to which A itself is squared
_SQUARINGS, _BETWEEN = 16, 4  # in all, and from one scaling to the next
_BLOCK = 16
_FIRST = 8  # block steps before the bounds are looked at
_MOST = 40  # block steps, if the bound is not reached before
_RISK = 1e-9
_GRID = 32
_RANGE = (1e-12, 1e12)  # of the largest entry: the sum of squares is far from both ends of float32


class Bounds(NamedTuple):
    """An interval for each matrix, [*batch] in float64."""

    lower: Tensor
    upper: Tensor


def stable_rank(weight: Tensor, *, tolerance: float = 2e-3, iterations: int | None = None) -> Tensor:
    """Return the stable rank ‖W‖_F² / ‖W‖_2² of each matrix: from 1 to its rank.

    The spectral norm comes from `spectral_norm`, without a singular value decomposition.

    Args:
        weight: [*batch, row, column], floating.
        tolerance: relative error up to which the result is known.
        iterations: a fixed number of steps instead, without a check: nothing then waits for the device.

    Returns:
        [*batch] in float64; NaN for a matrix of zeros, or one that has an infinity or NaN.

    >>> stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0])))
    tensor(1.5000, dtype=torch.float64)
    """
    total, bounds = _norms(weight, tolerance, iterations)
    return (total / bounds.lower).square()


def spectral_norm(weight: Tensor, *, tolerance: float = 2e-3, iterations: int | None = None) -> Bounds:
    """Return bounds of the largest singular value ‖W‖_2 of each matrix.

    Up to 256 rows or columns the bounds are certain, above that the upper one is wrong with probability 1e-9 (over the
    random start, whose seed is fixed); both up to float32 rounding. The lower one is by far the closer.

    Args:
        weight: [*batch, row, column], floating.
        tolerance: (upper/lower)² − 1 at which to stop, from 2e-4.
        iterations: a fixed number of steps instead, without a check: nothing then waits for the device.

    Returns:
        Lower and upper bounds, each [*batch] in float64; NaN where the matrix has an infinity or NaN.

    >>> norm = spectral_norm(torch.ones(2, 8))
    >>> norm.lower, bool(norm.upper / norm.lower < 1.0005)
    (tensor(4., dtype=torch.float64), True)
    """
    return _norms(weight, tolerance, iterations)[1]


def _norms(weight: Tensor, tolerance: float, iterations: int | None) -> tuple[Float[Tensor, "*batch"], Bounds]:
    """Return the Frobenius norm and bounds of the spectral one."""
    wanted = scalar("tolerance", tolerance, low=2e-4, high=1.0)
    steps = None if iterations is None else whole("iterations", iterations, low=1)
    if not weight.is_floating_point() or weight.ndim < 2 or weight.numel() == 0:
        got = f"{weight.dtype} of shape {tuple(weight.shape)}"
        raise InputError("weight", "floating [*batch, row, column] and non-empty", got, "pass matrices of weights")
    w = weight.detach()
    w = w if w.dtype == torch.float64 else w.float()
    w = w if w.shape[-2] <= w.shape[-1] else w.mT
    w, unit = _scaled(w)
    total = _frobenius(w)
    size = torch.where(total > 0, total, 1.0)[..., None, None].to(w.dtype)  # so that zeros stay zeros
    with exact_products(w.device), torch.autocast(w.device.type, enabled=False):
        square = _small(w, size) if w.shape[-2] <= _SMALL else _large(w, size, wanted, steps)
    lower, upper = (bound.sqrt() * size[..., 0, 0] for bound in square)
    return total * unit, Bounds(lower * unit, torch.maximum(torch.minimum(upper, total), lower) * unit)


def _scaled(w: Float[Tensor, "*batch row column"]) -> tuple[Tensor, Float[Tensor, "*batch"]]:
    """Return matrices whose squares their type can hold, and what each was divided by: a power of two, so exactly.

    On the CPU only where it is needed; on a GPU that would have to be waited for, and a copy costs little.
    """
    peak = torch.maximum(w.amax(dim=(-2, -1)), -w.amin(dim=(-2, -1)))
    if w.device.type == "cpu" and bool(((peak > _RANGE[0]) & (peak < _RANGE[1]) | (peak == 0)).all()):
        return w, torch.ones_like(peak, dtype=torch.float64)
    known = (peak > 0) & peak.isfinite()
    unit = torch.where(known, torch.exp2(peak.double().log2().floor()), 1.0)
    return w / unit[..., None, None].to(w.dtype), unit


def _frobenius(w: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch"]:
    """Return the norm: rows in their own precision, all of them in float64."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(w, dim=-1).double(), dim=-1)


def _small(w: Float[Tensor, "*batch row column"], size: Float[Tensor, "*batch 1 1"]) -> Bounds:
    w = (w / size).double()
    return _enclosed(w @ w.mT)


def _enclosed(a: Float[Tensor, "*batch row row"]) -> Bounds:
    """Enclose the largest eigenvalue of positive matrices by repeated squaring, every fourth power scaled to trace 1.

    A trace of 1 falls to n⁻¹⁵ at least by four squarings of n rows, which float64 holds with room to spare.
    """
    log, power = torch.zeros_like(a[..., 0, 0]), a
    for n in range(0, _SQUARINGS + 1, _BETWEEN):
        own = power.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        log = log + own.log() / 2**n
        power = power / torch.where(own > 0, own, 1)[..., None, None]
        for _ in range(_BETWEEN if n < _SQUARINGS else 0):
            power = power @ power
    lower = (a * power).sum(dim=(-2, -1))  # both symmetric: the trace of their product
    return Bounds(lower, torch.maximum(log.exp(), lower))


def _largest(a: Float[Tensor, "*batch row row"]) -> Bounds:
    """As `_enclosed`; on the CPU by eigenvalues, a quarter of the time, for which a GPU would have to be waited for."""
    if a.device.type != "cpu":
        return _enclosed(a)
    known = a.isfinite().all(dim=-1).all(dim=-1)
    value = torch.linalg.eigvalsh(torch.where(known[..., None, None], a, 0.0))[..., -1]
    value = torch.where(known, value.clamp(min=0), torch.nan)
    return Bounds(value, value)


def _large(
    w: Float[Tensor, "*batch row column"], size: Float[Tensor, "*batch 1 1"], wanted: float, steps: int | None
) -> Bounds:
    """Block Lanczos on A = w wᵀ / size², all vectors kept orthogonal, until the bounds are as wanted."""
    rows, most = w.shape[-2], min(steps or _MOST, w.shape[-2] // _BLOCK)
    random = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(rows, _BLOCK, generator=random, dtype=torch.float64, device="cpu")
    block = torch.linalg.qr(start)[0].to(w).expand(*w.shape[:-2], rows, _BLOCK)
    space = w.new_empty(*w.shape[:-2], rows, (most + 1) * _BLOCK)
    space[..., :_BLOCK] = block
    diagonal, below = [], []
    bounds, due, before = None, most if steps is not None else min(_FIRST, most), None
    for step in range(1, most + 1):
        image = thin_product(w, thin_product(w.mT, block / size)) / size
        diagonal.append((block.mT @ image).double())
        basis = space[..., : step * _BLOCK]
        image = image - basis @ (basis.mT @ image)
        block = image
        for _ in range(2):  # where nothing new is left, rounding has to be made orthogonal to the basis too
            block = torch.linalg.qr(block - basis @ (basis.mT @ block))[0]
        below.append((block.mT @ image).double())
        space[..., step * _BLOCK : (step + 1) * _BLOCK] = block
        if step == due:
            bounds = _bounds(torch.stack(diagonal, dim=-3), torch.stack(below, dim=-3), rows, wanted)
            ratio = bounds.upper / (bounds.lower * (1 + wanted))  # of zeros, NaN; of what overflowed, infinite
            if step == most or bool((~(ratio > 1)).all()):
                break
            now = step, math.log(min(float(ratio.nan_to_num(1.0).max()) * (1 + wanted) - 1, 1.0) / wanted)
            due, before = min(most, step + _wait(before, now)), now
    assert bounds is not None
    return bounds


def _wait(before: tuple[int, float] | None, now: tuple[int, float]) -> int:
    """Return how many steps to go on: (step, logarithm of how far it is too wide) falls on a line, or below it."""
    if before is None or before[1] <= now[1]:
        return 4
    rate = (before[1] - now[1]) / (now[0] - before[0])
    return max(1, min(8, int(0.9 * now[1] / rate)))


def _bounds(
    diagonal: Float[Tensor, "*batch step block block"],
    below: Float[Tensor, "*batch step block block"],
    rows: int,
    wanted: float,
) -> Bounds:
    """Return the largest eigenvalue of T, and the least t of a grid beyond which ‖M‖ stays below δ; tr(A) is 1."""
    inner = _largest(_tridiagonal(diagonal, below))
    grid = torch.logspace(math.log10(wanted), 0, _GRID, dtype=torch.float64, device=below.device)
    grid = inner.lower[..., None] * (1 + grid)
    delta = math.sqrt(betaincinv(_BLOCK / 2, (rows - _BLOCK) / 2, _RISK))
    passed = (_gain(diagonal, below, grid) < delta) & (grid > inner.upper[..., None])
    after = passed.flip(-1).cumprod(dim=-1).flip(-1).bool()  # it, and all that are greater
    upper = torch.where(after, grid, 1.0).amin(dim=-1)
    upper = torch.maximum(upper.clamp(max=1.0), inner.lower)
    return Bounds(inner.lower, torch.where(inner.lower.isnan(), torch.nan, upper))


def _tridiagonal(
    diagonal: Float[Tensor, "*batch step block block"], below: Float[Tensor, "*batch step block block"]
) -> Float[Tensor, "*batch size size"]:
    steps, block = diagonal.shape[-3], diagonal.shape[-1]
    matrix = diagonal.new_zeros(*diagonal.shape[:-3], steps, block, steps, block)
    for step in range(steps):
        own = diagonal[..., step, :, :]
        matrix[..., step, :, step, :] = (own + own.mT) / 2
        if step:
            matrix[..., step, :, step - 1, :] = below[..., step - 1, :, :]
            matrix[..., step - 1, :, step, :] = below[..., step - 1, :, :].mT
    return matrix.flatten(-4, -3).flatten(-2, -1)


def _gain(
    diagonal: Float[Tensor, "*batch step block block"],
    below: Float[Tensor, "*batch step block block"],
    at: Float[Tensor, "*batch grid"],
) -> Float[Tensor, "*batch grid"]:
    """Return ‖M(t)‖ in the Frobenius norm, which is no less: M is a product over the pivots of t − T."""
    identity = torch.eye(diagonal.shape[-1], dtype=at.dtype, device=at.device)
    product, carried = identity, torch.zeros_like(identity)
    for step in range(diagonal.shape[-3]):
        own, next_ = diagonal[..., None, step, :, :], below[..., None, step, :, :]
        pivot = at[..., None, None] * identity - own - carried
        solved = torch.linalg.solve_ex(pivot, next_.mT.expand_as(pivot))[0]
        carried = next_ @ solved
        product = product @ solved
    return torch.linalg.matrix_norm(product)
