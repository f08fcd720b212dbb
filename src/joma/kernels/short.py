"""Attention over a few positions in half precision on CUDA: one program for each head of each sample.

Products of 11 by 11 numbers are too small for the libraries' batched products, and splitting heads costs a copy before
and after each. One kernel reads queries, keys and values as products leave them, adds their biases, and writes what the
next product reads; the backward pass computes the weights again:

    p = softmax(q kᵀ/√d + reach),   o = p v,
    ds = p ∘ (do vᵀ − Σ p ∘ do vᵀ),   dq = ds k/√d,   dk = dsᵀ q/√d,   dv = pᵀ do
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from joma.kernels.gpu import HALF, TRITON

MOST = 64  # positions
_PARTS = (16, 32, 64, 128)  # units of a head
_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor reach, Tensor? biases"

Stream = Float[Tensor, "seed sample position width"]
Asking = Float[Tensor, "seed sample asks width"]
Reach = Float[Tensor, "asks position"]
Biases = Float[Tensor, "3 seed width"]


def fits(x: Stream, heads: int) -> bool:
    """Whether there is a kernel for so many positions and heads, and for what products of x come in."""
    shape = x.shape[2] <= MOST and x.shape[-1] // heads in _PARTS
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return TRITON and x.is_cuda and dtype in HALF and shape


def short_attention(
    query: Asking, key: Stream, value: Stream, reach: Reach, *, heads: int, biases: Biases | None = None
) -> Asking:
    """Return softmax(q kᵀ/√d + reach) v, head by head.

    Args:
        query, key, value: heads one after the other along the last axis; there may be fewer queries than keys.
        reach: what is added to the scores of every head, the least finite number for what is not to be seen. It gets no
            gradient.
        heads: their number.
        biases: of queries, keys and values, to be added to them.

    >>> value = torch.tensor([[[[1.0], [3.0]]]])
    >>> short_attention(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 2, 1), value, torch.zeros(1, 2), heads=1)
    tensor([[[[2.]]]])
    """
    return torch.ops.joma.short_attention(query, key, value, reach, biases, heads)


@torch.library.custom_op(
    "joma::short_attention",
    mutates_args=(),
    schema=f"({_GIVEN}, int heads) -> Tensor",
)
def _forward(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, reach: Tensor, biases: Tensor | None, heads: int
) -> Tensor:
    if query.is_cuda:
        from joma.kernels import short_triton  # triton comes with PyTorch for CUDA only

        return short_triton.forward(query, key, value, reach, biases, heads)
    q, k, v = _split((query, key, value), biases, heads)
    return _joined(_weights(q, k, reach) @ v)


@torch.library.custom_op(
    "joma::short_attention_backward",
    mutates_args=(),
    schema=f"({_GIVEN}, Tensor slope, int heads) -> (Tensor, Tensor, Tensor)",
)
def _backward(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, reach: Tensor, biases: Tensor | None, slope: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        from joma.kernels import short_triton

        return short_triton.backward(query, key, value, reach, biases, slope, heads)
    (q, k, v), (do,) = _split((query, key, value), biases, heads), _split((slope,), None, heads)
    p, dp = _weights(q, k, reach), do @ v.mT
    ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True)) * q.shape[-1] ** -0.5
    return _joined(ds @ k), _joined(ds.mT @ q), _joined(p.mT @ do)


def _split(streams: Sequence[Tensor], biases: Biases | None, heads: int) -> list[Tensor]:
    """Return [seed, sample, head, position, part] of each, its bias added."""
    if biases is not None:
        streams = [x + own[:, None, None] for x, own in zip(streams, biases, strict=True)]
    return [x.unflatten(-1, (heads, -1)).transpose(2, 3) for x in streams]


def _joined(x: Float[Tensor, "seed sample head position part"]) -> Stream:
    return x.transpose(2, 3).flatten(3).contiguous()


def _weights(q: Tensor, k: Tensor, reach: Reach) -> Float[Tensor, "seed sample head asks position"]:
    return (q @ k.mT * q.shape[-1] ** -0.5 + reach).softmax(dim=-1)


@_forward.register_fake
def _(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, reach: Tensor, biases: Tensor | None, heads: int
) -> Tensor:
    del key, value, reach, biases, heads
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@_backward.register_fake
def _(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, reach: Tensor, biases: Tensor | None, slope: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    del reach, biases, slope, heads
    q, k, v = (torch.empty(own.shape, dtype=own.dtype, device=own.device) for own in (query, key, value))
    return q, k, v


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    *given, biases = ctx.saved_tensors
    found = torch.ops.joma.short_attention_backward(*given, biases, slope, ctx.heads)
    by_bias = None if biases is None else torch.stack([own.sum(dim=(1, 2), dtype=biases.dtype) for own in found])
    return *found, None, by_bias, None


_forward.register_autograd(_slopes, setup_context=_remember)
