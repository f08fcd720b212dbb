"""Interactive pages: ordinary marimo notebooks that call the public library, opened in the browser by `joma lab`.

Each page is a file beside this one. It runs as a script too, and `marimo edit` opens it.
"""

from __future__ import annotations

from pathlib import Path

PAGES = ("sparse-then-dense", "invariant", "latent-tree", "token-order", "your-model", "runs")


def page_file(name: str) -> Path:
    """Return the notebook of a page.

    >>> page_file("sparse-then-dense").name
    'sparse_then_dense.py'
    """
    from joma.arguments import choice

    return Path(__file__).with_name(choice("PAGE", name, {page: f"{page.replace('-', '_')}.py" for page in PAGES}))
