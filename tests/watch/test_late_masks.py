"""Masks that a module applies after its softmax: what they hide is compared with what had weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from joma.watch import attention
from tiny_models import random_normal, textbook_entropy
from watch.test_softmaxes import BATCH, HEADS, LENGTH, MASK, Layer, check_not_seen, inputs


def causal_after_the_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1).masked_fill(~MASK.tril(), 0.0) @ value


def causal_after_the_softmax_in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights.masked_fill_(~MASK.tril(), 0.0)
    return weights @ value


def causal_by_an_index(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights[~MASK.tril().expand_as(weights)] = 0.0
    return weights @ value


def causal_by_a_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights *= MASK.tril()
    return weights @ value


def causal_by_where(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).flatten(0, 1).softmax(-1)
    return torch.where(MASK.tril(), weights, torch.zeros(())).unflatten(0, (BATCH, HEADS)) @ value


def filled_with_a_number(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logits = (query @ key.mT).masked_fill(~MASK.tril(), -torch.inf)
    return logits.softmax(-1).masked_fill(~MASK.tril(), 0.1) @ value


def dropped_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    keep = random_normal(LENGTH, LENGTH, seed=5) > 0
    return ((query @ key.mT).softmax(-1) * keep / 0.5) @ value


LATE_MASKS = [
    causal_after_the_softmax,
    causal_after_the_softmax_in_place,
    causal_by_an_index,
    causal_by_a_product,
    causal_by_where,
    filled_with_a_number,
    dropped_by_hand,
]


@torch.no_grad()
@pytest.mark.parametrize("compute", LATE_MASKS, ids=lambda compute: compute.__name__)
def test_masks_after_the_softmax_that_hide_weights_are_listed(compute: Callable) -> None:
    check_not_seen(compute, "hides keys after the softmax that have weight")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 3, 0, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_that_a_mask_empties_after_the_softmax_are_undefined(order: tuple[int, ...], in_place: bool) -> None:
    """Some models hide all keys of padded queries by equal logits, and then set their rows to zero."""
    padded = torch.zeros(BATCH, 1, LENGTH, 1, dtype=torch.bool)
    padded[1, :, 3:] = True

    def emptied(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = (query @ key.mT).masked_fill(~MASK.tril() | padded, -1e9)
        weights = logits.softmax(-1).permute(order)
        hidden = (~MASK.tril() | padded).expand(BATCH, HEADS, LENGTH, LENGTH).permute(order)
        weights = weights.masked_fill_(hidden, 0.0) if in_place else weights.masked_fill(hidden, 0.0)
        return weights.permute([order.index(axis) for axis in range(4)]) @ value

    layer, (query, key, value) = Layer(emptied), inputs()
    with torch.no_grad(), attention(layer, reduce="none", rows="all") as seen:
        layer(query, key, value)
    weights = (query @ key.mT).masked_fill(~MASK.tril(), -torch.inf).softmax(-1)
    expected = textbook_entropy(weights).masked_fill(padded[..., 0], torch.nan)
    torch.testing.assert_close(seen.passes[0]["Layer"], expected, atol=2e-6, rtol=0, equal_nan=True)
