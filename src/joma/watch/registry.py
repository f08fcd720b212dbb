"""See the attention functions of transformers' registry whose insides cannot be seen: FlashAttention, FlexAttention.

Models look their attention up by name in `AttentionInterface`. While a model is watched, the functions of these names
are returned wrapped: the attention is measured from their arguments, and they run unchanged.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from joma.arguments import InputError
from joma.probes.summary import AttentionCall
from joma.watch.flash import NO_WINDOW, flash_call, packed_places, places_of_positions
from joma.watch.flex import flex_call

FLASH = re.compile(r"^(paged\|)?(flash_attention|[^|/]+/)")  # also kernels from the hub, such as "org/flash-attn"
FLEX = "flex_attention"
_lock, _open = threading.Lock(), []  # of the contexts in which the registry is wrapped
Wrap = Callable[[Callable[..., Any], Callable[..., AttentionCall]], Callable[..., Any]]


@contextmanager
def wrapped_registry(wrap: Wrap) -> Iterator[None]:
    """Let the registry of transformers, if it is imported, return functions that are wrapped by `wrap`.

    Contexts may overlap and end in any order: the registry is restored with the last.
    """
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if interface is None:
        yield
        return
    with _lock:
        _open.append(wrap)
        if len(_open) == 1:
            interface.__getitem__ = _wrapped_look_up(interface.__getitem__, wrap)
    try:
        yield
    finally:
        with _lock:
            _open.remove(wrap)
            if not _open:
                del interface.__getitem__  # which hides that of its base class


def _wrapped_look_up(look_up: Callable[[Any, str], Callable[..., Any]], wrap: Wrap) -> Callable[[Any, str], Any]:
    def wrapped(self: Any, name: str) -> Callable[..., Any]:
        function = look_up(self, name)
        if name == FLEX:
            return wrap(function, flex_interface_call)
        return wrap(function, flash_interface_call) if FLASH.search(name) else function

    return wrapped


def flash_interface_call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> AttentionCall:
    """Return the attention that the registry's FlashAttention computes from queries and keys [batch, head, …]."""
    del value
    if options.get("cache") is not None or options.get("block_table") is not None:
        remedy = "watch the model outside continuous batching"
        raise InputError("attention", "without a paged cache", "keys in pages", remedy)
    causal = options.get("is_causal")
    window = options.get("sliding_window")
    starts = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    positions: Any = options.get("position_ids")
    places = None
    if attention_mask is None and starts[0] is not None and starts[1] is not None:
        places = packed_places(starts[0], starts[1], query.shape[0])
    elif attention_mask is None and is_packed(positions, query):
        places = places_of_positions(positions)
    return flash_call(
        query,
        key,
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        window=NO_WINDOW if window is None or key.shape[-2] <= window else (window - 1, window - 1),
        padding=attention_mask,
        places=places,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sink_logits=options.get("s_aux"),
    )


def is_packed(positions: Any, query: Tensor) -> bool:
    """Whether position ids are of several sequences in a row, as transformers decides it."""
    if not isinstance(positions, Tensor) or positions.ndim != 2 or query.shape[0] != 1:
        return False
    return positions.shape[-1] == query.shape[-2] > 1 and bool((positions.diff(dim=-1) != 1).any())


def flex_interface_call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> AttentionCall:
    """Return the attention that the registry's FlexAttention computes; a mask is a `BlockMask` or a bias."""
    del module, value
    bias, block_mask = options.get("position_bias"), attention_mask
    if isinstance(attention_mask, Tensor):
        mask, block_mask = attention_mask[..., : key.shape[-2]], None
        bias = mask if bias is None else mask + bias
    settings = {"scale": options.get("scaling"), "softcap": options.get("softcap"), "sink_logits": options.get("s_aux")}
    return flex_call(query, key, None, block_mask, mask=bias, **settings)
