"""Read the arguments of FlashAttention: windows, packed sequences and padding, without a matrix of what is visible.

The functions of the `flash_attn` package take [batch, position, head, dim], or all sequences in a row with the places
where they start. A model's modules have bound them by name; while it is watched those names are bound to functions that
measure first.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor

from joma.probes.summary import AttentionCall

NO_WINDOW = (-1, -1)
PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn.flash_attn_interface")
FUNCTIONS = {  # by the way their tensors are given
    "flash_attn_func": ("q", "k"),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_varlen_func": ("q", "k"),
    "flash_attn_varlen_kvpacked_func": ("q", "kv"),
    "flash_attn_varlen_qkvpacked_func": ("qkv",),
}


class Places(NamedTuple):
    """Where queries or keys are: the number of their sequence, and their position in it, each [batch, position]."""

    sequence: Tensor
    position: Tensor


class Visible(NamedTuple):
    """Which keys a query sees: those of its sequence that are no padding, up to itself if causal, and in a window."""

    queries: Places
    keys: Places
    padding: Tensor | None = None  # [batch, key], True for real keys
    causal: bool = False
    window: tuple[int, int] = NO_WINDOW  # how many keys before and after the query, -1 for all
    slopes: Tensor | None = None  # of ALiBi, [batch, head]

    def __call__(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return the score, −inf where the key is hidden: a `score_mod`."""

        def at(table: Tensor, position: Tensor) -> Tensor:
            return table[batch % table.shape[0], position]

        ahead = at(self.keys.position, key) - at(self.queries.position, query)
        visible = at(self.keys.sequence, key) == at(self.queries.sequence, query)
        left, right = self.window[0], 0 if self.causal else self.window[1]
        if self.padding is not None:
            visible = visible & at(self.padding, key)
        if right >= 0:
            visible = visible & (ahead <= right)
        if left >= 0:
            visible = visible & (ahead >= -left)
        if self.slopes is not None:
            score = score - at(self.slopes, head) * ahead.abs()
        return torch.where(visible, score, -torch.inf)


