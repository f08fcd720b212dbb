"""Find the key where the sequence of each query begins, by what an attention shows: packed and padded sequences.

A query belongs to the sequence of the first key that it sees, and that key to the sequence of the first one that it
sees itself, and so on: behind a sliding window too, this ends at the sequence's first token.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from joma.kernels.entropy_scores import modified
from joma.probes.attention_call import AttentionCall
from joma.watch.flash import Visible, first_keys
from joma.watch.masks import HIDDEN, is_visible

AT_ONCE = 2**22  # scores


def sequence_starts(call: AttentionCall) -> Int[Tensor, "some_batch query"] | None:
    """Return the key at which the sequence of each query begins; None where it is key 0, or where nothing says it.

    The queries or logits of the call have four axes. Unless they are FlashAttention's, there must be as many keys as
    queries.

    >>> packed = torch.block_diag(torch.ones(1, 1), torch.ones(2, 2)) == 1
    >>> sequence_starts(AttentionCall(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), mask=packed))
    tensor([[0, 1, 1]])
    """
    if isinstance(call.score_mod, Visible):
        return _or_none(first_keys(call.score_mod))
    mask = call.mask if call.logits is None else call.logits
    tensor = cast(Tensor, call.query if call.logits is None else call.logits)
    keys = cast(Tensor, call.key).shape[-2] if call.logits is None else tensor.shape[-1]
    queries = tensor.shape[-2]
    if queries != keys or (
        call.score_mod is None and type(mask) is not Tensor
    ):  # torch's `CausalBias` has another type
        return None
    with torch.no_grad():
        if call.score_mod is not None:
            first = _first_by_function(call, tensor.shape[0], keys)
        else:
            first = _first_visible(cast(Tensor, mask).detach(), queries, is_logits=call.logits is not None)
        return _or_none(linked(first))


def starts_by_mask(mask: Shaped[Tensor, "batch head query query"]) -> Int[Tensor, "batch query"]:
    """Return the key at which the sequence of each query of a square mask begins."""
    return linked(_first_visible(mask, mask.shape[-2]))


def linked(first: Int[Tensor, "batch query"]) -> Int[Tensor, "batch query"]:
    """Return where the first keys lead to in the end; a row without a key, numbered by the length, goes with key rows.

    >>> linked(torch.tensor([[0, 0, 1, 2, 4, 4]]))
    tensor([[0, 0, 0, 0, 4, 4]])
    """
    numbers = torch.arange(first.shape[-1], device=first.device)
    least = first.amin(-1, keepdim=True).clamp(max=first.shape[-1] - 1)
    first = torch.where(first < first.shape[-1], torch.minimum(first, numbers), least)
    for _ in range(first.shape[-1].bit_length()):
        first = first.gather(-1, first)
    return first


def _first_visible(mask: Tensor, queries: int, *, is_logits: bool = False) -> Int[Tensor, "batch query"]:
    """Return the first key that each query sees in any head; the number of keys if it sees none."""
    if is_logits:
        shown = mask > mask.amax(-1, keepdim=True) + HIDDEN / 2
    else:
        shown = is_visible(mask[(None,) * (4 - mask.ndim)])
    shown = (shown[:, 0] if shown.shape[1] == 1 or shown.stride(1) == 0 else shown.any(1)).expand(-1, queries, -1)
    return _first(shown)


def _first_by_function(call: AttentionCall, batch: int, length: int) -> Int[Tensor, "batch query"]:
    """Return the same for a `score_mod`, in the first head, some queries at a time."""
    scores = cast(Tensor, call.query).new_zeros(())
    numbers = [torch.arange(size, device=scores.device) for size in (batch, 1, length)]
    parts = []
    for rows in numbers[2].split(max(1, AT_ONCE // (batch * length))):
        block = scores.expand(batch, 1, len(rows), length)
        shown = modified(cast(Any, call.score_mod), block, (numbers[0], numbers[1], rows, numbers[2])) > -torch.inf
        parts.append(_first(shown[:, 0]))
    return torch.cat(parts, -1)


def _first(shown: Bool[Tensor, "batch query key"]) -> Int[Tensor, "batch query"]:
    return torch.where(shown.any(-1), shown.to(torch.uint8).argmax(-1), shown.shape[-1])


def _or_none(starts: Int[Tensor, "batch query"]) -> Int[Tensor, "batch query"] | None:
    """Return None for zeros, which the kernels measure faster; not on a GPU, which would have to be waited for."""
    return None if starts.is_cpu and not bool(starts.any()) else starts
