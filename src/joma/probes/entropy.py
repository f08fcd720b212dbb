"""The entropy of attention, in nats: defined here and nowhere else."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, choice, flag, scalar
from joma.kernels.entropy_blocks import visible_keys
from joma.kernels.entropy_choice import PRECISIONS, entropy_rows
from joma.kernels.entropy_scores import Scores
from joma.probes.states import check_expanded, floating
from joma.tensors import FLOATS, as_tensor, axis


class AttentionRows(NamedTuple):
    """Measures of each query's attention; every field has the shape of `query` without its last axis."""

    entropy: Tensor  # in nats
    relative: Tensor  # entropy over its largest possible value, the logarithm of the number of visible keys
    effective: Tensor  # exp(entropy), the effective number of tokens
    largest: Tensor  # the largest weight


def shannon_entropy(p: ArrayLike | Tensor, dim: int = -1) -> Tensor:
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
    p = floating("p", p, "pass probabilities")
    dim = axis("dim", dim, p)
    sums = p.detach().sum(dim=dim)
    defined_sums, defined_p = sums, p.detach()
    if not torch.isfinite(sums).all():
        undefined = sums.isnan()
        defined_sums, defined_p = sums[~undefined], p.masked_fill(undefined.unsqueeze(dim), 0.0)
    if defined_sums.numel() and ((defined_sums - 1).abs().max() > 1e-3 or defined_p.min() < 0):
        got = f"sums in [{float(defined_sums.min()):.3g}, {float(defined_sums.max()):.3g}]"
        raise InputError("p", "distributions that sum to 1", got, "apply `.softmax(-1)` first")
    return torch.special.entr(p).sum(dim=dim)


def attention_entropy(
    query: ArrayLike | Tensor,
    key: ArrayLike | Tensor,
    *,
    causal: bool = False,
    mask: ArrayLike | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "highest",
) -> Tensor:
    """Return the entropy of each row of scaled dot-product attention, without the attention matrix.

        H_i = −Σ_j p_ij ln p_ij,    p_i = softmax_j(scale · q_i·k_j + bias_ij)

    in nats, exact up to rounding, in memory proportional to the length. The arguments have the same meaning as in
    `torch.nn.functional.scaled_dot_product_attention`. The result has no gradient.

    Args:
        query: [*batch, head, query, dim], float16, bfloat16, float32 or float64, with any number of leading axes.
        key: [*batch, head, key, dim]; leading axes of the two broadcast.
        causal: whether query i sees only keys 0 to i, both counted from the first, even where the lengths differ.
        mask: broadcasts to [*batch, head, query, key]: True where a key is visible, or a bias that is added to the
            scores. A bias of −inf, or below half the least number of its dtype, hides the key. With `causal` both
            apply. A `torch.nn.attention.bias.CausalBias` is never expanded to a matrix.
        scale: 1/√dim if not given.
        enable_gqa: whether several neighbouring heads of `query` may share a head of `key`.
        precision: named as in `torch.set_float32_matmul_precision`. "highest" multiplies and adds in float32 at
            least, whatever the inputs. "high" lets a GPU round float32 factors to TF32, and uses the fused attention
            kernel of half precision where our own kernel cannot run.

    Returns:
        [*batch, head, query] in float32, or float64 for float64. NaN where all keys are hidden or there are none (see
            `mean_entropy`), and where the queries or keys of a head hold NaN, as those of a diverged seed do.

    >>> query, key = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    >>> attention_entropy(query, key, causal=True).exp()
    tensor([[[1., 2., 3., 4.]]])
    """
    order = choice("precision", precision, PRECISIONS)
    batches = _batches(query, key, causal, mask, scale, grouped=enable_gqa)
    return batches.join([entropy_rows(scores, order).entropy for scores in batches.scores])


