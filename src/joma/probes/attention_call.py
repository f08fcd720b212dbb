"""The arguments of one attention: checked, and split into the scores that the kernels measure."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, described, flag, scalar
from joma.kernels.entropy_scores import Scores
from joma.probes.states import check_expanded
from joma.tensors import FLOATS, as_tensor


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention, as `attention_summary` takes them: queries and keys, or the logits themselves.

    Attributes:
        query: [*batch, head, query, dim].
        key: [*batch, head, key, dim].
        mask: broadcasts to [*batch, head, query, key]; True where a key is visible, or a bias.
        causal: whether query i sees only keys 0 to i.
        scale: 1/√dim if None.
        enable_gqa: whether several heads of `query` may share a head of `key`.
        softcap: c, for scores c · tanh(scores / c).
        sink_logits: [head], one more logit in the denominator.
        score_mod: as in FlexAttention.
        logits: [*batch, head, query, key], with all of bias and mask in them, instead of queries and keys.
        positions: [*batch, query], where each query stands among the keys, for distances; as in `attention_summary` if
            None.
    """

    query: ArrayLike | Tensor | None = None
    key: ArrayLike | Tensor | None = None
    mask: ArrayLike | Tensor | None = None
    causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    softcap: float | None = None
    sink_logits: ArrayLike | Tensor | None = None
    score_mod: Callable[..., Tensor] | None = None
    logits: ArrayLike | Tensor | None = None
    positions: Tensor | None = None


def one_name(names: tuple[str, str], values: tuple[Any, Any]) -> Any:
    """Return the value of an argument that has two names, of which at most one may be given.

    >>> one_name(("causal", "is_causal"), (None, True))
    True
    """
    if values[0] is not None and values[1] is not None:
        raise InputError(names[1], f"left out where `{names[0]}` is given", "both", f"give `{names[0]}` alone")
    return values[1] if values[0] is None else values[0]


@contextmanager
def names_as_given(*, is_causal: Any, attn_mask: Any) -> Iterator[None]:
    """Let errors about `causal` and `mask` name the arguments `is_causal` and `attn_mask` where these are given.

    >>> with names_as_given(is_causal="no", attn_mask=None):
    ...     flag("causal", "no")
    Traceback (most recent call last):
    joma.arguments.InputError: `is_causal` must be True or False, got 'no'; give one of the two.
    """
    given = {"causal": ("is_causal", is_causal), "mask": ("attn_mask", attn_mask)}
    try:
        yield
    except InputError as error:
        name, value = given.get(error.name, (error.name, None))
        if value is None:
            raise
        raise InputError(name, error.expected, error.got, error.remedy, must=error.must) from None


