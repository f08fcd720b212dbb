"""The entropy of attention, in nats: defined here and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, flag
from joma.kernels.entropy_scores import entropy_of
from joma.probes.attention_call import AttentionCall, names_as_given, one_name
from joma.probes.states import floating
from joma.probes.summary import summary_rows
from joma.tensors import axis


class AttentionRows(NamedTuple):
    """Measures of each query's attention; every field has the shape of `query` without its last axis."""

    entropy: Tensor  # in nats
    relative: Tensor  # entropy over its largest possible value, the logarithm of the number of visible keys
    effective: Tensor  # exp(entropy), the effective number of tokens
    largest: Tensor  # the largest weight


def shannon_entropy(p: ArrayLike | Tensor, dim: int = -1, *, check: bool = True) -> Tensor:
    """Return the entropy H = −Σ p ln p of probabilities along `dim`, with 0 ln 0 = 0.

    Args:
        p: probabilities that sum to one along `dim`. A distribution that holds NaN, as the attention of a diverged
            seed does, has entropy NaN.
        dim: the axis of the distribution.
        check: refuse what does not sum to one, for which a GPU is awaited; a captured step cannot wait.

    Returns:
        A tensor without the axis `dim`, between 0 and the logarithm of its length.

    >>> shannon_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0], [torch.nan, 0.0]]))
    tensor([0.6931, 0.0000,    nan])
    """
    p = floating("p", p, "pass probabilities")
    dim = axis("dim", dim, p)
    if flag("check", check):
        _check_sums(p, dim)
    return entropy_of(p, dim)


def _check_sums(p: Tensor, dim: int) -> None:
    """Raise `InputError` unless the distributions along `dim`, those with NaN apart, sum to one."""
    sums = p.detach().sum(dim=dim)
    defined_sums, defined_p = sums, p.detach()
    if not torch.isfinite(sums).all():
        undefined = sums.isnan()
        defined_sums, defined_p = sums[~undefined], p.masked_fill(undefined.unsqueeze(dim), 0.0)
    if defined_sums.numel() and ((defined_sums - 1).abs().max() > 1e-3 or defined_p.min() < 0):
        got = f"sums in [{float(defined_sums.min()):.3g}, {float(defined_sums.max()):.3g}]"
        raise InputError("p", "distributions that sum to 1", got, "apply `.softmax(-1)` first")


def attention_entropy(
    query: ArrayLike | Tensor,
    key: ArrayLike | Tensor,
    *,
    causal: bool | None = None,
    mask: ArrayLike | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "highest",
    is_causal: bool | None = None,
    attn_mask: ArrayLike | Tensor | None = None,
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
        is_causal, attn_mask: torch's names of `causal` and `mask`, of each of which one name may be given.

    Returns:
        [*batch, head, query] in float32, or float64 for float64. NaN where all keys are hidden or there are none (see
            `mean_entropy`), and where the queries or keys of a head hold NaN, as those of a diverged seed do.

    >>> query, key = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    >>> attention_entropy(query, key, causal=True).exp()
    tensor([[[1., 2., 3., 4.]]])
    """
    causal, mask = (
        one_name(("causal", "is_causal"), (causal, is_causal)),
        one_name(("mask", "attn_mask"), (mask, attn_mask)),
    )
    call = AttentionCall(query, key, mask, causal is not None and causal, scale, enable_gqa)
    with names_as_given(is_causal=is_causal, attn_mask=attn_mask):
        return summary_rows(call, ("entropy",), precision=precision)["entropy"]


def attention_rows(
    query: ArrayLike | Tensor,
    key: ArrayLike | Tensor,
    *,
    causal: bool | None = None,
    mask: ArrayLike | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "highest",
    is_causal: bool | None = None,
    attn_mask: ArrayLike | Tensor | None = None,
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
        is_causal, attn_mask: torch's names of `causal` and `mask`.

    Returns:
        Four tensors [*batch, head, query], NaN where all keys are hidden.

    >>> rows = attention_rows(torch.zeros(2, 8), torch.ones(4, 8))
    >>> rows.relative, rows.effective, rows.largest
    (tensor([1., 1.]), tensor([4., 4.]), tensor([0.2500, 0.2500]))
    """
    causal, mask = (
        one_name(("causal", "is_causal"), (causal, is_causal)),
        one_name(("mask", "attn_mask"), (mask, attn_mask)),
    )
    call = AttentionCall(query, key, mask, causal is not None and causal, scale, enable_gqa)
    measures = ("entropy", "relative_entropy", "effective_tokens", "largest_weight")
    with names_as_given(is_causal=is_causal, attn_mask=attn_mask):
        return AttentionRows(*summary_rows(call, measures, precision=precision).values())


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
