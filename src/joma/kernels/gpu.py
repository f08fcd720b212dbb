"""What kernels of our own need and take: triton, which comes with PyTorch for CUDA alone, and half precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

TRITON = find_spec("triton") is not None
HALF = (torch.float16, torch.bfloat16)


def jit(function: Callable[..., object]) -> Any:
    """Compile a kernel as it is written: a checker of annotations may have wrapped it."""
    import triton  # pyright: ignore[reportMissingImports]

    return triton.jit(inspect.unwrap(function))
