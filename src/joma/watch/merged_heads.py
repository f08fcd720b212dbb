"""Tell heads from sequences where attention has one axis for both, by the tensors that its modules were called with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from joma.watch.softmaxes import head_count


class HeadsUnknown(UserWarning):
    """Sequences, heads or chunks of queries are not told apart: those in one axis, or in several computations."""


def merged_heads(modules: Sequence[nn.Module], arguments: Iterable[Any], sizes: tuple[int, int, int]) -> int | None:
    """Return how many heads share the first axis of an attention with sequences, 1 if none; None if nothing says it.

    The number of heads is an attribute of a module. Whether they are in the axis is seen by the number of sequences
    that modules were called with, [sequence, position, …] or [position, sequence, …].

    Args:
        modules: those that are being called, the outermost first.
        arguments: what they were called with.
        sizes: the lengths of the first axis, of the queries and of the keys.

    >>> import torch
    >>> attention = nn.MultiheadAttention(8, num_heads=2)
    >>> merged_heads([attention], [torch.ones(3, 5, 8)], (6, 5, 5)), merged_heads([attention], [], (6, 5, 5))
    (2, None)
    """
    first, *positions = sizes
    heads = head_count(reversed(modules))
    if heads == 1 or (heads is not None and first % heads):
        return 1
    shapes = [tensor.shape for tensor in tensors(arguments)]
    batches = {shape[0] for shape in shapes if len(shape) > 1}
    pairs = {tuple(shape[:2]) for shape in shapes if len(shape) > 1}
    alone = any((first, position) in pairs for position in positions)
    if heads is None:
        return 1 if alone or first in batches else None
    batch = first // heads
    if any((batch, position) in pairs or (position, batch) in pairs for position in positions):
        return heads
    if batch == 1 and any(len(shape) == 2 and shape[0] in positions for shape in shapes):  # a sequence without a batch
        return heads
    if alone or (first in batches and batch not in batches):
        return 1
    return heads if batch in batches and first not in batches else None


def unknown_heads(sizes: tuple[int, int, int]) -> str:
    """Return why the heads of an attention of these sizes are unknown."""
    return f"its weights {sizes} may be of sequences or of heads first, and no argument of its modules says which"


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in the lists and dictionaries among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from tensors(value.values() if isinstance(value, dict) else value)
