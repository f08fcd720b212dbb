"""The identity H = lse − scale · q·o, with the kernels of PyTorch that the CPU has in place of those of CUDA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.kernels import entropy_fused
from joma.kernels.entropy_fused import efficient, fits_efficient, fits_flash
from joma.kernels.entropy_scores import Scores, from_matrix


def cpu_kernel(query, key, causal, scale):
    """Return attention with the keys as values, and the log-sum-exp, padded as CUDA's kernels pad it."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(query, key, key, 0.0, causal, scale=scale)
    return output, torch.nn.functional.pad(lse, (0, 5), value=torch.nan)


@given(st.integers(0, 999), st.integers(1, 20), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_the_identity_agrees_with_the_whole_matrix(seed, length, dim, group, causal):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 2 * group, length, dim, generator=generator)
    key = torch.randn(2, 2, length, dim, generator=generator) + 3
    scores = Scores(query, key, None, causal, 0.4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy_fused, "_efficient_kernel", cpu_kernel)
        ours = efficient(scores)
    assert ours.largest is None
    torch.testing.assert_close(ours.entropy.double(), from_matrix(scores).entropy, rtol=0, atol=2e-5)


def test_fused_kernels_are_for_cuda():
    x = torch.ones(1, 1, 2, 4)
    assert not fits_efficient(Scores(x, x, None, False, 1.0))
    assert not fits_flash(Scores(x.half(), x.half(), None, False, 1.0))