def attention_rows(
    query: ArrayLike | Tensor,
    key: ArrayLike | Tensor,
    *,
    causal: bool = False,
    mask: ArrayLike | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "highest",
) -> AttentionRows:
    """Return entropy, relative entropy, effective number of tokens and largest weight of each row of attention.

        H_i / ln n_i,    exp(H_i),    max_j p_ij,        n_i the number of keys that query i sees

    in one pass over the keys. Where only one key is visible the relative entropy, 0/0, is NaN.

    Args:
        query: [*batch, head, query, dim]; this and all others as for `attention_entropy`.
        key: [*batch, head, key, dim].
        causal: whether query i sees only keys 0 to i.
        mask: True where a key is visible, or a bias.
        scale: 1/√dim if not given.
        enable_gqa: whether several heads of `query` may share a head of `key`.
        precision: "highest" or "high".

    Returns:
        Four tensors [*batch, head, query], NaN where all keys are hidden.

    >>> rows = attention_rows(torch.zeros(2, 8), torch.ones(4, 8))
    >>> rows.relative, rows.effective, rows.largest
    (tensor([1., 1.]), tensor([4., 4.]), tensor([0.2500, 0.2500]))
    """
    order = choice("precision", precision, PRECISIONS)
    batches = _batches(query, key, causal, mask, scale, grouped=enable_gqa)
    rows = [entropy_rows(scores, order, largest=True) for scores in batches.scores]
    entropy = batches.join([batch.entropy for batch in rows])
    largest = batches.join([cast(Tensor, batch.largest) for batch in rows])
    visible = batches.join([visible_keys(scores) for scores in batches.scores])
    limit = visible.to(entropy.dtype).log()
    relative = entropy / limit.masked_fill(visible <= 1, torch.nan)
    return AttentionRows(entropy, relative, effective_tokens(entropy), largest)


def effective_tokens(entropy: ArrayLike | Tensor) -> Tensor:
    """Return exp(H), the number of tokens over which uniform attention has the same entropy.

    Args:
        entropy: in nats, of any shape.

    Returns:
        A tensor of the same shape, at least 1.

    >>> effective_tokens(torch.tensor([0.0, 0.6931472]))
    tensor([1., 2.])
    """
    return floating("entropy", entropy, "pass what `attention_entropy` returns").exp()


def mean_entropy(entropy: ArrayLike | Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return the mean of row entropies over the rows that are defined.

        H̄ = (1/n) Σ_{i: H_i not NaN} H_i,    n the number of such rows

    Args:
        entropy: [*batch, head, query], as `attention_entropy` returns it.
        dim: the axes to average over; the rows if not given.

    Returns:
        `entropy` without these axes, NaN where all rows are NaN.

    >>> mean_entropy(torch.tensor([[1.0, 0.5, torch.nan], [0.5, 0.5, 0.5]]))
    tensor([0.7500, 0.5000])
    """
    expected, remedy = "row entropies [*batch, query]", "pass what `attention_entropy` returns"
    rows = floating("entropy", entropy, remedy, expected=expected)
    if rows.ndim == 0:
        raise InputError("entropy", expected, f"{rows.dtype} of shape ()", remedy)
    axes = dim if isinstance(dim, tuple | list) else (dim,)
    checked = {axis("dim", number, rows) % rows.ndim for number in axes}
    if len(checked) < max(1, len(axes)):
        raise InputError("dim", "axes, each once", axes, "give at least one, and none of them twice")
    return rows.nanmean(dim=sorted(checked))


class _Batches(NamedTuple):
    """The scores in batches of four axes; the list is empty if there are no queries or no keys."""

    scores: list[Scores]
    shape: torch.Size  # of the result
    query: Tensor
    reversed: bool  # whether the last query comes first

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return one number for each query from those of each batch; NaN where there is nothing to measure."""
        if not parts:
            dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
            return self.query.new_full(self.shape, torch.nan, dtype=dtype)
        rows = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).view(self.shape)
        return rows.flip(-1) if self.reversed else rows


def _batches(
    queries: ArrayLike | Tensor,
    keys: ArrayLike | Tensor,
    causal: bool,
    visible: ArrayLike | Tensor | None,
    scale: float | None,
    *,
    grouped: bool,
) -> _Batches:
    """Check the arguments and split them into batches of four axes: [batch, head, length, dim]."""
    query, key = _plain("query", queries), _plain("key", keys)
    causal, grouped = flag("causal", causal), flag("enable_gqa", grouped)
    mask = None if visible is None else _plain("mask", visible)
    _check_tensors(query, key)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if type(factor) is not float or not math.isfinite(factor):
        factor = scalar("scale", factor)
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
    scores = [
        Scores(_nth(query, n), _nth(key, n), None if mask is None else _nth(mask, n), causal, factor)
        for n in range(count)
    ]
    return _Batches(scores, query.shape[:-1], query, backwards)


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


def _nth(tensor: Tensor, n: int) -> Tensor:
    """Return batch `n` with four axes; the batches are counted over all axes before the last four."""
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
