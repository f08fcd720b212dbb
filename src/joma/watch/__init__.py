"""Attach the probes to models that you already have: while they run, while they train, and after, by checkpoints.

The names are imported on first use, so that what needs no torch or no framework does not load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.watch import hf, lightning
    from joma.watch.recorder import EntropyCollapse, RankCollapse, Recorder
    from joma.watch.sdpa import Recording, attention
    from joma.watch.series import Checkpoints
    from joma.watch.switches import AttentionSwitched

__all__ = [
    "AttentionSwitched",
    "Checkpoints",
    "EntropyCollapse",
    "RankCollapse",
    "Recorder",
    "Recording",
    "attention",
    "hf",
    "lightning",
]

_HOMES = {
    "AttentionSwitched": "joma.watch.switches",
    "Checkpoints": "joma.watch.series",
    "EntropyCollapse": "joma.watch.recorder",
    "RankCollapse": "joma.watch.recorder",
    "Recorder": "joma.watch.recorder",
    "Recording": "joma.watch.sdpa",
    "attention": "joma.watch.sdpa",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"joma.watch.{name}")
    raise AttributeError(f"module 'joma.watch' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
