"""Check the hidden states that are passed to probes, and separate diverged seeds."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from torch import Tensor

from joma import memory
from joma.arguments import InputError
from joma.tensors import as_floating

_MANY = 2**24  # numbers; fewer than this always fit


def checked_states(states: ArrayLike | Tensor, *, axes: int, positions: int = 2) -> Tensor:
    """Return hidden states as a detached tensor, or raise `InputError` if an axis is missing or too short.

    Args:
        states: [*lead, layer, sample, position, width], or without the layer for three axes.
        axes: how many of these axes the probe needs, 3 or 4; all axes before them are kept.
        positions: the least number of positions.

    >>> checked_states([[[1.0], [2.0]]], axes=3).shape
    torch.Size([1, 2, 1])
    """
    names = ["layer", "sample", "position", "width"][-axes:]
    tensor = floating("states", states, "pass activations")
    if tensor.ndim < axes or math.prod(tensor.shape) == 0 or tensor.shape[-2] < positions:
        expected = f"[*lead, {', '.join(names)}], non-empty, with at least {positions} positions"
        raise InputError("states", expected, f"shape {tuple(tensor.shape)}", "give each position's hidden vector")
    return tensor.detach()


def floating(name: str, value: Any, remedy: str, *, expected: str = "numbers of a floating-point type") -> Tensor:
    """Return a tensor, an array or nested lists as a tensor of a floating-point type, or raise `InputError`.

    >>> floating("similarity", [0.5], "pass what `slice_similarity` returns")
    tensor([0.5000])
    """
    tensor = as_floating(name, value, expected=expected, remedy=remedy)
    check_expanded(name, tensor)
    return tensor


def check_expanded(name: str, tensor: Tensor) -> None:
    """Raise `InputError` for an expanded tensor, far smaller in memory than it seems, that would not fit if copied.

    >>> check_expanded("weight", torch.ones(1).expand(1000, 1000))
    """
    if tensor.numel() > _MANY and tensor.is_cpu and tensor.untyped_storage().nbytes() < tensor.nbytes:
        memory.check(name, 8 * tensor.numel(), "give a smaller tensor, or parts of it")


def split_diverged(
    states: Float[Tensor, "*shape"], *, axes: int
) -> tuple[Float[Tensor, "*shape"], Bool[Tensor, "*lead"]]:
    """Return the states with those of diverged seeds set to zero, and which leading entries diverged.

    An entry of the leading axes, such as a seed, counts as diverged if any of its last `axes` axes holds NaN or an
    infinity. Its zeros let the others be computed in one batch: a Cholesky factorisation fails on NaN. The probe sets
    the results of diverged entries to NaN. If no entry diverged, the
    tensor is returned unchanged.

    >>> split_diverged(torch.tensor([[1.0, 2.0], [3.0, torch.nan]]), axes=1)
    (tensor([[1., 2.],
            [0., 0.]]), tensor([False,  True]))
    """
    diverged = ~states.isfinite().flatten(-axes).all(dim=-1)
    if not diverged.any():
        return states, diverged
    return states.masked_fill(diverged[(..., *(None,) * axes)], 0.0), diverged


def nan_where(diverged: Bool[Tensor, "*lead"], values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `values` with NaN for the diverged entries of its leading axes.

    >>> nan_where(torch.tensor([False, True]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [nan, nan]])
    """
    return values.masked_fill(diverged[(..., *(None,) * (values.ndim - diverged.ndim))], torch.nan)
