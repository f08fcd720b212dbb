"""What surrounds a command: closed pipes, full disks, strange paths and names, memory, and damaged neighbours."""

import dataclasses
import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import toy_study
from joma import cli
from joma.runs import open_run
from offered_studies import offer

HOSTILE = "\x1b[2J[bold]\n\u202e"


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    """Two studies, of which `exhausts` needs more memory than there is if its slope is 3, and overflows if it is 4."""

    def run(config, context):
        if config.slope == 3.0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes.")
        if config.slope == 4.0:
            raise OverflowError("cannot convert float infinity to integer")
        return toy_study.run(config, context)

    other = dataclasses.replace(toy_study.STUDY, name="exhausts", run=run)
    monkeypatch.setitem(sys.modules, "toy_twin", SimpleNamespace(STUDY=other))
    offer(monkeypatch, {"exhausts": "toy_twin", "toy": "toy_study"})
    monkeypatch.setattr("joma.commands.run.default_jobs", lambda _: 1)  # other processes do not know these studies
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def series(tmp_path):
    """Two checkpoints with a matrix whose name would clear the screen."""
    for step in range(2):
        folder = tmp_path / f"series{HOSTILE}" / f"step{step}"
        folder.mkdir(parents=True)
        weight = torch.randn(40, 8, generator=torch.Generator().manual_seed(step))
        save_file({f"{HOSTILE}mlp.fc1.weight": weight}, folder / "model.safetensors")
    return folder.parent


class Broken(io.StringIO):
    """Standard output that fails with the given error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, _):
        raise self.error


def test_a_damaged_run_ends_no_other_study(tmp_path, capsys):
    assert cli.main(["run", "--out", str(tmp_path)]) == 0
    (damaged,) = tmp_path.glob("exhausts/*/trajectory.nc")
    damaged.write_bytes(damaged.read_bytes()[:500])
    capsys.readouterr()
    assert cli.main(["run", "--out", str(tmp_path), "--json"]) == 2
    captured = capsys.readouterr()
    assert [outcome["study"] for outcome in json.loads(captured.out)] == ["toy"]
    assert captured.err.count("\n") == 1
    assert "trajectory.nc is cut short" in captured.err


def test_a_study_that_does_not_fit_into_memory_is_one_line_and_the_others_run(tmp_path, capsys):
    assert cli.main(["run", "--out", str(tmp_path), "--set", "slope=3", "--json"]) == 2
    captured = capsys.readouterr()
    assert [outcome["study"] for outcome in json.loads(captured.out)] == ["toy"]
    expected = "`config of exhausts` must be small enough for this machine's memory, got a size of 4 TB"
    assert captured.err == f"joma: {expected}; choose smaller sizes or fewer seeds.\n"
    assert not (tmp_path / "exhausts").exists()


def test_numbers_that_overflow_are_bad_input_in_a_changed_config_and_a_defect_in_a_preset(tmp_path, capsys):
    arguments = ["run", "exhausts", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--set", "slope=4"]) == 2
    assert capsys.readouterr().err == (
        "joma: `config of exhausts` must have numbers that can be computed with, got cannot convert float infinity to "
        "integer; choose numbers nearer to those of the preset.\n"
    )
    study = sys.modules["toy_twin"].STUDY
    preset = dataclasses.replace(study.presets["quick"], config=toy_study.Config(slope=4.0))
    sys.modules["toy_twin"].STUDY = dataclasses.replace(study, presets={"quick": preset})
    assert cli.main(arguments) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "1000000000"], "`seeds` must be a whole number in [1, 1000000], got 1000000000"),
        (["--set", f"points={10**30}"], "`points` must be a number that 64 bits hold, got 1e+30"),
        (["--set", "text=a\0b"], "`set` must be UTF-8 text without NUL"),
        (["--set", "slope=--help"], "`slope` must be a value, got '--help'; leave the dash out."),
        (["--out", "a\0b"], "`out` must be UTF-8 text without NUL, got 'a\\x00b'"),
        (["--out", os.fsdecode(b"caf\xe9")], "`out` must be UTF-8 text without NUL, got 'caf\\udce9'"),
        (["--out", "a" * 300], "File name too long; choose a folder that you may write to."),
        (["--out", "loop"], "choose a folder that you may write to."),
        (["--out", "loop/below"], "choose a folder that you may write to."),
    ],
)
def test_strange_sizes_and_paths_are_one_line(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["run", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("joma: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_results_are_stored_before_they_are_printed(series, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError(32, "Broken pipe")))
    assert cli.main(["probe", str(series), "--out", str(tmp_path / "out")]) == 1  # as with a reader: not run
    (folder,) = (tmp_path / "out").iterdir()
    assert open_run(folder).sizes["step"] == 2


def test_a_closed_pipe_ends_no_study_and_keeps_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError(32, "Broken pipe")))
    assert cli.main(["run", "--out", str(tmp_path), "--set", "slope=1"]) == 1
    assert len([*tmp_path.glob("*/*/manifest.json")]) == 2
    monkeypatch.setattr(sys, "stdout", Broken(OSError(28, "No space left on device")))
    assert cli.main(["run", "--out", str(tmp_path), "--set", "slope=1"]) == 2
    assert capsys.readouterr().err.startswith("joma: cannot write to standard output: No space left on device; ")


def test_names_from_outside_cannot_control_the_terminal(series, tmp_path, capsys):
    for options in ([], ["--json"]):
        assert cli.main(["probe", str(series), "--out", str(tmp_path / f"out{HOSTILE}"), *options]) == 1
        captured = capsys.readouterr()
        assert captured.err == ""
        assert captured.out.replace("\n", "").isprintable()
        assert "[bold]" in captured.out
    assert cli.main(["run", "toy", "--out", str(tmp_path / f"out{HOSTILE}")]) == 0
    assert r"\x1b[2J[bold]\n\u202e" in capsys.readouterr().out.replace("\n", "")
