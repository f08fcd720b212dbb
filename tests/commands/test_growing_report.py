import json

import pytest

from command_line import joma
from joma.study import execute
from offered_studies import offer


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    offer(monkeypatch, {"toy": "toy_study"})
    monkeypatch.setenv("COLUMNS", "120")


def test_the_report_is_there_after_the_first_study_and_grows(tmp_path, capsys, monkeypatch):
    states = []

    def execute_and_look(*args, **options):
        states.append((tmp_path / "report.html").exists())
        return execute(*args, **options)

    monkeypatch.setattr("joma.study.execute", execute_and_look)
    code, out, _ = joma("run", "toy", "toy", "--out", tmp_path, capsys=capsys)
    assert (code, states) == (0, [False, True])
    page = tmp_path / "report.html"
    assert out.count(f"The report grows with every study: {page}\n") == 1
    assert out.endswith(f"The report: {page}\n")
    assert out.count(str(page)) == 2
    before = page.stat().st_mtime_ns
    code, out, _ = joma("run", "toy", "--out", tmp_path, "--json", capsys=capsys)
    assert (code, len(json.loads(out))) == (0, 1)
    assert page.stat().st_mtime_ns > before


def test_a_report_that_cannot_be_written_does_not_stop_the_studies(tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    code, out, err = joma("run", "toy", "--out", tmp_path, capsys=capsys)
    assert (code, "The line ends at 2." in out) == (0, True)
    assert err.count("\n") == 1
    assert "joma: the report was not written: " in err
