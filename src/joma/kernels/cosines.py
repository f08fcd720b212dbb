"""Sums over the cosines of all pairs of unit vectors, block by block: the matrix of all cosines is never in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK_COSINES = 2**22  # in memory at once


class CosineSums(NamedTuple):
    """Sums over the cosines c_ij of unit vectors, in float64."""

    square: Float[Tensor, ""]  # Σ c_ij² over all i and j
    absolute: Float[Tensor, ""]  # Σ |c_ij| over i ≠ j
    largest: Float[Tensor, ""]  # max |c_ij| over i ≠ j


def cosine_sums(unit: Float[Tensor, "vector dim"]) -> CosineSums:
    """Return the sums over all pairs of unit vectors, block by block.

    >>> cosine_sums(torch.eye(2))
    CosineSums(square=tensor(2., dtype=torch.float64), absolute=tensor(0., dtype=torch.float64),
        largest=tensor(0., dtype=torch.float64))
    """
    absolute, largest = _absolute_sums(unit)
    return CosineSums(_square_sum(unit), absolute, largest)


def cosine_sums_from_matrix(unit: Float[Tensor, "vector dim"]) -> CosineSums:
    """Return the sums from the whole matrix of cosines in float64: the plain version, to compare with.

    >>> cosine_sums_from_matrix(torch.eye(2)).square
    tensor(2., dtype=torch.float64)
    """
    cosine = unit.double() @ unit.double().mT
    different = cosine.abs().fill_diagonal_(0)
    return CosineSums(cosine.square().sum(), different.sum(), different.amax().clamp(max=1))


def _square_sum(unit: Float[Tensor, "vector dim"]) -> Float[Tensor, ""]:
    """Return Σ_ij c_ij² = ‖X Xᵀ‖_F² = ‖Xᵀ X‖_F², from the smaller of the two Gram matrices."""
    short = unit if unit.shape[0] <= unit.shape[1] else unit.mT
    step = max(1, _BLOCK_COSINES // short.shape[0])
    parts = [(short[i : i + step] @ short.mT).double().square().sum() for i in range(0, short.shape[0], step)]
    return torch.stack(parts).sum()


def _absolute_sums(unit: Float[Tensor, "vector dim"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return Σ |c_ij| over i ≠ j and the largest |c_ij|: each pair once, in blocks above the diagonal."""
    count = unit.shape[0]
    step = max(1, math.isqrt(_BLOCK_COSINES))
    total = torch.zeros((), dtype=torch.float64, device=unit.device)
    largest = torch.zeros((), dtype=unit.dtype, device=unit.device)
    for i in range(0, count, step):
        for j in range(i, count, step):
            cosine = (unit[i : i + step] @ unit[j : j + step].mT).abs_()
            if i == j:
                cosine = cosine.triu_(1)
            total += 2 * cosine.sum(dtype=torch.float64)
            largest = torch.maximum(largest, cosine.amax())
    return total, largest.double().clamp(max=1)
