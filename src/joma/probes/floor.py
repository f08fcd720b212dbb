"""How low the entropy of a row of attention can be, given the size of its logits (Zhai et al., arXiv 2303.06296)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, broadcast, flag, real, scalar
from joma.probes.states import floating


def entropy_floor(logit_norm: ArrayLike | Tensor, keys: ArrayLike | Tensor) -> Tensor:
    """Return the least entropy of a row of attention over T keys whose centred logits have norm σ, in nats.

        B = ln(1 + x) + g x/(1 + x),    g = σ √(T/(T−1)),    x = (T−1) e^{−g}

    No row has a lower entropy, and a row with one logit up and all others equally down has this one.

    Args:
        logit_norm: σ, norm of each row's logits over the keys that it sees, less their mean; as `logit_norms` returns.
        keys: T, the number of keys that each row sees; broadcasts with `logit_norm`.

    Returns:
        A tensor of the common shape, in the floating-point type of `logit_norm`; 0 where one key is seen.

    >>> entropy_floor(torch.tensor([0.0, 4.0, 40.0]), torch.tensor(10))
    tensor([2.3026e+00, 6.1885e-01, 1.8963e-16])
    """
    norm = floating("logit_norm", logit_norm, "pass what `logit_norms` returns")
    count = torch.from_numpy(real("keys", keys)).to(norm)
    if norm.numel() and bool((norm < 0).any()):
        raise InputError("logit_norm", "at least 0", f"{float(norm.min()):.6g}", "pass what `logit_norms` returns")
    if count.numel() and not bool((count >= 1).all()):
        raise InputError("keys", "at least 1", f"{float(count.min()):.6g}", "give the number of keys a row sees")
    broadcast(logit_norm=np.empty(norm.shape), keys=np.empty(count.shape))
    others = count - 1
    gap = norm * (count / others.clamp_min(1)).sqrt()
    x = others * torch.exp(-gap)
    return torch.log1p(x) + torch.where(x > 0, gap * x, 0.0) / (1 + x)


def logit_norms(query: Tensor, key: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Return the norm of each row's attention logits over the keys that it sees, less their mean.

        ‖s_i − s̄_i‖,    s_ij = scale · q_i·k_j

    The matrix of logits is computed: this is for short contexts.

    Args:
        query: [*batch, query, dim].
        key: [*batch, key, dim].
        causal: whether query i sees only keys 0 to i.
        scale: 1/√dim if not given.

    Returns:
        [*batch, query].

    >>> logit_norms(torch.eye(2), torch.eye(2), scale=1.0)
    tensor([0.7071, 0.7071])
    """
    query, key = (floating(name, value, "pass queries and keys") for name, value in (("query", query), ("key", key)))
    if query.dtype != key.dtype or query.device != key.device:
        got = f"{key.dtype} on {key.device}"
        raise InputError("key", f"{query.dtype} on {query.device}, as `query`", got, "convert one of them")
    if query.ndim < 2 or key.ndim < 2 or query.shape[-1] != key.shape[-1]:
        got = f"{tuple(query.shape)} and {tuple(key.shape)}"
        raise InputError("key", "[*batch, key, dim] with the dim of `query`", got, "pass queries and keys of one head")
    factor = query.shape[-1] ** -0.5 if scale is None else scalar("scale", scale)
    logits = factor * query @ key.mT
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
    seen = seen.tril() if flag("causal", causal) else seen
    mean = (logits * seen).sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)
    return torch.linalg.vector_norm((logits - mean) * seen, dim=-1)
