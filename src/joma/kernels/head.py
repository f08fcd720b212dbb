"""−ln p of the next token: the largest products of a language model, and most of the memory it moves.

With l = x W + b and p = softmax(l), all that the gradients need of the logits is the excess e = p − 1[target]:

    ∂/∂x = g ∘ (e Wᵀ),    ∂/∂W = (g ∘ x)ᵀ e,    ∂/∂b = Σ g e,

g what comes from above. So the forward pass leaves e where the logits were, and nothing else of their size is made.
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

WORTH = 1024  # types from which a head is worth compiling on CUDA
IN_CACHE = 1 << 19  # logits that the CPU turns into their excess at once

Flat = Float[Tensor, "seed sample width"]
Head = Float[Tensor, "seed width type"]
Biases = Float[Tensor, "seed type"]


def surprisal(
    x: Float[Tensor, "seed sample position width"], weight: Head, bias: Biases, target: Tensor
) -> Float[Tensor, "seed sample position"]:
    """Return −ln softmax(x W + b)[target] in nats.

    Args:
        x: what the head reads.
        weight, bias: of the head.
        target: whole numbers [sample, position], or [seed, sample, position].

    >>> surprisal(torch.zeros(1, 1, 2, 3), torch.zeros(1, 3, 4), torch.zeros(1, 4), torch.tensor([[0, 3]]))
    tensor([[[1.3863, 1.3863]]])
    """
    flat, target = x.flatten(1, 2), target.expand(x.shape[:-1]).flatten(1)
    if weight.is_cuda and weight.shape[-1] < WORTH:
        with torch.autocast("cuda", enabled=False):  # logits rounded to bfloat16 would cost more than they save here
            logits = torch.baddbmm(bias[:, None], flat.to(weight.dtype), weight)
        own = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    else:
        own = _Surprisal.apply(flat, weight, bias, target)
    assert isinstance(own, Tensor)
    return own.view(x.shape[:-1])


class _Surprisal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Flat, weight: Head, bias: Biases, target: Int[Tensor, "seed sample"]) -> Tensor:
        needed = any(ctx.needs_input_grad)
        half = torch.bfloat16 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype
        ctx.types = weight.shape[-1]
        own, *kept = _choose(x)[0](x, weight, bias, target, half=half, needed=needed)
        if needed:
            ctx.save_for_backward(*kept)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Float[Tensor, "seed sample"]) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, excess = ctx.saved_tensors
        return *_choose(x)[1](g, x, weight, excess, ctx.types), None


def _choose(x: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward rule."""
    if not x.is_cuda:
        return _seed_by_seed, _gradients_seed_by_seed
    return torch.compile(_together), torch.compile(_gradients)


def _together(
    x: Flat, weight: Head, bias: Biases, target: Tensor, *, half: torch.dtype, needed: bool
) -> tuple[Tensor, ...]:
    """All seeds at once; rows are padded to what matrix units like, by types of probability zero."""
    spare = -weight.shape[-1] % 64
    x, weight = x.to(half), F.pad(weight.to(half), (0, spare))
    logits = (x @ weight).to(bias.dtype) + F.pad(bias, (0, spare), value=-math.inf)[:, None]
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = (total - logits.gather(-1, target[..., None]))[..., 0]
    if not needed:
        return (own,)
    chosen = torch.arange(logits.shape[-1], device=x.device) == target[..., None]
    return own, x, weight, (torch.exp(logits - total) - chosen.to(logits.dtype)).to(half)


def _gradients(g: Tensor, x: Flat, weight: Head, excess: Tensor, types: int) -> tuple[Tensor, Tensor, Tensor]:
    # Of g only what varies between samples passes through half precision, not its size.
    size = g.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    share, width = (g / size)[..., None], x.shape[-1]
    reading = torch.cat([share * x, share], dim=-1)  # the bias reads a one: its gradient is a row of the same product
    reading = F.pad(reading, (0, -reading.shape[-1] % 8)).to(x.dtype)
    by_head = size[..., None] * (reading.mT @ excess)[..., :types]
    return g[..., None] * (excess @ weight.mT), by_head[:, :width], by_head[:, width]


def _seed_by_seed(
    x: Flat, weight: Head, bias: Biases, target: Tensor, *, half: torch.dtype, needed: bool
) -> tuple[Tensor, ...]:
    """The CPU's way: large products one by one, and logits turned into their excess while they are in the cache."""
    del half
    samples, types = x.shape[1], weight.shape[-1]
    place = x.new_empty(len(x) if needed else 1, samples, types)
    own, rows = x.new_empty(x.shape[:2]), max(1, IN_CACHE // types)
    for seed in range(len(x)):
        logits = torch.mm(x[seed], weight[seed], out=place[seed if needed else 0])
        for part, aim, out in zip(*(one.split(rows) for one in (logits, target[seed, :, None], own[seed, :, None])),
                                  strict=True):  # fmt: skip
            most = part.add_(bias[seed]).amax(dim=1, keepdim=True)
            out.copy_(most - part.gather(1, aim))
            total = part.sub_(most).exp_().sum(dim=1, keepdim=True)
            out.add_(total.log())
            if needed:
                part.div_(total).scatter_add_(1, aim, -torch.ones_like(total))
    return (own, x, weight, place) if needed else (own,)


def _gradients_seed_by_seed(
    g: Tensor, x: Flat, weight: Head, excess: Tensor, types: int
) -> tuple[Tensor, Tensor, Tensor]:
    del types
    by_x, by_weight, by_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight[:, 0])
    for seed in range(len(x)):
        torch.mm(excess[seed], weight[seed].mT, out=by_x[seed]).mul_(g[seed, :, None])
        torch.mm((g[seed, :, None] * x[seed]).mT, excess[seed], out=by_weight[seed])
        torch.mv(excess[seed].mT, g[seed], out=by_bias[seed])
    return by_x, by_weight, by_bias
