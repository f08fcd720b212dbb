"""Row entropies of attention from PyTorch's fused attention kernels on CUDA, without the attention matrix.

With o = attention(q, k, value := k) and lse_i the log-sum-exp of row i, both of which fused kernels return,

    H_i = lse_i − scale · q_i·o_i.

Two numbers of the size of the scores cancel here, which costs digits; the sums of `entropy_blocks` do not cancel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from joma.kernels.entropy_blocks import centred, head_pieces
from joma.kernels.entropy_scores import Rows, Scores
from joma.kernels.gpu import HALF


def efficient(scores: Scores) -> Rows:
    """Return the rows from PyTorch's memory-efficient attention, in float32; without a mask."""
    return _from_identity(scores, _efficient_kernel, torch.float32, multiple=4)


def flash(scores: Scores) -> Rows:
    """Return the rows from flash attention, in half precision: its rounded output causes errors of up to 0.1 nats."""
    return _from_identity(scores, _flash_kernel, scores.query.dtype, multiple=8)


def _from_identity(
    scores: Scores, kernel: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, *, multiple: int
) -> Rows:
    """Return lse − scale · q·o, a few heads at a time; the width of a head is padded with zeros to a `multiple`."""
    batch, heads, queries, dim = scores.query.shape
    entropy = torch.empty(batch, heads, queries, dtype=torch.float32, device=scores.query.device)
    for part, shared in head_pieces(scores, batch * heads)[1]:
        query = pad(scores.query[part].to(dtype), (0, -dim % multiple))
        key = scores.key[shared] if dtype in HALF else centred(scores.key[shared], dtype)
        output, lse = kernel(query, pad(key, (0, -dim % multiple)), scores.causal, scores.scale)
        entropy[part] = lse[..., :queries] - scores.scale * output.float().mul_(query).sum(dim=-1)
    return Rows(entropy.clamp_(min=0), None)  # two large numbers cancel, and rounding may leave less than 0


def _efficient_kernel(query: Tensor, key: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, key, None, True, 0.0, causal, scale=scale)[:2]


def _flash_kernel(query: Tensor, key: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, key, 0.0, causal, False, scale=scale)[:2]


def fits_efficient(scores: Scores) -> bool:
    """Return whether `efficient` supports these scores."""
    return scores.query.is_cuda and scores.mask is None and scores.plain and scores.query.dtype != torch.float64


def fits_flash(scores: Scores) -> bool:
    """Return whether `flash` supports these scores."""
    square = not scores.causal or scores.query.shape[2] == scores.key.shape[2]
    small = scores.query.dtype in HALF and scores.query.shape[-1] <= 256
    return fits_efficient(scores) and square and small and torch.cuda.get_device_capability(scores.query.device)[0] >= 8
