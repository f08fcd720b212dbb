"""The public names of joma, and where the site documents each: once, under its first name, as in `reference.md`."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType
from typing import Any

from make_reference import PACKAGES, entries, public_names


@functools.cache
def documented() -> dict[str, Any]:
    """Return every documented name, such as joma.theory.growth.linear, with its value."""
    return {f"{module}.{name}": value for module, values in entries() for name, value in values}


@functools.cache
def modules() -> tuple[str, ...]:
    """Return the documented packages and modules."""
    return tuple(module for module, _ in entries())


@functools.cache
def aliases() -> dict[str, str]:
    """Return the name under which a value is documented, for every other name that it can be imported by."""
    first = {id(value): name for name, value in documented().items()}
    other = {f"{value.__module__}.{value.__qualname__}": name for name, value in documented().items() if _named(value)}
    for package in PACKAGES:
        module = importlib.import_module(package)
        values = {name: getattr(module, name) for name in public_names(module)}
        plain = (value for value in values.values() if not isinstance(value, ModuleType))
        assert all(id(value) in first for value in plain), package
        other |= {f"{package}.{name}": first[id(value)] for name, value in values.items() if id(value) in first}
    return other | {name: name for name in documented()}


def _named(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def resolve(text: str, module: str = "") -> str | None:
    """Return the documented name that a text in backticks stands for, or None.

    A dotted name is looked up as it is and by its end (`growth.linear`), a single word within `module` only.
    """
    name = text.removesuffix("()")
    known = aliases()
    for candidate in (name, f"{module}.{name}"):
        if candidate in known:
            return known[candidate]
        if candidate in modules():
            return candidate
    if "." not in name:
        return None
    ends = {target for alias, target in known.items() if alias.endswith(f".{name}")}
    return ends.pop() if len(ends) == 1 else None
