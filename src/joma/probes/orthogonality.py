"""How near to orthogonal a set of vectors is: token embeddings, or hidden states at a layer.

The theory assumes orthonormal embeddings; here it is measured, beside what vectors of random directions would give.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from joma.arguments import InputError

_COSINES = 2**22  # held at once


class Orthogonality(NamedTuple):
    """Cosines between different vectors, each field [*batch] in float64; NaN where fewer than two are not zero."""

    mean_absolute: Tensor
    root_mean_square: Tensor
    largest: Tensor  # the largest absolute cosine
    random: Tensor  # the root mean square cosine of random directions, 1/√dim
    excess: Tensor  # mean square cosine times dim: 1 for random directions, 0 for orthogonal vectors


def cosine_orthogonality(vectors: Tensor, *, centred: bool = False) -> Orthogonality:
    """Return how large the cosines between different vectors are.

        c_ij = x_i·x_j / (‖x_i‖ ‖x_j‖),    mean |c|, √(mean c²) and max |c| over pairs i ≠ j

    Isotropic random vectors have E c² = 1/dim. More than dim vectors cannot all be orthogonal: n of them have a mean
    square cosine of at least (n/dim − 1)/(n − 1). The mean square comes from ‖Xᵀ X‖_F² in the width of the vectors,
    the rest from blocks of cosines: no matrix of vectors by vectors is held. Vectors of length zero are left out.

    Args:
        vectors: [*batch, vector, dim], floating; seeds or layers lead.
        centred: whether to subtract the mean vector first, as hidden states often share a large one.

    Returns:
        Five tensors [*batch].

    >>> found = cosine_orthogonality(torch.eye(3))
    >>> found.largest, found.excess
    (tensor(0., dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    if not vectors.is_floating_point() or vectors.ndim < 2 or vectors.numel() == 0:
        got = f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        expected = "floating [*batch, vector, dim] and non-empty"
        raise InputError("vectors", expected, got, "pass embeddings or hidden states")
    x = vectors.detach().flatten(0, -3) if vectors.ndim > 2 else vectors.detach()[None]
    found = torch.stack([_measured(one, centred) for one in x], dim=-1)
    return Orthogonality(*found.view(5, *vectors.shape[:-2]))


def _measured(x: Float[Tensor, "vector dim"], centred: bool) -> Float[Tensor, " five"]:
    """Return the five measures of one set; a vector of length zero has cosine 0 with all others, and does not count."""
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    x = x - x.mean(dim=0) if centred else x
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    exists = norm > 0
    unit = x / torch.where(exists, norm, 1)
    count = exists.sum().double()
    pairs = (count * (count - 1)).masked_fill(count < 2, torch.nan)
    square = (_square_sum(unit) - count).clamp(min=0) / pairs
    total, largest = _absolute(unit)
    least = torch.tensor(1 / math.sqrt(x.shape[-1]), dtype=torch.float64, device=x.device)
    largest = largest.masked_fill(count < 2, torch.nan)
    return torch.stack([total / pairs, square.sqrt(), largest, least, square * x.shape[-1]])


def _square_sum(unit: Float[Tensor, "vector dim"]) -> Float[Tensor, ""]:
    """Return Σ_ij c_ij², from the smaller of the two Gram matrices."""
    short = unit if unit.shape[0] <= unit.shape[1] else unit.mT
    step = max(1, _COSINES // short.shape[0])
    parts = [(short[i : i + step] @ short.mT).double().square().sum() for i in range(0, short.shape[0], step)]
    return torch.stack(parts).sum()


def _absolute(unit: Float[Tensor, "vector dim"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return Σ |c_ij| over i ≠ j and the largest |c_ij|: each pair once, in blocks above the diagonal."""
    count = unit.shape[0]
    step = max(1, math.isqrt(_COSINES))
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
