"""The axes of attention in modules whose weights cannot be followed from the softmax to the values.

`LAYOUTS` is the table to add to. Its letters are b for sequences, n for parts of a sequence, h for heads, q for queries
and k for keys. In such a module a softmax of as many axes is attention, and any other softmax is not.
"""

from __future__ import annotations

from torch import Tensor, nn

LAYOUTS = {
    "ConvBertSelfAttention": "bhqk",  # the kernels of its convolutions are softmaxes of three axes
    "HieraMaskUnitAttention": "bhnqk",
    "LEDEncoderSelfAttention": "bqhk",  # the keys of a sliding window
    "LongformerSelfAttention": "bqhk",
}


def in_order(logits: Tensor, axes: str) -> Tensor:
    """Return logits with the given axes as [*batch, head, query, key].

    >>> import torch
    >>> in_order(torch.zeros(2, 5, 4, 7), "bqhk").shape
    torch.Size([2, 4, 5, 7])
    """
    return logits.permute(*(axes.index(letter) for letter in "bnhqk" if letter in axes))


def attends_globally(module: nn.Module, logits: Tensor) -> bool:
    """Whether a module with a sliding window also attends to global tokens: the logits have keys beyond the window."""
    window = getattr(module, "one_sided_attn_window_size", None)
    return window is not None and (logits.ndim == 3 or logits.shape[-1] > 2 * window + 1)
