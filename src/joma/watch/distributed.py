"""Measure a model that several processes train together, with `DistributedDataParallel` or `fully_shard`.

Every process measures its own batch, and the results are combined: all processes then have the same numbers. A failure
on one process is a failure on all of them, so that none waits for another in a collective operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from joma.arguments import InputError, StateError, flag, short_reason

T = TypeVar("T")


class OtherProcessFailed(RuntimeError):
    """Another of the processes that train the model together could not measure it."""


@dataclass(frozen=True)
class Processes:
    """The processes that train one model together; `Processes()` is this process alone.

    Attributes:
        rank: the number of this process.
        count: the number of processes.
        device: where tensors must be for a collective operation.
    """

    rank: int = 0
    count: int = 1
    device: str | torch.device = "cpu"

    def together(self) -> AbstractContextManager[None]:
        """Run a block on every process, and raise an error on all of them if it fails on any."""
        return self._all_together() if self.count > 1 else nullcontext()

    @contextmanager
    def _all_together(self) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        reasons = self.gather(None if failure is None else describe_failure(failure))
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise OtherProcessFailed(f"process {rank} failed: {reason}")

    def gather(self, value: T) -> list[T]:
        """Return the value of every process, by rank."""
        if self.count == 1:
            return [value]
        values: list[T | None] = [None] * self.count
        dist.all_gather_object(values, value)
        return cast(list[T], values)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over all processes, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM if self.count > 1 else None)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Return the maximum over all processes, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX if self.count > 1 else None)

    def _reduce(self, values: np.ndarray, operation: Any) -> np.ndarray:
        if operation is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=operation)
        return tensor.cpu().numpy()


def describe_failure(error: Exception) -> str:
    """Return an error's type and the first line of its message; our own errors need no type."""
    reason = short_reason(error)
    needs_no_type = isinstance(error, InputError | StateError | OtherProcessFailed)
    return reason if needs_no_type or reason == type(error).__name__ else f"{type(error).__name__}: {reason}"


def find_processes(model: nn.Module, distributed: bool | None) -> Processes:
    """Return the processes that measure together.

    By default they are all processes if the model is wrapped or sharded for them, else this one alone: a process may
    well measure a plain model by itself while others do something else.
    """
    running = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if distributed is not None and flag("distributed", distributed) and not running:
        got = "none, or a single process"
        remedy = "call `torch.distributed.init_process_group`, or leave `distributed` out"
        raise InputError("distributed", "given inside a process group", got, remedy)
    if not running or not (is_distributed(model) if distributed is None else distributed):
        return Processes()
    return Processes(dist.get_rank(), dist.get_world_size(), _collective_device(model))


def _collective_device(model: nn.Module) -> torch.device:
    """Return the device of the process group's collective operations: the CPU where its backend can use it."""
    backend = dist.get_backend()
    if "gloo" in backend or "mpi" in backend:
        return torch.device("cpu")
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return model_device(model)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter that is in memory, or the CPU if none is.

    Parameters that are offloaded are on the meta device until their module is called.
    """
    return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))


def is_distributed(model: nn.Module) -> bool:
    """Return whether `model` is wrapped or sharded for several processes."""
    wrapped = any(isinstance(module, DistributedDataParallel) or is_fsdp_wrapper(module) for module in model.modules())
    return wrapped or any(is_sharded(parameter) for parameter in model.parameters())


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is a `DTensor`, of which each process holds a part."""
    return hasattr(parameter, "full_tensor")


def is_fsdp_wrapper(module: nn.Module) -> bool:
    """Return whether a module is FSDP1's wrapper, recognised without importing it."""
    return type(module).__name__ == "FullyShardedDataParallel"


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, `DataParallel` or DeepSpeed's engine, as it was named."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(inner, DistributedDataParallel | DataParallel):  # compiled outside of the wrapper
            model = inner
        module = model._modules.get("module")
        wrapper = isinstance(model, DistributedDataParallel | DataParallel)
        if module is None or not (wrapper or type(model).__name__ == "DeepSpeedEngine"):
            return model
        model = module


def reshard(modules: Collection[nn.Module]) -> None:
    """Free the parameters that `fully_shard` has gathered in a model's modules for a forward pass.

    Its outermost module keeps them for a backward pass, which a probe never makes. An optimiser's step would change the
    shards alone, and the next forward pass would use the old gathered values.
    """
    sharded = {kind for kind in set(map(type, modules)) if hasattr(kind, "_get_fsdp_state")}
    for module in modules if sharded else ():
        if type(module) in sharded:
            cast(Any, module).reshard()


def full_weight(parameter: Tensor) -> Tensor:
    """Return the whole of a weight; every process takes part if it is sharded."""
    weight = parameter.detach()
    return cast(Any, weight).full_tensor() if is_sharded(weight) else weight
