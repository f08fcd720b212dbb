"""Measure the largest tensor of a computation."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        del types
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result
