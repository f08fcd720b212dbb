"""How well single hidden units represent the latents that the data came from."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, flag, scalar
from joma.probes.states import check_expanded, floating
from joma.tensors import as_tensor

TOLERANCE = 1e-5  # above the float32 rounding of a padding token's activation, far below what a unit learns


def latent_alignment(
    latent: ArrayLike | Tensor,
    hidden: ArrayLike | Tensor,
    *,
    present: ArrayLike | Tensor | None = None,
    weight: ArrayLike | Tensor | None = None,
    absolute: bool = False,
    tolerance: float = TOLERANCE,
) -> Tensor:
    """Return the largest correlation of each latent with any hidden unit, as in JoMA's Table 1.

        A_l = max_k ⟨y_l − ȳ_l, h_k − h̄_k⟩ / (‖y_l − ȳ_l‖ ‖h_k − h̄_k‖),    h_k = max over positions

    with means, products and norms over samples, in float64. The correlation is signed, as in the table: a unit that is
    active where the latent is 0 does not align. `absolute` takes its absolute value instead.

    A latent that is the same in all samples has no correlation: NaN. A unit that is constant has correlation 0. NaN or
    an infinity among the hidden units of a diverged seed makes that seed's results NaN, and no other's.

    Args:
        latent: [*seed, sample, latent], boolean or real.
        hidden: [*seed, sample, position, unit], or [*seed, sample, unit] after the max over positions.
        present: [*seed, sample, position], which positions exist; all if not given.
        weight: [sample] or [*seed, sample], the weight of each sample; equal if not given.
        absolute: whether to take absolute values of correlations.
        tolerance: a unit whose range over samples is at most this share of its largest magnitude counts as constant.
            Rounding errors would otherwise be normalised to a correlation.

    Returns:
        [*seed, latent] in [−1, 1].

    >>> latent = torch.tensor([[1, 0, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]])
    >>> hidden = torch.tensor([[3.0, 0.0], [3.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> latent_alignment(latent, hidden)
    tensor([1., 0., nan], dtype=torch.float64)
    >>> latent_alignment(latent, hidden, absolute=True)
    tensor([1.0000, 0.5774, nan], dtype=torch.float64)
    """
    share, absolute = scalar("tolerance", tolerance, low=0.0, high=1.0), flag("absolute", absolute)
    latent, hidden = _real("latent", latent), floating("hidden", hidden, "pass activations")
    exists = None if present is None else _real("present", present)
    _check_shapes(latent, hidden, exists)
    y = latent.detach().double()
    if not y.isfinite().all():
        got = f"{int((~y.isfinite()).sum())} values that are not finite"
        raise InputError("latent", "finite", got, "drop those samples first")
    h = (hidden.detach() if hidden.ndim == latent.ndim else _max_over_positions(hidden.detach(), exists)).double()
    share_of = None if weight is None else _real("weight", weight)
    w = _weights(share_of, y.shape[:-1], y.device)
    y, h = (values.masked_fill(w[..., None] == 0, 0) for values in (y, h))  # so that 0 · NaN is 0
    correlation = _correlation(y, h, w, share)
    best = (correlation.abs() if absolute else correlation).amax(dim=-1)
    return best.masked_fill(_range(y, w) == 0, torch.nan)


def mean_alignment(aligned: ArrayLike | Tensor) -> Tensor:
    """Return the mean of `latent_alignment` over the latents that vary, the entry of JoMA's Table 1.

        Ā = (1/n) Σ_{l: A_l not NaN} A_l,    n the number of such latents

    Args:
        aligned: [*seed, latent].

    Returns:
        [*seed], NaN where all latents are NaN.

    >>> mean_alignment(torch.tensor([[1.0, 0.5, torch.nan], [0.5, 0.5, 0.5]]))
    tensor([0.7500, 0.5000])
    """
    expected, remedy = "real numbers [*seed, latent]", "pass what `latent_alignment` returns"
    table = floating("aligned", aligned, remedy, expected=expected)
    if table.ndim == 0:
        raise InputError("aligned", expected, f"{table.dtype} of shape ()", remedy)
    return table.nanmean(dim=-1)


def _real(name: str, value: Any) -> Tensor:
    """Return booleans, whole or floating-point numbers as a tensor."""
    tensor = as_tensor(name, value, expected="real numbers", remedy="give numbers, in rows of one length")
    if tensor.is_complex():
        raise InputError(name, "real numbers", tensor.dtype, "take their absolute values or real parts")
    check_expanded(name, tensor)
    return tensor


def _correlation(
    y: Float[Tensor, "*seed sample latent"],
    h: Float[Tensor, "*seed sample unit"],
    w: Float[Tensor, "*seed sample"],
    share: float,
) -> Float[Tensor, "*seed latent unit"]:
    """Return the correlation of every latent with every unit, 0 for a constant unit."""
    spread = _range(h, w)
    constant = (spread <= share * h.abs().amax(dim=-2)) & spread.isfinite()
    y, h = (_standardised(values, w) for values in (y, h))
    return (y.mT @ h).clamp(-1, 1).masked_fill(constant[..., None, :], 0)


def _standardised(
    values: Float[Tensor, "*seed sample column"], w: Float[Tensor, "*seed sample"]
) -> Float[Tensor, "*seed sample column"]:
    """Subtract the mean and divide by the norm, so that the product of two such columns is their correlation."""
    centred = values - (w[..., None] * values).sum(dim=-2, keepdim=True)
    scaled = w[..., None].sqrt() * centred
    return scaled / scaled.norm(dim=-2, keepdim=True)


def _range(
    values: Float[Tensor, "*seed sample column"], w: Float[Tensor, "*seed sample"]
) -> Float[Tensor, "*seed column"]:
    """Return the range over the samples of positive weight."""
    absent = w[..., None] == 0
    return values.masked_fill(absent, -torch.inf).amax(dim=-2) - values.masked_fill(absent, torch.inf).amin(dim=-2)


def _max_over_positions(
    hidden: Float[Tensor, "*seed sample position unit"], present: Bool[Tensor, "*seed sample position"] | None
) -> Float[Tensor, "*seed sample unit"]:
    """Return the max over the positions that exist, one position at a time, without a copy of all activations."""
    if present is None:
        return hidden.amax(dim=-2)
    largest = torch.full_like(hidden[..., 0, :], -torch.inf)
    for exists, activation in zip(present.unbind(-1), hidden.unbind(-2), strict=True):
        largest = torch.where(exists[..., None], torch.maximum(largest, activation), largest)
    return largest


def _weights(weight: Tensor | None, shape: torch.Size, device: torch.device) -> Float[Tensor, "*seed sample"]:
    """Return each sample's share of the total weight."""
    if weight is None:
        return torch.full(shape, 1 / shape[-1], dtype=torch.float64, device=device)
    if weight.shape not in (shape, shape[-1:]):
        expected = f"shape {tuple(shape)} or {tuple(shape[-1:])}"
        raise InputError("weight", expected, tuple(weight.shape), "give one number for each sample", must="have")
    w = weight.detach().double().expand(shape)
    total = w.sum(dim=-1, keepdim=True)
    if not (torch.isfinite(total) & (total > 0)).all() or (w < 0).any():
        got = f"least value {float(w.min()):.3g}, least sum {float(total.min()):.3g}"
        raise InputError("weight", "non-negative and finite, with a positive sum", got, "give counts or shares")
    return w / total


def _check_shapes(latent: Tensor, hidden: Tensor, present: Tensor | None) -> None:
    got = f"shape {tuple(hidden.shape)}"
    if latent.ndim < 2 or latent.numel() == 0:
        remedy = "give at least one sample and one latent"
        raise InputError("latent", "[*seed, sample, latent] and non-empty", f"shape {tuple(latent.shape)}", remedy)
    lead = latent.shape[:-1]
    if hidden.ndim not in (latent.ndim, latent.ndim + 1) or hidden.shape[: len(lead)] != lead or hidden.numel() == 0:
        axes = ", ".join(map(str, lead))
        expected = f"[{axes}, position, unit] or [{axes}, unit] and non-empty, as `latent` is [{axes}, latent]"
        raise InputError("hidden", expected, got, "give both for the same seeds and samples")
    if present is None:
        return
    if hidden.ndim == latent.ndim or present.shape != hidden.shape[:-1] or present.dtype != torch.bool:
        shapes = f"{present.dtype} of shape {tuple(present.shape)} for `hidden` of {got}"
        raise InputError("present", "boolean [*seed, sample, position], as `hidden`", shapes, "align it with `hidden`")
    if not present.any(dim=-1).all():
        raise InputError(
            "present", "true somewhere in every sample", "a sample with no position", "leave that sample out"
        )
