"""The plain twin of the entropy kernels against SciPy, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.kernels.entropy_scores import Scores, from_matrix, hidden


@given(st.integers(0, 999), st.booleans(), st.sampled_from(["none", "boolean", "bias"]), st.integers(1, 3))
def test_the_whole_matrix_agrees_with_scipy_row_by_row(seed, causal, kind, group):
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 2 * group, 5, 3, generator=generator), torch.randn(2, 2, 6, 3, generator=generator)
    seen = torch.rand(2, 2 * group, 5, 6, generator=generator) < 0.6
    bias = torch.randn(2, 2 * group, 5, 6, generator=generator).masked_fill(~seen, -torch.inf)
    mask = {"none": None, "boolean": seen, "bias": bias}[kind]
    rows = from_matrix(Scores(query, key, mask, causal, 0.7))
    for b, h, i in np.ndindex(2, 2 * group, 5):
        visible = [j for j in range(6) if (j <= i or not causal) and (kind == "none" or seen[b, h, i, j])]
        if not visible:
            assert rows.entropy[b, h, i].isnan()
            continue
        logits = 0.7 * (key[b, h // group].double() @ query[b, h, i].double()).numpy()
        logits = logits + bias[b, h, i].double().numpy() if kind == "bias" else logits
        p = scipy.special.softmax(logits[visible])
        assert float(rows.entropy[b, h, i]) == pytest.approx(scipy.stats.entropy(p), abs=1e-12)
        assert float(rows.largest[b, h, i]) == pytest.approx(p.max(), abs=1e-12)


def test_a_mask_hides_by_false_minus_infinity_or_the_least_number():
    assert hidden(torch.tensor([True, False])).tolist() == [False, True]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        least = torch.finfo(dtype).min
        values = torch.tensor([0.0, least / 4, least, -torch.inf], dtype=dtype)
        assert hidden(values).tolist() == [False, False, True, True]


def test_sums_are_in_float64_for_float64_alone():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(1, 1, 1, 1, dtype=dtype)
        assert Scores(x, x, None, False, 1.0).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
