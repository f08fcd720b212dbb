"""The Triton kernel against its plain twin; only where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from joma.kernels.entropy_scores import Scores, from_matrix

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dim", [1, 16, 72, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (65, 200), (200, 65)])
@pytest.mark.parametrize("causal", [False, True])
def test_any_width_and_length_agrees_with_the_whole_matrix(dim, dtype, queries, keys, causal):
    from joma.kernels.entropy_triton import row_sums

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, dim, generator=generator).to("cuda", dtype)
    key = torch.randn(2, 2, keys, dim, generator=generator).to("cuda", dtype)
    for scale in (dim**-0.5, -(dim**-0.5)):
        scores = Scores(query, key, None, causal, scale)
        ours, exact = row_sums(scores, "tf32x3"), from_matrix(scores)
        torch.testing.assert_close(ours[0].double(), exact.entropy, rtol=0, atol=2e-5)
        torch.testing.assert_close(ours[1].double(), exact.largest, rtol=0, atol=2e-5)


def test_strides_that_are_not_contiguous_and_masks_that_repeat_are_read_as_they_are():
    from joma.kernels.entropy_triton import row_sums

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 90, 4, 32, generator=generator).cuda().transpose(1, 2) for _ in range(2))
    mask = (torch.rand(2, 1, 90, 90, generator=generator) < 0.5).cuda().mT.expand(2, 4, 90, 90)
    scores = Scores(query, key, mask, True, 0.2)
    ours, exact = row_sums(scores, "tf32x3"), from_matrix(scores)
    torch.testing.assert_close(ours[0].double(), exact.entropy, rtol=0, atol=2e-5, equal_nan=True)