def flash_call(
    query: Tensor,
    key: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] = NO_WINDOW,
    padding: Tensor | None = None,
    places: tuple[Places, Places] | None = None,
    slopes: Tensor | None = None,
    **options: Any,
) -> AttentionCall:
    """Return the attention of queries and keys [batch, head, position, dim] with the masks of FlashAttention.

    If there are more keys than queries, the queries are the last, also for `causal`.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if padding is not None and padding.shape[-1] < keys:  # a cache of fixed length, not yet full
        padding = torch.nn.functional.pad(padding, (0, keys - padding.shape[-1]))
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    causal = causal and queries > 1
    if places is None and window == NO_WINDOW and slopes is None and (queries == keys or not causal):
        mask = None if padding is None else padding.bool()[:, None, None]
        return AttentionCall(query, key, mask=mask, causal=causal, **options)
    if places is not None and queries != keys:
        options["positions"] = _sequence_starts(*places) + places[0].position
    places = places or _aligned(queries, keys, query.device)
    padding = None if padding is None else padding.bool()
    return AttentionCall(query, key, score_mod=Visible(*places, padding, causal, window, slopes), **options)


def first_keys(visible: Visible) -> Int[Tensor, "batch query"]:
    """Return the first real key of the sequence of each query; that of a sequence without keys is any.

    >>> places = places_of_positions(torch.tensor([[0, 1, 0, 1]]))
    >>> first_keys(Visible(*places)), first_keys(Visible(*places, torch.tensor([[True, True, False, True]])))
    (tensor([[0, 0, 2, 2]]), tensor([[0, 0, 3, 3]]))
    """
    starts = _sequence_starts(visible.queries, visible.keys).clamp(max=visible.keys.sequence.shape[-1] - 1)
    if visible.padding is None:
        return starts
    keys = torch.arange(visible.padding.shape[-1], device=starts.device)
    following = torch.where(visible.padding, keys, len(keys) - 1).flip(-1).cummin(-1).values.flip(-1)
    return following.gather(-1, starts.expand(len(following), -1))


def _sequence_starts(queries: Places, keys: Places) -> Int[Tensor, "batch query"]:
    """Return the first key of the sequence of each query; sequences are numbered in their order."""
    return torch.searchsorted(keys.sequence.contiguous(), queries.sequence.contiguous())


def _aligned(queries: int, keys: int, device: torch.device) -> tuple[Places, Places]:
    position = torch.arange(keys, device=device)[None]
    return Places(torch.zeros_like(position[:, :queries]), position[:, keys - queries :]), Places(
        torch.zeros_like(position), position
    )


def packed_places(starts_of_queries: Tensor, starts_of_keys: Tensor, batch: int = 1) -> tuple[Places, Places]:
    """Return the places of sequences in a row, from where each starts and the last ends; queries are the last of keys.

    >>> packed_places(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 4]))[0].position
    tensor([[1, 1]])
    """
    result = []
    lengths = starts_of_keys.diff() - starts_of_queries.diff()
    for starts, offset in ((starts_of_queries, lengths), (starts_of_keys, torch.zeros_like(lengths))):
        position = torch.arange(int(starts[-1]), device=starts.device)
        sequence = torch.searchsorted(starts.contiguous(), position, right=True) - 1
        local = position - starts[sequence] + offset[sequence]
        result.append(Places(sequence.unflatten(0, (batch, -1)), local.unflatten(0, (batch, -1))))
    return result[0], result[1]


def places_of_positions(positions: Tensor) -> tuple[Places, Places]:
    """Return the places of packed sequences by their position ids [1, position], which start again in each.

    >>> places_of_positions(torch.tensor([[0, 1, 0, 1]]))[0].sequence
    tensor([[1, 1, 2, 2]])
    """
    starts = positions.diff(dim=-1, prepend=positions[:, :1] + 1) <= 0
    places = Places(starts.cumsum(-1), positions)
    return places, places


def package_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
    """Return the attention that a call of one of the package's functions computes."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    arguments = given.arguments
    tensors = [arguments[name] for name in FUNCTIONS[function.__name__]]
    if len(tensors) == 1:
        query, key, _ = tensors[0].unbind(-3)
    else:
        query, key = tensors[0], tensors[1] if tensors[1].ndim == tensors[0].ndim else tensors[1].unbind(-3)[0]
    starts = [arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in arguments]
    starts = starts or [arguments["cu_seqlens"]] * 2 if "cu_seqlens" in arguments else starts
    places = packed_places(starts[0], starts[-1]) if starts else None
    if places is not None:
        query, key = query[None], key[None]
    slopes = arguments.get("alibi_slopes")
    return flash_call(
        query.transpose(1, 2),
        key.transpose(1, 2),
        causal=bool(arguments.get("causal", False)),
        window=cast(tuple[int, int], tuple(arguments.get("window_size") or NO_WINDOW)),
        places=places,
        slopes=None if slopes is None else slopes.view(-1, slopes.shape[-1]),
        scale=arguments.get("softmax_scale"),
        softcap=arguments.get("softcap") or None,
    )


@contextmanager
def rebound(
    modules: set[str], wrap: Callable[[Callable[..., Any], Callable[..., AttentionCall]], Callable[..., Any]]
) -> Iterator[None]:
    """Bind the package's functions to wrapped ones in the Python modules of these names, and restore them."""
    packages = [sys.modules[package] for package in PACKAGES if package in sys.modules]
    functions = {
        id(function): function
        for package in packages
        for name in FUNCTIONS
        if (function := getattr(package, name, None)) is not None
    }
    bound: list[tuple[Any, str, Any]] = []
    try:
        for name in sorted({*modules, *PACKAGES}) if functions else ():
            namespace = vars(sys.modules[name]) if name in sys.modules else {}
            for attribute, value in list(namespace.items()):
                if id(value) in functions and callable(value):
                    bound.append((namespace, attribute, value))
                    namespace[attribute] = wrap(value, lambda *a, function=value, **k: package_call(function, a, k))
        yield
    finally:
        for namespace, attribute, value in bound:
            namespace[attribute] = value
