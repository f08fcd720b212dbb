"""Values of users become tensors of the same numbers, or an error that names the argument."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.tensors import as_tensor, of_finite

TEXTS = {"expected": "a matrix", "remedy": "give rows of one length"}


def test_a_tensor_is_returned_as_it_is():
    tensor = torch.ones(2, requires_grad=True)
    assert as_tensor("x", tensor, **TEXTS) is tensor


@pytest.mark.parametrize("kind", [np.array, list, lambda rows: tuple(map(tuple, rows))])
def test_arrays_and_nested_lists_keep_their_numbers(kind):
    rows = [[1, 2], [3, 4]]
    tensor = as_tensor("x", kind(rows), **TEXTS)
    assert tensor.dtype == torch.int64
    assert tensor.tolist() == rows


def test_a_read_only_array_is_copied_without_a_warning():
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = as_tensor("x", array, **TEXTS)
    tensor += 1
    assert array.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "got"),
    [([[1, 2], [3]], "a list"), ("text", "a str"), (None, "a NoneType"), (np.array(["a"]), "a ndarray")],
)
def test_a_value_that_is_no_tensor_is_named(value, got):
    with pytest.raises(
        InputError, match=rf"`x` must be a matrix, got {got} \(.*\); give rows of one length\."
    ) as caught:
        as_tensor("x", value, **TEXTS)
    assert "\n" not in str(caught.value)


def test_matrices_that_have_diverged_are_nan_and_the_others_right():
    matrices = torch.randn(5, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrices = matrices + matrices.mT
    expected = torch.linalg.eigvalsh(matrices)[..., 0]
    matrices[1, 0, 2], matrices[3] = torch.inf, torch.nan
    least = of_finite(lambda matrix: torch.linalg.eigvalsh(matrix)[..., 0], matrices)
    assert least.isnan().tolist() == [False, True, False, True, False]
    torch.testing.assert_close(least[::2], expected[::2])
