"""Read the arguments of FlexAttention: a `BlockMask` becomes a function of a score, and no matrix is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from joma.probes.summary import AttentionCall

ScoreMod = Callable[..., Tensor]


def flex_call(query: Tensor, key: Tensor, score_mod: ScoreMod | None, block_mask: Any, **options: Any) -> AttentionCall:
    """Return the attention that FlexAttention computes; `block_mask` is a `BlockMask`, its tuple, or None."""
    if block_mask is not None:
        parts = block_mask if isinstance(block_mask, tuple) else block_mask.as_tuple()
        score_mod = _masked(score_mod, parts)
    return AttentionCall(query, key, score_mod=score_mod, enable_gqa=query.shape[1] != key.shape[1], **options)


def _masked(score_mod: ScoreMod | None, parts: tuple[Any, ...]) -> ScoreMod:
    """Return a `score_mod` that also hides what the block mask hides.

    A block of keys is hidden, seen as far as the mask's function says, or seen whole; each kind has a list of blocks.
    """
    tensors: list[Any] = [part for part in parts if isinstance(part, Tensor) or part is None]
    rows, columns, mask_mod = parts[-3:]
    keys = max(1, -(-parts[1] // columns)) if isinstance(parts[1], int) else tensors[1].shape[-1]
    partial, full = _blocks(tensors[0], tensors[1], keys), _blocks(tensors[2], tensors[3], keys)

    def masked(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = batch % partial.shape[0], head % partial.shape[1], query // rows, key // columns
        visible = partial[place] & mask_mod(batch, head, query, key)
        if full is not None:
            visible = visible | full[place]
        score = score if score_mod is None else score_mod(score, batch, head, query, key)
        return torch.where(visible, score, -torch.inf)

    return masked


def _blocks(counts: Tensor | None, indices: Tensor | None, keys: int) -> Any:
    """Return which blocks are in a list of blocks: [batch, head, query block, key block]."""
    if counts is None or indices is None:
        return None
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros(*indices.shape[:-1], max(keys, indices.shape[-1]), dtype=torch.int32, device=indices.device)
    return table.scatter_add(-1, indices.long(), listed.int()) > 0
