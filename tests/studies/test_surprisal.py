"""Surprisals against torch's cross entropy."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from joma.studies.surprisal import cross_entropy_by_row, expected_surprisal, mean_surprisal, surprisal


@given(seed=st.integers(0, 2**31), outputs=st.integers(1, 5), scale=st.sampled_from([0.1, 3.0, 300.0]))
def test_surprisals_are_the_cross_entropies_of_torch(seed, outputs, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 3, outputs, generator=generator, dtype=torch.float64)
    target = torch.randint(outputs, (2, 3), generator=generator)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(surprisal(logits, target), expected)
    p = torch.rand(2, 3, outputs, generator=generator, dtype=torch.float64).softmax(-1)
    expected = F.cross_entropy(logits.flatten(0, 1), p.flatten(0, 1), reduction="none").view(2, 3)
    torch.testing.assert_close(expected_surprisal(logits, p), expected)


@given(seed=st.integers(0, 2**31), outputs=st.integers(1, 5))
def test_means_of_surprisals_are_those_of_torch(seed, outputs):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, outputs, outputs, generator=generator, dtype=torch.float64)
    target = torch.randint(outputs, (2, outputs), generator=generator)
    by_row = [F.cross_entropy(rows, torch.arange(outputs)) for rows in logits]
    torch.testing.assert_close(cross_entropy_by_row(logits), torch.stack(by_row))
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(mean_surprisal(logits.log_softmax(-1), target), expected)
