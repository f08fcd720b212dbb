"""Whether the states at a location stay similar from layer to layer: the similarity of vertical slices.

All axes before layer, sample, position and width, such as the seed, are kept. All arithmetic is in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, flag, scalar, whole
from joma.probes.states import checked_states, floating, nan_where, split_diverged


@dataclass(frozen=True)
class SliceSimilarity:
    """The similarity of location i of layer a to location j of layer b, at [a, b, i, j].

    Attributes:
        cka: linear centred kernel alignment, 0 to 1; invariant to rotations of the units.
        correlation: mean over units of a unit's correlation with the same unit, −1 to 1.
    """

    cka: Float[Tensor, "*seed layer layer position position"]
    correlation: Float[Tensor, "*seed layer layer position position"]


def slice_similarity(
    states: ArrayLike | Tensor, *, debiased: bool = False, tolerance: float = 1e-5, block: int = 64
) -> SliceSimilarity:
    """Return the similarity, over samples, of every pair of layers and locations.

        CKA(X, Y) = ⟨K_X, K_Y⟩ / (‖K_X‖ ‖K_Y‖),  K_X = X Xᵀ,     correlation = mean over units k of corr(X_k, Y_k)

    X and Y [sample, width] are the states of two locations with their means over samples subtracted. As ⟨K_X, K_Y⟩ =
    ‖Xᵀ Y‖², this equals the form with cross-covariances, but here all pairs are one matrix product, computed for a few
    rows of K at a time.

    Plain CKA of unrelated X and Y is far above 0 unless there are many more samples than units; `debiased` replaces
    each product by Song et al.'s unbiased estimate (of the independence criterion), which may then be negative. The
    study `addition` debiases.

    A unit that does not vary at a location is left out there; a location where no unit varies, such as that of a fixed
    token before layer 1, has similarity NaN. So has every location of a seed whose states hold NaN or an infinity.

    Args:
        states: [*seed, layer, sample, position, width], e.g. `torch.stack(model.activations(...)["residual"], dim=-4)`.
        debiased: whether to remove the bias of few samples from CKA.
        tolerance: a unit whose range over samples is at most this share of its largest magnitude does not vary.
        block: number of rows of K in memory at a time.

    Returns:
        `SliceSimilarity`, each [*seed, layer, layer, position, position].

    >>> states = torch.randn(1, 50, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> similarity = slice_similarity(torch.cat([states, -2 * states]))
    >>> torch.stack([similarity.cka[0, 1].diagonal(), similarity.correlation[0, 1].diagonal()]).round(decimals=9)
    tensor([[ 1.,  1.,  1.],
            [-1., -1., -1.]], dtype=torch.float64)
    """
    activations, share = checked_states(states, axes=4), scalar("tolerance", tolerance, low=0.0, high=1.0)
    layers, samples, debiased = activations.shape[-4], activations.shape[-3], flag("debiased", debiased)
    if samples < (min_samples := 4 if debiased else 2):
        raise InputError("states", f"at least {min_samples} samples", samples, "give more sequences", must="have")
    finite, diverged = split_diverged(activations, axes=4)
    x = finite.double().transpose(-3, -2).flatten(-4, -3)
    varies = (x.amax(dim=-2) - x.amin(dim=-2)) > share * x.abs().amax(dim=-2)
    x = (x - x.mean(dim=-2, keepdim=True)) * varies[..., None, :]
    cka, correlation = _alignment(x, whole("block", block), debiased), _correlation(x, varies)
    constant = ~varies.any(dim=-1)
    constant = constant[..., :, None] | constant[..., None, :]
    defined = (nan_where(diverged, values.masked_fill(constant, torch.nan)) for values in (cka, correlation))
    split = (values.unflatten(-1, (layers, -1)).unflatten(-3, (layers, -1)) for values in defined)
    return SliceSimilarity(*(values.transpose(-3, -2) for values in split))


def _alignment(
    x: Float[Tensor, "*seed slice sample width"], block: int, debiased: bool
) -> Float[Tensor, "*seed slice slice"]:
    """Return CKA of every pair of slices; debiased, by Song et al.'s estimate of each product."""
    slices, samples = x.shape[-3:-1]
    product = x.new_zeros(*x.shape[:-3], slices, slices)
    row_sums = []
    for start in range(0, samples, block):
        gram = x[..., start : start + block, :] @ x.mT
        if debiased:
            gram.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
            row_sums.append(gram.sum(dim=-1))
        flat = gram.flatten(-2)
        product += flat @ flat.mT
    if debiased:
        sums = torch.cat(row_sums, dim=-1)
        total = sums.sum(dim=-1)
        product += total[..., :, None] * total[..., None, :] / ((samples - 1) * (samples - 2))
        product -= 2 / (samples - 2) * sums @ sums.mT
    size = product.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return (product / (size[..., :, None] * size[..., None, :])).clamp(-1, 1)


def _correlation(
    x: Float[Tensor, "*seed slice sample width"], varies: Bool[Tensor, "*seed slice width"]
) -> Float[Tensor, "*seed slice slice"]:
    """Return the mean correlation of a unit with the same unit, over the units that vary in both slices."""
    size = x.norm(dim=-2, keepdim=True)
    unit = (x / torch.where(size > 0, size, 1.0)).flatten(-2)
    both = varies.double() @ varies.double().mT
    return ((unit @ unit.mT) / both).clamp(-1, 1)


@dataclass(frozen=True)
class OwnLocation:
    """How much of each vertical slice stays at its own location, at [a, b] for layers a and b.

    Attributes:
        share: fraction of the locations of layer a whose most similar location of layer b is the same one.
        margin: similarity to the same location minus that to the most similar other one, mean over locations.
    """

    share: Float[Tensor, "*seed layer layer"]
    margin: Float[Tensor, "*seed layer layer"]


def own_location(similarity: ArrayLike | Tensor) -> OwnLocation:
    """Return how often, and by how much, a location is most similar to itself at another layer.

        margin_i = S[a, b, i, i] − max_{j ≠ i} S[a, b, i, j],    share = mean over i of 1(margin_i > 0)

    By chance the share is 1 over the number of locations. Locations without a similarity (NaN) are left out.

    Args:
        similarity: [*seed, layer, layer, position, position], of `slice_similarity`; at least 2 positions.

    Returns:
        `OwnLocation`, each [*seed, layer, layer]; NaN where no location is left.

    >>> own_location(torch.tensor([[[[0.9, 0.2], [0.5, 0.4]]]])).share
    tensor([[0.5000]])
    """
    table = floating("similarity", similarity, "pass what `slice_similarity` returns")
    if table.ndim < 4 or table.shape[-1] != table.shape[-2] or table.shape[-1] < 2:
        got = f"shape {tuple(table.shape)}"
        raise InputError("similarity", "[*seed, layer, layer, position, position]", got, "give at least 2 positions")
    same = torch.eye(table.shape[-1], dtype=torch.bool, device=table.device)
    others = table.masked_fill(same, -torch.inf)
    margin = table.diagonal(dim1=-2, dim2=-1) - others.masked_fill(others.isnan(), -torch.inf).amax(dim=-1)
    margin = margin.masked_fill(margin.isinf(), torch.nan)  # a location without another to compare with
    most_similar = (margin > 0).to(table.dtype).masked_fill(margin.isnan(), torch.nan)
    return OwnLocation(most_similar.nanmean(dim=-1), margin.nanmean(dim=-1))
