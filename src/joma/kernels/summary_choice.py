"""Choose the implementation that measures attention's rows: the first that supports the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from joma.kernels import entropy_choice
from joma.kernels.entropy_scores import Rows, Scores
from joma.kernels.summary_blocks import blocked


class SummarySums(Protocol):
    """A function that returns all of `Rows`, except the weight of the top keys for `top` 0 and unwanted distances."""

    def __call__(self, scores: Scores, top: int = 0, *, distance: bool = False, sink: int | None = None) -> Rows:
        """Return the measures of each row.

        `visible` may be None where `visible_keys` counts the same keys, and the weight of `sink` may be left out.
        """
        ...


class Implementation(NamedTuple):
    """A function that measures the rows, and which scores it supports."""

    rows: SummarySums
    fits: Callable[[Scores], bool]


def exact(scores: Scores, top: int = 0, *, distance: bool = False, sink: int | None = None) -> Rows:
    """Return the rows from our Triton kernels: half-precision products are exact, float32 ones within 1e-6."""
    from joma.kernels import summary_triton  # triton comes with PyTorch for CUDA only

    return summary_triton.summary_sums(scores, "tf32x3", top, distance=distance, sink=sink)


def rounded(scores: Scores, top: int = 0, *, distance: bool = False, sink: int | None = None) -> Rows:
    """Return the rows from our Triton kernels with float32 products rounded to TF32."""
    from joma.kernels import summary_triton

    return summary_triton.summary_sums(scores, "tf32", top, distance=distance, sink=sink)


def fits_triton(scores: Scores) -> bool:
    """Return whether our Triton kernels support these scores on this device."""
    return (
        scores.score_mod is None
        and not scores.backwards
        and scores.places is None
        and entropy_choice.fits_triton(scores)
    )


# In the order of preference, by precision.
IMPLEMENTATIONS = {
    "exact": Implementation(exact, fits_triton),
    "rounded": Implementation(rounded, fits_triton),
    "blocked": Implementation(blocked, lambda _: True),
}
ORDERS = {"highest": ("exact", "blocked"), "high": ("rounded", "blocked")}


def summary_sums(
    scores: Scores, precision: str, top: int = 0, *, distance: bool = False, sink: int | None = None
) -> Rows:
    """Return the measures of each row by the first implementation that supports the scores.

    >>> import torch
    >>> ones = torch.ones(1, 1, 2, 4)
    >>> summary_sums(Scores(ones, ones, None, True, 1.0), "highest", distance=True).distance
    tensor([[[0.0000, 0.5000]]])
    """
    candidates = (IMPLEMENTATIONS[name] for name in ORDERS[precision])
    implementation = next(candidate for candidate in candidates if candidate.fits(scores))
    return implementation.rows(scores, top, distance=distance, sink=sink)
