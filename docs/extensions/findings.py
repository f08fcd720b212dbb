"""The pages of findings, one a study, and what other pages quote of a stored run: all from `docs/runs`.

`make_runs.py` writes the sentences and tables, here as in `docs/runs/README.md`, so that no number is typed by hand.
The pages are written before Sphinx reads its sources, into a folder that git ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, get_args

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import make_runs
from joma.report.table import totals
from joma.runs import read_claims
from joma.studies import STUDIES, load
from joma.verdicts import KINDS, Verdict

DOCS = Path(__file__).parents[1]
VERDICTS = get_args(Verdict)
FOLDER = DOCS / "findings"
PICTURES = "../runs/pictures"
HEAD = """# Findings

One page a study: what the paper says, what came out, a figure, and every claim with its verdict. All of it is
read from the runs in `docs/runs` when the site is built. Verdicts are counted by kind, since a check of our own
implementation is no evidence for a paper, and a control of our own that fails refutes no theorem.
"""


def pages() -> dict[str, str]:
    """Return the text of every page of findings by its name."""
    paths = make_runs.in_order()
    stored = {path.parent.name: path for path in paths}
    texts = {name: "\n\n".join(_page(name, stored.get(name))) + "\n" for name in STUDIES}
    return {"index": "\n\n".join(_index(stored)) + "\n", **texts}


def _page(name: str, path: Path | None) -> Iterator[str]:
    """Yield the parts of a study's page."""
    study = load(name)
    if path is None:
        yield f"# {study.title}"
        yield make_runs.paragraph(make_runs.cited(study.description("paper", "")))
        yield f"No run of `{name}` is stored: {make_runs.NOT_STORED[name]}. These claims are waiting for one:"
        yield "\n".join(f"- {claim.statement} ({claim.kind})" for claim in study.claims)
    else:
        _, command, *parts = make_runs.section(path, pictures=PICTURES)
        *parts, claims = parts
        yield f"# {read_claims(path).description.title}"
        yield from parts
        yield "## How it was done"
        yield make_runs.paragraph(study.about)
        yield command
        yield "## Claims"
        yield claims
    yield "## The code"
    yield f"The study is `{STUDIES[name]}`; its name on the command line is `{name}`."


def _index(stored: dict[str, Path]) -> Iterator[str]:
    """Yield the parts of the first page."""
    paths = list(stored.values())
    yield HEAD.rstrip()
    yield "\n".join(make_runs.counts(paths))
    yield "| study | finding | claims by kind |\n|---|---|---|\n" + "\n".join(
        _row(name, stored.get(name)) for name in STUDIES
    )
    yield "## What is not stored, or not at its full size"
    yield "\n".join(make_runs.costs(paths))
    yield "\n".join(["```{toctree}", ":hidden:", "", *STUDIES, "```"])


def _row(name: str, path: Path | None) -> str:
    if path is None:
        return f"| [{name}]({name}.md) | {load(name).title} | no run is stored |"
    stored = read_claims(path)
    return f"| [{name}]({name}.md) | {stored.description.title} | {totals(stored.claims)} |"


def write_pages(_app: Sphinx) -> None:
    """Write the pages whose text has changed, so that Sphinx reads only those again."""
    FOLDER.mkdir(exist_ok=True)
    texts = {FOLDER / f"{name}.md": text for name, text in pages().items()}
    for path in FOLDER.glob("*.md"):
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


class Finding(SphinxDirective):
    """What a stored run shows: the outcome, its figure, and its claims, or those of some kinds."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Callable[[str], Any]] | None] = {"kinds": str.split}

    def run(self) -> list[nodes.Node]:
        """Return the parts as nodes, parsed as those of a page are."""
        return self.parse_text_to_nodes("\n\n".join(self._parts()))

    def _parts(self) -> Iterator[str]:
        (name,), kinds = self.arguments, self.options.get("kinds", list(KINDS))
        path = next((path for path in make_runs.in_order() if path.parent.name == name), None)
        if path is None:
            yield f"No run of `{name}` is stored: {make_runs.NOT_STORED[name]}."
            return
        depth = self.env.docname.count("/")
        self.env.note_dependency(path / "claims.json")
        study, stored = load(name), read_claims(path)
        yield stored.description.outcome
        yield f"![{make_runs.alt_text(study)}]({'../' * depth}runs/pictures/{name}.png)"
        yield next(iter(study.figures.values())).caption
        yield "\n".join(make_runs.claims_table([record for record in stored.claims if record["kind"] in kinds]))
        rest = len([record for record in stored.claims if record["kind"] not in kinds])
        link = f"[the finding]({'../' * depth}findings/{name}.md)"
        yield f"All of it: {link}" + (f", with {rest} further claims of other kinds." if rest else ".")


class MarkVerdicts(SphinxTransform):
    """A cell of a table that is a verdict gets a class, so that those that do not hold stand out."""

    default_priority = 600

    def apply(self, **_options: Any) -> None:
        """Mark the cells whose text begins with a verdict."""
        for entry in self.document.findall(nodes.entry):
            verdict = next((verdict for verdict in VERDICTS if entry.astext().partition(":")[0] == verdict), None)
            if verdict:
                entry["classes"].append(f"verdict-{verdict.replace(' ', '-')}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive, and write the pages before the sources are read."""
    app.add_directive("finding", Finding)
    app.add_transform(MarkVerdicts)
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
