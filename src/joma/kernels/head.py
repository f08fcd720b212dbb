"""−ln p of the next token: the largest products of a language model, and most of its memory traffic.

With l = x W + b and p = softmax(l), all that the gradients need of the logits is the excess e = p − 1[target]:

    ∂/∂x = g ∘ (e Wᵀ),    ∂/∂W = (g ∘ x)ᵀ e,    ∂/∂b = Σ g e,

where g is the gradient of the result. So the forward pass overwrites the logits with e, and allocates nothing else of
their size. There are three ways to compute this: one seed after the other (CPU), all seeds at once (compiled, CUDA),
and the same with one kernel for the rows of logits (half precision on CUDA).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from joma.kernels.gpu import HALF, TRITON

ROW_MULTIPLE = 64  # a length of rows that suits the tensor cores
MIN_COMPILED_VOCABULARY = 1024  # below that, compiling the head does not pay off on CUDA
CACHED_LOGITS = 1 << 19  # logits that the CPU overwrites by their excess at once, while they are in its cache

Flat = Float[Tensor, "seed sample width"]
Weight = Float[Tensor, "seed width vocabulary"]
Bias = Float[Tensor, "seed vocabulary"]


def surprisal(
    x: Float[Tensor, "seed sample position width"], weight: Weight, bias: Bias, target: Tensor
) -> Float[Tensor, "seed sample position"]:
    """Return −ln softmax(x W + b)[target] in nats.

    Args:
        x: the input of the head.
        weight, bias: parameters of the head.
        target: whole numbers [sample, position], or [seed, sample, position].

    >>> surprisal(torch.zeros(1, 1, 2, 3), torch.zeros(1, 3, 4), torch.zeros(1, 4), torch.tensor([[0, 3]]))
    tensor([[[1.3863, 1.3863]]])
    """
    flat, target = x.flatten(1, 2), target.expand(x.shape[:-1]).flatten(1)
    if weight.is_cuda and weight.shape[-1] < MIN_COMPILED_VOCABULARY:
        with torch.autocast("cuda", enabled=False):  # logits rounded to bfloat16 would cost more than they save here
            logits = torch.baddbmm(bias[:, None], flat.to(weight.dtype), weight)
        nats = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    else:
        nats = _Surprisal.apply(flat, weight, bias, target)
    assert isinstance(nats, Tensor)
    return nats.view(x.shape[:-1])


class _Surprisal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Flat, weight: Weight, bias: Bias, target: Int[Tensor, "seed sample"]) -> Tensor:
        gradients = any(ctx.needs_input_grad)
        dtype = torch.bfloat16 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype
        ctx.vocabulary = weight.shape[-1]
        forward, _ = _passes(x, dtype)
        nats, *saved = forward(x, weight, bias, target, dtype=dtype, gradients=gradients)
        if gradients:
            ctx.save_for_backward(*saved)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Float[Tensor, "seed sample"]) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, excess = ctx.saved_tensors
        _, backward = _passes(x, x.dtype)
        return *backward(g, x, weight, excess, ctx.vocabulary), None


def _passes(x: Tensor, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward pass for the device and the dtype of the products."""
    if not x.is_cuda:
        return _forward_by_seed, _backward_by_seed
    use_kernel = TRITON and dtype in HALF
    return _forward_by_kernel if use_kernel else torch.compile(_forward_at_once), torch.compile(_backward_at_once)


def _forward_by_kernel(
    x: Flat, weight: Weight, bias: Bias, target: Tensor, *, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, ...]:
    """Return the same as `_forward_at_once`: one kernel reads each row of logits once and writes its excess."""
    from joma.kernels import head_triton  # triton comes with PyTorch for CUDA only

    x, weight = x.to(dtype), torch.compile(_padded)(weight, dtype)
    logits = torch.bmm(x, weight)
    nats = head_triton.excess(logits, bias, target, write=gradients)
    return (nats, x, weight, logits) if gradients else (nats,)


def _padded(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight with columns of zeros added, up to a length that suits the tensor cores."""
    return F.pad(weight.to(dtype), (0, -weight.shape[-1] % ROW_MULTIPLE))


def _forward_at_once(
    x: Flat, weight: Weight, bias: Bias, target: Tensor, *, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, ...]:
    """Return the surprisals of all seeds, and what the backward pass needs if `gradients`.

    Rows are padded with tokens of probability zero to a length that suits the tensor cores.
    """
    x, weight = x.to(dtype), _padded(weight, dtype)
    padding = weight.shape[-1] - bias.shape[-1]
    logits = (x @ weight).to(bias.dtype) + F.pad(bias, (0, padding), value=-math.inf)[:, None]
    total = logits.logsumexp(dim=-1, keepdim=True)
    nats = (total - logits.gather(-1, target[..., None]))[..., 0]
    if not gradients:
        return (nats,)
    one_hot = torch.arange(logits.shape[-1], device=x.device) == target[..., None]
    return nats, x, weight, (torch.exp(logits - total) - one_hot.to(logits.dtype)).to(dtype)


def _backward_at_once(
    g: Tensor, x: Flat, weight: Weight, excess: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    # Only the ratios between samples pass through half precision, not the size of g.
    size = g.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    ratio, width = (g / size)[..., None], x.shape[-1]
    inputs = torch.cat([ratio * x, ratio], dim=-1)  # the bias has input 1: its gradient is a row of the same product
    inputs = F.pad(inputs, (0, -inputs.shape[-1] % 8)).to(x.dtype)
    grad_head = (inputs.mT @ excess)[..., :vocabulary]
    # Separate tensors: autograd would copy a part of a larger one.
    grad_weight, grad_bias = size[..., None] * grad_head[:, :width], size * grad_head[:, width]
    return g[..., None] * (excess @ weight.mT), grad_weight, grad_bias


def _forward_by_seed(
    x: Flat, weight: Weight, bias: Bias, target: Tensor, *, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, ...]:
    """Return the same on the CPU: one product for each seed, and logits overwritten by their excess in the cache."""
    del dtype
    samples, vocabulary = x.shape[1], weight.shape[-1]
    excess = x.new_empty(len(x) if gradients else 1, samples, vocabulary)
    nats, rows = x.new_empty(x.shape[:2]), max(1, CACHED_LOGITS // vocabulary)
    for seed in range(len(x)):
        logits = torch.mm(x[seed], weight[seed], out=excess[seed if gradients else 0])
        columns = logits, target[seed, :, None], nats[seed, :, None]
        for part, label, out in zip(*(column.split(rows) for column in columns), strict=True):
            largest = part.add_(bias[seed]).amax(dim=1, keepdim=True)
            out.copy_(largest - part.gather(1, label))
            total = part.sub_(largest).exp_().sum(dim=1, keepdim=True)
            out.add_(total.log())
            if gradients:
                part.div_(total).scatter_add_(1, label, -torch.ones_like(total))
    return (nats, x, weight, excess) if gradients else (nats,)


def _backward_by_seed(
    g: Tensor, x: Flat, weight: Weight, excess: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    del vocabulary
    grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight[:, 0])
    for seed in range(len(x)):
        torch.mm(excess[seed], weight[seed].mT, out=grad_x[seed]).mul_(g[seed, :, None])
        torch.mm((g[seed, :, None] * x[seed]).mT, excess[seed], out=grad_weight[seed])
        torch.mv(excess[seed].mT, g[seed], out=grad_bias[seed])
    return grad_x, grad_weight, grad_bias
