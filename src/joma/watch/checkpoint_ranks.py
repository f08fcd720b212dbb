"""The stable ranks of a checkpoint's matrices: the next matrix is read while the current one is measured.

A matrix takes some thirty products with blocks of 16 vectors, each a pass over all its values. On a CPU core this takes
far longer than reading it from a disk; on a GPU it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Float
from torch import Tensor

from joma.probes.rank import stable_rank
from joma.watch.audit import NOT_FINITE_REMEDY
from joma.watch.byte_ranges import NotFinite
from joma.watch.series import LazyCheckpoint

MIN_VALUES_FOR_GPU = 2**25  # values in all matrices; for fewer the start of CUDA would take longer than a CPU


def stable_ranks(
    checkpoint: LazyCheckpoint, names: Sequence[str], check: Callable[[str, Float[Tensor, "row column"]], None]
) -> list[float]:
    """Return the stable rank of each named matrix, measured on a GPU if there is one and the matrices are large.

    Args:
        checkpoint: where to read the matrices; at most two of them are in memory.
        names: the names of the matrices.
        check: is called with each name and matrix, in float32, and raises an error for a matrix that is not to be
            measured.
    """
    count = sum(math.prod(checkpoint.shape(name)) for name in names)
    device = "cuda" if count >= MIN_VALUES_FOR_GPU and torch.cuda.is_available() else "cpu"
    ranks: list[float] = []
    for name, weight in read_ahead(names, lambda name: checkpoint.tensor(name, torch.float32)):
        try:
            on_device = weight.to(device)
            check(name, on_device)
            ranks.append(float(stable_rank(on_device)))
        except torch.OutOfMemoryError:  # another process may use the GPU
            device = "cpu"
            check(name, weight)
            ranks.append(float(stable_rank(weight)))
    return ranks


def read_ahead(names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each name with its tensor, while a thread reads the next one.

    >>> list(read_ahead(["a", "b"], lambda name: torch.tensor(ord(name))))
    [('a', tensor(97)), ('b', tensor(98))]
    """
    reader = ThreadPoolExecutor(1, thread_name_prefix="joma-read-ahead")
    try:
        following = reader.submit(read, names[0]) if names else None
        for index, name in enumerate(names):
            assert following is not None
            tensor = following.result()
            following = reader.submit(read, names[index + 1]) if index + 1 < len(names) else None
            yield name, tensor
            del tensor  # or three would be in memory
    finally:
        reader.shutdown(wait=False, cancel_futures=True)


def check_finite(checkpoint: LazyCheckpoint, name: str, values: Float[Tensor, "row column"]) -> None:
    """Raise an error unless all values are finite: the audit has seen a sample only."""
    if bool(values.sum().isfinite()):  # no sum of NaN or infinities is finite, and it takes a thirtieth of the time
        return
    if not bool(values.isfinite().all()):
        got = f"NaN or infinities in {name}"
        raise NotFinite(checkpoint.name, "finite weights", got, NOT_FINITE_REMEDY, must="have")
