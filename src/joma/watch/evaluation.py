"""Run a model for a measurement, and leave it as it was: training flags, gradients, random number generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def call_model(model: nn.Module, batch: Any) -> object:
    """Call `model` on a mapping, a tuple or list, or a single argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def move(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with all its tensors on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: move(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple takes its items one by one
        return type(batch)(*(move(value, device) for value in batch))
    return type(batch)(move(value, device) for value in batch) if isinstance(batch, tuple | list) else batch


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Turn gradients and the training flag of each of a model's modules off, and restore the flags afterwards.

    The flags are set directly: `model.eval()` may be overridden, and then do more, such as merging adapters; and to set
    an attribute of a module takes a microsecond, which a small model's probe would notice.
    """
    training = [attributes for attributes in map(vars, modules) if attributes.get("training")]
    for attributes in training:
        attributes["training"] = False
    try:
        with torch.no_grad():
            yield
    finally:
        for attributes in training:
            attributes["training"] = True


@contextmanager
def preserve_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and torch after the block.

    Of the GPUs' generators, that of `device` alone if it is given, or all.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = None if device is None else [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
