"""Tell whole attentions from parts of one, where a module computes attention several times in one call.

A loop over sequences, heads or chunks of queries computes one attention in parts, each with an entry of its own in the
recording. Several whole attentions, such as those of layers that are no modules, are as good as layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from joma.watch.layouts import WITH_STREAMS, layout
from joma.watch.merged_heads import tensors
from joma.watch.softmaxes import head_count
from joma.watch.unseen import describe


class Computation(NamedTuple):
    """An attention that a module has computed: its entry in the recording, and the sizes of its rows."""

    label: str
    batch: int
    heads: int
    queries: int


def may_be_parts(
    computations: Sequence[Computation], modules: Sequence[nn.Module], arguments: Iterable[Any]
) -> str | None:
    """Return why the computations of one call may be parts of one attention; None if each is known to be a whole one.

    A whole attention has several heads, or the only one, and a row for each position of an argument of the module.

    Args:
        computations: what one call of a module has computed.
        modules: those that are being called, the outermost first and the one that computes last.
        arguments: what the last one was called with.

    >>> import torch
    >>> attention, states = nn.Module(), torch.ones(2, 5, 8)
    >>> whole = [Computation("attn", 2, 4, 5), Computation("attn[1]", 2, 4, 5)]
    >>> may_be_parts(whole, [attention], [states]) is None
    True
    >>> may_be_parts([part._replace(batch=1) for part in whole], [attention], [states])
    'it computes attention 2 times in one call'
    """
    if len(computations) < 2 or layout(modules[-1]) is not None or type(modules[-1]).__name__ in WITH_STREAMS:
        return None
    has_all_heads = all(computation.heads > 1 for computation in computations) or head_count(reversed(modules)) == 1
    shapes = [tuple(tensor.shape) for tensor in tensors(arguments)]
    if has_all_heads and all(_has_all_rows(computation, shapes) for computation in computations):
        return None
    return f"it computes attention {len(computations)} times in one call"


def _has_all_rows(computation: Computation, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether an attention has a row for each position of an argument that is no table shared by all sequences."""
    states = [shape[:2] for shape in shapes if len(shape) == 3]
    states = states or [shape for shape in shapes if len(shape) == 2 and shape[0] != shape[1]]  # tokens, but no mask
    positions: set[int] = set()
    for shape in shapes:
        if len(shape) < 2 or any(_has_more_sequences(other, shape[:2]) for other in states):
            continue
        positions.add(math.prod(shape[:2]))
        if len(shape) == 2 and computation.batch == 1:  # one sequence [position, dim]
            positions.add(shape[0])
        if len(shape) == 4:  # images, with channels last or first
            positions |= {math.prod(shape[:3]), shape[0] * math.prod(shape[2:])}
    return computation.batch * computation.queries in positions


def _has_more_sequences(larger: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether two shapes have the same length, and the first one has more sequences."""
    (first, second), (other_first, other_second) = shape, larger
    return (first == other_first and other_second > second) or (second == other_second and other_first > first)


def describe_unknown(heads: Mapping[str, str], repeats: Mapping[str, str]) -> str:
    """Return as one line which entries of a recording may be of sequences or heads, or parts of an attention.

    >>> describe_unknown({"attn": "its weights are …"}, {})
    'heads and sequences are not told apart in attn (its weights are …): recorded as one head'
    """
    parts = [f"heads and sequences are not told apart in {describe(heads)}: recorded as one head"] if heads else []
    if repeats:
        name = next(iter(repeats))
        parts.append(
            f"attention may be recorded in parts in {describe(repeats)}: the entries `{name}`, `{name}[1]` … are "
            "separate computations, of sequences, heads or chunks of queries, and no argument of the module says "
            "which; compute them in one call on [sequence, head, query, key], or read each entry as the part that it is"
        )
    return "; ".join(parts)
