"""How close to orthogonal a set of vectors is: token embeddings, or the hidden states of a layer.

The theory assumes orthonormal embeddings. Here this is measured, and compared with vectors of random directions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, flag
from joma.kernels.cosines import cosine_sums
from joma.probes.states import floating


class Orthogonality(NamedTuple):
    """Cosines between different vectors, each field [*batch] in float64; NaN where fewer than two are nonzero."""

    mean_absolute: Tensor
    root_mean_square: Tensor
    largest: Tensor  # the largest absolute cosine
    random: Tensor  # the root mean square cosine of random directions, 1/√dim
    excess: Tensor  # mean square cosine times dim: 1 for random directions, 0 for orthogonal vectors


def cosine_orthogonality(vectors: ArrayLike | Tensor, *, centred: bool = False) -> Orthogonality:
    """Return the size of the cosines between different vectors: 0 for orthogonal ones.

        c_ij = x_i·x_j / (‖x_i‖ ‖x_j‖),    mean |c|, √(mean c²) and max |c| over pairs i ≠ j

    Isotropic random vectors have E c² = 1/dim. More than dim vectors cannot all be orthogonal: n of them have a mean
    square cosine of at least (n/dim − 1)/(n − 1). The matrix of all cosines is never in memory. Vectors of length zero
    are left out.

    Args:
        vectors: [*batch, vector, dim], floating, with leading axes such as seed and layer.
        centred: whether to subtract the mean vector first, as hidden states often share a large one.

    Returns:
        Five tensors [*batch]. All but `random` are NaN where vectors hold NaN or an infinity, as for a diverged seed.

    >>> cosines = cosine_orthogonality(torch.eye(3))
    >>> cosines.largest, cosines.excess
    (tensor(0., dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    expected, remedy = "floating [*batch, vector, dim] and non-empty", "pass embeddings or hidden states"
    x = floating("vectors", vectors, remedy, expected=expected).detach()
    if x.ndim < 2 or x.numel() == 0:
        raise InputError("vectors", expected, f"{x.dtype} of shape {tuple(x.shape)}", remedy)
    lead, centred = x.shape[:-2], flag("centred", centred)
    x = x.flatten(0, -3) if x.ndim > 2 else x[None]
    fields = torch.stack([_measure(matrix, centred) for matrix in x], dim=-1)
    return Orthogonality(*fields.view(5, *lead))


def _measure(x: Float[Tensor, "vector dim"], centred: bool) -> Float[Tensor, " five"]:
    """Return the five fields of one set of vectors.

    A vector of length zero has cosine 0 with all others, and is not counted.
    """
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    x = x - x.mean(dim=0) if centred else x
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    nonzero = norm > 0
    unit = x / torch.where(nonzero, norm, 1)
    count = nonzero.sum().double()
    pairs = (count * (count - 1)).masked_fill(count < 2, torch.nan)
    sums = cosine_sums(unit)
    mean_square = (sums.square - count).clamp(min=0) / pairs
    random = torch.tensor(1 / math.sqrt(x.shape[-1]), dtype=torch.float64, device=x.device)
    largest = sums.largest.masked_fill(count < 2, torch.nan)
    return torch.stack([sums.absolute / pairs, mean_square.sqrt(), largest, random, mean_square * x.shape[-1]])
