"""Attention over few positions in half precision on CUDA: one program for each head of each sample.

Products of 11 by 11 numbers are too small for the libraries' batched products, and splitting heads costs a copy before
and after each. One kernel reads queries, keys and values as the projections write them, adds their biases, and
writes what the next product reads; the backward pass computes the weights again:

    p = softmax(q kᵀ/√d + mask),   o = (r ∘ p) v,   dp = r ∘ (do vᵀ),
    ds = p ∘ (dp − Σ p ∘ dp),   dq = ds k/√d,   dk = dsᵀ q/√d,   dv = (r ∘ p)ᵀ do

where r is 1, or the factors of dropout on the weights, which `joma.noise` defines.
On the CPU the same operator runs as plain tensor code, and the tests compare the kernel with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from joma.kernels.gpu import HALF, TRITON
from joma.noise import dropout

MAX_POSITIONS = 64
MIN_HEAD_WIDTH, MAX_HEAD_WIDTH = 16, 1024
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? biases, Tensor? noise"
_OPTIONS = "int heads, float p, int site"

Keys = Float[Tensor, "seed sample position width"]  # and values
Queries = Float[Tensor, "seed sample query width"]
Mask = Float[Tensor, "*sample query position"]
Biases = Float[Tensor, "3 seed width"]


def fits(x: Keys, heads: int) -> bool:
    """Return whether the kernel supports `x`: few positions, an even head width, half-precision products on CUDA."""
    part = x.shape[-1] // heads
    shape = x.shape[2] <= MAX_POSITIONS and MIN_HEAD_WIDTH <= part <= MAX_HEAD_WIDTH and part % 8 == 0
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return TRITON and x.is_cuda and dtype in HALF and shape


class WeightDropout(NamedTuple):
    """Dropout on the attention weights: the arguments of `joma.noise.dropout`."""

    p: float
    key: Int[Tensor, "2 seed"]
    site: int


def short_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    mask: Mask,
    *,
    heads: int,
    biases: Biases | None = None,
    dropout: WeightDropout | None = None,
) -> Queries:
    """Return softmax(q kᵀ/√d + mask) v for each head.

    Args:
        query, key, value: heads one after the other along the last axis; there may be fewer queries than keys.
        mask: what is added to the scores of every head, the least finite number for keys that must not be seen;
            [query, key], [sample, 1, query, key] or [seed, sample, 1, query, key]. It gets no gradient.
        heads: number of heads.
        biases: of queries, keys and values, to which they are added.
        dropout: on the weights, after the softmax.

    >>> value = torch.tensor([[[[1.0], [3.0]]]])
    >>> short_attention(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 2, 1), value, torch.zeros(1, 2), heads=1)
    tensor([[[[2.]]]])
    """
    p, noise, site = (0.0, None, 0) if dropout is None else dropout
    return torch.ops.joma.short_attention(query, key, value, mask, biases, noise, heads, p, site)


def short_attention_joined(
    joined: Float[Tensor, "seed sample position three_widths"],
    mask: Mask,
    *,
    heads: int,
    dropout: WeightDropout | None = None,
) -> Queries:
    """Return `short_attention` of queries, keys and values that one product wrote side by side, biases included.

    Its gradient is one tensor too, so that the next products need no copies.

    >>> joined = torch.tensor([[[[0.0, 1.0, 1.0], [0.0, 1.0, 3.0]]]])
    >>> short_attention_joined(joined, torch.zeros(2, 2), heads=1)
    tensor([[[[2.],
              [2.]]]])
    """
    p, noise, site = (0.0, None, 0) if dropout is None else dropout
    return torch.ops.joma.short_attention_joined(joined, mask, noise, heads, p, site)


@torch.library.custom_op(
    "joma::short_attention",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}) -> Tensor",
)
def _forward(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    biases: Tensor | None,
    noise: Tensor | None,
    heads: int,
    p: float,
    site: int,
) -> Tensor:
    options = {"heads": heads, "p": p, "site": site}
    if query.is_cuda:
        from joma.kernels import short_triton  # triton comes with PyTorch for CUDA only

        return short_triton.forward((query, key, value, mask), biases, noise, options)
    q, k, v = _split_heads((query, key, value), biases, heads)
    return _join_heads(_retained(_weights(q, k, mask), noise, p, site) @ v)


@torch.library.custom_op(
    "joma::short_attention_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor grad_output, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    biases: Tensor | None,
    noise: Tensor | None,
    grad_output: Tensor,
    heads: int,
    p: float,
    site: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        from joma.kernels import short_triton

        options = {"heads": heads, "p": p, "site": site}
        return short_triton.backward((query, key, value, mask), biases, noise, grad_output, options)
    (q, k, v), (do,) = _split_heads((query, key, value), biases, heads), _split_heads((grad_output,), None, heads)
    weights, dp = _weights(q, k, mask), _retained(do @ v.mT, noise, p, site)
    ds = weights * (dp - (weights * dp).sum(dim=-1, keepdim=True)) * q.shape[-1] ** -0.5
    return _join_heads(ds @ k), _join_heads(ds.mT @ q), _join_heads(_retained(weights, noise, p, site).mT @ do)


def _retained(weights: Tensor, noise: Tensor | None, p: float, site: int) -> Tensor:
    return weights if noise is None else dropout(weights, p, key=noise, site=site)


def _split_heads(inputs: Sequence[Tensor], biases: Biases | None, heads: int) -> list[Tensor]:
    """Return [seed, sample, head, position, part] of each input, its bias added."""
    if biases is not None:
        inputs = [x + bias[:, None, None] for x, bias in zip(inputs, biases, strict=True)]
    return [x.unflatten(-1, (heads, -1)).transpose(2, 3) for x in inputs]


def _join_heads(x: Float[Tensor, "seed sample head position part"]) -> Keys:
    return x.transpose(2, 3).flatten(3).contiguous()


def _weights(q: Tensor, k: Tensor, mask: Mask) -> Float[Tensor, "seed sample head query position"]:
    return (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(dim=-1)


@_forward.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    return q, k, v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.heads, ctx.p, ctx.site = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, biases, noise = ctx.saved_tensors
    options = ctx.heads, ctx.p, ctx.site
    gradients = torch.ops.joma.short_attention_backward(*inputs, biases, noise, grad_output, *options)
    grad_biases = None if biases is None else torch.stack([g.sum(dim=(1, 2), dtype=biases.dtype) for g in gradients])
    return *gradients, None, grad_biases, *(None,) * 4


_forward.register_autograd(_gradients, setup_context=_setup_context)


@torch.library.custom_op(
    "joma::short_attention_joined",
    mutates_args=(),
    schema=f"(Tensor joined, Tensor mask, Tensor? noise, {_OPTIONS}) -> Tensor",
)
def _forward_joined(  # noqa: PLR0917
    joined: Tensor, mask: Tensor, noise: Tensor | None, heads: int, p: float, site: int
) -> Tensor:
    return _forward(*joined.chunk(3, dim=-1), mask, None, noise, heads, p, site)


@torch.library.custom_op(
    "joma::short_attention_joined_backward",
    mutates_args=(),
    schema=f"(Tensor joined, Tensor mask, Tensor? noise, Tensor grad_output, {_OPTIONS}) -> Tensor",
)
def _backward_joined(  # noqa: PLR0917
    joined: Tensor, mask: Tensor, noise: Tensor | None, grad_output: Tensor, heads: int, p: float, site: int
) -> Tensor:
    if joined.is_cuda:
        from joma.kernels import short_triton

        return short_triton.backward_joined(joined, mask, noise, grad_output, {"heads": heads, "p": p, "site": site})
    gradients = _backward(*joined.chunk(3, dim=-1), mask, None, noise, grad_output, heads, p, site)
    return torch.cat(gradients, dim=-1)


@_forward_joined.register_fake
def _(joined: Tensor, *_: Any) -> Tensor:
    return torch.empty((*joined.shape[:3], joined.shape[3] // 3), dtype=joined.dtype, device=joined.device)


@_backward_joined.register_fake
def _(joined: Tensor, *_: Any) -> Tensor:
    return torch.empty(joined.shape, dtype=joined.dtype, device=joined.device)


def _gradients_joined(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    options = ctx.heads, ctx.p, ctx.site
    gradient = torch.ops.joma.short_attention_joined_backward(*ctx.saved_tensors, grad_output, *options)
    return gradient, *(None,) * 5


_forward_joined.register_autograd(_gradients_joined, setup_context=_setup_context)
