"""Attention over a few positions in half precision on CUDA: one program for each head of each sample.

Products of 11 by 11 numbers are too small for the libraries' batched products, and splitting heads costs a copy before
and after each. One kernel reads queries, keys and values as the projections leave them, and writes what the next one
reads; the backward pass computes the weights again:

    p = softmax(q kᵀ/√d + reach),   o = p v,
    ds = p ∘ (do vᵀ − Σ p ∘ do vᵀ),   dq = ds k/√d,   dk = dsᵀ q/√d,   dv = pᵀ do
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from joma.gpu import TRITON

MOST = 64  # positions
_PARTS = (16, 32, 64, 128)  # units of a head
_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor reach"
_HALF = (torch.bfloat16, torch.float16)

Stream = Float[Tensor, "seed sample position width"]
Asking = Float[Tensor, "seed sample asks width"]
Reach = Float[Tensor, "asks position"]


def fits(value: Stream, heads: int) -> bool:
    """Whether there is a kernel for values of this kind and so many heads."""
    shape = value.shape[2] <= MOST and value.shape[-1] // heads in _PARTS
    return TRITON and value.is_cuda and value.dtype in _HALF and shape


def short_attention(query: Asking, key: Stream, value: Stream, reach: Reach, *, heads: int) -> Asking:
    """Return softmax(q kᵀ/√d + reach) v, head by head.

    Args:
        query, key, value: heads one after the other along the last axis; there may be fewer queries than keys.
        reach: what is added to the scores of every head, the least finite number for what is not to be seen. It gets no
            gradient.
        heads: their number.

    >>> value = torch.tensor([[[[1.0], [3.0]]]])
    >>> short_attention(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 2, 1), value, torch.zeros(1, 2), heads=1)
    tensor([[[[2.]]]])
    """
    return torch.ops.joma.short_attention(query, key, value, reach, heads)


@torch.library.custom_op(
    "joma::short_attention",
    mutates_args=(),
    schema=f"({_GIVEN}, int heads) -> Tensor",
)
def _forward(query: Tensor, key: Tensor, value: Tensor, reach: Tensor, heads: int) -> Tensor:
    if query.is_cuda:
        from joma.models import short_kernel  # triton comes with PyTorch for CUDA only

        return short_kernel.forward(query, key, value, reach, heads)
    q, k, v = (_split(x, heads) for x in (query, key, value))
    return _joined(_weights(q, k, reach) @ v)


@torch.library.custom_op(
    "joma::short_attention_backward",
    mutates_args=(),
    schema=f"({_GIVEN}, Tensor slope, int heads) -> (Tensor, Tensor, Tensor)",
)
def _backward(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, reach: Tensor, slope: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        from joma.models import short_kernel

        return short_kernel.backward(query, key, value, reach, slope, heads)
    q, k, v, do = (_split(x, heads) for x in (query, key, value, slope))
    p, dp = _weights(q, k, reach), do @ v.mT
    ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True)) * q.shape[-1] ** -0.5
    return _joined(ds @ k), _joined(ds.mT @ q), _joined(p.mT @ do)


def _split(x: Stream, heads: int) -> Float[Tensor, "seed sample head position part"]:
    return x.unflatten(-1, (heads, -1)).transpose(2, 3)


def _joined(x: Float[Tensor, "seed sample head position part"]) -> Stream:
    return x.transpose(2, 3).flatten(3).contiguous()


def _weights(q: Tensor, k: Tensor, reach: Reach) -> Float[Tensor, "seed sample head asks position"]:
    return (q @ k.mT * q.shape[-1] ** -0.5 + reach).softmax(dim=-1)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, reach: Tensor, heads: int) -> Tensor:
    del key, value, reach, heads
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@_backward.register_fake
def _(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, reach: Tensor, slope: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    del reach, slope, heads
    q, k, v = (torch.empty(own.shape, dtype=own.dtype, device=own.device) for own in (query, key, value))
    return q, k, v


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.joma.short_attention_backward(*ctx.saved_tensors, slope, ctx.heads)
    return *found, None, None


_forward.register_autograd(_slopes, setup_context=_remember)
