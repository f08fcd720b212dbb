"""A training step on CUDA: compiled in parts, captured once as a graph, and then replayed without running Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from joma.train.optimiser import Updater
from joma.train.options import Compute
from joma.train.protocol import CompiledModel

TRIAL_STEPS = 3  # before the capture: PyTorch compiles and allocates in them, which a graph cannot contain


def capture(step: Callable[[], None], *, trial: Callable[[], None], reset: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture one call of `step` as a graph, after a few calls of `trial` on a side stream and a call of `reset`."""
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
    """Compile the modules that the model offers for the duration of the block, in which a step is captured."""
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
    """Replace large weights that only matrix products read by bfloat16 copies for the duration of the block.

    A step that is captured in it casts neither the weights nor their gradients; the casts would move half as many bytes
    as an update.
    """
    weights = model.product_weights() if compute.half and isinstance(model, CompiledModel) else {}
    originals: dict[str, nn.Parameter] = {}
    for name, copy in updater.half_copies(weights).items():
        module, attribute = weights[name]
        originals[name] = getattr(module, attribute)
        setattr(module, attribute, copy)
    try:
        yield
    finally:
        for name, original in originals.items():
            module, attribute = weights[name]
            setattr(module, attribute, original)


@contextmanager
def matmul_precision(compute: Compute) -> Iterator[None]:
    """Set PyTorch's precision of float32 matrix products for the duration of the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if compute.precision == "highest" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
