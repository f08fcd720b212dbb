import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import toy_study
from command_line import joma
from joma import __version__, cli
from joma.files import lock
from joma.manifest import write_manifest
from offered_studies import offer


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    offer(monkeypatch, {"toy": "toy_study"})
    monkeypatch.setenv("COLUMNS", "120")


def test_judge_judges_and_draws_what_is_stored(tmp_path, capsys):
    joma("run", "toy", "--out", tmp_path, capsys=capsys)
    joma("run", "toy", "--out", tmp_path, "--set", "slope=1.0", capsys=capsys)
    for file in tmp_path.rglob("figures/*"):
        file.unlink()
    code, out, err = joma("judge", tmp_path, "--json", capsys=capsys)
    assert (code, err) == (1, "")
    assert [outcome["failed"] for outcome in json.loads(out)] == [0, 2]
    assert len([*tmp_path.rglob("figures/*.svg")]) == 2
    path = json.loads(out)[0]["path"]
    code, out, _ = joma("judge", path, capsys=capsys)
    assert code == 0
    assert "The line ends at 2." in out
    assert "judged again" in " ".join(out.split())  # a long path breaks the line
    code, out, _ = joma("judge", tmp_path / "toy", "--json", capsys=capsys)
    assert (code, len(json.loads(out))) == (1, 2)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "config.json").write_text("{"), "config.json is cut short or altered"),
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: edit(path / "config.json", '"quick"', '"quack"'), "config.json is altered"),
        (lambda path: (path / "trajectory.nc").unlink(), "trajectory.nc is missing"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json is cut short or altered"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (
            lambda path: rewrite(path, '"study": "toy"', '"study": "gone"'),
            "must be one of toy, got 'gone'",
        ),
        (lambda path: rewrite(path, '"version": 1', '"version": 0'), "version 0, where toy, version 1 is"),
    ],
)
def test_judge_leaves_what_it_cannot_judge_and_goes_on(tmp_path, capsys, spoil, words):
    joma("run", "toy", "--out", tmp_path, capsys=capsys)
    (file,) = tmp_path.rglob("config.json")
    shutil.copytree(file.parent, tmp_path / "toy" / "a")
    shutil.copytree(file.parent, tmp_path / "toy" / "z")
    spoil(tmp_path / "toy" / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "toy" / "a").rglob("*") if path.is_file()}
    code, out, err = joma("judge", tmp_path, "--json", capsys=capsys)
    assert code == 2
    assert len(json.loads(out)) == 2
    assert err.count("\n") == 1
    assert "toy/a was not judged: " in err
    assert words in err
    assert {path: path.read_bytes() for path in (tmp_path / "toy" / "a").rglob("*") if path.is_file()} == before


def test_judge_goes_on_beside_a_run_that_is_held(tmp_path, capsys):
    joma("run", "toy", "--out", tmp_path, capsys=capsys)
    joma("run", "toy", "--out", tmp_path, "--seeds", 2, capsys=capsys)
    held, _ = sorted(file.parent for file in tmp_path.rglob("config.json"))
    with lock(held):
        code, out, err = joma("judge", tmp_path, "--json", capsys=capsys)
    assert (code, len(json.loads(out))) == (2, 1)
    assert "locked by another process" in err


def rewrite(path, before, after):
    """Change a run's config and write a manifest to match, as a run of another study or version would have it."""
    edit(path / "config.json", before, after)
    names = ("config.json", "trajectory.nc", "claims.json")
    write_manifest(path, json.loads((path / "config.json").read_text()), names)


