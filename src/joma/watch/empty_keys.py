"""Leave the empty keys of a static cache out of distances: it has more keys than there are tokens.

Without a position of its own a query is taken to be at the end of the keys (`joma.attention_summary`). Keys at the end
that a mask hides from all queries have not been filled yet, and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from joma.kernels.entropy_scores import modified
from joma.probes.attention_call import AttentionCall
from joma.watch.masks import HIDDEN


class WithoutEmptyKeys(NamedTuple):
    """A call without the empty keys, or with them and their number, which is then too much in each distance."""

    call: AttentionCall
    excess: Int[Tensor, ""] | None = None


def without_empty_keys(call: AttentionCall, keys: int) -> WithoutEmptyKeys:
    """Return a call with this number of keys so that empty keys can be left out of its distances.

    All keys that a single query sees are before it, so that every distance is too large by the number of empty keys,
    and no GPU is waited for. Several queries may see later keys: there the keys are cut.

    >>> hidden = torch.tensor([0.0, 0.0, -torch.inf])
    >>> without_empty_keys(AttentionCall(logits=hidden.expand(1, 1, 1, 3)), 3).excess
    tensor(1)
    >>> without_empty_keys(AttentionCall(logits=hidden.expand(1, 1, 2, 3)), 3).call.logits.shape
    torch.Size([1, 1, 2, 2])
    """
    queries = cast(Tensor, call.query if call.logits is None else call.logits).shape[-2]
    shown = None if call.causal or queries >= keys else _shown_keys(call, keys)
    if shown is None:
        return WithoutEmptyKeys(call)
    empty = shown.flip(0).int().argmax()
    if queries == 1:
        return WithoutEmptyKeys(call, empty)
    filled = len(shown) - int(empty)
    if call.logits is not None:
        return WithoutEmptyKeys(replace(call, logits=cast(Tensor, call.logits)[..., :filled]))
    mask = call.mask if call.mask is None else cast(Tensor, call.mask)[..., :filled]
    return WithoutEmptyKeys(replace(call, key=cast(Tensor, call.key)[..., :filled, :], mask=mask))


def _shown_keys(call: AttentionCall, keys: int) -> Bool[Tensor, " key"] | None:
    """Return which keys any query of any sequence sees, or None if no mask could hide the last."""
    mask = call.mask if call.logits is None else call.logits
    if type(mask) is Tensor and mask.shape[-1] == keys:  # torch's `CausalBias` has another type
        axes = tuple(range(mask.ndim - 1))
        if mask.dtype == torch.bool:
            return mask.any(axes) if axes else mask
        largest = mask.detach().amax(axes) if axes else mask.detach()
        return largest > largest.max() + HIDDEN / 2
    return None if call.score_mod is None else _shown_by_function(call, call.score_mod, keys)


def _shown_by_function(call: AttentionCall, score_mod: Callable[..., Tensor], keys: int) -> Bool[Tensor, " key"]:
    """Return which keys the last query of any sequence sees."""
    batch, queries = cast(Tensor, call.query).shape[0], cast(Tensor, call.query).shape[-2]
    scores = cast(Tensor, call.query).new_zeros(batch, 1, 1, keys)
    numbers = [torch.arange(size, device=scores.device) for size in (batch, 1, queries, keys)]
    numbers[2] = numbers[2][-1:]
    return (modified(score_mod, scores, (numbers[0], numbers[1], numbers[2], numbers[3])) > -torch.inf).any((0, 1, 2))
