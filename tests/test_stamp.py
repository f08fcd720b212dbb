import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import xarray as xr

import joma
from joma import runs, stamp
from joma.runs import Run, open_run
from joma.stamp import STAMP, code_identity, has_changed, now, provenance, source_tree


@pytest.fixture(autouse=True)
def _a_process_that_has_not_asked():
    stamp._code.cache_clear()
    yield
    stamp._code.cache_clear()


def git_in(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_stamp_names_versions_time_and_commit():
    fields = provenance()
    assert tuple(fields) == STAMP
    assert fields["numpy_version"] == version("numpy")
    assert fields["joma_version"] == joma.__version__  # of the code, whatever is installed
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", fields["created"])
    assert now() >= fields["created"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", fields["git_commit"])
    assert re.fullmatch(r"[0-9a-f]{40}", fields["source_tree"])
    assert all(isinstance(value, str) for value in fields.values())  # netCDF stores no other attributes


def test_a_package_or_program_that_is_missing_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "PACKAGES", ("no-such-package",))
    monkeypatch.setenv("PATH", str(tmp_path))
    fields = provenance()
    assert fields["no-such-package_version"] == "not installed"
    assert fields["git_commit"] == "unknown"


def test_an_environment_inside_another_repository_does_not_take_its_commit(monkeypatch, tmp_path):
    package = tmp_path / ".venv" / "joma"
    package.mkdir(parents=True)
    (package / "stamp.py").touch()
    git_in(tmp_path, "init")
    git_in(tmp_path, "commit", "--allow-empty", "--message", "theirs")
    monkeypatch.setattr(stamp, "__file__", str(package / "stamp.py"))
    assert provenance()["git_commit"] == "unknown"
    git_in(tmp_path, "add", ".venv")
    git_in(tmp_path, "commit", "--message", "ours")
    stamp._code.cache_clear()
    assert provenance()["git_commit"] == git_in(tmp_path, "rev-parse", "HEAD")


def test_the_source_tree_is_gits_name_for_the_package(tmp_path):
    package = tmp_path / "joma"
    files = {"b.py": "b", "a/__init__.py": "", "a-b.py": "x", "a.py": "ä", "a/c/d.csv": "1,2\n", "z/e.html": "<p>"}
    for name, content in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(content, encoding="utf-8")
    git_in(tmp_path, "init")
    git_in(tmp_path, "add", ".")
    tracked = git_in(tmp_path, "write-tree", "--prefix=joma/")
    assert source_tree(package) == tracked
    (package / "a" / "__pycache__").mkdir()  # what git does not track changes nothing
    (package / "a" / "__pycache__" / "c.pyc").touch()
    (package / "empty" / "deeper").mkdir(parents=True)
    (package / ".hidden").touch()
    assert source_tree(package) == tracked
    (package / "b.py").write_text("c")
    assert source_tree(package) != tracked


def test_a_run_names_the_code_that_it_began_with(monkeypatch, tmp_path):
    package = tmp_path / "joma"
    package.mkdir()
    (package / "stamp.py").write_text("began")
    monkeypatch.setattr(stamp, "__file__", str(package / "stamp.py"))
    Run(tmp_path / "runs", "toy", 1, {}, range(1)).begin("quick")
    began = source_tree(package)
    assert not has_changed()
    (package / "stamp.py").write_text("changed while it ran")
    assert code_identity()["source_tree"] == provenance()["source_tree"] == began != source_tree(package)
    assert has_changed()


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_whose_code_has_changed_on_the_way_says_so(monkeypatch, tmp_path, changed):
    monkeypatch.setattr(runs, "has_changed", lambda: changed)
    run = Run(tmp_path, "toy", 1, {}, range(1))
    run.begin("quick")
    run.save(xr.Dataset({"value": ("seed", [1.0])}, {"seed": [0]}), device="cpu", wall_time=1.0)
    assert ("source_changed" in open_run(run.path).attrs) == changed


def test_the_source_tree_of_this_package_is_that_of_its_files_in_git():
    package = Path(joma.__file__).parent
    status = ["git", "-C", str(package), "status", "--porcelain", "."]
    tracked = subprocess.run(status, capture_output=True, text=True, check=False)
    if tracked.returncode or tracked.stdout:
        pytest.skip("no checkout, or one with changes")
    assert source_tree(package) == git_in(package, "rev-parse", "HEAD:./")


def test_a_package_that_cannot_be_read_is_no_error(tmp_path):
    assert source_tree(tmp_path / "package.zip" / "joma") == "unknown"
