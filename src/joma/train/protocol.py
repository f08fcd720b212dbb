"""The methods by which a model tells the training loop what to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from joma.kernels.products import ProductWeight


@runtime_checkable
class CompiledModel(Protocol):
    """A model that names the modules and weights that the loop may compile, or copy to bfloat16, on CUDA.

    Any `nn.Module` whose parameters have the seed as leading axis can be trained. One that has these two methods trains
    faster on CUDA; others are captured as they are.
    """

    def compiled_modules(self) -> Sequence[nn.Module]:
        """Return the modules to compile; modules of one class share a graph."""
        ...

    def product_weights(self) -> Mapping[str, ProductWeight]:
        """Return the weights that only matrix products read, by parameter name.

        With bfloat16 products the loop replaces large ones by copies in bfloat16 while a step is captured.
        """
        ...


@runtime_checkable
class CapturedStep(Protocol):
    """A training step that can be made again without running its Python code, such as a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Make the step again."""
        ...
