"""Choose the implementation of attention's row entropies: the first that supports the scores at a given precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from joma.kernels.entropy_blocks import bounded, fits_bounded
from joma.kernels.entropy_fused import efficient, fits_efficient, fits_flash, flash
from joma.kernels.entropy_scores import Rows, Scores
from joma.kernels.gpu import TRITON
from joma.kernels.summary_blocks import blocked


class Implementation(NamedTuple):
    """A function that computes the rows, which scores it supports, and whether it also returns the largest weights."""

    rows: Callable[[Scores], Rows]
    fits: Callable[[Scores], bool]
    largest: bool


def exact(scores: Scores) -> Rows:
    """Return the rows from our Triton kernel: half-precision products are exact, float32 ones within 1e-6."""
    from joma.kernels import entropy_triton  # triton comes with PyTorch for CUDA only

    return Rows(*entropy_triton.row_sums(scores, "tf32x3"))


def rounded(scores: Scores) -> Rows:
    """Return the rows from our Triton kernel with float32 products rounded to TF32."""
    from joma.kernels import entropy_triton

    return Rows(*entropy_triton.row_sums(scores, "tf32"))


def fits_triton(scores: Scores) -> bool:
    """Return whether our Triton kernel supports these scores on this device."""
    small = scores.query.dtype != torch.float64 and scores.query.shape[-1] <= 256
    return (
        scores.query.is_cuda
        and scores.plain
        and small
        and _compiles(scores.query.device, scores.query.dtype, scores.query.shape[-1])
    )


@cache
def _compiles(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether the kernel compiles: it needs triton, and triton needs a compiler and a GPU that it knows."""
    if not TRITON:
        return False
    ones = torch.ones(1, 1, 16, dim, device=device, dtype=dtype)
    try:
        rounded(Scores(ones, ones, None, True, 1.0))
        exact(Scores(ones, ones, None, True, 1.0))
        torch.cuda.synchronize(device)
    except Exception as cause:  # if the kernel does not compile for any reason, another implementation is used
        warnings.warn(f"attention entropy is computed without its Triton kernel, which failed: {cause}", stacklevel=2)
        return False
    return True


IMPLEMENTATIONS = {
    "exact": Implementation(exact, fits_triton, True),
    "rounded": Implementation(rounded, fits_triton, True),
    "flash": Implementation(flash, fits_flash, False),
    "efficient": Implementation(efficient, fits_efficient, False),
    "bounded": Implementation(bounded, fits_bounded, False),
    "blocked": Implementation(blocked, lambda _: True, True),
}
# In the order of preference. In half precision the Triton kernel is exact, and equally fast, at either precision.
PRECISIONS = {
    "highest": ("exact", "efficient", "bounded", "blocked"),
    "high": ("rounded", "flash", "efficient", "bounded", "blocked"),
}


def entropy_rows(scores: Scores, order: tuple[str, ...], *, largest: bool = False) -> Rows:
    """Return the rows by the first implementation of `order` that supports the scores, and `largest` if needed.

    >>> ones = torch.ones(1, 1, 2, 4)
    >>> entropy_rows(Scores(ones, ones, None, True, 1.0), PRECISIONS["highest"]).entropy
    tensor([[[0.0000, 0.6931]]])
    """
    candidates = (IMPLEMENTATIONS[name] for name in order)
    implementation = next(
        candidate for candidate in candidates if candidate.fits(scores) and (candidate.largest or not largest)
    )
    return implementation.rows(scores)
