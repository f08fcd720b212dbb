"""Docstrings of joma as reStructuredText: they are written in plain words, with backticks and indented formulas.

A name in backticks becomes a link where it is public, other text in backticks becomes code, an indented formula becomes
a literal block, and characters that reStructuredText would read as marks are escaped. Napoleon does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

from public_names import resolve

CODE = re.compile(r"(``.+?``|`[^`]+`)")
MARKS = re.compile(r"([\\*|_])")
SECTION = re.compile(r"(Args|Attributes|Raises|Yields|Returns)\b *(\(.*\))?: *(.*)")
ALIAS = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")
DEFAULT = re.compile(r"<factory>|<[\w.]+ object[^<>]*>")
INDENT = re.compile(r" *")
BEFORE_NAPOLEON = 400


def rewrite(_app: Sphinx, what: str, name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place."""
    lines[:] = [*rewritten(lines, f"{name}." if what == "module" else name)]
    if what in ("attribute", "data", "property"):  # what stands before a colon would be a type to Napoleon
        lines.insert(0, "\\ ")


def plain_signature(
    _app: Sphinx, _what: str, _name: str, _value: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Return a signature in which a type alias is its name, and a default that cannot be written is an ellipsis."""
    return signature and DEFAULT.sub("...", ALIAS.sub(r"\1", signature)), returns and ALIAS.sub(r"\1", returns)


def rewritten(lines: list[str], name: str) -> Iterator[str]:
    """Yield the lines of a docstring as reStructuredText."""
    inside = None  # the section that indented lines belong to
    literal = False
    for number, line in enumerate(lines):
        depth = _depth(line)
        if not line.strip():
            yield ""
            continue
        if literal and depth >= 4:
            yield line
            continue
        literal = False
        if depth == 0:
            heading = SECTION.fullmatch(line)
            inside = heading[1] if heading else None
            if heading:
                yield from _heading(heading, name)
                continue
        elif inside is None and depth >= 4 and number and not lines[number - 1].strip():
            literal = True
            yield from ("::", "", line)
            continue
        if line.lstrip().startswith(">>>") or (lines[number - 1 : number] and _continues_example(lines, number)):
            yield line
        else:
            yield inline(line, name)


def _depth(line: str) -> int:
    match = INDENT.match(line)
    return match.end() if match else 0


def _continues_example(lines: list[str], number: int) -> bool:
    """Return whether a line is output or continuation of an example: no blank line stands between it and its `>>>`."""
    for line in reversed(lines[:number]):
        if not line.strip():
            return False
        if line.lstrip().startswith(">>>"):
            return True
    return False


def _heading(heading: re.Match[str], name: str) -> Iterator[str]:
    """Yield a heading that Napoleon knows, or a field of what is returned, whose text may contain colons."""
    section, remark, text = heading.groups()
    if remark:
        yield from (f"*Arguments:* {inline(remark.strip('()'), name)}.", "")
    if section == "Returns":
        yield from ("", f":returns: {inline(text, name)}")
    elif text:
        yield f"*{'Arguments' if section == 'Args' else section}:* {inline(text, name)}"
    else:
        yield f"{section}:"


def inline(text: str, name: str) -> str:
    """Return a line with links and code for what stands in backticks, and marks escaped elsewhere."""
    parts = CODE.split(text)
    written = [_code(part, name) if number % 2 else MARKS.sub(r"\\\1", part) for number, part in enumerate(parts)]
    for number in range(1, len(parts), 2):  # a mark must not touch a letter: an escaped space ends it
        before, after = parts[number - 1], parts[number + 1]
        left = r"\ " if before and not before[-1].isspace() and before[-1] not in "([" else ""
        right = r"\ " if after and after[0].isalnum() else ""
        written[number] = left + written[number] + right
    return "".join(written)


def _code(part: str, name: str) -> str:
    text = part.strip("`")
    target = resolve(text, name.rpartition(".")[0])
    if target is None or target == name:
        return f"``{text}``"
    return f":py:obj:`{text} <{target}>`"


def skip(_app: Sphinx, _what: str, name: str, value: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave out members that no one has described: the fields of a named tuple, and what a base class describes."""
    text = getattr(value, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") or name == "__init__" else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to autodoc, before Napoleon."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", rewrite, priority=BEFORE_NAPOLEON)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
