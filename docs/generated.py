"""The parts of pages that scripts write: each stands between a comment with its name and `<!-- end -->`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_generated_parts(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its generated parts written anew.

    >>> with_generated_parts("<!-- generated: sum -->\\n3\\n<!-- end -->", {"sum": lambda: "4\\n"})
    '<!-- generated: sum -->\\n4\\n<!-- end -->'
    """
    return BLOCK.sub(lambda match: f"{match[1]}{parts[match[2]]()}{match[3]}", text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a table of Markdown; with `numbers` all columns but the first are aligned to the right.

    >>> print(table(["arm", "loss"], [["ReLU", "1.2"]]))
    | arm | loss |
    |---|---:|
    | ReLU | 1.2 |
    """
    rule = "|---|" + ("---:|" if numbers else "---|") * (len(columns) - 1)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def paragraph(sentences: Iterable[str]) -> str:
    """Return parts of sentences as lines of at most 120 characters."""
    return textwrap.fill(" ".join(sentences), 120, break_on_hyphens=False, break_long_words=False)
