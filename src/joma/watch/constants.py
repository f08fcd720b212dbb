"""Tell the parameters and buffers of a model from what it computes: a softmax that averages constants looks them up."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn


class Constants:
    """The buffers of a model as they are when it is first watched; one that is written since, as a cache, is none.

    >>> codebook = nn.Module()
    >>> codebook.register_buffer("codes", Tensor([[1.0, 2.0]]))
    >>> constants = Constants([codebook])
    >>> codebook.codes.T in constants, codebook.codes + 1 in constants
    (True, False)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._versions = {
            id(buffer): (weakref.ref(buffer), _version(buffer))
            for module in modules
            for buffer in module._buffers.values()
            if buffer is not None
        }

    def __contains__(self, tensor: Tensor) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, nn.Parameter):
            return True
        buffer, version = self._versions.get(id(owner), (None, None))
        return buffer is not None and buffer() is owner and version == _version(owner)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
