"""Make a model's attention visible while it is watched, and restore the model afterwards.

Two kinds of models make no call that can be intercepted: torch's Transformer modules on their fused fast path, and
compiled models.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial

import torch
from torch import nn

_warned: set[str] = set()
_open: dict[str, tuple[int, ExitStack]] = {}  # how many contexts hold a switch, and what undoes it
_lock = threading.RLock()


class AttentionSwitched(UserWarning):
    """While it is watched, the model runs another kernel: outputs are equal up to rounding, but not bit for bit.

    Padded rows of `nn.TransformerEncoder` are an exception: the fast path leaves them at 0, the slow one computes them.
    """


@contextmanager
def without_fast_path(modules: Collection[nn.Module]) -> Iterator[None]:
    """Turn off the fused inference kernels of torch's Transformer modules, which never call SDPA."""
    before = torch.backends.mha.get_fastpath_enabled()
    attention = [kind for kind in set(map(type, modules)) if issubclass(kind, nn.MultiheadAttention)]
    if before and attention and any(type(module) in attention and not module.training for module in modules):
        message = "the fused fast path of `nn.MultiheadAttention` is off while attention is watched"
        _warn_once("fast path", message, " except for padded rows, which it may leave at 0,")
    with _while_open("fast path", _fast_path_off):
        yield


@contextmanager
def without_compilation(modules: Collection[nn.Module]) -> Iterator[None]:
    """Run compiled models eagerly, because calls inside compiled code cannot be intercepted."""
    if "torch._dynamo" not in sys.modules and not any(
        map(_calls_flex, {type(module).__module__ for module in modules})
    ):
        yield  # nothing is compiled, and importing the compiler would take seconds
        return
    if [module for module in modules if "_orig_mod" in module._modules or module._compiled_call_impl is not None]:
        _warn_once("compiled", "a compiled model runs eagerly while attention is watched")
    with _while_open("compilation", partial(_stance, "force_eager")):
        yield


@contextmanager
def _while_open(name: str, switch: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Switch when the first context opens, and back when the last one closes: they may end in any order."""
    with _lock:
        count, undo = _open.get(name, (0, ExitStack()))
        if count == 0:
            undo.enter_context(switch())
        _open[name] = count + 1, undo
    try:
        yield
    finally:
        with _lock:
            count, undo = _open.pop(name)
            if count > 1:
                _open[name] = count - 1, undo
            else:
                undo.close()


@contextmanager
def _fast_path_off() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _stance(name: str) -> Iterator[None]:
    with torch.compiler.set_stance(name):
        yield


@cache
def _calls_flex(name: str) -> bool:
    """Whether FlexAttention, which compiles itself when it is called, is among the names of a Python module."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or name not in sys.modules:
        return False
    return any(value is flex or value is flex.flex_attention for value in vars(sys.modules[name]).values())


@contextmanager
def compilation() -> Iterator[None]:
    """Allow compiled functions again inside `without_compilation`: FlexAttention is compiled by itself."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _stance("default"):
        yield


def _warn_once(key: str, message: str, exception: str = ",") -> None:
    if key not in _warned:
        _warned.add(key)
        message = f"{message}; outputs are equal up to rounding{exception} and as before afterwards."
        warnings.warn(message, AttentionSwitched, stacklevel=5)
