import json
import os
from pathlib import Path

import pytest

from command_line import joma
from joma.files import lock
from offered_studies import offer


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    offer(monkeypatch, {"toy": "toy_study"})
    monkeypatch.setenv("COLUMNS", "120")


def test_run_prints_said_measured_and_verdict(tmp_path, capsys):
    code, out, err = joma("run", "--out", tmp_path, capsys=capsys)
    assert code == 0
    assert "The line ends at 2." in out
    assert "2 ± 0.05" in out
    assert "2.01 ± 0.01" in out
    assert "2 to 2.02" in out
    assert "not tested" in out
    assert err == ""


def test_a_claim_that_does_not_hold_is_exit_1(tmp_path, capsys):
    code, out, _ = joma("run", "toy", "--out", tmp_path, "--set", "slope=1.0", "--json", capsys=capsys)
    assert code == 1
    (outcome,) = json.loads(out)
    assert outcome["failed"] == 2
    assert json.loads((tmp_path / "toy" / os.listdir(tmp_path / "toy")[0] / "config.json").read_text())["config"][
        "slope"
    ] == pytest.approx(1.0)


@pytest.mark.parametrize(("interrupted", "expected"), [(False, (2, 2)), (True, (130, 1))])
def test_no_other_study_begins_after_ctrl_c_even_if_saving_failed(interrupted, expected, tmp_path, capsys, monkeypatch):
    joma("run", "toy", "--out", tmp_path, capsys=capsys)
    (file,) = tmp_path.rglob("config.json")
    monkeypatch.setattr("joma.train.interrupt.was_interrupted", lambda: interrupted)
    with lock(file.parent):
        code, _, err = joma("run", "toy", "toy", "--out", tmp_path, capsys=capsys)
    assert (code, err.count("is locked by another process")) == expected


def test_an_output_folder_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = joma("run", "--out", tmp_path / "file", capsys=capsys)
    assert code == 2
    assert err.startswith("joma: cannot write ")
    assert err.count("\n") == 1


def test_a_run_that_another_process_holds_is_exit_2(tmp_path, capsys):
    _, out, _ = joma("run", "--out", tmp_path, "--json", capsys=capsys)
    with lock(Path(json.loads(out)[0]["path"])):
        code, _, err = joma("run", "--out", tmp_path, capsys=capsys)
    assert code == 2
    assert "locked by another process" in err


def test_defects_and_interrupts_have_their_own_codes(tmp_path, capsys):
    code, _, err = joma("run", "--out", tmp_path, "--set", "mode=crash", capsys=capsys)
    assert code == 3
    assert "internal error (RuntimeError)" in err
    code, _, err = joma("run", "--out", tmp_path, "--set", "mode=interrupt", capsys=capsys)
    assert code == 130
    assert err.count("\n") == 1
