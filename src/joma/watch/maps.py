"""Attention maps of a chosen window, computed again from the queries and keys of the last pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from joma import memory
from joma.arguments import InputError, StateError, choice, sequence, whole
from joma.kernels.entropy_scores import logit_matrix
from joma.kernels.summary_blocks import HIDDEN
from joma.probes.attention_call import AttentionCall, Batches, batches

DEFAULT_LIMIT = 256 * 2**20  # bytes of queries and keys
TENSORS = ("query", "key", "logits", "mask", "sink_logits")  # of a call


class KeptCalls:
    """The arguments of the attention calls of the last pass, by layer, as far as they fit into a number of bytes.

    Args:
        limit: the number of bytes. A call that does not fit is left out, and its size remembered.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls: dict[str, AttentionCall] = {}
        self._sizes: dict[str, int] = {}  # in bytes, also of the calls that were left out

    def start_pass(self) -> None:
        """Forget the calls of the pass before."""
        self._calls.clear()
        self._sizes.clear()

    def keep(self, layer: str, call: AttentionCall) -> None:
        """Copy the tensors of a call: a model may change them in place, and views would keep more than they show."""
        tensors = {name: getattr(call, name) for name in TENSORS}
        self._sizes[layer] = sum(map(_size, tensors.values()))
        if sum(self._sizes[each] for each in (*self._calls, layer)) <= self.limit:
            self._calls[layer] = dataclasses.replace(call, **{name: _copy(value) for name, value in tensors.items()})

    def drop(self, layer: str) -> None:
        """Forget the call of a layer."""
        self._calls.pop(layer, None)
        self._sizes.pop(layer, None)

    def call(self, layer: Any) -> tuple[str, AttentionCall]:
        """Return the name of a layer, given by name or number, and the arguments of its call."""
        if not self._sizes:
            raise StateError("recording", "has no forward pass", "call `model(...)` inside the context")
        names = list(self._sizes)
        if isinstance(layer, str):
            name = choice("layer", layer, dict(zip(names, names, strict=True)))
        else:
            name = names[whole("layer", layer, low=-len(names), high=len(names) - 1)]
        if name not in self._calls:
            needed = sum(self._sizes.values())
            got = f"maps={self.limit} bytes, which {name!r} did not fit into"
            raise InputError("maps", "large enough for this layer", got, f"watch with maps={needed} to keep all layers")
        return name, self._calls[name]


def kept_calls(maps: Any) -> KeptCalls | None:
    """Return where calls are kept for `maps=` of `joma.watch.attention`: nowhere for False, a default size for True."""
    if isinstance(maps, bool | np.bool_):
        return KeptCalls(DEFAULT_LIMIT) if maps else None
    if not isinstance(maps, Number):
        raise InputError("maps", "True, False or a number of bytes", repr(maps), "write maps=True for 256 MiB")
    return KeptCalls(whole("maps", maps))


def attention_maps(
    calls: KeptCalls | None,
    layer: Any,
    head: Any = None,
    *,
    queries: Any = None,
    keys: Any = None,
    tokens: Any = None,
    key_tokens: Any = None,
    tokenizer: Any = None,
) -> xr.DataArray:
    """Return attention weights of one layer of the last pass; all arguments as for `Recording.maps`."""
    if calls is None:
        raise StateError("recording", "keeps no queries and keys", "watch with `attention(model, maps=True)`")
    name, call = calls.call(layer)
    split = batches(call)
    *lead, rows = split.shape
    heads = lead[-1] if len(lead) > 1 else 1
    batch, columns = torch.Size(lead).numel() // max(1, heads), split.keys
    chosen = {
        "batch": np.arange(batch),
        "head": _positions("head", head, heads),
        "query": _positions("queries", queries, rows),
        "key": _positions("keys", keys, columns),
    }
    memory.check(
        "queries",
        3 * 8 * batch * len(chosen["head"]) * len(chosen["query"]) * columns,
        "choose a window, such as queries=slice(0, 64), or one head",
    )
    weights = _weights(split, chosen["head"], chosen["query"])[..., torch.as_tensor(chosen["key"])]
    result = xr.DataArray(weights.cpu().numpy(), coords=chosen, dims=tuple(chosen), name="weight")
    result = result.assign_coords(layer=name).assign_attrs(
        offset=max((part.offset for part in split.scores), default=0)
    )
    words = _token_strings("tokens", tokens, tokenizer)
    of_keys = _token_strings("key_tokens", key_tokens, tokenizer)
    if of_keys is None and words is not None and len(words[-1]) == columns:
        of_keys = words
    if words is not None and key_tokens is None and rows < len(words[-1]) == columns:
        words = [sequence[-rows:] for sequence in words]  # with a cache, the queries are the last of the keys
    result = _with_tokens(result, "query", "tokens", words, rows)
    return _with_tokens(result, "key", "key_tokens", of_keys, columns)


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter)  # a `CausalBias` is a tensor without values in memory


