# ruff: noqa: ARG001 - the signatures are those of FlexAttention
"""FlexAttention: block masks and score functions, called directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from joma.watch import attention
from tiny_models import random_normal, textbook_entropy

LENGTH = 40
DOCUMENTS = torch.tensor([[0] * 13 + [1] * 27, [0] * 30 + [1] * 10])


class Flex(nn.Module):
    def forward(self, query: Tensor, key: Tensor, **options: Any) -> Tensor:
        return flex_attention(query, key, key, **options)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def documents(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (DOCUMENTS[batch, query] == DOCUMENTS[batch, key])


def windows_by_head(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < 3 + 5 * head)


def slopes(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.tanh(score) - (query - key).abs() / (1 + head)


def dense(function: Any) -> Tensor:
    """Return a mask function as a matrix [batch, head, query, key]."""
    numbers = torch.meshgrid(*(torch.arange(n) for n in (2, 4, LENGTH, LENGTH)), indexing="ij")
    return function(*numbers)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", [None, causal, documents, windows_by_head])
@pytest.mark.parametrize("score_mod", [None, slopes])
def test_block_masks_and_score_functions(mask: Any, score_mod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    query, key = 3 * random_normal(2, 4, LENGTH, 8), random_normal(2, 2, LENGTH, 8, seed=1)
    options: dict[str, Any] = {"score_mod": score_mod, "enable_gqa": True, "scale": 0.4}
    if mask is not None:
        options["block_mask"] = create_block_mask(mask, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    model = Flex()
    with torch.no_grad():
        plain = model(query, key, **options)
        with attention(model, reduce="none") as seen:
            assert torch.equal(model(query, key, **options), plain)
    logits = 0.4 * query @ key.repeat_interleave(2, 1).mT
    if score_mod is not None:
        numbers = torch.meshgrid(*(torch.arange(n) for n in logits.shape), indexing="ij")
        logits = score_mod(logits, *numbers)
    logits = logits if mask is None else logits.masked_fill(~dense(mask), -torch.inf)
    torch.testing.assert_close(seen.passes[0]["Flex"], textbook_entropy(logits.softmax(-1)), atol=2e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_blocks_that_a_mask_does_not_list_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(4, 4), seq_lengths=(8, 8))
    query, model = random_normal(1, 2, 8, 4), Flex()
    with torch.no_grad(), attention(model, reduce="none") as seen:
        model(query, query, block_mask=mask)
    visible = torch.ones(8, 8, dtype=torch.bool)
    visible[:4, 4:] = False
    expected = (query @ query.mT / 2).masked_fill(~visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(seen.passes[0]["Flex"], textbook_entropy(expected), atol=2e-6, rtol=0)