def edit(file, before, after):
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "tyo"], "`study` must be one of toy, got 'tyo'; did you mean 'toy'."),
        (["run", "--preset", "quik"], "`preset` must be one of quick, paper, got 'quik'; did you mean 'quick'."),
        (["run", "--seeds", "0"], "`seeds` must be a whole number in [1, 1000000], got 0; give a number"),
        (["run", "--set", "slope"], "`--set` must be KEY=VALUE"),
        (["run", "--set", "slop=1"], "did you mean 'slope'"),
        (["run", "--set", "points=1"], "`points` must be at least 2, got 1; use more points."),
        (["run", "--set", "slope=nan"], "`slope` must be finite, got nan; give a finite number."),
        (["run", "--set", "levels=1,inf"], "`levels` must be finite, got inf"),
        (["run", "--device", "cuda"], "`--device` must be an available device"),
        (["judge", "nowhere"], "no finished run below nowhere; give the folder that runs are stored in"),
        (["report", "nowhere"], "no finished run below nowhere; run `joma run --out nowhere` first."),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = joma(*args, capsys=capsys)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("joma: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [["rnu"], ["run", "--preset"], ["run", "--set", "points=many"], ["list", "--jsn"]])
def test_usage_errors_keep_the_box_and_exit_2(args, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2
    assert "helptext" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_trajectory_cut_short_is_exit_2_for_run_and_report(tmp_path, capsys):
    joma("run", "--out", tmp_path, capsys=capsys)
    (file,) = tmp_path.rglob("trajectory.nc")
    file.write_bytes(file.read_bytes()[:500])
    for command in (["run", "--out", tmp_path], ["report", tmp_path]):
        code, _, err = joma(*command, capsys=capsys)
        assert code == 2
        assert "trajectory.nc is cut short or altered" in err
    assert file.stat().st_size == 500


def test_list(capsys):
    code, out, _ = joma("list", capsys=capsys)
    assert code == 0
    assert "toy: A line" in out
    assert "quick 1 s, paper 2 s" in out
    assert "Every seed ends above 2." in out
    assert out.index("Every seed ends above 2.") < out.index("Studies")  # the overview is what a terminal shows last
    assert joma("list", "toy", capsys=capsys) == (0, out, "")
    code, out, _ = joma("list", "--json", capsys=capsys)
    assert json.loads(out)[0]["presets"]["paper"]["config"]["points"] == 50


@pytest.mark.parametrize("command", ["list", "run", "judge", "report", "lab"])
def test_help_shows_what_may_be_left_out_in_brackets(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    usage, _, _ = out.partition("\n\n")
    assert re.search(r"\[(STUDY \.\.\.|DIR|PAGE)\]", usage)
    assert "(default: )" not in out


def test_list_of_a_study_that_does_not_exist_is_exit_2(capsys):
    code, out, err = joma("list", "toi", capsys=capsys)
    assert (code, out) == (2, "")
    assert "'toy'" in err


def test_report_is_one_file_with_everything_inside(tmp_path, capsys):
    joma("run", "--out", tmp_path, capsys=capsys)
    joma("run", "--out", tmp_path, "--set", "slope=1.0", capsys=capsys)
    code, out, _ = joma("report", tmp_path, "--json", capsys=capsys)
    assert code == 0
    answer = json.loads(out)
    assert answer["runs"] == 2
    page = Path(answer["report"]).read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "http://" not in page
    assert "https://" not in page
    assert "&lt;check&gt;" in page
    assert page.count("✗ does not hold") == 2 * 2  # in the table of all claims and in the run's own section
    assert "what does not hold" in page


def test_a_run_is_headed_by_the_title_of_its_preset(tmp_path, capsys, monkeypatch):
    preset = dataclasses.replace(toy_study.STUDY.presets["quick"], title="Half a line")
    study = dataclasses.replace(toy_study.STUDY, presets=toy_study.STUDY.presets | {"quick": preset})
    monkeypatch.setattr(toy_study, "STUDY", study)
    for arguments in (("run", "--out", tmp_path), ("judge", tmp_path)):
        assert "toy: Half a line" in joma(*arguments, capsys=capsys)[1]
    assert "toy: A line" in joma("run", "--preset", "paper", "--out", tmp_path, capsys=capsys)[1]


def test_the_version_is_one_line_and_stands_in_the_help(capsys):
    assert joma("--version", capsys=capsys) == (0, f"joma {__version__}\n", "")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--version", "list"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "joma --version" in capsys.readouterr().out


@pytest.mark.parametrize("code", ["import joma", "from joma import cli; cli.main(['--help'])"])
def test_import_and_help_leave_torch_alone(code):
    script = f"""
import sys
try:
    {code}
except SystemExit:
    pass
heavy = {{"torch", "scipy", "matplotlib", "xarray", "rich"}} & set(sys.modules)
sys.exit(", ".join(sorted(heavy)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m joma list | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("default:mind the gap")
def test_a_warning_is_one_line(tmp_path, capsys):
    code, _, err = joma("run", "--out", tmp_path, "--set", "mode=warn", capsys=capsys)
    assert code == 0
    assert err == "joma: warning: mind the gap\n"
