"""Which functions leave the distribution of weights, against the rows themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from joma.watch.weight_functions import (
    COPIES,
    DIVISIONS,
    DROPOUTS,
    MASKS,
    MULTIPLICATIONS,
    VIEWS,
    after_mask,
    leaves_weights,
    may_hide_keys,
)
from tiny_models import random_normal

SHAPE = 2, 3, 4, 5


def weights(axis: int = -1) -> Tensor:
    return random_normal(*SHAPE).softmax(axis)


def same_rows(result: Tensor, axis: int) -> bool:
    """Return whether the rows of a result, divided by their sums, are those of the weights."""
    return torch.allclose(result / result.sum(axis, keepdim=True), weights(axis), atol=1e-6)


def kind_and_name(func: Callable) -> str:
    """Name a function the same in every process; its text has an address in memory."""
    return f"{type(func).__name__} {func.__name__}"


@pytest.mark.parametrize("func", sorted(MULTIPLICATIONS, key=kind_and_name), ids=kind_and_name)
@given(st.lists(st.integers(0, 3), max_size=4, unique=True), st.integers(0, 3))
def test_a_factor_leaves_rows_if_it_is_the_same_for_all_keys(func: Callable, axes: list[int], key_axis: int) -> None:
    shape = [size if axis in axes else 1 for axis, size in enumerate(SHAPE)]
    positive, tensor = random_normal(*shape, seed=1).abs() + 0.1, weights(key_axis)
    for factor in (positive, positive.squeeze(0)):
        expected = same_rows(tensor * factor, key_axis)
        assert leaves_weights(func, (tensor, factor), tensor, key_axis) == expected
        assert leaves_weights(func, (factor, tensor), tensor, key_axis) == expected
    assert leaves_weights(func, (tensor, 2.0), tensor, None)
    assert may_hide_keys(func, (tensor, positive > 0))
    assert not leaves_weights(func, (tensor, tensor.sum(-1, keepdim=True)), tensor, None)


@pytest.mark.parametrize("func", sorted(DIVISIONS, key=kind_and_name), ids=kind_and_name)
def test_only_numbers_divide(func: Callable) -> None:
    tensor = weights()
    assert leaves_weights(func, (tensor, 2.0), tensor, 3)
    assert leaves_weights(func, (tensor, torch.tensor(2.0)), tensor, 3)
    assert not leaves_weights(func, (tensor, tensor.sum(-1, keepdim=True)), tensor, 3)  # weights may have been masked
    assert not leaves_weights(func, (torch.tensor(2.0), tensor), tensor, 3)


def test_copies_and_views_leave_the_numbers() -> None:
    """Every function of the lists returns the numbers that it is given."""
    tensor = weights()
    arguments: dict[str, tuple[Any, ...]] = {
        "to": (torch.float64,), "type": (torch.float64,), "type_as": (tensor.double(),), "view": (-1,),
        "view_as": (tensor,), "reshape": ((-1,),), "reshape_as": (tensor,), "unflatten": (0, (1, 2)), "unsqueeze": (0,),
        "expand": (1, *SHAPE), "expand_as": (tensor,), "broadcast_to": (SHAPE,), "__getitem__": (slice(None),),
        "narrow": (0, 0, 2), "select": (0, 0),
    }  # fmt: skip
    for func in COPIES | VIEWS:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "cuda"):
            continue
        result = func(tensor, *arguments.get(name, ()))
        expected = tensor[0] if name == "select" else tensor
        tolerance = 1e-2 if name in ("half", "bfloat16") else 1e-7
        torch.testing.assert_close(result.flatten().double(), expected.flatten().double(), atol=tolerance, rtol=0)


def test_masks_are_of_few_kinds() -> None:
    assert F.dropout in DROPOUTS
    assert {func.__name__ for func in DROPOUTS} == {"dropout", "dropout_", "nan_to_num", "nan_to_num_"}
    assert {func.__name__ for func in MASKS} == {"masked_fill", "masked_fill_", "where"}


@given(st.integers(0, 2**20 - 1), st.integers(0, 2**20 - 1), st.sampled_from([0, 1]), st.sampled_from([0.0, 0.5]))
def test_a_mask_after_the_softmax_keeps_rows_if_what_it_hides_had_no_weight(
    first: int, second: int, axis: int, fill: float
) -> None:
    """Rows are the same, or hold nothing, if and only if the mask keeps them; rows without a key are NaN before."""
    hidden, again = (torch.tensor([code >> bit & 1 for bit in range(20)]).bool().view(4, 5) for code in (first, second))
    before = random_normal(4, 5).masked_fill(hidden, -torch.inf).softmax(axis)
    after = before.masked_fill(again, fill)
    pairs = list(zip(before.movedim(axis, -1).tolist(), after.movedim(axis, -1).tolist(), strict=True))
    empty = [row != old and not any(row) and not any(map(math.isnan, old)) for old, row in pairs]
    keeps = [e or row == old or any(map(math.isnan, old)) for e, (old, row) in zip(empty, pairs, strict=True)]
    masked = after_mask(before, after, axis)
    assert masked.keeps == all(keeps)
    assert [False] * len(empty) == empty if masked.emptied is None else masked.emptied.flatten().tolist() == empty


@pytest.mark.parametrize("func", [torch.sqrt, Tensor.pow, torch.clamp, F.normalize, torch.sub, torch.cumsum])
def test_other_functions_may_change_weights(func: Callable) -> None:
    tensor = weights()
    assert not leaves_weights(func, (tensor, 2), tensor, 3)
