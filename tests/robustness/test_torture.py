"""What `make torture` counts as a failure, and that it goes on after one."""

import sys
from pathlib import Path

import pytest

from robustness import __main__ as torture

HARNESSES = {
    "counts": "def torture(scale):\n    return {'damages': int(100 * scale), 'damages failed': 0}\n",
    "dies": "import os\n\ndef torture(scale):\n    os._exit(9)\n",
    "finds": "def torture(scale):\n    return {'failures': 2}\n",
    "raises": "def torture(scale):\n    raise AssertionError('a fault of the code')\n",
    "test_fast": "def test_nothing():\n    pass\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of harnesses: one that passes and three that fail, each in another way."""
    for name, content in HARNESSES.items():
        (tmp_path / "robustness").mkdir(exist_ok=True)
        (tmp_path / "robustness" / f"{name}.py").write_text(content)
    monkeypatch.setattr(torture, "FOLDER", tmp_path / "robustness")
    package = sys.modules["robustness"]
    monkeypatch.setattr(package, "__path__", [str(tmp_path / "robustness"), *package.__path__])
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_every_harness_is_run_and_a_failing_one_ends_no_other(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["robustness", "--scale", "0.5"])
    monkeypatch.setattr(torture, "run_apart", torture.run)
    monkeypatch.setattr(torture, "harnesses", lambda: ("counts", "finds", "raises"))
    assert torture.main() == 1
    output = capsys.readouterr().out
    assert "| counts  | damages        |    50 |" in output
    assert "AssertionError: a fault of the code" in output
    assert output.endswith("3 failures\n")  # two that were counted and one error


def test_harnesses_are_the_modules_with_a_long_part(folder):
    assert list(torture.harnesses()) == ["counts", "dies", "finds", "raises"]
    assert Path(torture.FOLDER).parent == folder


def test_a_harness_that_dies_is_a_failure(monkeypatch, folder):
    monkeypatch.syspath_prepend(str(folder))  # spawned processes get this path
    result = torture.run_apart("dies", 1.0)
    assert result.failures == 1
    assert "BrokenProcessPool" in result.error
