"""Convert users' input to tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.arguments import InputError, short_reason


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
    try:
        # Arrays are copied, as torch warns about those that are read-only.
        return torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError) as cause:
        got = f"a {type(value).__name__} ({short_reason(cause)})"
        raise InputError(name, expected, got, remedy) from None
