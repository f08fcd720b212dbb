"""The axes of attention in modules where they cannot be found out: from the softmax to the values, or in SDPA.

`LAYOUTS` is the table to add to, by the class of a module, with its package where the name is a common one. Its letters
are b for sequences, n for parts of a sequence, h for heads, q for queries and k for keys; (bh) is one axis of both. In
such a module a softmax of as many axes is attention, and any other softmax is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn

from joma.watch.softmaxes import head_count

LAYOUTS = {
    "CascadedGroupAttention": "bqk",  # timm's EfficientViT: one head at a time
    "ConvBertSelfAttention": "bhqk",  # the kernels of its convolutions are softmaxes of three axes
    "HaloAttn": "(bh)nqk",
    "HieraMaskUnitAttention": "bhnqk",
    "LEDEncoderSelfAttention": "bqhk",  # the keys of a sliding window
    "LongformerSelfAttention": "bqhk",
    "MaskUnitAttention": "bhnqk",  # timm's Hiera
    "OutlookAttention": "bhnqk",
    "timm.models.nest.Attention": "bhnqk",
    "timm.models.vision_transformer_sam.Attention": "(bh)qk",
}

WITH_STREAMS = ("ProphetNetNgramSelfAttention", "ProphetNetDecoder")


def layout(module: nn.Module) -> str | None:
    """Return the axes of the attention in a module of `LAYOUTS`, or None for any other.

    >>> layout(nn.MultiheadAttention(4, 2)) is None
    True
    """
    name = type(module).__name__
    return LAYOUTS.get(name) or LAYOUTS.get(f"{type(module).__module__}.{name}")


def fits(tensor: Tensor, axes: str) -> bool:
    """Whether a tensor has as many axes as the layout."""
    return tensor.ndim == len(axes.replace("(bh)", "b"))


def in_order(tensor: Tensor, axes: str, module: nn.Module) -> Tensor:
    """Return a tensor with the axes of a module's attention as [*batch, head, query, key].

    >>> import torch
    >>> in_order(torch.zeros(2, 5, 4, 7), "bqhk", nn.Identity()).shape
    torch.Size([2, 4, 5, 7])
    """
    if axes.startswith("(bh)"):
        tensor = tensor.unflatten(0, (-1, head_count(iter([module])) or 1))
        axes = axes.replace("(bh)", "bh")
    elif "h" not in axes:
        tensor, axes = tensor.unsqueeze(1), axes.replace("b", "bh")
    return tensor.permute(*(axes.index(letter) for letter in "bnhqk" if letter in axes))


def attends_globally(module: nn.Module, logits: Tensor) -> bool:
    """Whether a module with a sliding window also attends to global tokens: the logits have keys beyond the window."""
    window = getattr(module, "one_sided_attn_window_size", None)
    return window is not None and (logits.ndim == 3 or logits.shape[-1] > 2 * window + 1)


def rearranged_rows(
    real: Bool[Tensor, "sequence position"], modules: Mapping[str, nn.Module], layer: str, shape: tuple[int, int]
) -> Bool[Tensor, "batch query"] | None:
    """Return the real tokens in the order of a layer's rows [batch, query], in modules that rearrange them, or None.

    LongT5 fills a sequence that is shorter than a block up to the block. ProphetNet has a stream for the tokens and
    `ngram` streams of predictions: its self-attention takes those as batch, its cross attention all as one sequence.
    """
    name = layer.partition("[")[0]
    if getattr(modules.get(name), "block_len", None) == shape[1] and len(real) == shape[0]:
        return nn.functional.pad(real, (0, shape[1] - real.shape[1])) if real.shape[1] < shape[1] else None
    names = ("", *(name.rsplit(".", count)[0] for count in range(name.count(".") + 1)))
    above: Any = [module for module in map(modules.get, names) if type(module).__name__ in WITH_STREAMS]
    streams: int = above[0].ngram if above else 0
    if streams and shape == (len(real) * streams, real.shape[1]):
        return real.repeat_interleave(streams, dim=0)
    if streams and shape == (len(real), real.shape[1] * (1 + streams)):
        return real.repeat(1, 1 + streams)
    return None
