"""As another user, on a full disk and on a read-only one: one line, exit code 2, and nothing is changed."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import toy_study
from joma.files import StorageError
from joma.report.html import write_report
from joma.runs import open_run
from joma.study import execute, judge
from offered_studies import offer
from robustness.fault_scenarios import prepare_series
from robustness.faulty_files import run_apart
from robustness.restricted import become_nobody, joma, mount, remount, snapshot

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user or mount")

# What nobody may not do: for a place below `--out`, its mode.
UNWRITABLE = {"folder of all runs": (".", 0o755)}
UNREADABLE = {
    "folder of all runs": (".", 0o700),
    "folder that can be listed only": (".", 0o744),
    "folder of a study": ("toy", 0o700),
    "folder of a run": ("toy/*", 0o700),
    "manifest": ("toy/*/manifest.json", 0o600),
    "config": ("toy/*/config.json", 0o600),
    "trajectory": ("toy/*/trajectory.nc", 0o600),
    "claims": ("toy/*/claims.json", 0o600),
    "figure": ("toy/*/figures/1-line.svg", 0o600),
    "figures": ("toy/*/figures", 0o700),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with a finished run and its report in `out`, and checkpoints in `series`."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        offer(patch, {"toy": "toy_study"})
        patch.setattr("joma.report.probe.draw", lambda _: Figure(figsize=(1, 1)))
        execute(toy_study.STUDY, out=folder / "out")
        write_report(folder / "out")
        prepare_series(folder / "out")
        joma("probe", folder / "series", "--out", folder / "warm")  # imports what the other user may not read
        shutil.rmtree(folder / "warm")
        yield folder


@pytest.fixture
def place(template):
    """A copy of the template that everybody can read."""
    folder = Path(tempfile.mkdtemp()).resolve()
    try:
        shutil.copytree(template, folder, dirs_exist_ok=True)
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


def answers(place: Path, *, prepare=become_nobody) -> dict:
    """Return what each command and each function answers in a process that `prepare` restricts."""

    def act() -> dict:
        out = place / "out"
        prepare()
        commands = {
            "run": ("run", "toy", "--out", out),
            "new run": ("run", "toy", "--out", out, "--set", "slope=1.0"),
            "judge": ("judge", out),
            "report": ("report", out),
            "probe": ("probe", place / "series", "--out", out),
        }
        results: dict = {name: joma(*command) for name, command in commands.items()}
        functions = {
            "open_run": lambda: open_run(path),
            "execute": lambda: execute(toy_study.STUDY, out=out),
            "judging": lambda: judge(toy_study.STUDY, path),
        }
        for name, function in functions.items():
            try:
                function()
                results[name] = "done"
            except StorageError as problem:
                results[name] = str(problem)
        return results

    (path,) = (place / "out").glob("toy/*")
    before = snapshot(place)
    end = run_apart(place / "nowhere", act)
    assert end.how == "done", end.value
    assert snapshot(place) == before
    return end.value


def is_refused(answer, place: Path) -> bool:
    """Return whether a command ended with exit code 2 and lines that name a place, and no traceback."""
    named = [line for line in answer.lines if str(place) in line]
    return answer.code == 2 and bool(named) and all(line.startswith("joma: ") for line in answer.lines)


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_may_not_be_read_is_named(place, what):
    pattern, mode = UNREADABLE[what]
    for path in (place / "out").glob(pattern) if pattern != "." else [place / "out"]:
        path.chmod(mode)
    results = answers(place)
    assert {name for name in ("run", "new run", "judge", "report", "probe") if is_refused(results[name], place)} == {
        "run", "new run", "judge", "report", "probe"
    }  # fmt: skip
    assert all(str(place) in results[name] for name in ("execute", "judging"))
    if what in ("claims", "figure", "figures"):  # a trajectory needs neither
        assert results["open_run"] == "done"
    else:
        assert str(place) in results["open_run"]


def test_what_may_not_be_written_can_be_read(place):
    results = answers(place)
    assert all(is_refused(results[name], place) for name in ("new run", "judge", "report", "probe"))
    assert all("Permission denied" in results[name].lines[-1] for name in ("new run", "judge", "report", "probe"))
    assert (results["run"].code, results["execute"], results["open_run"]) == (0, "done", "done")
    assert "Permission denied" in results["judging"]


class NotPermitted(Exception):
    """Mounts are not permitted here."""


def test_a_read_only_disk_can_be_read(place):
    def prepare() -> None:
        out = str(place / "out")
        if not (mount(place / "out", "--bind", out) and remount(place / "out", "ro,bind")):
            raise NotPermitted

    try:
        results = answers(place, prepare=prepare)
    except AssertionError as problem:
        if "NotPermitted" in str(problem):
            pytest.skip("mounts are not permitted")
        raise
    refused = ("new run", "judge", "report", "probe")
    assert all(is_refused(results[name], place) for name in refused)
    assert all("Read-only file system" in results[name].lines[-1] for name in refused)
    assert (results["run"].code, results["execute"], results["open_run"]) == (0, "done", "done")
    assert "Read-only file system" in results["judging"]


def test_a_full_disk_is_named_and_the_run_resumes_when_there_is_room(place):
    def act() -> list | None:
        disk = place / "disk"
        disk.mkdir()
        if not mount(disk, "-t", "tmpfs", "-o", "size=32k", "tmpfs"):
            return None
        run = ("run", "toy", "--out", disk)
        results = [joma(*run), sorted(path.name for path in disk.rglob(".joma-*"))]
        remount(disk, "size=1m")
        results += [joma(*run)]
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
        results += [joma("judge", disk), joma("report", disk), joma("probe", place / "series", "--out", disk)]
        (disk / "filler").unlink()
        return [*results, joma("judge", disk), joma("report", disk), open_run(next(disk.glob("toy/*"))).value.values]

    end = run_apart(place / "nowhere", act)
    assert end.how == "done", end.value
    assert list((place / "disk").iterdir()) == []  # the mount has ended with its process
    if end.value is None:
        pytest.skip("mounts are not permitted")
    full, left, resumed, *refused, judged, reported, values = end.value
    assert is_refused(full, place / "disk")
    assert "No space left on device" in full.lines[-1]
    assert left == []
    assert all(is_refused(answer, place / "disk") for answer in refused)
    assert (resumed.code, judged.code, reported.code) == (0, 0, 0)
    assert (values == open_run(next((place / "out").glob("toy/*"))).value.values).all()
