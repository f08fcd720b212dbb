import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError, StateError, broadcast, choice, probabilities, real, whole


@pytest.mark.parametrize(
    ("value", "options", "expected", "got"),
    [
        ([1.0, np.nan], {}, "free of NaN", "1 NaN"),
        ([], {}, "non-empty", "shape (0,)"),
        ([np.inf], {}, "finite", "an infinite value"),
        ([[1.0]], {"ndim": 1}, "1-dimensional", "shape (1, 1)"),
        ([-0.1], {"low": 0}, "at least 0", "-0.1"),
        ([2.0], {"high": 1}, "at most 1", "2"),
        (["a"], {}, "an array of real numbers", "could not convert"),
        ([1j], {}, "an array of real numbers", "complex numbers"),
        ([[1], [1, 2]], {}, "an array of real numbers", "inhomogeneous"),
    ],
)
def test_real_names_argument_expectation_and_what_came(value, options, expected, got):
    with pytest.raises(InputError) as caught:
        real("beta", value, **options)
    message = str(caught.value)
    assert message.startswith("`beta` must be ")
    assert expected in message
    assert got in message
    assert message.count(";") >= 1  # the remedy


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8))
def test_probabilities_accept_exactly_what_is_normalised(weights):
    normal = np.array(weights) / np.sum(weights)
    np.testing.assert_array_equal(probabilities("p", normal), normal)
    with pytest.raises(InputError, match="sum to 1"):
        probabilities("p", normal * 1.001)


def test_probabilities_refuse_negative_values():
    with pytest.raises(InputError, match="at least 0"):
        probabilities("p", [1.5, -0.5])


@pytest.mark.parametrize("value", [0, 1.5, "3", None, [1], np.nan, np.inf, 11])
def test_whole_refuses(value):
    with pytest.raises(InputError, match="whole number"):
        whole("depth", value, high=10)


def test_choice_lists_the_known_names():
    with pytest.raises(InputError, match=r"one of relu, gelu, got 'rellu'; did you mean 'relu'"):
        choice("activation", "rellu", {"relu": 0, "gelu": 1})


@given(st.lists(st.integers(2, 4), max_size=3))
def test_broadcast_agrees_with_numpy(shape):
    arrays = {"mu": np.zeros(shape), "v0": np.zeros(1)}
    assert broadcast(**arrays) == np.broadcast(*arrays.values()).shape


def test_broadcast_names_all_shapes():
    with pytest.raises(InputError, match=r"mu \(2,\), v0 \(3,\)"):
        broadcast(mu=np.zeros(2), v0=np.zeros(3))


@pytest.mark.parametrize(
    "problem",
    [
        InputError("p0", "to 1", 1.1, "divide it by its sum", must="sum"),
        InputError("loss", "a function", lambda: None, "give one"),
        StateError("block", "needs a forward pass first", "call it"),
    ],
)
def test_errors_reach_other_processes_with_their_parts(problem):
    copy = pickle.loads(pickle.dumps(problem))
    assert type(copy) is type(problem)
    assert str(copy) == str(problem)
    assert copy.remedy == problem.remedy
