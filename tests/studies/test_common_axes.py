"""The numbers on common axes: against plain loops over rows, with masks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.studies.common_axes import NAMES, STEP, attention_axes, axes_dataset


def draw(seed, rows, keys):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, keys, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randn(4, 3, generator=generator, dtype=torch.float64), generator


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 6))
def test_the_numbers_are_those_of_a_loop_over_rows(seed, rows, keys):
    attention, weight, _ = draw(seed, rows, keys)
    axes = attention_axes(attention, weight)
    entropies = [-sum(p * math.log(p) for p in row.tolist()) / math.log(keys) for row in attention]
    received = [sum(row[key] for row in attention.tolist()) / rows for key in range(keys)]
    singular = torch.linalg.svdvals(weight)
    assert float(axes["axes_entropy"]) == pytest.approx(sum(entropies) / rows, abs=1e-12)
    assert float(axes["axes_sink"]) == pytest.approx(max(received), abs=1e-12)
    assert float(axes["axes_rank"]) == pytest.approx(float((singular**2).sum() / singular[0] ** 2), rel=4e-3)


def test_causal_rows_are_relative_to_the_keys_that_they_see():
    visible = torch.ones(4, 4).tril().bool()
    attention = visible / visible.sum(-1, keepdim=True)
    axes = attention_axes(attention, torch.eye(2), visible)
    assert float(axes["axes_entropy"]) == pytest.approx(1.0)  # the first row sees one key and is left out
    assert float(axes["axes_sink"]) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)


def test_a_flow_has_one_row_a_seed_and_one_column_a_time():
    attention = np.stack([np.full((2, 3, 4), 0.25), np.tile([1.0, 0.0, 0.0, 0.0], (2, 3, 1))])
    run = axes_dataset(attention, np.ones((2, 2, 3, 1)), [0.0, 5.0])
    assert tuple(run.data_vars) == NAMES
    np.testing.assert_allclose(run.axes_entropy, [[1.0, 1.0], [0.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(run.axes_sink, [[0.25, 0.25], [1.0, 1.0]])
    np.testing.assert_allclose(run.axes_rank, 1.0)
    assert list(run[STEP].values) == [0.0, 5.0]
