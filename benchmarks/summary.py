"""The cost of attention's measures: each beside entropy, and all of them, relative to entropy alone.

On the CPU and, if there is a GPU, there in bfloat16 and float32. No time is promised for the CPU, where selecting the
heaviest keys takes as long as all the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import Row
from benchmarks.timing import synchronised, time_ratio
from joma.probes.summary import MEASURES, AttentionCall, summary_rows

CALLS = 20  # on a GPU, for one time


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    for causal in (True, False):
        yield from ratios("CPU", inputs(2048, 8, 64, "cpu", torch.float32), causal, None)
    yield hidden_keys()
    if torch.cuda.is_available():
        for dtype, bound in ((torch.bfloat16, 1.6), (torch.float32, None)):
            for length in (2048, 8192):
                yield from ratios("CUDA", inputs(length, 16, 128, "cuda", dtype), True, bound)


def inputs(length: int, heads: int, dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random queries and keys; on a GPU as many sequences as make 8,192 tokens."""
    generator = torch.Generator().manual_seed(0)
    batch = 1 if device == "cpu" else 8192 // length
    query, key = (torch.randn(batch, heads, length, dim, generator=generator).to(device, dtype) for _ in range(2))
    return query, key


def measure(query: Tensor, key: Tensor, causal: bool, names: tuple[str, ...]) -> None:
    """Measure the rows, on a GPU so often that the calls take longer than the clock's resolution."""
    for _ in range(CALLS if query.is_cuda else 1):
        summary_rows(AttentionCall(query, key, causal=causal), names)


def ratios(where: str, pair: tuple[Tensor, Tensor], causal: bool, bound: float | None) -> Iterator[Row]:
    """Yield the time of entropy alone, then that of more measures relative to it; `bound` is the target of all."""
    query = pair[0]
    alone = partial(measure, *pair, causal, ("entropy",))
    alone()
    start = synchronised()
    alone()
    took = (synchronised() - start) / (CALLS if query.is_cuda else 1)
    shape = f"{query.shape[0]} x {query.shape[2]:,} x {query.shape[1]} x {query.shape[3]}"
    kind = f"{str(query.dtype).removeprefix('torch.')}{', causal' if causal else ''}"
    yield f"entropy alone, {where}, {shape}, {kind}", "–", f"{1e3 * took:.3f} ms", True
    for name in [name for name in MEASURES if name != "entropy"]:
        ratio = time_ratio(partial(measure, *pair, causal, ("entropy", name)), alone, repeats=5, clock=synchronised)
        yield f"    and {name} over entropy alone", "–", f"{ratio:.2f} x", True
    ratio = time_ratio(partial(measure, *pair, causal, tuple(MEASURES)), alone, repeats=9, clock=synchronised)
    target, met = ("–", True) if bound is None else (f"≤ {bound} x", ratio <= bound)
    yield f"    all measures over entropy alone, {where}, {shape}, {kind}", target, f"{ratio:.2f} x", met


def hidden_keys() -> Row:
    """Compare entropy with a boolean mask of all heads and without, on the CPU and not causal."""
    query, key = inputs(2048, 8, 64, "cpu", torch.float32)
    mask = torch.rand(2048, 2048, generator=torch.Generator().manual_seed(0)) < 0.7
    masked = AttentionCall(query, key, mask)
    ratio = time_ratio(
        lambda: summary_rows(masked, ("entropy",)), partial(measure, query, key, False, ("entropy",)), repeats=5
    )
    return "entropy with a boolean mask over entropy without, CPU, 1 x 2,048 x 8 x 64", "–", f"{ratio:.2f} x", True
