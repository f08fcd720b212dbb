"""What is released: the wheel and the sdist as people install them, away from the checkout."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import joma
from joma.stamp import source_tree
from joma.verify import CHECKS

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NEW_FILES = ("--others", "--exclude-standard")  # git does not track them yet, and does not ignore them
ENVIRONMENT = {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def skip_without(*packages: str) -> None:
    """Skip the test unless all packages are installed. A folder `build` on the path is not the package."""
    for package in packages:
        try:
            distribution(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed; `make check` installs it")


def call(*command: object, folder: Path, codes: tuple[int, ...] = (0,), **options) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, **options)
    assert done.returncode in codes, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done


def build(out: Path, *options: str) -> None:
    call(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", out, *options, ROOT, folder=out)


def checksums(wheel: Path) -> dict[str, int]:
    """Return the checksum of every file in a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def files_of_git(folder: str, *options: str) -> set[str]:
    """Return the files of a folder that git tracks; skip the test where this is no checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout: git does not say which files belong to the package")
    names = call("git", "ls-files", "-z", "--cached", *options, "--", folder, folder=ROOT).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The sdist, and the wheel that is built from it: what `python -m build` makes."""
    skip_without("build", "hatchling")
    out = tmp_path_factory.mktemp("dist")
    build(out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(released, tmp_path_factory):
    """The interpreter of an environment with the wheel and, from this one, the packages that joma depends on.

    A path in a `.pth` file is searched, but its own `.pth` files are not read: an editable install of the checkout in
    this environment cannot be reached from the other.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-P", "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet")
    call(*pip, "install", "--no-index", "--no-deps", "--no-compile", released[1], folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others), encoding="utf-8")
    return python


@pytest.fixture
def elsewhere(installed, tmp_path):
    """A function that runs a program of the environment in an empty folder, with nothing from this process."""

    def run(name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        folders = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "JOMA_CACHE": str(tmp_path / "cache")}
        program = installed.with_name(name)
        return call(program, *arguments, folder=tmp_path, codes=codes, env=ENVIRONMENT | folders)

    return run


def test_the_wheel_holds_the_package_and_nothing_else(released):
    names = set(checksums(released[1]))
    package = {name.removeprefix("src/") for name in files_of_git("src/joma", *NEW_FILES)}
    assert {"joma/py.typed", "joma/__init__.pyi", "joma/report/template.html"} <= package
    notes = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert names - package == {f"joma-{joma.__version__}.dist-info/{name}" for name in notes}
    assert package <= names


def test_the_sdist_builds_the_wheel_of_the_checkout(released, tmp_path):
    build(tmp_path, "--wheel")
    (wheel,) = tmp_path.glob("*.whl")
    assert checksums(wheel) == checksums(released[1])


def test_the_sdist_holds_what_make_check_needs(released):
    with tarfile.open(released[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of_git(".") - names == files_of_git(".ci")
    assert names - files_of_git(".", *NEW_FILES) == {"PKG-INFO"}


def test_twine_takes_both(released):
    skip_without("twine")
    done = call(sys.executable, "-P", "-m", "twine", "check", "--strict", *released, folder=released[0].parent)
    assert done.stdout.count("PASSED") == 2


def test_the_metadata_are_valid_and_complete(released):
    with zipfile.ZipFile(released[1]) as archive:
        content = archive.read(f"joma-{joma.__version__}.dist-info/METADATA")
    metadata = Metadata.from_email(content, validate=True)
    assert metadata.version == Version(joma.__version__)
    assert (metadata.license_expression, metadata.license_files) == ("MIT", ["LICENSE"])
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(metadata.provides_extra or ()) == set(SETTINGS["project"]["optional-dependencies"])


def test_the_wheel_is_imported_and_not_the_checkout(elsewhere, installed):
    script = "import json, sys, joma; print(json.dumps([joma.__file__, joma.__version__, sys.path]))"
    file, version, path = json.loads(elsewhere("python", "-c", script).stdout)
    assert Path(file).is_relative_to(installed.parents[1])
    assert version == joma.__version__
    assert not [folder for folder in path if Path(folder).is_relative_to(ROOT / "src")]
    assert elsewhere("joma", "--version").stdout == f"joma {joma.__version__}\n"


def test_the_wheel_runs_a_study_and_draws_its_report(elsewhere, tmp_path):
    done = elsewhere("joma", "run", "winner", "--json", codes=(0, 1))
    (outcome,) = json.loads(done.stdout)
    verdicts = {(claim["kind"], claim["verdict"]) for claim in outcome["claims"]}
    assert ("theorem", "holds") in verdicts
    assert ("theorem", "does not hold") not in verdicts
    assert done.returncode == int(outcome["failed"] > 0)
    report = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert f'id="winner-{Path(outcome["path"]).name}"' in report
    assert "<style>" in report
    attributes = joma.open_run(tmp_path / outcome["path"]).attrs
    assert (attributes["joma_version"], attributes["git_commit"]) == (joma.__version__, "unknown")
    assert attributes["source_tree"] == source_tree(Path(joma.__file__).parent)


def test_the_wheel_verifies_every_theorem(elsewhere):
    results = json.loads(elsewhere("joma", "verify", "--json").stdout)
    assert [result["statement"] for result in results] == [check.statement for check in CHECKS]
    assert {result["verdict"] for result in results} == {"holds"}


def test_a_type_checker_reads_the_types_of_the_wheel(installed, tmp_path):
    skip_without("pyright")
    file = tmp_path / "user.py"
    file.write_text("import joma\nreveal_type(joma.schedule.every(5, 10))\njoma.schedule.every('five', 10)\n")
    command = (sys.executable, "-P", "-m", "pyright", "--outputjson", "--pythonpath", installed, file)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = call(*command, folder=tmp_path, codes=(1,), env=variables)
    answers = [(line["severity"], line.get("rule")) for line in json.loads(done.stdout)["generalDiagnostics"]]
    assert answers == [("information", None), ("error", "reportArgumentType")]
    assert 'is "tuple[int, ...]"' in done.stdout.replace('\\"', '"')


def test_the_version_is_stated_in_one_place_and_has_its_changes():
    assert "version" in SETTINGS["project"]["dynamic"]
    assert "version" not in SETTINGS["project"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changes, re.MULTILINE)
    assert len(headings) == changes.count("\n## ")
    (first, date), *earlier = headings
    assert (first, date) == ("Unreleased", "")
    versions = [Version(name) for name, _ in earlier]
    assert all(date for _, date in earlier)
    assert versions == sorted(versions, reverse=True)
    running = Version(joma.__version__)
    assert str(running) == joma.__version__
    assert running == versions[0] or (running.is_devrelease and running > versions[0])


def test_the_supported_pythons_are_stated_alike():
    marks = [mark.rpartition(" ")[2] for mark in SETTINGS["project"]["classifiers"] if ":: Python :: 3." in mark]
    supported = SpecifierSet(SETTINGS["project"]["requires-python"])
    assert all(supported.contains(mark) for mark in marks)
    assert not supported.contains("3.10")
