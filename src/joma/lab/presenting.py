"""What the pages share: figures with a description, code to copy, and problems as sentences."""

from __future__ import annotations

from base64 import b64encode
from html import escape

import marimo as mo
from matplotlib.figure import Figure

from joma import drawing

LEGIBLE = 700  # pixels in width, below which the text of a figure cannot be read


def picture(figure: Figure, alt: str) -> mo.Html:
    """Return a figure as an image that fits the width of the page; `alt` describes it to those who cannot see it.

    On a narrow screen it stays large enough to be read, and is scrolled.
    """
    # The bytes travel inside the page: a file of its own would cost another request at every move of a slider.
    source = f"data:image/png;base64,{b64encode(drawing.png(figure)).decode()}"
    width = int(figure.get_figwidth() * drawing.STYLE["figure.dpi"])
    size = {"width": "100%", "min-width": f"{min(width, LEGIBLE)}px", "max-width": f"{width}px", "height": "auto"}
    return mo.image(source, alt=escape(alt), style=size).style({"overflow-x": "auto"})


def copy_as_python(code: str) -> mo.Html:
    """Return code that reproduces what a page shows, folded, with a button that copies it."""
    return mo.accordion({"Copy as Python": mo.ui.code_editor(code, language="python", disabled=True, min_height=40)})


def problem(error: Exception) -> mo.Html:
    """Return what is wrong with an input, as a sentence in the page."""
    return mo.callout(mo.plain_text(str(error)), kind="danger")


def read_on(*, functions: str, documents: str, study: str = "") -> mo.Html:
    """Return where to read on: the functions that the page calls, the documents of the repository, and the study."""
    names = ", ".join(f"`{name}`" for name in functions.split())
    paths = ", ".join(f"`{path}`" for path in documents.split())
    claims = f" Claims, with seeds and controls: `joma run {study}`." if study else ""
    text = mo.md(f"This page calls {names}. To read on, in the repository: {paths}.{claims}")
    return text.style({"overflow-wrap": "anywhere"})  # long names are broken on a narrow screen
