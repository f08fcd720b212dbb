"""What the Triton kernels need: triton, which comes only with PyTorch for CUDA, and the half-precision dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

TRITON = find_spec("triton") is not None
HALF = (torch.float16, torch.bfloat16)


def compiled_on_cuda(function: Callable[..., Any], x: torch.Tensor) -> Callable[..., Any]:
    """Return a function as it is for tensors on the CPU, and compiled for those on CUDA."""
    return torch.compile(function) if x.is_cuda else function


def jit(function: Callable[..., object]) -> Any:
    """Compile a function as a Triton kernel, without the wrapper of the run-time type checker in the tests."""
    import triton  # pyright: ignore[reportMissingImports]

    return triton.jit(inspect.unwrap(function))
