"""The page on stored runs states what these come to, and its commands run the same configs."""

import dataclasses
import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import xarray as xr

from joma.commands.parsing import config_with
from joma.runs import Run, open_run, read_claims, read_config
from joma.studies import STUDIES, load

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "runs"
RUNS = sorted(claims.parent for claims in STORED.glob("*/*/claims.json"))
OTHER_VERSION = {"learning-rates"}  # one variable was computed anew, as the attribute `recomputed` of the run says
EACH_RUN = pytest.mark.parametrize("path", RUNS, ids=lambda path: path.parent.name)
MAX_BYTES = 15_000_000


def load_script(name):
    """Import a script of the folder of documents, which finds those beside it as it does when it is run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        spec.loader.exec_module(module)
    return module


make_runs = load_script("make_runs")


def git(*words):
    """Return what git prints about this repository; None if it fails, or is not there."""
    try:
        answer = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def has_whole_history():
    """Return whether the tests are in a clone with all commits, not in an archive or a shallow clone."""
    return git("rev-parse", "--is-shallow-repository") == "false" and git("ls-files", "tests/test_docs.py") != ""


def test_every_study_has_a_stored_run_or_a_reason_why_not():
    assert {path.parent.name for path in RUNS} | set(make_runs.NOT_STORED) == set(STUDIES)
    assert len(RUNS) == len({path.parent.name for path in RUNS})


def test_stored_runs_their_page_and_its_pictures_are_small():
    folders = (*RUNS, STORED, STORED / "pictures")
    files = (file for folder in folders for file in folder.iterdir() if file.is_file() and file.name != "report.html")
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


def test_the_page_is_what_the_stored_runs_say():
    assert (STORED / "README.md").read_text(encoding="utf-8") == make_runs.page(make_runs.in_order())


def test_the_readme_shows_what_the_stored_runs_say():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert make_runs.START in readme
    assert make_runs.with_findings(readme, make_runs.in_order()) == readme


def without_numbers(claim):
    """Return a claim's record without the numbers that were measured."""
    return {name: value for name, value in claim.items() if name != "measured"}


def numbers(claim):
    """Return the measured numbers of a claim's record; processors differ in their last bits, as sums have no order."""
    return {
        f"{name} {index}": math.nan if value is None else value
        for name, values in claim["measured"].items()
        for index, value in enumerate(values if isinstance(values, list) else [values])
    }


@EACH_RUN
def test_a_stored_run_has_the_verdicts_of_the_present_claims(path):
    study, stored, run = load(path.parent.name), read_claims(path), open_run(path)
    preset = read_config(path)["preset"]
    records = [claim.judge(run, preset) for claim in study.claims]
    assert [without_numbers(claim) for claim in stored.claims] == [without_numbers(claim) for claim in records]
    for claim, record in zip(stored.claims, records, strict=True):
        assert numbers(claim) == pytest.approx(numbers(record), rel=1e-9, abs=1e-12, nan_ok=True), claim["name"]
    assert stored.description == study.description(preset, study.outcome(run) if study.outcome else "")


@EACH_RUN
def test_the_command_of_a_run_makes_its_config(path):
    study, stored = load(path.parent.name), read_config(path)
    words = shlex.split(make_runs.command(path))[3:]
    options = [*zip(words[::2], words[1::2], strict=True)]
    config = config_with(study, stored["preset"], tuple(value for name, value in options if name == "--set"))
    seeds = range(int(dict(options).get("--seeds", study.presets[stored["preset"]].seeds)))
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    former = {name: value for name, value in fields.items() if name not in stored["config"]}
    assert former == {name: make_runs.FORMER[name] for name in former}  # the command switches off what came later
    fields = {name: value for name, value in fields.items() if name not in former}
    text = {name: value for name, value in stored["config"].items() if name not in fields}
    assert set(text) <= {"text_sha256", "stored_axes_sha256"}
    assert Run(STORED, study.name, study.version, fields | text, seeds).path == path


@EACH_RUN
def test_a_stored_run_names_a_clean_commit_and_its_own_config(path):
    run = open_run(path)
    attributes = run.attrs
    commit = make_runs.commit_of(run) if has_whole_history() else attributes["git_commit"][:40]
    assert make_runs.COMMIT.fullmatch(commit)
    if has_whole_history():
        assert git("merge-base", "--is-ancestor", commit, "HEAD") is not None
        assert attributes.get("source_tree", make_runs.tree_of(commit)) == make_runs.tree_of(commit)
    assert json.loads(attributes["config"]) == read_config(path)["config"]


def test_a_run_on_files_without_their_history_is_of_the_commit_that_has_its_source_tree():
    if not has_whole_history():
        pytest.skip("this clone lacks older commits")
    earlier = open_run(next(path for path in make_runs.in_order() if path.parent.name == "winner")).attrs["git_commit"]
    stale = {"git_commit": f"{earlier[::-1]}-dirty", "source_tree": make_runs.tree_of(earlier)}
    commit = make_runs.commit_of(xr.Dataset(attrs=stale))
    assert make_runs.tree_of(commit) == make_runs.tree_of(earlier)
    unknown = stale | {"source_tree": "0" * 40}
    assert make_runs.commit_of(xr.Dataset(attrs=unknown)) == stale["git_commit"]


@EACH_RUN
def test_the_commit_of_a_stored_run_has_the_version_of_the_study_that_it_names(path):
    """What a run was computed with and what it says are one version, but for runs whose page says otherwise."""
    if not has_whole_history():
        pytest.skip("this clone lacks older commits")
    commit, name = make_runs.commit_of(open_run(path)), path.parent.name
    (file,) = (git("grep", "-l", f'name="{name}"', commit, "--", "src") or "").split()
    versions = re.findall(r"^    version=(\d+),$", git("show", file) or "", flags=re.MULTILINE)
    same = versions == [str(read_config(path)["version"])]
    assert same == (name not in OTHER_VERSION)
