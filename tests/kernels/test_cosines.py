"""Sums over cosines in blocks against the whole matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.kernels import cosines
from joma.kernels.cosines import cosine_sums, cosine_sums_from_matrix


@given(st.integers(0, 999), st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 30, 2**22]))
def test_blocks_of_any_size_agree_with_the_whole_matrix(seed, count, dim, block):
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit = torch.nn.functional.normalize(x, dim=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cosines, "_BLOCK_COSINES", block)
        ours = cosine_sums(unit)
    torch.testing.assert_close(ours, cosine_sums_from_matrix(unit), rtol=0, atol=1e-10)


def test_one_vector_that_is_nan_makes_every_sum_nan():
    unit = torch.eye(4)
    unit[2] = torch.nan
    assert all(bool(value.isnan()) for value in cosine_sums(unit))
