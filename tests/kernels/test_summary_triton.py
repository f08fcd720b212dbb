"""The Triton kernels against their plain twin; only where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from joma.kernels.entropy_scores import Scores, from_matrix, logit_matrix

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compare(scores: Scores, top: int, tolerance: float = 2e-5) -> None:
    """Compare every measure with that of the whole matrix in float64; a distance relative to the longest possible."""
    from joma.kernels.summary_triton import summary_sums

    sink = scores.key.shape[2] // 3
    ours, exact = summary_sums(scores, "tf32x3", top, distance=True, sink=sink), from_matrix(scores, top)
    weights = logit_matrix(scores).softmax(dim=-1)[..., sink]
    torch.testing.assert_close(ours.sink_mass.double(), weights, rtol=0, atol=tolerance, equal_nan=True)
    length = max(scores.query.shape[2], scores.key.shape[2])
    for name in ("entropy", "largest", "log_sum", "largest_logit", "top_mass", "distance"):
        measured, true = getattr(ours, name).double(), getattr(exact, name)
        atol = tolerance * (length if name == "distance" else 1)
        torch.testing.assert_close(measured, true, rtol=0, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("top", [1, 2, 8, 16])
@pytest.mark.parametrize("dim", [1, 16, 72, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [(1, 1), (65, 200), (200, 65), (700, 700)])
@pytest.mark.parametrize("causal", [False, True])
def test_any_width_and_length_agrees_with_the_whole_matrix(top, dim, dtype, lengths, causal):
    queries, keys = lengths
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, dim, generator=generator).to("cuda", dtype)
    key = torch.randn(2, 2, keys, dim, generator=generator).to("cuda", dtype)
    for scale in (dim**-0.5, -(dim**-0.5)):
        compare(Scores(query, key, None, causal, scale), top)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["boolean", "bias", "hidden rows"])
def test_masks_and_caps_agree_with_the_whole_matrix(kind, softcap):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 90, 4, 32, generator=generator).cuda().transpose(1, 2) for _ in range(2))
    mask = torch.rand(2, 1, 90, 90, generator=generator).cuda().mT.expand(2, 4, 90, 90)
    mask = mask if kind == "bias" else mask < (0.5 if kind == "boolean" else 0.02)
    compare(Scores(query, key, mask, True, 0.2, softcap), 8)


@pytest.mark.parametrize("period", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("top", [2, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_top_mass_is_exact_when_the_heaviest_keys_share_lanes(period, top, dtype):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 1500, 64, generator=generator) for _ in range(2))
    key = torch.where((torch.arange(1500) % period < 2)[:, None], 4 * key, 0.01 * key)
    compare(Scores(query.to("cuda", dtype), key.to("cuda", dtype), None, True, 0.125), top)


def test_equal_scores_are_counted_as_often_as_they_occur():
    query, key = torch.randn(1, 2, 300, 16).cuda(), torch.ones(1, 2, 300, 16).cuda()
    compare(Scores(query, key, None, True, 0.25), 8)


def test_scores_of_any_size_leave_the_weights_exact():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 200, 16, generator=generator, dtype=torch.float64).cuda() for _ in range(2))
    compare(Scores((query * 16).float(), key.float(), None, False, 0.25), 8, tolerance=2e-4)
