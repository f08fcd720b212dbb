"""A laboratory for the training dynamics of Transformers.

`joma` predicts (closed forms and flows), trains (small models, many seeds at once), and puts prediction and
measurement side by side, claim by claim. The public names are imported on first use: `import joma` costs nothing.

>>> import joma
>>> joma.theory.growth.linear([0.9, 0.7], t=1.0)
array([1.076..., 0.769...])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma import data, models, probes, report, studies, theory, train, watch
    from joma.probes.entropy import attention_entropy
    from joma.probes.permutation import permutation_gap
    from joma.probes.rank import stable_rank
    from joma.runs import open_run

__all__ = [
    "attention_entropy",
    "data",
    "models",
    "open_run",
    "permutation_gap",
    "probes",
    "report",
    "stable_rank",
    "studies",
    "theory",
    "train",
    "watch",
]
__version__ = "0.1.0"

_FUNCTIONS = {
    "attention_entropy": "joma.probes.entropy",
    "open_run": "joma.runs",
    "permutation_gap": "joma.probes.permutation",
    "stable_rank": "joma.probes.rank",
}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    if name in __all__:
        return import_module(f"joma.{name}")
    raise AttributeError(f"module 'joma' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
