"""Which functions leave attention weights as they are: their rows keep the distribution that the softmax gave them.

Dropout is not part of what is measured. A mask that is applied again, and a factor that is the same for all keys of a
row, such as that of a head, leave the distribution of the weights; anything else may change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
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
MASKS = _named("dropout dropout_ masked_fill masked_fill_ where nan_to_num nan_to_num_") | {F.dropout}
MULTIPLICATIONS = _named("mul mul_ multiply multiply_ __mul__ __rmul__ __imul__")
DIVISIONS = _named("div div_ divide divide_ true_divide __truediv__ __itruediv__")
KEEPING = PERMUTATIONS | COPIES | VIEWS | MASKS
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


def _same_for_keys(factor: Any, axes: int, key_axis: int | None) -> bool:
    """Whether a factor is a number, a mask, or a tensor that broadcasts along the axis of keys."""
    if not isinstance(factor, Tensor) or factor.dtype == torch.bool or factor.numel() == 1:
        return True
    if key_axis is None:
        return False
    axis = key_axis - axes + factor.ndim
    return axis < 0 or factor.shape[axis] == 1
