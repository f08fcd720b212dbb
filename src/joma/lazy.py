"""Lazy packages: the public names of a package are imported on first use.

Every package states its public names once, in a stub `__init__.pyi` beside its `__init__.py`, where editors and type
checkers read them too. So `import joma` and `joma --help` import neither torch nor any framework.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import lazy_loader


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package from its stub: `attach(__name__, __file__)`."""
    load, listing, names = lazy_loader.attach_stub(package, file)

    def get(name: str) -> Any:
        if name in names:
            return load(name)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
        raise AttributeError(f"module {package!r} has no attribute {name!r}; {hint}", name=name)

    return get, listing, names