def _distinct(tensor: Tensor) -> Tensor:
    """Return the tensor with length 1 along the axes that it is expanded along."""
    return tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _size(value: Any) -> int:
    return _distinct(value).numel() * value.element_size() if _is_plain(value) else 0


def _copy(value: Any) -> Any:
    return _distinct(value).clone().expand(value.shape) if _is_plain(value) else value


def _positions(name: str, window: Any, count: int) -> np.ndarray:
    """Return the positions that a window selects: all, one, a slice, or a list of positions."""
    if window is None:
        return np.arange(count)
    if isinstance(window, slice):
        positions = np.arange(count)[window]
    else:
        several = isinstance(window, Sequence | np.ndarray | range)
        numbers = [whole(name, number, low=-count, high=count - 1) for number in (window if several else [window])]
        positions = np.array(numbers, dtype=int) % max(1, count)
    if not positions.size:
        raise InputError(name, f"a window of the {count} positions", window, "choose at least one")
    return positions


def _weights(split: Batches, heads: np.ndarray, queries: np.ndarray) -> Float[Tensor, "batch head query key"]:
    """Return the weights of chosen heads and queries; NaN where a query sees no key. A learned sink takes its share."""
    several = len(split.shape) > 2  # the axis before the queries is the batch if there is no other
    rows = torch.as_tensor(split.shape[-1] - 1 - queries if split.reversed else queries)
    parts = [logit_matrix(scores, torch.as_tensor(heads) if several else None, rows) for scores in split.scores]
    logits = torch.cat(parts) if several else parts[0].transpose(0, 1)
    logits = logits.masked_fill(logits <= HIDDEN / 2, -torch.inf)  # hidden keys, as the measures count them
    if split.sink_logits is None:
        return logits.softmax(dim=-1)  # NaN in a row without a key
    sinks = split.sink_logits.to(logits).expand(split.shape[-2] if several else 1, 1)[heads, None]
    seen = (logits != -torch.inf).any(dim=-1, keepdim=True)
    with_sink = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
    return with_sink.softmax(dim=-1)[..., :-1].where(seen, torch.nan)


def _token_strings(name: str, tokens: Any, tokenizer: Any) -> list[list[str]] | None:
    """Return strings by sequence, from strings, a tokenizer's output, or numbers together with a tokenizer."""
    if tokens is None:
        return None
    if getattr(tokens, "encodings", None) and tokenizer is None:  # the output of a fast tokenizer has its strings
        return [encoding.tokens for encoding in tokens.encodings]
    ids = tokens["input_ids"] if isinstance(tokens, Mapping) or hasattr(tokens, "encodings") else tokens
    items = ids.tolist() if hasattr(ids, "tolist") else sequence(name, ids, "a list of strings or of token numbers")
    sequences = items if items and isinstance(items[0], list | tuple) else [items]
    if all(isinstance(word, str) for words in sequences for word in words):
        return [list(words) for words in sequences]
    if not hasattr(tokenizer, "decode"):
        got = f"numbers with tokenizer={type(tokenizer).__name__}"
        raise InputError(name, "strings", got, "pass `tokenizer=` as well, with a method `decode`")
    return [[tokenizer.decode([number]) for number in words] for words in sequences]


def _with_tokens(
    weights: xr.DataArray, axis: str, argument: str, tokens: list[list[str]] | None, count: int
) -> xr.DataArray:
    """Add the coordinate `query_token` or `key_token`: a string for each position, of each sequence if they differ."""
    if tokens is None:
        return weights
    lengths = {len(words) for words in tokens}
    if lengths != {count} or len(tokens) not in (1, weights.sizes["batch"]):
        expected = f"{count} tokens, for one or all of {weights.sizes['batch']} sequences"
        got = f"{len(tokens)} of {' or '.join(map(str, sorted(lengths)))} tokens"
        raise InputError(argument, expected, got, "pass the tokens that the model was called with")
    words = np.array(tokens, dtype=object)[:, weights[axis].values]
    dims, values = (axis, words[0]) if len(words) == 1 else (("batch", axis), words)
    return weights.assign_coords({f"{axis}_token": (dims, values)})
