"""The data of the study `max-margin`: unit vectors, scores, and streams that do not depend on other seeds."""

import numpy as np
import pytest

from joma.arguments import InputError
from joma.studies.related.max_margin_data import check_dim, factor_starts, sequences, starts
from joma.study import Context


def test_tokens_and_queries_have_length_one_and_scores_their_kinds():
    data = sequences(Context((3, 4)), "test", (5, 4, 6))
    assert data.x.shape == (2, 5, 4, 6)
    np.testing.assert_allclose(np.linalg.norm(data.x, axis=-1), 1)
    np.testing.assert_allclose(np.linalg.norm(data.z, axis=-1), 1)
    equal, free = data.g
    assert set(np.unique(equal)) == {0.0, 1.0}
    np.testing.assert_array_equal(equal.sum(axis=-1), 1)
    assert 0 <= free.min() < free.max() <= 1
    assert len(np.unique(equal.argmax(axis=-1))) > 1  # the best token is not always at the same position


def test_a_seed_has_the_same_data_beside_other_seeds():
    alone, both = (sequences(Context(seeds), "test", (2, 3, 4)) for seeds in ((4,), (3, 4)))
    np.testing.assert_array_equal(alone.x[0], both.x[1])
    np.testing.assert_array_equal(alone.g[:, 0], both.g[:, 1])
    assert not np.allclose(both.x[0], both.x[1])


def test_starts_are_zero_and_random_and_factors_have_their_scale():
    zero, random = starts(Context((0, 1)), 2000)
    assert not zero.any()
    assert random.std() == pytest.approx(1, abs=0.05)
    k, q = factor_starts(Context((0, 1)), 50, 1e-3)
    assert k.std() == pytest.approx(1e-3, rel=0.05)
    assert not np.allclose(k, q)


def test_too_low_a_dimension_is_refused():
    check_dim("dim", 8, 8)
    with pytest.raises(InputError, match="`dim` must be at least 8"):
        check_dim("dim", 7, 8)
