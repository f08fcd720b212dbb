"""What the site's extensions do to docstrings, formulas and names."""

from __future__ import annotations

import importlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sphinx", reason="Sphinx is not installed; `make check` installs it")
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def _extensions_on_the_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(DOCS / "extensions"), str(DOCS), *sys.path])


def extension(name: str) -> ModuleType:
    """Import an extension of the site, or a script beside them."""
    return importlib.import_module(name)


def rewritten(text: str, name: str = "joma.theory.growth.linear") -> str:
    return "\n".join(extension("docstrings").rewritten(text.splitlines(), name))


def test_an_indented_formula_becomes_a_literal_block_as_it_is():
    text = "Return v.\n\n    v̇ = Δ * |v|\n\n    w_ = 2\n\nThe end."
    assert rewritten(text) == "Return v.\n\n::\n\n    v̇ = Δ * |v|\n\n    w_ = 2\n\nThe end."


def test_marks_are_escaped_and_code_is_not():
    assert rewritten("Weights |v0| and x_ with `a*b` in `[..., token]`.") == (
        "Weights \\|v0\\| and x\\_ with ``a*b`` in ``[..., token]``."
    )


def test_names_in_backticks_become_links_within_their_module_or_by_their_end():
    link = ":py:obj:`nonlinear <joma.theory.growth.nonlinear>`"
    assert rewritten("As `nonlinear` and `unknown`.") == f"As {link} and ``unknown``."
    assert "<joma.theory.flows.linear>" in rewritten("See `flows.linear`.")
    assert rewritten("`linear` itself") == "``linear`` itself"  # no link to the page that one is on


def test_arguments_of_a_section_are_no_literal_block_and_returns_keep_their_colons():
    text = "Sum.\n\nArgs:\n    x: a `number`.\n\nReturns:\n    An array: the sum.\n\n>>> 1 | 2\n3"
    assert rewritten(text).split("\n\n") == [
        "Sum.",
        "Args:\n    x: a ``number``.",
        "\n:returns: \n    An array: the sum.",
        ">>> 1 | 2\n3",
    ]


def test_a_second_name_leads_to_the_first():
    names = extension("public_names")
    assert names.aliases()["joma.probes.attention_entropy"] == "joma.attention_entropy"
    assert names.aliases()["joma.probes.entropy.attention_entropy"] == "joma.attention_entropy"
    assert set(names.aliases().values()) == set(names.documented())


@pytest.mark.parametrize(("formula", "shape"), [(r"\dot v_k", ["msub", "mover"]), (r"\sum_k^n v", ["munderover"])])
def test_an_index_stands_beside_an_accented_letter_and_below_a_sum(formula, shape):
    mathml = extension("mathml").mended(tex2mathml(formula, as_block=True))
    tags = [element.tag.partition("}")[2] for element in ET.fromstring(mathml).iter()]
    assert [tag for tag in tags if tag in ("msub", "mover", "munderover")] == shape
    assert tags.count("mi") + tags.count("mo") == len("vk˙") + (formula != r"\dot v_k")


def test_a_formula_that_is_not_understood_ends_the_build():

    with pytest.raises(ExtensionError, match="nosuchcommand"):
        extension("mathml").translate(nodes.math("", r"\nosuchcommand"), as_block=False)


def test_every_study_has_a_page_that_states_its_claims():
    make_runs, texts = extension("make_runs"), extension("findings").pages()
    stored = {path.parent.name: path for path in make_runs.in_order()}
    for name, path in stored.items():
        assert "\n".join(make_runs.claims_table(make_runs.read_claims(path).claims)) in texts[name]
    for name in make_runs.NOT_STORED:
        assert make_runs.NOT_STORED[name] in texts[name]
    assert set(texts) == {"index", *stored, *make_runs.NOT_STORED}
