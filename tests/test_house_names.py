"""The names of the house: none that would make a reader ask what it is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)

# Words that fit any module or any function: a module is called by what is in it, a function by what it does.
MODULES = re.compile(r"(.*_)?(utils?|helpers?|misc|stuff|tools?|things?)|common|core|base|shared|main")
FUNCTIONS = re.compile(r"_?(handle|process|manage|do)(_.*)?")
# Words that fit anything: placeholders, numbered copies, and verbs and pronouns in the place of a noun.
ANYTHING = re.compile(
    r"stuff|things?|foo|baz|obj|tmp|temp|misc|everything|something"
    r"|(data|result|value|array|tensor|model|name|item|list|dict|copy|new|old|temp|tmp|var)_?\d+"
    r"|own|found|one|there|here|said|made|kept|asked|gone|mine"
)
# Names that others chose, or rely on.
GIVEN_NAMES = {
    "asked": "a field of the configs of studies, from which the folder of a run follows",
    "do_GET": "the method that `http.server` calls",
    "do_HEAD": "the method that `http.server` calls",
    "handle_data": "the method that `html.parser` calls",
    "handle_endtag": "the method that `html.parser` calls",
    "handle_starttag": "the method that `html.parser` calls",
}


def definitions(source: str) -> Iterator[tuple[int, str, re.Pattern[str] | None]]:
    """Yield the line and the name of all that a module defines, and the words that its kind must not be called by."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node.lineno, node.name, FUNCTIONS
        elif isinstance(node, ast.ClassDef):
            yield node.lineno, node.name, None
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, None


def is_vague(name: str, words: re.Pattern[str] | None) -> bool:
    return any(pattern is not None and pattern.fullmatch(name.lower()) for pattern in (words, ANYTHING))


def vague_names(source: str) -> list[str]:
    every = sorted(definitions(source), key=lambda definition: definition[0])
    return [f"{line}: {name}" for line, name, words in every if name not in GIVEN_NAMES and is_vague(name, words)]


def test_no_module_has_a_vague_name():
    assert not [str(path.relative_to(ROOT)) for path in FILES if is_vague(path.stem, MODULES)]


def test_nothing_that_a_module_defines_has_a_vague_name():
    vague = {str(path.relative_to(ROOT)): vague_names(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {path: names for path, names in vague.items() if names}


@pytest.mark.parametrize("name", ["utils", "train_helpers", "common", "tools", "data2"])
def test_vague_names_of_modules_are_seen(name):
    assert is_vague(name, MODULES)


@pytest.mark.parametrize("name", ["common_axes", "entropy", "tokens"])
def test_names_of_modules_that_say_something_are_not(name):
    assert not is_vague(name, MODULES)


def test_vague_names_are_seen_wherever_they_are_defined():
    source = """
def do_it(obj, *, entropy): ...
def document(process): ...
class Stuff: ...
data2 = [own.copy() for own in trajectories]
found, loss = (result_3 := 1), 2
"""
    names = ["2: do_it", "2: obj", "4: Stuff", "5: data2", "5: own", "6: found", "6: result_3"]
    assert sorted(vague_names(source)) == sorted(names)


def test_each_given_name_is_still_needed():
    needed = {name for path in FILES for _, name, _ in definitions(path.read_text(encoding="utf-8"))}
    assert set(GIVEN_NAMES) <= needed
