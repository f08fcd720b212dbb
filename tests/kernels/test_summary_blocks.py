"""The blocked pass against its plain twin, over blocks so small that every edge occurs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels import entropy_blocks, summary_blocks
from joma.kernels.entropy_blocks import BlockSize, visible_keys
from joma.kernels.entropy_scores import Scores, from_matrix, hidden, logit_matrix
from joma.kernels.summary_blocks import blocked, chosen_scores

SEEDS = st.integers(0, 2**32)


@settings(max_examples=60)
@given(SEEDS, st.sampled_from(["none", "boolean", "bias"]), st.booleans(), st.integers(1, 3), st.floats(-3, 3))
def test_blocks_agree_with_the_whole_matrix(seed, kind, causal, group, scale):
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (int(torch.randint(1, 14, (), generator=generator)) for _ in range(2))
    query = 3 * torch.randn(2, 2 * group, queries, 4, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, keys, 4, generator=generator, dtype=torch.float64)
    seen = torch.rand(2, 1, queries, keys, generator=generator) < 0.6
    bias = torch.randn(2, 1, queries, keys, generator=generator, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    mask = {"none": None, "boolean": seen, "bias": bias}[kind]
    mask = None if mask is None else mask.expand(2, 2 * group, queries, keys)
    scores = Scores(query, key, mask, causal, scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(entropy_blocks._TILES, "cpu", BlockSize(60, 3, 5))
        ours, count = blocked(scores, 3, distance=True), visible_keys(scores)
    expected = from_matrix(scores, 3)
    torch.testing.assert_close(ours[:6], expected[:6], rtol=1e-12, atol=1e-12, equal_nan=True)
    assert ours.visible is None
    assert torch.equal(count, expected.visible)
    shown = torch.ones(2, 2 * group, queries, keys, dtype=torch.bool) if mask is None else ~hidden(mask)
    assert torch.equal(count, (shown.tril() if causal else shown).sum(-1))


@settings(max_examples=40)
@given(SEEDS, st.booleans(), st.integers(1, 3), st.sampled_from([None, 1.5]))
def test_chosen_keys_have_the_scores_of_the_matrix(seed, causal, group, softcap):
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
    query = torch.randn(2, 2 * group, queries, 4, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, keys, 4, generator=generator, dtype=torch.float64)
    mask = (torch.rand(2, 1, queries, keys, generator=generator) < 0.6).expand(2, 2 * group, queries, keys)
    scores = Scores(query, key, mask, causal, 0.7, softcap)
    logits = logit_matrix(scores)
    for number in {0, keys - 1}:
        torch.testing.assert_close(chosen_scores(scores, number), logits[..., number])
    numbers = torch.randint(0, keys, (2, 2 * group, queries), generator=generator)
    for index in (numbers, numbers[..., :1].expand(numbers.shape)):
        expected = logits.gather(-1, index[..., None])[..., 0]
        torch.testing.assert_close(chosen_scores(scores, index), expected)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(summary_blocks, "COPIED_BYTES", 600)  # in many parts
            torch.testing.assert_close(chosen_scores(scores, index), expected)


def test_what_is_not_asked_for_is_left_out():
    ones = torch.ones(1, 1, 3, 4)
    rows = blocked(Scores(ones, ones, None, True, 1.0))
    assert (rows.top_mass, rows.distance, rows.visible) == (None, None, None)
