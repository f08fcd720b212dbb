"""A training step on CUDA: compiled in parts, captured once as a graph, and then replayed without running Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module

import torch
from torch import Tensor, nn

from joma.train.interrupt import interruptible
from joma.train.optimiser import Updater
from joma.train.options import Compute
from joma.train.protocol import CompiledModel

TRIAL_STEPS = 3  # before the capture: PyTorch compiles and allocates in them, which a graph cannot contain
COMPILER_MODULES = "torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.async_compile"
MIN_AHEAD_SECONDS, MAX_AHEAD_SECONDS = 0.1, 0.4  # between two events at which Python waits for the device


def capture(step: Callable[[], None], *, trial: Callable[[], None], reset: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture one call of `step` as a graph, after a few calls of `trial` and a call of `reset`.

    All of it is on the current stream, which must not be the default one. Graphs that are replayed side by side must be
    captured on streams of their own: cuBLAS has one workspace for each stream, and two graphs that share one would
    overwrite each other's intermediate sums.

    Ctrl-C ends the trial steps at once, and the capture after its end: an unfinished one would raise other errors.
    """
    for _ in range(TRIAL_STEPS):
        trial()
    reset()
    graph = torch.cuda.CUDAGraph()
    on_own_stream = torch.cuda.graph(graph, stream=torch.cuda.current_stream())
    with interruptible("the capture of a step to end") as stop, on_own_stream:
        step()
    if stop:
        raise KeyboardInterrupt
    return graph


@contextmanager
def joined(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Order the block's work on `stream` after what the current stream has queued, and before what it will queue."""
    if stream is None:
        yield
        return
    outer_stream = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outer_stream)
    try:
        yield
    finally:
        outer_stream.wait_stream(stream)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after what the device's current stream has queued; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def stream_after(event: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Compute on a stream that waits for the event alone, for the duration of the block; without one change nothing.

    To copy a tensor to the CPU, Python waits for the current stream; on that of a training it would wait for all the
    steps that are queued.
    """
    if event is None:
        yield
        return
    stream = _copying_stream(device)
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class LateNumber:
    """A number of the device for display, read without waiting for it: it comes one reading late on CUDA."""

    def __init__(self) -> None:
        self.copy: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    def exchange(self, number: Tensor) -> float | None:
        """Return the number given before, or None if it is not there yet; on the CPU this number itself.

        >>> LateNumber().exchange(torch.tensor(2.5))
        2.5
        """
        if not number.is_cuda:
            return float(number)
        if self.arrived is not None and not self.arrived.query():
            return None
        last = None if self.copy is None else float(self.copy)
        self.copy, self.arrived = number.detach().to("cpu", non_blocking=True), mark(number.device)
        return last


class Throttle:
    """Keep Python less than a second ahead of the device, so that a run stops soon after Ctrl-C.

    Without it a thousand replayed steps may be queued, and saving waits for all of them. Every `interval` steps Python
    waits for the device to reach the event before the last one: the device always has steps to do meanwhile.
    """

    def __init__(
        self,
        new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.new_event, self.clock = new_event, clock
        self.interval, self.steps = 1, 0
        self.last_event: torch.cuda.Event | None = None
        self.reached_at = clock()

    def count_step(self) -> None:
        """Count a step that was queued, and wait for the device if it is due."""
        self.steps += 1
        if self.steps < self.interval:
            return
        event = self.new_event()
        event.record()
        if self.last_event is not None:
            self.last_event.synchronize()
            self._adapt(self.clock() - self.reached_at)
        self.last_event, self.reached_at, self.steps = event, self.clock(), 0

    def _adapt(self, seconds: float) -> None:
        """Change the interval, which has taken the device this many seconds, where that is too short or too long."""
        if seconds < MIN_AHEAD_SECONDS:
            self.interval *= 2
        elif seconds > MAX_AHEAD_SECONDS:
            self.interval = max(1, self.interval // 2)


@cache
def load_compiler() -> threading.Thread:
    """Load PyTorch's compiler in the background, and start the processes that compile its kernels; return the thread.

    This takes ten seconds, in which a study draws its data and its models. Kernels that are needed before these
    processes are ready are compiled one after the other instead.

    A process that ends meanwhile, because of bad input for example, waits for the module that is being imported: a
    thread that is cut off within an import can end the process with a code of its own.
    """
    thread = threading.Thread(target=_load_compiler, name="load PyTorch's compiler")
    thread.start()
    return thread


def _load_compiler() -> None:
    with suppress(ImportError, AttributeError):  # without it the first compilation loads the rest
        for name in COMPILER_MODULES:
            import_module(name)
            if not threading.main_thread().is_alive():
                return
        import_module(COMPILER_MODULES[-1]).AsyncCompile.wakeup()


@contextmanager
def compiled_modules(model: nn.Module, compute: Compute) -> Iterator[None]:
    """Compile the modules that the model offers for the duration of the block, in which a step is captured."""
    modules = model.compiled_modules() if compute.compiled and isinstance(model, CompiledModel) else ()
    load_compiler().join()
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
    for name, copy in updater.half_copies({name: weight.copy for name, weight in weights.items()}).items():
        module, attribute, _ = weights[name]
        originals[name] = getattr(module, attribute)
        setattr(module, attribute, copy)
    try:
        yield
    finally:
        for name, original in originals.items():
            module, attribute, _ = weights[name]
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
