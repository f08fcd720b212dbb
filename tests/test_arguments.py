import pickle
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import (
    InputError,
    StateError,
    as_numbers,
    broadcast,
    check_size,
    choice,
    described,
    distinct,
    flag,
    in_range,
    increasing,
    instance,
    positive,
    probabilities,
    real,
    scalar,
    sequence,
    whole,
)

NUMBERS = {
    "int": 2,
    "float": 2.0,
    "numpy": np.float32(2),
    "unsigned": np.uint8(2),
    "0-d": np.array(2),
    "fraction": Fraction(4, 2),
    "decimal": Decimal("2.0"),
    "tensor": torch.tensor(2),
    "bfloat16": torch.tensor(2.0, dtype=torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.tensor(2.0)),
    "data array": xr.DataArray(2.0),
}

NO_NUMBERS = {
    "digits": ("2", "strings"),
    "bytes": (b"2", "bytes"),
    "list of digits": (["1", "2"], "strings"),
    "number and digits": ([1.0, "2"], "strings"),
    "date": (np.datetime64("2020-01-01"), "dates"),
    "duration": (np.timedelta64(3, "s"), "durations"),
    "python date": (datetime.now(UTC), "datetime"),
    "none": (None, "NoneType"),
    "none inside": ([1.0, None], "NoneType"),
    "dict": ({"a": 1}, "dict"),
    "set": ({1, 2}, "set"),
    "generator": ((number for number in (1, 2)), "generator"),
    "bool": (True, "booleans"),
    "mask": (np.array([True, False]), "booleans"),
    "boolean tensor": (torch.tensor([True]), "booleans"),
    "bool inside": ([[0.5], [True]], "booleans"),
    "mask inside": ([np.array([True])], "booleans"),
    "complex": (1j, "complex"),
    "complex tensor": (torch.tensor(1j), "complex"),
    "ragged": ([[1.0], [1.0, 2.0]], "inhomogeneous"),
    "structured": (np.zeros(2, dtype=[("a", float)]), "structured"),
    "masked": (np.ma.masked_array([1.0, 2.0], [False, True]), "1 masked"),
    "masked inside": ([np.ma.masked_array([1.0, 2.0], [False, True])], "1 masked"),
    "meta tensor": (torch.empty(2, device="meta"), "meta"),
    "sparse tensor": (torch.eye(2).to_sparse(), "Sparse"),
    "beyond a float": (10**400, "too large"),
    "function": (len, "builtin_function_or_method"),
}


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_every_kind_are_read(value):
    assert scalar("rate", value) == whole("rate", value) == positive("rate", value) == 2.0
    array = as_numbers("rate", value)
    assert array.dtype == np.float64
    assert array.shape == ()


@pytest.mark.parametrize(("value", "got"), NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("check", [as_numbers, real, positive, scalar, probabilities])
def test_what_is_no_number_is_refused_in_one_line(check, value, got):
    with pytest.raises(InputError, match="`rate` must be an array of real numbers") as caught:
        check("rate", value)
    assert got in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(InputError, match="`rate` must be a whole number"):
        whole("rate", value)


def test_numbers_are_copied_and_large_whole_numbers_are_exact():
    array = np.ones(2)
    as_numbers("rate", array)[0] = 5.0
    assert array.tolist() == [1.0, 1.0]
    assert whole("total", np.int64(2**62 + 1)) == whole("total", torch.tensor(2**62 + 1)) == 2**62 + 1
    with pytest.raises(InputError, match=r"`total` must be a whole number of at least 1 and below 2\^63"):
        whole("total", 2**63)


def test_an_array_that_cannot_fit_into_memory_is_refused():
    huge = np.broadcast_to(1.0, (10**8, 10**8))
    with pytest.raises(InputError, match="`rate` must be small enough"):
        real("rate", huge)
    with pytest.raises(InputError, match="`mu`, `v0` must be of a size that fits into memory"):
        broadcast(mu=np.broadcast_to(1.0, (10**8, 1)), v0=np.broadcast_to(1.0, 10**8))
    check_size("times", (1000, 1000))


def test_a_message_is_one_short_line():
    message = str(InputError("a\nb", "small", "x\x1b[2J" * 1000, "give\tless"))
    assert message.isprintable()
    assert len(message) < 600
    assert message.startswith("`a\\nb` must be small, got x\\x1b[2J")
    assert str(InputError("\udc80", "text", 1, "x")).startswith("`\\udc80` must be")
    assert described("word " * 100) == "a str"
    with pytest.raises(InputError, match="one of a, got a str; choose a known one"):
        choice("kind", "b" * 10**6, {"a": 1})
    with pytest.raises(InputError, match="`depths` must be a list of single values"):
        distinct("depths", [[1], [2]])


@pytest.mark.parametrize(
    ("value", "options", "expected", "got"),
    [
        ([1.0, np.nan], {}, "free of NaN", "1 NaN"),
        ([], {}, "non-empty", "shape (0,)"),
        ([np.inf], {}, "finite", "an infinite value"),
        ([[1.0]], {"ndim": 1}, "1-dimensional", "shape (1, 1)"),
        ([-0.1], {"low": 0}, "at least 0", "-0.1"),
        ([2.0], {"high": 1}, "at most 1", "2"),
        (["a"], {}, "an array of real numbers", "strings"),
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


@pytest.mark.parametrize("value", [True, False, np.True_, 1, 0])
def test_flags_are_true_or_false(value):
    assert flag("causal", value) is bool(value)


@pytest.mark.parametrize("value", ["True", None, 2, -1, 1.0, [True], np.array([True, False]), torch.tensor(True)])
def test_no_other_value_is_a_flag(value):
    with pytest.raises(InputError, match="`causal` must be True or False"):
        flag("causal", value)


def test_sequences_are_lists_of_single_values():
    assert sequence("latents", np.array([10, 20]), "numbers") == [10, 20]
    assert sequence("latents", iter((1, 2)), "numbers") == [1, 2]
    assert sequence("steps", {1}, "numbers", ordered=False) == [1]
    for value in ("12", 3, None, {1: 2}, {1}, np.array(3), np.broadcast_to(1.0, 10**12)):
        with pytest.raises(InputError, match="`latents` must be numbers"):
            sequence("latents", value, "numbers")


def test_classes_and_results_are_checked():
    assert instance("rule", "a", str, "give text") == "a"
    with pytest.raises(InputError, match="`rule` must be a str, got 3; give text"):
        instance("rule", 3, str, "give text")
    in_range("v", np.ones(2))
    with pytest.raises(InputError, match="`v` must be such that the result is a finite number"):
        in_range("v", np.array([np.nan]))


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([0.0, 1.0, 1.0], "1 after 1"),
        ([3.0, 2.0, 5.0, 4.0], "2 after 3"),
        ([[0.0, 1.0]], r"shape \(1, 2\)"),
        ([-1.0, 1.0], "at least 0"),
    ],
)
def test_rows_that_do_not_increase_are_refused_with_the_place(value, got):
    with pytest.raises(InputError, match=got):
        increasing("times", value)


@given(values=st.sets(st.floats(0, 1e300), min_size=1, max_size=9))
def test_sorted_different_numbers_increase(values):
    row = sorted(values)
    assert increasing("times", row).tolist() == row
    assert increasing("times", row[0]).tolist() == row[:1]
