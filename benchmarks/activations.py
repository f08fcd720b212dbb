"""The cost of `joma.watch.activations`: a forward pass with norms, and with norms and ranks, over a plain one.

With CUDA also in bfloat16 and at the size of Pythia-160M, for which nothing is promised. The ranks cost two products of
the hidden states with themselves in float32 for each block; its attention and MLP are twelve products of this size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks import Row
from benchmarks.timing import synchronised, time_ratio
from benchmarks.watch import _neox
from joma.watch import activations, gradient_norms


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the small products of the ranks on several threads would time mostly their contention
    small = _neox(6, 512, 8)
    yield from forward_ratios("6 x 512, 2 x 512 tokens, CPU", small, 2, 512, limits=(1.1, 2.5))
    yield gradient_share("6 x 512, 2 x 512 tokens, CPU", small, 2, 512)
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        pythia = _neox(12, 768, 12, vocabulary=50_304).to("cuda", torch.bfloat16)
        for batch, length in ((8, 512), (4, 2048)):
            what = f"12 x 768, {batch} x {length}, CUDA, bf16"
            yield from forward_ratios(what, pythia, batch, length, limits=(math.inf, math.inf))
        yield gradient_share("12 x 768, 4 x 2048, CUDA, bf16", pythia, 4, 2048, limit=math.inf)


def forward_ratios(
    what: str, model: nn.Module, batch: int, length: int, *, limits: tuple[float, float]
) -> Iterator[Row]:
    """Measure the time of a forward pass inside the context relative to a plain one, without and with ranks."""
    device = next(model.parameters()).device
    tokens = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)

    def plain() -> None:
        model(input_ids=tokens, use_cache=False)

    for ranks, limit in zip((False, True), limits, strict=True):

        def watched(ranks: bool = ranks) -> None:
            with activations(model, ranks=ranks) as recording:
                plain()
            recording.dataset()

        with torch.no_grad():
            ratio = time_ratio(watched, plain, repeats=7, clock=synchronised)
        measured = "norms and ranks" if ranks else "norms"
        target = f"≤ {limit} x" if math.isfinite(limit) else "–"
        yield f"forward pass with {measured} over plain: {what}", target, f"{ratio:.2f} x", ratio <= limit


def gradient_share(what: str, model: nn.Module, batch: int, length: int, *, limit: float = 0.1) -> Row:
    """Measure the time of `gradient_norms` relative to a forward and backward pass."""
    device = next(model.parameters()).device
    tokens = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)

    def train() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    train()
    ratio = time_ratio(lambda: gradient_norms(model), train, repeats=5, clock=synchronised)
    model.zero_grad()
    target = f"≤ {100 * limit:.0f} %" if math.isfinite(limit) else "–"
    return f"gradient_norms over forward and backward: {what}", target, f"{100 * ratio:.1f} %", ratio <= limit
