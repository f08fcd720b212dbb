"""The rank of hidden states: how many directions they fill, from one Gram matrix and no eigendecomposition.

With G the Gram matrix of the shorter side and λ its eigenvalues, both ranks need only sums over entries and the largest
eigenvalue: Σλ = tr G and Σλ² = ‖G‖_F². The states are centred before they are multiplied, so that a mean that is far
larger than the spread costs no digits; the Gram matrix of the uncentred states is a sum of positive terms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, flag
from joma.kernels.products import exact_products
from joma.probes.rank import gram_norm
from joma.probes.states import floating

_MAX_COPIED = 2**24  # values that are converted and centred at once
_LANCZOS_STEPS = 12  # on the Gram matrix, whose gaps are wider than those of the states


class StateRanks(NamedTuple):
    """Two ranks of a set of vectors, each [*batch] in float64; NaN where they are not defined."""

    stable: Tensor  # ‖X‖_F² / ‖X‖_2²
    participation: Tensor  # (Σλ)² / Σλ² of the covariance


def participation_ratio(states: ArrayLike | Tensor, *, centred: bool = True) -> Tensor:
    """Return the participation ratio (Σλ)² / Σλ² of the eigenvalues λ of the covariance: from 1 to the rank.

    It is the number of directions over which the variance is spread: k if k directions share it equally. For n random
    normal vectors of d dimensions it is about 1 / (1/d + 1/n).

    Args:
        states: [*batch, vector, dim], floating: hidden states, embeddings; a tensor, an array or nested lists.
        centred: whether to subtract the mean vector first, as a covariance does.

    Returns:
        [*batch] in float64; NaN where all vectors are equal, or any holds NaN or an infinity.

    >>> participation_ratio(torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))  # variances 4 : 1
    tensor(1.4706, dtype=torch.float64)
    """
    x, centred = _matrices(states), flag("centred", centred)
    every = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    with exact_products(x.device), torch.autocast(x.device.type, enabled=False):
        gram, mean_terms = _gram_matrix(x, every)
        return _participation(gram if centred else gram + mean_terms)


def state_ranks(states: ArrayLike | Tensor, rows: Bool[Tensor, "*batch vector"] | None = None) -> StateRanks:
    """Return the stable rank of the states and the participation ratio of their covariance, from one Gram matrix.

    Nothing waits for the device up to 4,096 dimensions. On the CPU above 256 dimensions, and on a GPU beyond 4,096, the
    stable rank comes from a fixed number of Lanczos steps: at 1,500 dimensions it is 5e-4 too large for eigenvalues
    that fall linearly to 0, 3e-8 for random states.

    Args:
        states: [*batch, vector, dim], floating.
        rows: which vectors count; all by default. The others may hold anything.

    Returns:
        Stable rank and participation ratio, each [*batch] in float64; NaN where no vector counts, where those that
        count are all zero (all equal, for the participation ratio), or hold NaN or an infinity.

    >>> ranks = state_ranks(torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]), torch.tensor([True, True, False]))
    >>> ranks.stable.round(decimals=4), ranks.participation.round(decimals=4)
    (tensor(2., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    x = _matrices(states)
    if rows is None:
        rows = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    elif rows.shape != x.shape[:-1]:
        expected = f"of shape {tuple(x.shape[:-1])} like the states"
        raise InputError("rows", expected, f"shape {tuple(rows.shape)}", "give one value for each vector")
    with exact_products(x.device), torch.autocast(x.device.type, enabled=False):
        gram, mean_terms = _gram_matrix(x, rows)
        uncentred = gram + mean_terms
        largest = gram_norm(uncentred, iterations=_LANCZOS_STEPS)
        return StateRanks(_trace(uncentred) / largest, _participation(gram))


def _matrices(states: ArrayLike | Tensor) -> Tensor:
    """Return the states as a detached tensor, or raise an error."""
    expected, remedy = "floating [*batch, vector, dim] and non-empty", "pass hidden states"
    x = floating("states", states, remedy, expected=expected).detach()
    if x.ndim < 2 or x.numel() == 0:
        raise InputError("states", expected, f"{x.dtype} of shape {tuple(x.shape)}", remedy)
    return x


def _gram_matrix(
    x: Float[Tensor, "*batch vector dim"], rows: Bool[Tensor, "*batch vector"]
) -> tuple[Float[Tensor, "*batch side side"], Float[Tensor, "*batch side side"]]:
    """Return the Gram matrix of the centred vectors, and what the mean adds to it without centring, both rescaled."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    counted = rows[..., None]
    peaks = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True)
    peak = torch.where(counted, peaks, 0).amax(dim=-2, keepdim=True).to(dtype)
    defined = torch.where((peak > 0) & peak.isfinite(), peak, 1)
    unit = torch.ldexp(torch.ones_like(defined), torch.frexp(defined).exponent - 1)  # a power of two: no rounding
    count = rows.sum(dim=-1, dtype=dtype)[..., None, None]
    size, dim = x.shape[-2:]
    length = max(1, _MAX_COPIED * max(size, dim) // x.numel())
    if size < dim:
        columns = (torch.where(counted, part.to(dtype) / unit, 0) for part in x.split(length, dim=-1))
        return _gram_of_vectors(columns, counted, count)
    pairs = list(zip(x.split(length, dim=-2), counted.split(length, dim=-2), strict=True))
    sums = [torch.where(real, part.to(dtype) / unit, 0).sum(dim=-2, keepdim=True) for part, real in pairs]
    mean = torch.stack(sums).sum(dim=0) / count
    differences = (torch.where(real, part.to(dtype) / unit - mean, 0) for part, real in pairs)
    return _gram_of_dims(differences, mean, count)


def _gram_of_vectors(
    columns: Iterable[Float[Tensor, "*batch vector part"]],
    counted: Bool[Tensor, "*batch vector 1"],
    count: Float[Tensor, "*batch 1 1"],
) -> tuple[Float[Tensor, "*batch vector vector"], Float[Tensor, "*batch vector vector"]]:
    """Return Y Yᵀ of the centred vectors Y = X − 1 μᵀ, and Y μ 1ᵀ + 1 (Y μ)ᵀ + ‖μ‖² 1 1ᵀ."""
    ones = counted.to(count.dtype)
    gram, projection, square = torch.zeros_like(ones @ ones.mT), torch.zeros_like(ones), torch.zeros_like(count)
    for part in columns:
        mean = part.sum(dim=-2, keepdim=True) / count
        centred = torch.where(counted, part - mean, 0)
        rest = centred.sum(dim=-2, keepdim=True) / count  # what rounding has left of the mean
        centred, mean = torch.where(counted, centred - rest, 0), mean + rest
        gram = gram + centred @ centred.mT
        projection = projection + centred @ mean.mT
        square = square + mean @ mean.mT
    return gram, projection @ ones.mT + ones @ projection.mT + square * (ones @ ones.mT)


def _gram_of_dims(
    differences: Iterable[Float[Tensor, "*batch part dim"]],
    mean: Float[Tensor, "*batch 1 dim"],
    count: Float[Tensor, "*batch 1 1"],
) -> tuple[Float[Tensor, "*batch dim dim"], Float[Tensor, "*batch dim dim"]]:
    """Return Yᵀ Y of the centred vectors Y = X − 1 μᵀ, and n μ μᵀ, from the differences to a rounded mean."""
    gram, rest = torch.zeros_like(mean.mT @ mean), torch.zeros_like(mean)
    for part in differences:
        gram = gram + part.mT @ part
        rest = rest + part.sum(dim=-2, keepdim=True)
    rest = rest / count
    mean = mean + rest
    return gram - count * (rest.mT @ rest), count * (mean.mT @ mean)


def _trace(gram: Float[Tensor, "*batch side side"]) -> Float[Tensor, "*batch"]:
    return gram.diagonal(dim1=-2, dim2=-1).double().sum(dim=-1)


def _participation(gram: Float[Tensor, "*batch side side"]) -> Float[Tensor, "*batch"]:
    """Return (tr G)² / ‖G‖_F², which is NaN for zeros; rows are summed in G's precision and then in float64."""
    rows = torch.linalg.vector_norm(gram, dim=-1).double()
    return (_trace(gram) / torch.linalg.vector_norm(rows, dim=-1)).square()
