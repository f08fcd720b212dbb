"""The reference: a page for every package and module, with every public name, and links to them from code in a text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

from make_reference import entries, summary, summary_of_module
from public_names import documented, modules, resolve

DOCS = Path(__file__).parents[1]
FOLDER = DOCS / "api"
ROOT_PAGES = ("changelog", "contributing", "security")
HEAD = """# The complete reference

Every public name with its formula, arguments, returns and an example, from the docstrings. [All names on one
page](../reference.md). Examples are doctests: `make test` runs them.
"""


def pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    texts = {f"{module}.rst": "\n".join(_page(module, values)) for module, values in entries()}
    rows = "\n".join(f"| [`{name}`]({name}.rst) | {summary_of_module(name)} |" for name in modules())
    contents = "\n".join(["```{toctree}", ":hidden:", "", *modules(), "```"])
    return {"index.md": f"{HEAD}\n| module | |\n|---|---|\n{rows}\n\n{contents}\n", **texts}


def _page(module: str, values: list[tuple[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page of a module."""
    yield from (module, "=" * len(module), "", f".. automodule:: {module}", "   :no-members:", "")
    for name, value in values:
        kind = "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
        kind = "exception" if inspect.isclass(value) and issubclass(value, BaseException) else kind
        if kind == "data":  # its docstring would be that of dict or str
            yield from (f".. py:data:: {name}", f"   :module: {module}", "", f"   {summary(value)}", "")
            continue
        yield f".. auto{kind}:: {module}.{name}"
        yield from ("   :members:", "") if kind == "class" else ("",)


def write_pages(_app: Sphinx) -> None:
    """Write the pages whose text has changed, so that Sphinx reads only those again."""
    FOLDER.mkdir(exist_ok=True)
    texts = {FOLDER / name: text for name, text in pages().items()}
    for path in FOLDER.iterdir():
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


class LinkNames(SphinxTransform):
    """Code in a text that is a public name in full, such as `joma.stable_rank`, becomes a link to the reference."""

    default_priority = 600

    def apply(self, **_options: Any) -> None:
        """Wrap each such literal into a reference that Sphinx resolves."""
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            target = resolve(text) if text.startswith("joma.") else None
            if target is None or isinstance(literal.parent, (nodes.reference, addnodes.pending_xref, nodes.title)):
                continue
            cross_reference = addnodes.pending_xref(
                "", literal.deepcopy(), refdomain="py", reftype="obj", reftarget=target, refexplicit=True
            )
            literal.replace_self(cross_reference)


class LinkRootFiles(SphinxTransform):
    """A link to a file of the repository's root leads to the page that includes it: SECURITY.md to `security`."""

    default_priority = 600

    def apply(self, **_options: Any) -> None:
        """Turn each such link into one to a document."""
        for node in self.document.findall(addnodes.pending_xref):
            page = node["reftarget"].removesuffix(".md").lower()
            if node["reftype"] == "myst" and page in ROOT_PAGES:
                node.attributes |= {"refdomain": "std", "reftype": "doc", "reftarget": f"/{page}"}


def resolve_alias(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Return a link to the first name of a value, or plain text for a type in a signature that is not documented."""
    if node.get("refdomain") != "py":
        return None
    target = resolve(node["reftarget"], node.get("py:module") or "")
    if target in documented():
        entry = env.domains.python_domain.objects[target]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, target)
    return None if node["reftype"] == "obj" and node["reftarget"].startswith("joma") else content


class Formula(SphinxDirective):
    """A formula beside the public function that computes it: its name, with a link, and what it returns."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the formula and a line with the function below it."""
        (name,) = self.arguments
        if name not in documented():
            raise self.error(f"{name!r} is no documented name; see reference.md")
        block = nodes.math_block("\n".join(self.content), "\n".join(self.content), nowrap=True, number=None, label=None)
        block["no-wrap"] = True
        self.set_source_info(block)
        box = nodes.container("", block, classes=["computed"])
        sentence = summary(documented()[name])
        box += self.parse_text_to_nodes(f"{{py:obj}}`{name}`: {sentence}")
        return [box]


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages before the sources are read, and resolve names."""
    app.connect("builder-inited", write_pages)
    app.connect("missing-reference", resolve_alias)
    app.add_transform(LinkNames)
    app.add_transform(LinkRootFiles)
    app.add_directive("formula", Formula)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
