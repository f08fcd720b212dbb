"""Which functions leave attention weights as they are: their rows keep the distribution that the softmax gave them.

Dropout is not part of what is measured. A factor that is the same for all keys of a row, such as that of a head, leaves
the distribution of the weights, and so does a mask that hides keys which had no weight before: whether it does is read
from the numbers (`after_mask`). Anything else may change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor


def _named(names: str) -> frozenset[Any]:
    """Return the functions of these names, those of torch and the methods of tensors."""
    functions = (getattr(owner, name, None) for name in names.split() for owner in (torch, Tensor))
    return frozenset(function for function in functions if callable(function))


PERMUTATIONS = _named("permute transpose swapaxes swapdims movedim moveaxis") | {
    cast(Any, Tensor).mT.__get__,
    cast(Any, Tensor).T.__get__,
}
COPIES = _named("to type type_as float double half bfloat16 cpu cuda clone contiguous detach requires_grad_") | {
    cast(Any, Tensor).data.__get__
}
VIEWS = _named(
    "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze expand expand_as broadcast_to __getitem__ "
    "narrow select"
)
DROPOUTS = _named("dropout dropout_ nan_to_num nan_to_num_") | {F.dropout}
MASKS = _named("masked_fill masked_fill_ where")
MULTIPLICATIONS = _named("mul mul_ multiply multiply_ __mul__ __rmul__ __imul__")
DIVISIONS = _named("div div_ divide divide_ true_divide __truediv__ __itruediv__")
KEEPING = PERMUTATIONS | COPIES | VIEWS | DROPOUTS
IN_PLACE = _named("masked_fill_ mul_ multiply_ __imul__ __setitem__")  # which may hide keys in the weights themselves
SELECTIONS = _named("topk sort gather scatter scatter_ take_along_dim")  # results with another number of keys
WITHOUT_WEIGHTS = _named(
    "isnan isinf isfinite zeros_like ones_like empty_like full_like rand_like randn_like bernoulli new_zeros new_ones "
    "new_empty new_full"
)  # results of the same shape that are not made of the weights


def leaves_weights(func: Callable[..., Any], args: tuple[Any, ...], weights: Tensor, key_axis: int | None) -> bool:
    """Return whether a function of weights, and of arguments that are not, leaves the distribution of each row.

    Args:
        func: a function of torch or a method of tensors.
        args: its arguments, `weights` among them.
        weights: the weights.
        key_axis: their axis of keys, or None if it is not known.

    >>> weights = torch.ones(1, 2, 3, 4) / 4
    >>> leaves_weights(torch.mul, (weights, torch.ones(2, 1, 1)), weights, 3)
    True
    >>> leaves_weights(torch.mul, (weights, torch.ones(4)), weights, 3)
    False
    """
    if func in KEEPING:
        return True
    factors = [argument for argument in args if argument is not weights]
    if func in DIVISIONS:
        return args[0] is weights and all(not isinstance(factor, Tensor) or factor.numel() == 1 for factor in factors)
    return func in MULTIPLICATIONS and all(_same_for_keys(factor, weights.ndim, key_axis) for factor in factors)


def may_hide_keys(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a function of weights may hide keys and leaves the others as they are: it applies a mask.

    >>> may_hide_keys(torch.masked_fill, ()), may_hide_keys(torch.mul, (torch.ones(2), torch.ones(2)))
    (True, False)
    """
    return func in MASKS or (
        func in MULTIPLICATIONS and any(isinstance(factor, Tensor) and factor.dtype == torch.bool for factor in args)
    )


class Masked(NamedTuple):
    """What a mask has done to weights: whether their rows are the same or empty, and which it has emptied, if any."""

    keeps: bool
    emptied: Bool[Tensor, "*shape"] | None = None  # with an axis of keys of length 1


def after_mask(before: Tensor, after: Tensor, key_axis: int | None) -> Masked:
    """Compare weights before and after a mask: rows must be the same, or without any weight, or undefined before.

    >>> weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    >>> after_mask(weights, weights.masked_fill(torch.tensor([False, False, True]), 0.0), 1).keeps
    True
    >>> after_mask(weights, weights.masked_fill(torch.tensor([False, True, False]), 0.0), 1).keeps
    False
    """
    if key_axis is None or before.shape != after.shape:
        return Masked(keeps=False)
    changed = ((after != before) & ~before.isnan()).any(key_axis, keepdim=True)
    emptied = changed & (after == 0).all(key_axis, keepdim=True)
    try:
        loses, empties = torch.stack([(changed & ~emptied).any(), emptied.any()]).tolist()
    except RuntimeError:  # inside vmap no numbers can be read
        return Masked(keeps=False)
    return Masked(not loses, emptied if empties else None)


def _same_for_keys(factor: Any, axes: int, key_axis: int | None) -> bool:
    """Whether a factor is a number, or a tensor that broadcasts along the axis of keys."""
    if not isinstance(factor, Tensor) or factor.numel() == 1:
        return True
    if key_axis is None:
        return False
    axis = key_axis - axes + factor.ndim
    return axis < 0 or factor.shape[axis] == 1
