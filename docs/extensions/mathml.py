"""Formulas as MathML, written when the site is built, with a font beside them: no script and no other host are needed.

The translator is docutils' own. It refuses a command that it does not know, which ends the build. The font is STIX Two
Math (SIL Open Font License 1.1), from the package ziamath: many systems have no font with large brackets and sums.
"""

from __future__ import annotations

import logging
import xml.etree.ElementTree as ET
from importlib import resources
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from fontTools import subset
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

FONT = Path("_static") / "STIXTwoMath.woff"
ALPHABETS = (0x20, 0x7E), (0xA0, 0xFF), (0x2B0, 0x3FF)  # Latin, accents, Greek
ITALIC_AND_OUTLINED = (0x1D400, 0x1D467), (0x1D538, 0x1D56B), (0x1D6A4, 0x1D71B)
SIGNS = (0x2000, 0x209F), (0x2100, 0x22FF), (0x27C0, 0x27FF), (0x2A00, 0x2AFF)
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ACCENTS = "˙ˉ¯ˆ˜→"


def translate(node: nodes.math | nodes.math_block, *, as_block: bool) -> str:
    """Return the MathML of a formula; a formula that cannot be translated is an error with its place."""
    try:
        return mended(tex2mathml(node.astext(), as_block=as_block))
    except MathError as problem:
        source = f"{node.source}:{node.line}"
        raise ExtensionError(f"{source}: the formula {node.astext()!r} is not understood: {problem}") from problem


def mended(mathml: str) -> str:
    """Return a formula with the index of an accented letter beside the letter, not below it, and with short norm bars.

    >>> mended(tex2mathml(r"\\dot v_k"))[49:].replace(" ", "")
    '<msub><moveraccent="true"><mi>v</mi><mostretchy="false">˙</mo></mover><mi>k</mi></msub></math>'
    """
    ET.register_namespace("", NAMESPACE)
    tree = ET.fromstring(mathml.replace("&ApplyFunction;", "\u2061"))
    tag = f"{{{NAMESPACE}}}"
    for element in tree.iter(f"{tag}munderover"):
        letter, index, accent = element
        if (accent.text or "") in ACCENTS:
            element.tag = f"{tag}msub"
            over = ET.Element(f"{tag}mover", accent="true")
            over.extend([letter, accent])
            element[:] = [over, index]
    for element in tree.iter():
        if element.text in ("‖", "∥"):
            element.set("stretchy", "false")
        element.tail = None
        element.text = (element.text or "").strip("\n ") if len(element) else element.text
    return ET.tostring(tree, encoding="unicode")


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(translate(node, as_block=False))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula that stands alone; a wide one scrolls."""
    translator.body.append(f'<div class="formula">{translate(node, as_block=True)}</div>')
    raise nodes.SkipNode


def write_font(app: Sphinx, problem: Exception | None) -> None:
    """Write the font with the characters of formulas, and with its licence, to the static files of the site."""
    path = Path(app.outdir) / FONT
    if problem or app.builder.format != "html" or path.exists():
        return
    options = subset.Options(flavor="woff", name_IDs=["*"], layout_features=["ssty"], notdef_outline=True)
    with resources.as_file(resources.files("ziamath.fonts") / "STIXTwoMath-Regular.ttf") as source:
        font = subset.load_font(source, options)
    logging.getLogger(subset.__name__).setLevel(logging.WARNING)
    subsetter = subset.Subsetter(options)
    ranges = (*ALPHABETS, *ITALIC_AND_OUTLINED, *SIGNS)
    subsetter.populate(unicodes=[code for low, high in ranges for code in range(low, high + 1)])
    subsetter.subset(font)
    subset.save_font(font, path, options)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer and its font."""
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None))
    app.connect("build-finished", write_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