class Batches(NamedTuple):
    """The scores in batches of four axes; the list is empty if there are no queries or no keys."""

    scores: list[Scores]
    shape: torch.Size  # of the result
    query: Tensor  # or the logits
    keys: int
    reversed: bool  # whether the last query comes first
    sink_logits: Tensor | None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return one number for each query from those of each batch; NaN where there is nothing to measure."""
        if not parts:
            dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
            return self.query.new_full(self.shape, torch.nan, dtype=dtype)
        rows = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).view(self.shape)
        return rows.flip(-1) if self.reversed else rows


def batches(call: AttentionCall) -> Batches:
    """Check the arguments and split them into batches of four axes: [batch, head, length, dim].

    >>> batches(AttentionCall(torch.ones(3, 4), torch.ones(5, 4))).scores[0].query.shape
    torch.Size([1, 1, 3, 4])
    """
    if call.logits is not None:
        return _of_logits(call)
    query, key = _plain("query", call.query), _plain("key", call.key)
    causal, grouped = flag("causal", call.causal), flag("enable_gqa", call.enable_gqa)
    mask = None if call.mask is None else _plain("mask", call.mask)
    _check_tensors(query, key)
    scale, softcap, score_mod = _scale(call, query), _softcap(call), _score_mod(call)
    query, key, backwards = query.detach(), key.detach(), False
    lead, key_lead = _leading_axes(query.shape[:-2], key.shape[:-2], grouped)
    query, key = query.expand(*lead, *query.shape[-2:]), key.expand(*key_lead, *key.shape[-2:])
    offset = _causal_offset(mask, query.shape[-2], key.shape[-2])
    if offset is not None:
        offset = min(offset, 0) if causal else offset
        causal, mask, backwards = offset == 0, None, offset != 0
        if backwards:
            query, mask = query.flip(-2), _sliding_mask(query, key.shape[-2], offset)
    if mask is not None:
        mask = _expanded(mask, (*lead, query.shape[-2], key.shape[-2]), query.device)
    empty = query.numel() == 0 or key.numel() == 0
    count = 0 if empty else torch.Size(lead[:-2]).numel()  # not flattened: an expanded mask would be copied
    places = None if call.positions is None else call.positions[..., None, :, None]
    places = places.flip(-2) if places is not None and backwards else places
    scores = [
        Scores(
            nth(query, n), nth(key, n), _nth_mask(mask, n), causal, scale, softcap, score_mod, backwards,
            _nth_mask(places, n),
        )
        for n in range(count)
    ]  # fmt: skip
    sink_logits = _sink_logits(call, query)
    return Batches(scores, query.shape[:-1], query, key.shape[-2], backwards, sink_logits)


def _of_logits(call: AttentionCall) -> Batches:
    """Return the batches of an attention whose logits are given."""
    for name in ("query", "key", "mask", "scale", "softcap", "score_mod"):
        if getattr(call, name) is not None:
            raise InputError(name, "left out where `logits` are given", "both", "apply it to the logits")
    logits = _plain("logits", call.logits).detach()
    if logits.dtype not in FLOATS or logits.ndim < 2:
        got = f"{logits.dtype} of shape {tuple(logits.shape)}"
        raise InputError("logits", "floating numbers [*batch, head, query, key]", got, "pass what softmax takes")
    count = torch.Size(logits.shape[:-4]).numel() if logits.numel() else 0
    scores = [Scores.of_logits(nth(logits, n), flag("causal", call.causal)) for n in range(count)]
    sink_logits = _sink_logits(call, logits)
    return Batches(scores, logits.shape[:-1], logits, logits.shape[-1], False, sink_logits)


def _scale(call: AttentionCall, query: Tensor) -> float:
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    return scale if type(scale) is float and math.isfinite(scale) else scalar("scale", scale)


def _softcap(call: AttentionCall) -> float | None:
    return None if call.softcap is None else scalar("softcap", call.softcap, above=0.0)


def _score_mod(call: AttentionCall) -> Callable[..., Tensor] | None:
    if call.score_mod is not None and not callable(call.score_mod):
        expected = "a function of a score and the numbers of its batch, head, query and key"
        remedy = "pass what you pass to `flex_attention`"
        raise InputError("score_mod", expected, described(call.score_mod), remedy)
    return call.score_mod


def _sink_logits(call: AttentionCall, query: Tensor) -> Tensor | None:
    """Return the extra logit of each head, which broadcasts to the result."""
    if call.sink_logits is None:
        return None
    logits, heads = _plain("sink_logits", call.sink_logits).detach(), query.shape[-3] if query.ndim > 2 else 1
    if logits.dtype not in FLOATS or tuple(logits.shape) not in {(heads,), ()}:
        got = f"{logits.dtype} of shape {tuple(logits.shape)}"
        raise InputError("sink_logits", f"{heads} floating numbers, one a head", got, "pass the module's own sinks")
    if logits.device != query.device:
        raise InputError("sink_logits", f"on {query.device}, as `query`", logits.device, "move them there")
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return logits.to(dtype).reshape(-1, 1) if query.ndim > 2 else logits.to(dtype).reshape(-1)


def _causal_offset(mask: Any, queries: int, keys: int) -> int | None:
    """Return the offset of a `CausalBias`, by which query i sees the keys up to i + offset; None for any other mask.

    A `CausalBias` is a tensor without values in memory. Torch treats one that is aligned at the upper left, or
    square, as causal attention, whatever its lengths.
    """
    # Not imported here, which would take a second: unless it is already, no mask can be a `CausalBias`.
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(mask, module.CausalBias):
        return None
    lengths = mask.seq_len_q, mask.seq_len_kv
    if mask.variant == module.CausalVariant.UPPER_LEFT or lengths[0] == lengths[1]:
        return 0
    if lengths != (queries, keys):
        got = f"one for {lengths}"
        raise InputError("mask", f"for {queries} queries and {keys} keys", got, "create it for these lengths")
    return keys - queries


def _sliding_mask(query: Tensor, keys: int, offset: int) -> Tensor:
    """Return the mask for queries in reverse order, where query n sees the keys up to n + `offset`.

    For the i-th query from the end and key j it depends on i + j alone. So it is a window that slides along one line,
    and no matrix is in memory.
    """
    queries = query.shape[-2]
    line = torch.arange(max(0, queries + keys - 1), device=query.device) <= queries - 1 + offset
    return line.unfold(0, keys, 1) if queries and keys else line.new_zeros(queries, keys)


def _nth_mask(mask: Tensor | None, n: int) -> Tensor | None:
    return None if mask is None else nth(mask, n)


def nth(tensor: Tensor, n: int) -> Tensor:
    """Return batch `n` with four axes; the batches are counted over all axes before the last four.

    >>> nth(torch.arange(6).view(3, 2, 1, 1, 1), 1).flatten()
    tensor([2, 3])
    """
    for size in reversed(tensor.shape[:-4]):
        tensor, n = tensor.select(tensor.ndim - 5, n % size), n // size
    return tensor[(None,) * (4 - tensor.ndim)]


def _plain(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.is_nested:
        raise InputError(name, "a plain tensor", "a nested one", "pad it and hide the padding with `mask`")
    tensor = as_tensor(name, value, expected="a tensor", remedy="pass what you pass to attention")
    if _inside_vmap(tensor):
        remedy = "pass the mapped axis as a leading axis, without vmap"
        raise InputError(name, "a plain tensor", "one inside vmap", remedy)
    if name != "mask":  # a mask is never copied
        check_expanded(name, tensor)
    return tensor


def _check_tensors(query: Tensor, key: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dtype not in FLOATS:
            raise InputError(name, "of float16, bfloat16, float32 or float64", tensor.dtype, "convert it first")
        if tensor.ndim < 2 or tensor.shape[-1] == 0:
            got = f"shape {tuple(tensor.shape)}"
            expected, remedy = "[*batch, head, length, dim], dim at least 1", "pass what you pass to attention"
            raise InputError(name, expected, got, remedy)
    for key_property, query_property in (
        (key.dtype, query.dtype),
        (key.device, query.device),
        (f"of width {key.shape[-1]}", f"of width {query.shape[-1]}"),
    ):
        if key_property != query_property:
            raise InputError("key", f"{query_property}, as `query`", key_property, "convert one to match the other")


def _inside_vmap(tensor: Tensor) -> bool:
    """Return whether `torch.vmap` hides an axis of the tensor, so that its values cannot be read."""
    functorch = cast(Any, torch._C)._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _leading_axes(query: torch.Size, key: torch.Size, grouped: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading axes of both after broadcasting; shared heads are not broadcast."""
    if query == key:
        return query, key
    if grouped:
        if not query or not key or not key[-1] or query[-1] % key[-1] or query[-1] < key[-1]:
            expected = f"a number of heads that divides the {query[-1] if query else 0} of `query`"
            raise InputError("key", expected, f"leading axes {tuple(key)}", "check the head axis", must="have")
        batch, _ = _leading_axes(query[:-1], key[:-1], grouped=False)
        return (*batch, query[-1]), (*batch, key[-1])
    try:
        lead = tuple(torch.broadcast_shapes(query, key))
    except RuntimeError:
        expected = f"leading axes that broadcast with {tuple(query)} of `query`"
        remedy = "align the leading axes, or pass enable_gqa=True for shared heads"
        raise InputError("key", expected, tuple(key), remedy, must="have") from None
    return lead, lead


def _expanded(mask: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        raise InputError("mask", "boolean or floating", mask.dtype, "pass True where a key is visible, or a bias")
    if mask.device != device:
        raise InputError("mask", f"on {device}, as `query`", mask.device, "move it there")
    try:
        return mask.detach().expand(shape)
    except RuntimeError:
        got = f"shape {tuple(mask.shape)}"
        raise InputError(
            "mask", f"a shape that broadcasts to {shape}", got, "align it from the right", must="have"
        ) from None
