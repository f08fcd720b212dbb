"""Attention over few positions in half precision on CUDA: one program for each head of each sample.

Products of 11 by 11 numbers are too small for the libraries' batched products, and splitting heads costs a copy before
and after each. One kernel reads queries, keys and values as the projections write them, adds their biases, and
writes what the next product reads; the backward pass computes the weights again:

    p = softmax(q kᵀ/√d + mask),   o = p v,
    ds = p ∘ (do vᵀ − Σ p ∘ do vᵀ),   dq = ds k/√d,   dk = dsᵀ q/√d,   dv = pᵀ do

On the CPU the same operator runs as plain tensor code, and the tests compare the kernel with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from joma.kernels.gpu import HALF, TRITON

MAX_POSITIONS = 64
_HEAD_WIDTHS = (16, 32, 64, 128)
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? biases"

Keys = Float[Tensor, "seed sample position width"]  # and values
Queries = Float[Tensor, "seed sample query width"]
Mask = Float[Tensor, "query position"]
Biases = Float[Tensor, "3 seed width"]


def fits(x: Keys, heads: int) -> bool:
    """Return whether the kernel supports `x`: few positions, a known head width, half-precision products on CUDA."""
    shape = x.shape[2] <= MAX_POSITIONS and x.shape[-1] // heads in _HEAD_WIDTHS
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return TRITON and x.is_cuda and dtype in HALF and shape


def short_attention(
    query: Queries, key: Keys, value: Keys, mask: Mask, *, heads: int, biases: Biases | None = None
) -> Queries:
    """Return softmax(q kᵀ/√d + mask) v for each head.

    Args:
        query, key, value: heads one after the other along the last axis; there may be fewer queries than keys.
        mask: what is added to the scores of every head, the least finite number for keys that must not be seen. It gets
            no gradient.
        heads: number of heads.
        biases: of queries, keys and values, to which they are added.

    >>> value = torch.tensor([[[[1.0], [3.0]]]])
    >>> short_attention(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 2, 1), value, torch.zeros(1, 2), heads=1)
    tensor([[[[2.]]]])
    """
    return torch.ops.joma.short_attention(query, key, value, mask, biases, heads)


@torch.library.custom_op(
    "joma::short_attention",
    mutates_args=(),
    schema=f"({_INPUTS}, int heads) -> Tensor",
)
def _forward(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, biases: Tensor | None, heads: int
) -> Tensor:
    if query.is_cuda:
        from joma.kernels import short_triton  # triton comes with PyTorch for CUDA only

        return short_triton.forward(query, key, value, mask, biases, heads)
    q, k, v = _split_heads((query, key, value), biases, heads)
    return _join_heads(_weights(q, k, mask) @ v)


@torch.library.custom_op(
    "joma::short_attention_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor grad_output, int heads) -> (Tensor, Tensor, Tensor)",
)
def _backward(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, biases: Tensor | None, grad_output: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        from joma.kernels import short_triton

        return short_triton.backward(query, key, value, mask, biases, grad_output, heads)
    (q, k, v), (do,) = _split_heads((query, key, value), biases, heads), _split_heads((grad_output,), None, heads)
    p, dp = _weights(q, k, mask), do @ v.mT
    ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True)) * q.shape[-1] ** -0.5
    return _join_heads(ds @ k), _join_heads(ds.mT @ q), _join_heads(p.mT @ do)


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
def _(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, biases: Tensor | None, heads: int
) -> Tensor:
    del key, value, mask, biases, heads
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@_backward.register_fake
def _(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, biases: Tensor | None, grad_output: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    del mask, biases, grad_output, heads
    q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    return q, k, v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, biases = ctx.saved_tensors
    gradients = torch.ops.joma.short_attention_backward(*inputs, biases, grad_output, ctx.heads)
    grad_biases = None if biases is None else torch.stack([g.sum(dim=(1, 2), dtype=biases.dtype) for g in gradients])
    return *gradients, None, grad_biases, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
