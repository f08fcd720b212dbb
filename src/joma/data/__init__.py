"""Samplers that return tokens *and* the latents they came from, so that what a model learns can be set beside them.

`tokens` has classes of sequences over distinct and common tokens; `trees` has the hierarchical latent trees that are
sampled, `combinations` the deterministic ones. `text` has corpora of real text, found by `sources`; `addition` has sums
of numbers, character by character. Randomness arrives as a `torch.Generator`, or as a key of `joma.noise`. The modules
are imported on first use, as they import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.data import addition, combinations, sources, text, tokens, trees

__all__ = ["addition", "combinations", "sources", "text", "tokens", "trees"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
