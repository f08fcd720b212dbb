"""The entropy of attention, in nats: defined here and nowhere else."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from joma.arguments import InputError, choice, scalar
from joma.kernels import entropy_blocks
from joma.kernels.entropy_blocks import Scores

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AttentionRows(NamedTuple):
    """What each query's attention looks like; every field has the shape of `query` less its last axis."""

    entropy: Tensor  # in nats
    relative: Tensor  # entropy over its largest possible value, the logarithm of the number of keys that are seen
    effective: Tensor  # exp(entropy), the effective number of tokens
    largest: Tensor  # the largest weight


def shannon_entropy(p: Tensor, dim: int = -1) -> Tensor:
    """Return the entropy H = −Σ p ln p of probabilities along `dim`, with 0 ln 0 = 0.

    Args:
        p: probabilities that sum to one along `dim`. A distribution that holds NaN, as the attention of a diverged
            seed does, has entropy NaN.
        dim: the axis of the distribution.

    Returns:
        A tensor without the axis `dim`, between 0 and the logarithm of its length.

    >>> shannon_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0], [torch.nan, 0.0]]))
    tensor([0.6931, 0.0000,    nan])
    """
    sums = p.sum(dim=dim)
    known, given = sums, p
    if not torch.isfinite(sums).all():
        undefined = sums.isnan()
        known, given = sums[~undefined], p.masked_fill(undefined.unsqueeze(dim), 0.0)
    if known.numel() and ((known - 1).abs().max() > 1e-3 or given.min() < 0):
        got = f"sums in [{float(known.min()):.3g}, {float(known.max()):.3g}]"
        raise InputError("p", "distributions that sum to 1", got, "apply `.softmax(-1)` first")
    return torch.special.entr(p).sum(dim=dim)


def attention_entropy(
    query: Tensor,
    key: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "highest",
) -> Tensor:
    """Return the entropy of each row of scaled dot-product attention, without the matrix of attention.

        H_i = −Σ_j p_ij ln p_ij,    p_i = softmax_j(scale · q_i·k_j + bias_ij)

    in nats, exact up to rounding, in memory proportional to the length. The arguments mean what they mean for
    `torch.nn.functional.scaled_dot_product_attention`. It is a measure: no gradient flows through it.

    Args:
        query: [*batch, head, query, dim], float16, bfloat16, float32 or float64; fewer or more leading axes will do.
        key: [*batch, head, key, dim]; leading axes of the two broadcast.
        causal: whether query i sees keys 0 to i alone, counted from the first of both also where lengths differ.
        mask: to broadcast to [*batch, head, query, key]: True where a key is seen, or a bias that is added to the
            scores. −inf, and a number below half the least of its type, hide the key. With `causal` both apply. A
            `torch.nn.attention.bias.CausalBias` is taken at its word, without a matrix.
        scale: 1/√dim if not given.
        enable_gqa: whether several heads of `query` may share one of `key`, neighbours the same one.
        precision: in the words of `torch.set_float32_matmul_precision`. "highest" multiplies and adds in float32 at
            least, whatever the inputs. "high" lets a GPU round float32 factors to TF32, and uses the fused attention
            kernel of half precision where our own kernel cannot run.

    Returns:
        [*batch, head, query] in float32, or float64 for float64; NaN where all keys are hidden, or there are none: see
            `mean_entropy`.

    >>> query, key = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    >>> attention_entropy(query, key, causal=True).exp()
    tensor([[[1., 2., 3., 4.]]])
    """
    order = choice("precision", precision, entropy_blocks.PRECISIONS)
    asked = _asked(query, key, causal, mask, scale, grouped=enable_gqa)
    return asked.joined([entropy_blocks.rows(part, order).entropy for part in asked.scores])


