"""−ln p of the next token: the largest products of a language model, and most of its memory traffic.

With l = x W + b and p = softmax(l), all that the gradients need of the logits is the excess e = p − 1[target]:

    ∂/∂x = g ∘ (e Wᵀ),    ∂/∂W = (g ∘ x)ᵀ e,    ∂/∂b = Σ g e,

where g is the gradient of the result. So the forward pass overwrites the logits with e, and allocates nothing else of
their size. There are two ways to compute this: one seed after the other (CPU), and all seeds at once (CUDA), where
weight and bias are one matrix (`joma.kernels.head_matrix`) and one kernel turns each row of logits into its excess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from joma.kernels.gpu import HALF, TRITON, compiled_on_cuda
from joma.kernels.head_matrix import Bias, Matrix, Weight, head_matrix, is_copy, with_ones, write_bias

MIN_COMPILED_VOCABULARY = 1024  # below that, compiling the head does not pay off on CUDA
MAX_LOGITS = 1 << 29  # logits of a pass without gradients that are in memory at once, on CUDA
CACHED_LOGITS = 1 << 19  # logits that the CPU overwrites by their excess at once, while they are in its cache

Flat = Float[Tensor, "seed sample width"]
Nats = Float[Tensor, "seed sample"]


def surprisal(
    x: Float[Tensor, "seed sample position width"], weight: Weight | Matrix, bias: Bias, target: Tensor
) -> Float[Tensor, "seed sample position"]:
    """Return −ln softmax(x W + b)[target] in nats.

    Args:
        x: the input of the head.
        weight: of the head; or its copy by `head_matrix.half_copy`, into which the bias is written here.
        bias: of the head.
        target: whole numbers [sample, position], or [seed, sample, position].

    >>> surprisal(torch.zeros(1, 1, 2, 3), torch.zeros(1, 3, 4), torch.zeros(1, 4), torch.tensor([[0, 3]]))
    tensor([[[1.3863, 1.3863]]])
    """
    flat, target = x.flatten(1, 2), target.expand(x.shape[:-1]).flatten(1)
    if is_copy(weight, x.shape[-1]):
        write_bias(weight, bias, x.shape[-1])
    elif weight.is_cuda and weight.shape[-1] < MIN_COMPILED_VOCABULARY:
        with torch.autocast("cuda", enabled=False):  # logits rounded to bfloat16 would cost more than they save here
            logits = torch.baddbmm(bias[:, None], flat.to(weight.dtype), weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(x.shape[:-1])
    nats = _Surprisal.apply(flat, weight, bias, target, torch.is_grad_enabled())
    assert isinstance(nats, Tensor)
    return nats.view(x.shape[:-1])


def takes_copies(vocabulary: int) -> bool:
    """Return whether it pays off on CUDA to keep a `half_copy` of the head's weight for a vocabulary of this size."""
    return vocabulary >= MIN_COMPILED_VOCABULARY


class _Surprisal(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x: Flat,
        weight: Weight | Matrix,
        bias: Bias,
        target: Int[Tensor, "seed sample"],
        grad_enabled: bool,  # here it is always disabled, and `needs_input_grad` does not ask
    ) -> Tensor:
        gradients = grad_enabled and any(ctx.needs_input_grad)
        dtype = torch.bfloat16 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype
        forward, ctx.backward_pass = _passes(x)
        nats, *saved = forward(x, weight, bias, target, dtype=dtype, gradients=gradients)
        if gradients:
            ctx.options = {
                "width": x.shape[-1],
                "vocabulary": bias.shape[-1],
                "copied": is_copy(weight, x.shape[-1]),
            }
            ctx.save_for_backward(*saved)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Float[Tensor, "seed sample"]) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ctx.backward_pass(g, *ctx.saved_tensors, **ctx.options), None, None


def _passes(x: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward pass for the device."""
    if x.is_cuda:
        return _forward_at_once, torch.compile(_backward_at_once)
    return _forward_by_seed, _backward_by_seed


def _forward_at_once(
    x: Flat, weight: Weight | Matrix, bias: Bias, target: Tensor, *, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, ...]:
    """Return the surprisals of all seeds, and what the backward pass needs if `gradients`."""
    matrix = weight if is_copy(weight, x.shape[-1]) else compiled_on_cuda(head_matrix, x)(weight, bias, dtype)
    x = compiled_on_cuda(with_ones, x)(x, matrix.shape[1], matrix.dtype)
    if gradients:
        logits = torch.bmm(x, matrix)
        return _excess(logits, target, write=True), x, matrix, logits
    samples = max(1, MAX_LOGITS // (len(x) * matrix.shape[-1]))
    parts = zip(x.split(samples, dim=1), target.split(samples, dim=1), strict=True)
    return (torch.cat([_excess(torch.bmm(part, matrix), label, write=False) for part, label in parts], dim=1),)


def _excess(logits: Float[Tensor, "seed sample column"], target: Tensor, *, write: bool) -> Nats:
    """Return −ln softmax(l)[target]; with `write` overwrite the logits l by softmax(l) − 1[target]."""
    if logits.is_cuda and TRITON and logits.dtype != torch.float64:  # the kernel computes in float32
        from joma.kernels import head_triton  # triton comes with PyTorch for CUDA only

        return head_triton.excess(logits, target, write=write)
    return compiled_on_cuda(plain_excess, logits)(logits, target, write=write)


def plain_excess(logits: Float[Tensor, "seed sample column"], target: Tensor, *, write: bool) -> Nats:
    """Return the same as the kernel `head_triton.excess`, which is compared with it."""
    wide = logits.float() if logits.dtype in HALF else logits
    total = wide.logsumexp(dim=-1, keepdim=True)
    nats = (total - wide.gather(-1, target[..., None]))[..., 0]
    if write:
        one_hot = torch.arange(logits.shape[-1], device=logits.device) == target[..., None]
        logits.copy_(torch.exp(wide - total) - one_hot.to(wide.dtype))
    return nats


def _backward_at_once(
    g: Tensor, x: Tensor, matrix: Matrix, excess: Tensor, *, width: int, vocabulary: int, copied: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients; that of a copy is as large as the copy, and its row after the weight is that of the bias.

    Only the ratios between samples pass through half precision, not the size of g. The gradient of a copy in bfloat16
    has its range: there g, which is usually the same for all samples, is rounded as a whole.
    """
    size = torch.ones_like(g[:, :1])
    if excess.dtype in HALF and not copied:
        size = g.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    inputs = ((g / size)[..., None] * x).to(excess.dtype)  # the bias has input 1: its gradient is a row of the product
    grad_matrix = inputs.mT @ excess
    grad_bias = size * grad_matrix[:, width, :vocabulary].to(g.dtype)
    grad_x = g[..., None] * (excess @ matrix.mT)[..., :width].to(g.dtype)
    if copied:
        return grad_x, grad_matrix, grad_bias
    # Separate tensors: autograd would copy a part of a larger one.
    return grad_x, size[..., None] * grad_matrix[:, :width, :vocabulary].to(g.dtype), grad_bias


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
    g: Tensor, x: Flat, weight: Weight, excess: Tensor, **sizes: int
) -> tuple[Tensor, Tensor, Tensor]:
    del sizes
    grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight[:, 0])
    for seed in range(len(x)):
        torch.mm(excess[seed], weight[seed].mT, out=grad_x[seed]).mul_(g[seed, :, None])
        torch.mm((g[seed, :, None] * x[seed]).mT, excess[seed], out=grad_weight[seed])
        torch.mv(excess[seed].mT, g[seed], out=grad_bias[seed])
    return grad_x, grad_weight, grad_bias
