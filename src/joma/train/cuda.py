"""A training step on CUDA: compiled in parts, captured once as a graph, and then replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from joma.train.optimiser import Updater
from joma.train.options import Compute
from joma.train.protocol import CompiledModel

TRIAL_STEPS = 3  # steps before the capture, in which PyTorch compiles and allocates


def capture(step: Callable[[], None], *, trial: Callable[[], None], reset: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run `trial` a few times on a side stream, `reset`, then capture one `step` as a graph."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(TRIAL_STEPS):
            trial()
    torch.cuda.current_stream().wait_stream(side_stream)
    reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@contextmanager
def compiled_modules(model: nn.Module, compute: Compute) -> Iterator[None]:
    """Compile the modules that the model offers while a step is captured."""
    modules = model.compiled_modules() if compute.compiled and isinstance(model, CompiledModel) else ()
    with torch._dynamo.config.patch(recompile_limit=64):
        for module in modules:
            module.compile(dynamic=compute.dynamic)
        try:
            yield
        finally:
            for module in modules:
                module._compiled_call_impl = None


@contextmanager
def half_weights(model: nn.Module, updater: Updater, compute: Compute) -> Iterator[None]:
    """Replace large weights that only matrix products read by copies in bfloat16 while a step is captured.

    The captured step then casts neither them nor their gradients, which would move as many bytes as half an update.
    """
    places = model.product_weights() if compute.half and isinstance(model, CompiledModel) else {}
    originals: dict[str, nn.Parameter] = {}
    for name, copy in updater.half_copies(places).items():
        module, attribute = places[name]
        originals[name] = getattr(module, attribute)
        setattr(module, attribute, copy)
    try:
        yield
    finally:
        for name, weight in originals.items():
            module, attribute = places[name]
            setattr(module, attribute, weight)


@contextmanager
def matmul_precision(compute: Compute) -> Iterator[None]:
    """Set PyTorch's precision of float32 matrix products for the duration of the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if compute.precision == "highest" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