def attention_rows(
    query: Tensor,
    key: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "highest",
) -> AttentionRows:
    """Return entropy, relative entropy, effective number of tokens and largest weight of each row of attention.

        H_i / ln n_i,    exp(H_i),    max_j p_ij,        n_i the number of keys that query i sees

    in one pass over the keys. Where one key is seen the relative entropy, 0/0, is NaN.

    Args:
        query: [*batch, head, query, dim]; this and all others as for `attention_entropy`.
        key: [*batch, head, key, dim].
        causal: whether query i sees keys 0 to i alone.
        mask: True where a key is seen, or a bias.
        scale: 1/√dim if not given.
        enable_gqa: whether several heads of `query` may share one of `key`.
        precision: "highest" or "high".

    Returns:
        Four tensors [*batch, head, query], NaN where all keys are hidden.

    >>> rows = attention_rows(torch.zeros(2, 8), torch.ones(4, 8))
    >>> rows.relative, rows.effective, rows.largest
    (tensor([1., 1.]), tensor([4., 4.]), tensor([0.2500, 0.2500]))
    """
    order = choice("precision", precision, entropy_blocks.PRECISIONS)
    asked = _asked(query, key, causal, mask, scale, grouped=enable_gqa)
    found = [entropy_blocks.rows(part, order, largest=True) for part in asked.scores]
    nats, largest = (asked.joined([cast(Tensor, part[n]) for part in found]) for n in range(2))
    seen = asked.joined([entropy_blocks.visible(part) for part in asked.scores])
    limit = seen.to(nats.dtype).log()
    return AttentionRows(nats, nats / limit.masked_fill(seen <= 1, torch.nan), effective_tokens(nats), largest)


def effective_tokens(entropy: Tensor) -> Tensor:
    """Return exp(H), the number of tokens that uniform attention of the same entropy would look at.

    Args:
        entropy: in nats, of any shape.

    Returns:
        A tensor of the same shape, at least 1.

    >>> effective_tokens(torch.tensor([0.0, 0.6931472]))
    tensor([1., 2.])
    """
    return entropy.exp()


def mean_entropy(entropy: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return the mean of row entropies over the rows that are defined.

        H̄ = (1/n) Σ_{i: H_i not NaN} H_i,    n the number of such rows

    Args:
        entropy: [*batch, head, query], as `attention_entropy` returns it.
        dim: the axes to average over; the rows if not given.

    Returns:
        `entropy` less these axes, NaN where all rows are.

    >>> mean_entropy(torch.tensor([[1.0, 0.5, torch.nan], [0.5, 0.5, 0.5]]))
    tensor([0.7500, 0.5000])
    """
    if not entropy.is_floating_point() or entropy.ndim == 0:
        got = f"{entropy.dtype} of shape {tuple(entropy.shape)}"
        raise InputError("entropy", "row entropies [*batch, query]", got, "pass what `attention_entropy` returns")
    return entropy.nanmean(dim=dim)


class _Asked(NamedTuple):
    """What was asked for, in batches of four axes; none where there is no row, or no key."""

    scores: list[Scores]
    shape: torch.Size
    query: Tensor
    backwards: bool  # the last query first

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One number for each query from those of each batch; NaN where there was nothing to measure."""
        if not parts:
            dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
            return self.query.new_full(self.shape, torch.nan, dtype=dtype)
        found = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).view(self.shape)
        return found.flip(-1) if self.backwards else found


def _asked(
    query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None, *, grouped: bool
) -> _Asked:
    """Check everything and bring it to four axes: one batch axis and one of heads."""
    _check_tensors(query, key, mask)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if type(factor) is not float or not math.isfinite(factor):
        factor = scalar("scale", factor)
    query, key, backwards = query.detach(), key.detach(), False
    lead, shared = _leads(query.shape[:-2], key.shape[:-2], grouped)
    query, key = query.expand(*lead, *query.shape[-2:]), key.expand(*shared, *key.shape[-2:])
    offset = _offset(mask, query.shape[-2], key.shape[-2])
    if offset is not None:
        offset = min(offset, 0) if causal else offset
        causal, mask, backwards = offset == 0, None, offset != 0
        if backwards:
            query, mask = query.flip(-2), _later(query, key.shape[-2], offset)
    if mask is not None:
        mask = _expanded(mask, (*lead, query.shape[-2], key.shape[-2]), query.device)
    empty = query.numel() == 0 or key.numel() == 0
    outer = 0 if empty else torch.Size(lead[:-2]).numel()  # not flattened: a mask that repeats would have to be copied
    parts = [
        Scores(_nth(query, n), _nth(key, n), None if mask is None else _nth(mask, n), causal, factor)
        for n in range(outer)
    ]
    return _Asked(parts, query.shape[:-1], query, backwards)


