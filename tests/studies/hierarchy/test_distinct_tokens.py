"""Distinct tokens of classes, selected by hand."""

from __future__ import annotations

import numpy as np
import torch

from joma.data.tokens import SequenceClasses
from joma.studies.hierarchy.distinct_tokens import by_frequency, distinct_logits

# Two classes with two distinct tokens each, and token 4 in common; the queries are 1 and 0.
DATA = SequenceClasses(
    frequency=torch.tensor(
        [[[0.1, 0.4, 0, 0, 0.5], [0, 0, 0.3, 0.2, 0.5]], [[0.4, 0.1, 0, 0, 0.5], [0, 0, 0.2, 0.3, 0.5]]]
    ),
    query=torch.tensor([1, 0]),
    distinct=torch.tensor([[True, True, False, False, False], [False, False, True, True, False]]),
)


def test_values_of_distinct_tokens_are_ordered_by_the_frequency_of_each_seed():
    values = np.arange(20.0).reshape(2, 2, 5)
    np.testing.assert_array_equal(by_frequency(DATA, values), [[[1, 0], [7, 8]], [[10, 11], [18, 17]]])


def test_the_frequencies_themselves_fall():
    assert (np.diff(by_frequency(DATA, DATA.frequency.numpy()), axis=-1) < 0).all()


def test_a_class_has_the_logits_of_its_query():
    z = np.arange(60.0).reshape(2, 3, 2, 5)  # [seed, step, query, token]
    logits = distinct_logits(DATA, z)
    assert logits.shape == (2, 3, 2, 2)
    np.testing.assert_array_equal(logits[0, 2], [[z[0, 2, 1, 1], z[0, 2, 1, 0]], [z[0, 2, 0, 2], z[0, 2, 0, 3]]])
    np.testing.assert_array_equal(logits[1, 0], [[z[1, 0, 1, 0], z[1, 0, 1, 1]], [z[1, 0, 0, 3], z[1, 0, 0, 2]]])
