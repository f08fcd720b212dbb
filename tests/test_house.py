"""The shape of the house: sizes of files and functions, numbers of parameters, and a test for every module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "joma", ROOT / "tests"
MAX_FILE, MAX_BODY, MAX_PARAMETERS = 500, 40, 8

# Functions with more parameters than eight, each with the reason.
TRITON = "a Triton kernel: its parameters are pointers, sizes and compile-time constants, which cannot be grouped"
ATTENTION = "the arguments of attention, under our names and torch's, which users pass by name"
OPERATOR = "an operator of torch: its arguments are tensors and numbers, which cannot be grouped"
MANY_PARAMETERS = {
    "kernels/entropy_triton.py: _kernel": TRITON,
    "kernels/entropy_triton.py: _step": TRITON,
    "kernels/entropy_triton.py: query_block": TRITON,
    "kernels/entropy_triton.py: tile_scores": TRITON,
    "kernels/short.py: _backward": OPERATOR,
    "kernels/short.py: _forward": OPERATOR,
    "kernels/short_triton.py: _backward": TRITON,
    "kernels/short_triton.py: _forward": TRITON,
    "kernels/short_triton.py: _load_biased": TRITON,
    "kernels/short_triton.py: _retained": TRITON,
    "kernels/short_triton.py: _store": TRITON,
    "kernels/short_triton.py: _weights": TRITON,
    "kernels/summary_triton.py: _insert": TRITON,
    "kernels/summary_triton.py: _key_score": TRITON,
    "kernels/summary_triton.py: _search_kernel": TRITON,
    "kernels/summary_triton.py: _step": TRITON,
    "kernels/summary_triton.py: _sums_kernel": TRITON,
    "kernels/summary_triton.py: _top_kernel": TRITON,
    "probes/entropy.py: attention_entropy": ATTENTION,
    "probes/entropy.py: attention_rows": ATTENTION,
    "probes/summary.py: attention_summary": ATTENTION,
    "watch/recorder.py: __init__": "the options of `Recorder`, which users pass by name",
    "train/packed.py: _update": "the update of Adam as an equation: four tensors and its coefficients by name",
}

# Modules whose tests are elsewhere, or that have nothing of their own to test.
TESTED_ELSEWHERE = {
    "__main__": "train/test_interrupt",
    "lazy": "test_surface",
    "kernels/head_triton": "kernels/test_head",
    "kernels/short_triton": "kernels/test_short",
    "kernels/table_triton": "kernels/test_table",
    "train/cuda": "train/test_cuda",
    "train/options": "train/test_loop",
    "train/packed": "train/test_optimiser",
    "train/state": "train/test_loop",
}


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield f"{path.relative_to(SOURCE)}: {node.name}", node


def body_lines(function: ast.FunctionDef) -> int:
    """Count the lines of a function after its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return 0 if not body else (function.end_lineno or 0) - body[0].lineno + 1


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in every)


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_no_file_is_long(folder):
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files(ROOT / folder)}
    assert not {path: length for path, length in lengths.items() if length > MAX_FILE}


def test_no_function_is_long():
    every = [pair for path in python_files(SOURCE) for pair in functions(path)]
    assert not {name: body_lines(node) for name, node in every if body_lines(node) > MAX_BODY}


def test_few_parameters_but_for_equations_and_kernels():
    every = [pair for path in python_files(SOURCE) for pair in functions(path)]
    many = {name for name, node in every if parameters(node) > MAX_PARAMETERS}
    assert many == set(MANY_PARAMETERS)


def test_every_module_has_its_test():
    modules = {str(path.relative_to(SOURCE).with_suffix("")) for path in python_files(SOURCE)}
    modules = {name for name in modules if not name.endswith("__init__")}
    assert set(TESTED_ELSEWHERE) <= modules
    for name in sorted(modules):
        mirror = Path(name).with_name(f"test_{Path(name).name}")
        test = TESTS / f"{TESTED_ELSEWHERE.get(name, mirror)}.py"
        assert test.exists(), f"{name} has no {test.relative_to(ROOT)}"
