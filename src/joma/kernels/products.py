"""Matrix products that keep float32, one for few columns on the CPU, and weights to copy for faster products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

_ONE_DNN = torch.backends.mkldnn.is_available()


class ProductWeight(NamedTuple):
    """A weight that only matrix products read.

    Attributes:
        module, attribute: where the weight is.
        copy: makes the copy in bfloat16 that takes its place while a step is captured. The copy may be larger than the
            weight: the weight is its leading part.
    """

    module: nn.Module
    attribute: str
    copy: Callable[[Tensor], Tensor] = Tensor.bfloat16


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Keep float32 matrix products in float32 inside the context, whatever the user allows elsewhere.

    >>> with exact_products(torch.device("cpu")):
    ...     product = torch.ones(2, 2) @ torch.ones(2, 2)
    """
    backend: Any = getattr(torch.backends, "cuda" if device.type == "cuda" else "mkldnn").matmul
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before


def thin_product(w: Float[Tensor, "*batch row column"], x: Float[Tensor, "*batch column block"]) -> Tensor:
    """Return w @ x for an x of few columns, by oneDNN for a single float32 matrix on the CPU.

    oneDNN multiplies few columns a quarter faster than BLAS, and BLAS multiplies few rows faster than few columns, so
    that a transposed w comes second. All other cases use the plain version, `w @ x`.

    >>> thin_product(torch.eye(2), torch.tensor([[1.0], [2.0]]))
    tensor([[1.],
            [2.]])
    """
    if w.ndim == 2 and w.is_contiguous() and w.dtype == torch.float32 and _ONE_DNN and w.device.type == "cpu":
        return F.linear(x.mT.contiguous().to_mkldnn(), w).to_dense().mT
    if w.ndim == 2 and w.mT.is_contiguous() and w.device.type == "cpu":
        return (x.mT.contiguous() @ w.mT).mT
    return w @ x
