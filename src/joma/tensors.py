"""Convert users' input to tensors, and apply linear algebra where some matrices have diverged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joma.arguments import InputError, short_reason, whole

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def of_finite(function: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Return one number for each matrix, NaN for those with an entry that is not finite, on which torch would raise.

    >>> of_finite(lambda m: torch.linalg.matrix_norm(m, ord=2), torch.tensor([[[3.0]], [[torch.inf]]]))
    tensor([3., nan])
    """
    finite = matrices.isfinite().all(dim=-1).all(dim=-1)
    values = function(torch.where(finite[..., None, None], matrices, 0.0))
    return torch.where(finite, values, torch.nan)


def as_tensor(name: str, value: Any, *, expected: str, remedy: str) -> Tensor:
    """Return a tensor, an array or nested lists as a tensor; raise `InputError` for anything else.

    Args:
        name: the argument, for the error.
        value: what the user gave. A tensor is returned as it is, an array is copied.
        expected, remedy: parts of the error: what the argument must be, and what to do.

    >>> as_tensor("pairs", [[1, 2]], expected="pairs", remedy="give some")
    tensor([[1, 2]])
    >>> as_tensor("pairs", [[1, 2], [3]], expected="pairs", remedy="give some")
    Traceback (most recent call last):
    joma.arguments.InputError: `pairs` must be pairs, got a list (expected sequence of length 2 at dim 1 (got 1)); ...
    """
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not (value.is_nested or value.is_quantized or value.is_meta):
            return value
        raise _unreadable(name, value)
    if isinstance(value, nn.Module):
        raise InputError(name, expected, f"a module, {type(value).__name__}", "give one of its weights instead")
    try:
        return torch.as_tensor(_array(value) if _holds_arrays(value) else value)
    except MemoryError:
        got = f"shape {np.shape(value)}"
        raise InputError(name, "small enough for this machine's memory", got, "give fewer numbers") from None
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as cause:
        got = f"a {type(value).__name__} ({short_reason(cause)})"
        raise InputError(name, expected, got, remedy) from None


def as_floating(name: str, value: Any, *, expected: str, remedy: str) -> Tensor:
    """Return `value` as `as_tensor` does, if it has a floating-point type in which one can compute.

    >>> as_floating("weight", np.ones(2), expected="floating numbers", remedy="pass weights")
    tensor([1., 1.], dtype=torch.float64)
    """
    tensor = as_tensor(name, value, expected=expected, remedy=remedy)
    if tensor.dtype not in FLOATS:
        raise InputError(name, expected, f"{tensor.dtype} of shape {tuple(tensor.shape)}", remedy)
    return tensor


def as_whole(name: str, value: Any, *, shape: tuple[int, ...], expected: str, remedy: str) -> Tensor:
    """Return `value` as `as_tensor` does, if it has whole numbers or booleans and this shape.

    >>> as_whole("steps", [3, 5], shape=(2,), expected="two steps", remedy="give two")
    tensor([3, 5])
    """
    tensor = as_tensor(name, value, expected=expected, remedy=remedy)
    if tensor.shape != shape or tensor.is_floating_point():
        raise InputError(name, expected, f"{tensor.dtype} {tuple(tensor.shape)}", remedy)
    return tensor


def axis(name: str, value: Any, tensor: Tensor) -> int:
    """Return the number of an axis of `tensor`, which may count from the end; raise `InputError` if there is none.

    >>> axis("dim", -1, torch.ones(2, 3))
    -1
    """
    if tensor.ndim == 0:
        raise InputError(name, "an axis of the tensor", f"{value!r} for a tensor without axes", "give one with axes")
    return whole(name, value, low=-tensor.ndim, high=tensor.ndim - 1)


def _unreadable(name: str, tensor: Tensor) -> InputError:
    """Return the error for a tensor whose values cannot be read like those of others."""
    got, remedy = "a sparse one", "call `.to_dense()` first"
    if tensor.is_nested:
        got, remedy = "a nested one", "pad it, or pass its parts one by one"
    elif tensor.is_quantized:
        got, remedy = "a quantised one", "call `.dequantize()` first"
    elif tensor.is_meta:
        got, remedy = "one on the meta device, which has no values", "load its values first"
    return InputError(name, "a plain tensor", got, remedy)


def _holds_arrays(value: Any) -> bool:
    """Return whether `value` is an array of another library, or a list of such; torch reads those slowly or not."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value):
        return hasattr(value[0], "__array__") and not isinstance(value[0], Tensor)
    return hasattr(value, "__array__")


def _array(value: Any) -> np.ndarray:
    """Return a copy, as torch warns about arrays that are read-only, in the byte order that torch reads."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError("masked entries")
    array = np.array(value)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
