"""Code in the documents: examples give what they print, Python names what there is, and command lines can be parsed."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from joma.cli import Command
from joma.commands.grids import parse_plan
from joma.commands.parsing import config_with, parse
from joma.commands.run import RunCommand
from joma.commands.sweep import SweepCommand
from joma.studies import load

ROOT = Path(__file__).parents[1]
GENERATED = {"api", "findings"}  # written when the site is built
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not GENERATED & set(page.relative_to(ROOT).parts)]
FENCED = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^    (?:\.venv/bin/)?joma (?P<words>.*(?:\n {11,}\S.*)*)$", re.MULTILINE)
SYNOPSIS = re.compile(r"(?<![=\w])[A-Z]{3,}\b|\[--|\.\.\.")  # metavariables and what may be left out
CLASSES = {get_args(kind)[1].name: get_args(kind)[0] for kind in get_args(Command)}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [code for _, marked, code in FENCED.findall(page.read_text(encoding="utf-8")) if marked == language]


def command_lines(page: Path) -> Iterator[str]:
    """Yield what follows `joma` in the indented and the executed command lines of a page."""
    for match in COMMAND.finditer(page.read_text(encoding="utf-8")):
        yield " ".join(match["words"].split())
    for cell in blocks(page, "{code-cell}"):
        yield from re.findall(r"^!joma (.*)$", cell, re.MULTILINE)


WITH_EXAMPLES = [page for page in PAGES if blocks(page, "pycon")]
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
LINES = sorted({line for page in PAGES for line in command_lines(page)})


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=named)
def test_examples_print_what_the_page_shows(page):
    text = "\n".join(blocks(page, "pycon"))
    example = doctest.DocTestParser().get_doctest(text, {}, named(page), str(page), 0)
    assert example.examples
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    report: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(example, out=report.append)
    assert not report, "".join(report)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every name of joma that code uses, dotted: what it imports, and attributes of `joma` itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "joma":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"joma(\.\w+)+", dotted):
                yield dotted


def reach(dotted: str) -> object:
    """Return what a dotted name stands for."""
    value = importlib.import_module("joma")
    for number, name in enumerate(dotted.split(".")[1:], start=2):
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(".".join(dotted.split(".")[:number]))
    return value


@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_python_can_be_compiled_and_its_names_exist(page):
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        for dotted in imported(tree):
            assert reach(dotted) is not None


def test_a_name_that_does_not_exist_is_noticed():
    (name,) = imported(ast.parse("import joma\njoma.no_such_function(1)"))
    with pytest.raises(ModuleNotFoundError):
        reach(name)


@pytest.mark.parametrize("line", [line for line in LINES if not SYNOPSIS.search(line)])
def test_a_command_line_is_one_that_joma_accepts(line):
    command = parse(Command, shlex.split(line, comments=True), prog="joma")
    if isinstance(command, RunCommand):
        for name in command.studies:
            config_with(load(name), command.preset, command.set)
    if isinstance(command, SweepCommand):
        options = {"changes": command.set, "random": command.random, "seed": command.seed}
        parse_plan(load(command.study), command.preset, command.grid, **options)


@pytest.mark.parametrize("line", [line for line in LINES if SYNOPSIS.search(line)])
def test_a_synopsis_names_options_that_there_are(line):
    name, _, rest = line.partition(" ")
    options = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(CLASSES[name])}
    assert set(re.findall(r"--[\w-]+", rest)) <= options


def test_every_command_has_a_line_in_the_documents():
    assert {line.partition(" ")[0] for line in LINES} >= set(CLASSES)
