"""Make a model call `scaled_dot_product_attention` eagerly while it is watched, and restore it afterwards.

Three kinds of models make no such call that can be intercepted: torch's Transformer modules on their fused fast path,
Hugging Face models with another implementation of attention, and compiled models.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from joma.arguments import InputError, short_reason

OTHER_IMPLEMENTATIONS = ("eager", "flex_attention", "flash_attention")  # of Hugging Face models, instead of SDPA
_warned: set[str] = set()


class AttentionSwitched(UserWarning):
    """While it is watched, the model runs another kernel: outputs are equal up to rounding, but not bit for bit.

    Padded rows of `nn.TransformerEncoder` are an exception: the fast path leaves them at 0, the slow one computes them.
    """


@contextmanager
def without_fast_path(modules: Collection[nn.Module]) -> Iterator[None]:
    """Turn off the fused inference kernels of torch's Transformer modules, which never call SDPA."""
    before = torch.backends.mha.get_fastpath_enabled()
    if before and any(isinstance(module, nn.MultiheadAttention) and not module.training for module in modules):
        message = "the fused fast path of `nn.MultiheadAttention` is off while attention is watched"
        _warn_once("fast path", message, " except for padded rows, which it may leave at 0,")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def without_compilation(modules: Collection[nn.Module]) -> Iterator[None]:
    """Run compiled models eagerly, because calls inside compiled code cannot be intercepted."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and importing it would take seconds
        yield
        return
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in modules):
        _warn_once("compiled", "a compiled model runs eagerly while attention is watched")
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def hugging_face_with_sdpa(modules: Collection[nn.Module]) -> Iterator[None]:
    """Switch Hugging Face models with another implementation of attention to SDPA."""
    before: list[tuple[Any, str]] = []
    seen_configs: set[int] = set()
    for module in modules:
        config = module.__dict__.get("config")  # `getattr` would also search parameters, buffers and submodules
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str) and id(config) not in seen_configs:
            seen_configs.add(id(config))
            before.append((module, name))
    others = [(module, name) for module, name in before if name.startswith(OTHER_IMPLEMENTATIONS) or "/" in name]
    try:
        for module, name in others:
            _switch_to_sdpa(module, name)
        if others:
            names = ", ".join(sorted({name for _, name in others}))
            _warn_once(f"from {names}", f"attention {names!r} is replaced by 'sdpa' while attention is watched")
        yield
    finally:
        for module, name in before if others else ():  # outer modules first: each also sets its submodules
            if module.config._attn_implementation != name:
                module.set_attn_implementation(name)


def _switch_to_sdpa(module: Any, name: str) -> None:
    """Set `module` to SDPA through the public interface of transformers, or raise an error."""
    reason = "it has no `set_attn_implementation`"
    try:
        if hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation("sdpa")
            reason = "it does not follow transformers' attention interface"
    except (ValueError, ImportError) as cause:
        reason = short_reason(cause)
    if module.config._attn_implementation != "sdpa":
        got = f"{type(module).__name__} with {name!r} attention ({reason})"
        remedy = "load it with `attn_implementation='sdpa'`; a model without SDPA can only be measured from its weights"
        raise InputError("model", "one whose attention can be switched to SDPA", got, remedy)


def _warn_once(key: str, message: str, exception: str = ",") -> None:
    if key not in _warned:
        _warned.add(key)
        message = f"{message}; outputs are equal up to rounding{exception} and as before afterwards."
        warnings.warn(message, AttentionSwitched, stacklevel=5)
