"""The pass of small scores against its plain twin, over blocks so small that every edge occurs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels import entropy_blocks
from joma.kernels.entropy_blocks import BlockSize, bounded, centred, fits_bounded, head_pieces
from joma.kernels.entropy_scores import Scores, from_matrix

SEEDS = st.integers(0, 2**32)


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 40), st.integers(2, 40), st.floats(0, 29), st.booleans())
def test_small_scores_are_summed_without_a_shift_over_any_number_of_blocks(seed, queries, keys, size, causal):
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(2, 3, n, 5, generator=generator) for n in (queries, keys))
    query, key = (x / torch.linalg.vector_norm(x, dim=-1).amax() for x in (query, key - key.mean(-2, keepdim=True)))
    scores = Scores(query, key, None, causal, size)
    assert fits_bounded(scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy_blocks, "_STRIPS", BlockSize(60, 4, 8))
        ours = bounded(scores).entropy
    torch.testing.assert_close(ours.double(), from_matrix(scores).entropy, rtol=0, atol=2e-5)


def test_large_scores_masks_and_float64_are_not_bounded():
    query, key = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4)
    assert fits_bounded(Scores(query, key, None, False, 1.0))
    assert not fits_bounded(Scores(query, key + 1, None, False, 60.0))
    assert not fits_bounded(Scores(query, key, torch.ones(1, 1, 2, 3, dtype=torch.bool), False, 1.0))
    assert not fits_bounded(Scores(query.double(), key.double(), None, False, 1.0))
    assert not fits_bounded(Scores(query, key, None, False, 1.0, softcap=1.0))


@given(st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(64, 200))
def test_every_visible_score_is_covered_once(queries, keys, causal, max_scores):
    count = torch.zeros(queries, keys, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy_blocks, "_STRIPS", BlockSize(60, 4, 16))
        for part in entropy_blocks._cover(queries, keys, causal, max_scores):
            assert part.times * part.rows * part.columns <= max_scores
            ones = torch.ones(part.rows, part.columns, dtype=torch.int64)
            for i in range(part.times):
                row, column = part.row + i * part.apart, part.column + i * part.apart
                rectangle = count[row : row + part.rows, column : column + part.columns]
                rectangle += ones.tril() if part.diagonal else ones
    assert torch.equal(count, torch.ones_like(count).tril() if causal else torch.ones_like(count))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
def test_pieces_cover_every_head_once_and_pair_it_with_its_key_head(batch, shared, group, max_heads):
    query, key = torch.zeros(batch, shared * group, 2, 1), torch.zeros(batch, shared, 2, 1)
    count = torch.zeros(batch, shared * group, dtype=torch.int64)
    number = torch.arange(shared).repeat_interleave(group)
    at_once, pieces = head_pieces(Scores(query, key, None, False, 1.0), max_heads)
    assert at_once <= max_heads
    for (samples, query_heads), (key_samples, key_heads) in pieces:
        count[samples, query_heads] += 1
        assert samples == key_samples
        assert number[query_heads].tolist() == list(range(shared))[key_heads]
        assert count[samples, query_heads].numel() <= at_once
    assert bool((count == 1).all())


def test_centring_copies_even_without_a_change_of_dtype():
    key = torch.tensor([[1.0], [3.0]])
    assert centred(key, torch.float32).tolist() == [[-1.0], [1.0]]
    assert key.tolist() == [[1.0], [3.0]]
