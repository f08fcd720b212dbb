"""What the kernels of our own need: Triton where it is installed, and functions as they were written."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import torch

from joma.kernels import gpu


def test_a_kernel_is_compiled_from_the_function_that_was_written(monkeypatch):
    """A type checker wraps functions in the tests; Triton must see the source below the wrapper."""

    def kernel():
        pass

    @functools.wraps(kernel)
    def wrapped():
        return kernel()

    compiled = []
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(jit=compiled.append))
    gpu.jit(wrapped)
    assert compiled == [kernel]


def test_half_precision_is_two_bytes_wide():
    assert [dtype.itemsize for dtype in gpu.HALF] == [2, 2]
    assert torch.float32 not in gpu.HALF
