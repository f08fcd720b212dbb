"""Tiny models of timm, which imports torchvision for names that its models do not need."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from watch.tiny_configs import with_spread_weights

PARTS = (
    "torchvision torchvision.datasets torchvision.models torchvision.models.feature_extraction torchvision.ops "
    "torchvision.ops.misc torchvision.transforms torchvision.transforms.functional"
)


class _StandIn(ModuleType):
    """A module that has every name, each an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (nn.Module,), {})


class _AnyAttribute(type):
    """The type of classes that have every attribute, such as the members of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@contextmanager
def _torchvision() -> Iterator[None]:
    """Put a stand-in for torchvision in its place, if it cannot be imported; transformers must not see it later."""
    try:
        import torchvision  # noqa: F401

        yield
        return
    except (ImportError, RuntimeError):
        pass
    for name in PARTS.split():
        module = sys.modules[name] = _StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
    for name in PARTS.split()[1:]:
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, sys.modules[name])
    try:
        yield
    finally:
        for name in PARTS.split():
            del sys.modules[name]


def timm_model(name: str, **options: Any) -> nn.Module:
    """Return a tiny model of timm, with weights that make attention far from uniform."""
    if "timm" not in sys.modules:
        import transformers  # noqa: F401  (it looks for torchvision when it is imported)

        with _torchvision():
            import timm  # noqa: F401
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sys.modules["timm"].create_model(name, num_classes=0, **options)
    return with_spread_weights(model).eval()


def set_fused(model: nn.Module, fused: bool) -> None:
    """Let every attention call SDPA, or compute its own weights."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