def _offset(mask: Any, queries: int, keys: int) -> int | None:
    """Return how many keys beyond its own number a query sees by a `CausalBias`, whose memory says nothing; else None.

    Aligned at the upper left, or square, torch takes it as causal attention whatever its lengths.
    """
    known = sys.modules.get("torch.nn.attention.bias")  # a second to import, and without it there is no such bias
    if known is None or not isinstance(mask, known.CausalBias):
        return None
    lengths = mask.seq_len_q, mask.seq_len_kv
    if mask.variant == known.CausalVariant.UPPER_LEFT or lengths[0] == lengths[1]:
        return 0
    if lengths != (queries, keys):
        raise InputError("mask", f"for {queries} queries and {keys} keys", f"one for {lengths}", "make it anew")
    return keys - queries


def _later(query: Tensor, keys: int, offset: int) -> Tensor:
    """Return which keys the queries, the last one first, see up to their own number plus `offset`.

    Key j of query i from the end depends on i + j alone: a window that slides along one line, and no matrix.
    """
    queries = query.shape[-2]
    line = torch.arange(max(0, queries + keys - 1), device=query.device) <= queries - 1 + offset
    return line.unfold(0, keys, 1) if queries and keys else line.new_zeros(queries, keys)


def _nth(tensor: Tensor, n: int) -> Tensor:
    """Return one batch of four axes, the n-th along the axes before them."""
    for size in reversed(tensor.shape[:-4]):
        tensor, n = tensor.select(tensor.ndim - 5, n % size), n // size
    return tensor[(None,) * (4 - tensor.ndim)]


def _check_tensors(query: Tensor, key: Tensor, mask: Tensor | None) -> None:
    for name, tensor in (("query", query), ("key", key), ("mask", mask)):
        if tensor is None and name == "mask":
            continue
        if not isinstance(tensor, Tensor):
            raise InputError(name, "a tensor", type(tensor).__name__, "pass what attention is given")
        if tensor.is_nested:
            raise InputError(name, "a plain tensor", "a nested one", "pad it and hide the padding with `mask`")
        if _mapped(tensor):
            raise InputError(name, "a plain tensor", "one inside vmap", "give the axis as a leading one, without vmap")
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dtype not in _TYPES:
            raise InputError(name, "of float16, bfloat16, float32 or float64", tensor.dtype, "convert it first")
        if tensor.ndim < 2 or tensor.shape[-1] == 0:
            got = f"shape {tuple(tensor.shape)}"
            raise InputError(name, "[*batch, head, length, dim], dim at least 1", got, "pass what attention is given")
    for name, ours, other in (
        ("key", key.dtype, query.dtype),
        ("key", key.device, query.device),
        ("key", f"of width {key.shape[-1]}", f"of width {query.shape[-1]}"),
    ):
        if ours != other:
            raise InputError(name, f"{other}, as `query`", ours, "bring both to the same")


def _mapped(tensor: Tensor) -> bool:
    """Whether `torch.vmap` hides an axis of it: its values cannot be looked at."""
    functorch = cast(Any, torch._C)._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _leads(query: torch.Size, key: torch.Size, grouped: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading axes of both after broadcasting, heads left as they are where they are shared."""
    if query == key:
        return query, key
    if grouped:
        if not query or not key or not key[-1] or query[-1] % key[-1] or query[-1] < key[-1]:
            expected = f"of a number of heads that divides the {query[-1] if query else 0} of `query`"
            raise InputError("key", expected, f"leading axes {tuple(key)}", "check the axis of heads")
        batch, _ = _leads(query[:-1], key[:-1], grouped=False)
        return (*batch, query[-1]), (*batch, key[-1])
    try:
        lead = tuple(torch.broadcast_shapes(query, key))
    except RuntimeError:
        expected = f"of leading axes that broadcast with {tuple(query)} of `query`"
        remedy = "align the leading axes, or pass enable_gqa=True for shared heads"
        raise InputError("key", expected, f"leading axes {tuple(key)}", remedy) from None
    return lead, lead


def _expanded(mask: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if mask.dtype != torch.bool and mask.dtype not in _TYPES:
        raise InputError("mask", "boolean or floating", mask.dtype, "pass True where a key is seen, or a bias")
    if mask.device != device:
        raise InputError("mask", f"on {device}, as `query`", mask.device, "move it there")
    try:
        return mask.detach().expand(shape)
    except RuntimeError:
        got = f"shape {tuple(mask.shape)}"
        raise InputError("mask", f"of a shape that broadcasts to {shape}", got, "align it from the right") from None
