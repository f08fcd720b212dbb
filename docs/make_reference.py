"""Write `docs/reference.md`: every public name with the first line of its docstring. Run by `make reference`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("reference.md")
PACKAGES = ("joma", "joma.theory", "joma.data", "joma.models", "joma.probes", "joma.train", "joma.watch", "joma.study",
            "joma.studies", "joma.sweeps", "joma.engine", "joma.report")  # fmt: skip
HEAD = """# Reference

Every public name, once, with the first line of its docstring; `help(name)` has formula, arguments, returns and an
example. Packages are imported on first use. This page is generated: `make reference`.
"""


def public_names(module: ModuleType) -> list[str]:
    """Return `__all__`, or the functions and classes that a plain module defines itself."""
    if hasattr(module, "__path__"):
        return list(module.__all__)
    members = vars(module).items()
    return sorted(
        name
        for name, value in members
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    )


def entries() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield every package or module with its public names and their values; each value once, under its first name."""
    seen: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        values = [(name, getattr(module, name)) for name in public_names(module)]
        yield package, list(_first_time(values, seen))
        for name, value in values:
            if isinstance(value, ModuleType) and not hasattr(value, "__path__"):
                members = [(member, getattr(value, member)) for member in public_names(value)]
                yield f"{package}.{name}", list(_first_time(members, seen))


def _first_time(values: list[tuple[str, Any]], seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, value in values:
        if isinstance(value, ModuleType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value


def summary(value: Any) -> str:
    """Return the first sentence of a docstring, as one line."""
    documented = inspect.isclass(value) or inspect.isroutine(value)
    if not documented:
        return f"a table: {', '.join(map(str, value))}" if isinstance(value, dict) else f"`{value}`"
    text = inspect.getdoc(value) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for module, values in entries():
        description = summary_of_module(module)
        parts.append(f"## `{module}`\n\n{description}\n")
        if values:
            rows = "\n".join(f"| `{name}` | {summary(value)} |" for name, value in values)
            parts.append(f"| name | |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def summary_of_module(name: str) -> str:
    """Return the first paragraph of a module's docstring."""
    return " ".join((inspect.getdoc(importlib.import_module(name)) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
